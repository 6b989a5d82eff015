"""What a config of `accelerate launch` meant that does not say it: files without a version, GPUs that are not there."""

import os
import warnings
from typing import Any

import torch
from accelerate import ParallelismConfig

from hf_fsdp_tools.distributed.launcher import world_size
from hf_fsdp_tools.distributed.mesh import gpus_are_hidden, local_device, rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.settings import HYBRID, drop_fsdp1_settings, is_set, reshards, strategy_of


def read_version(asked: int | None) -> tuple[int, bool]:
    """The version of FSDP, and whether a config that names none was launched.

    `accelerate launch` takes a file without `fsdp_version` for version 1, and the processes see the same variables as
    for a file that says 1. Only files that know of versions give FSDP1 its strategy as `fsdp_reshard_after_forward`;
    with others the launcher leaves that at true, which FSDP1 does not have.
    """
    text = str(os.environ.get("FSDP_VERSION", "2") if asked is None else asked).strip()
    if text not in ("1", "2"):
        raise ConfigError(
            f"fsdp_version is {text}: use 2 (fully_shard), or 1 (FullyShardedDataParallel, deprecated in PyTorch)."
        )
    is_open = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() in ("true", "false")
    unversioned = asked is None and text == "1" and is_open and _is_by_launcher()
    return (2 if unversioned else int(text)), unversioned


def read_unversioned(plugin: Any) -> ParallelismConfig | None:
    """Read the launched settings of a file without a version as FSDP2, in place, and say so once, on rank 0.

    Returns the copies of the model that HYBRID_SHARD means: one per machine; None for one copy.
    """
    strategy = strategy_of(plugin.sharding_strategy or os.environ.get("FSDP_SHARDING_STRATEGY") or "FULL_SHARD")
    is_hybrid = strategy in HYBRID
    asked = plugin.reshard_after_forward
    plugin.reshard_after_forward = reshards(HYBRID.get(strategy, strategy) if asked is None else asked)
    plugin.sharding_strategy = None
    if plugin.state_dict_type is None and os.environ.get("FSDP_STATE_DICT_TYPE", "").upper() == "LOCAL_STATE_DICT":
        plugin.state_dict_type = "SHARDED_STATE_DICT"
    left_out = drop_fsdp1_settings(plugin)
    size = rank_on_node()[1]
    machines = world_size(os.environ) // size
    means = f"reshard_after_forward={plugin.reshard_after_forward}"
    means += f" in {machines} copies, one per machine" * (is_hybrid and machines > 1)
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            "The launch config has no fsdp_version, as `accelerate config` wrote it for years, and is read as FSDP2: "
            f"{strategy} means {means}; {f'left out: {left_out}' if left_out else 'the rest means the same'}. "
            "`hf-fsdp config --from FILE --output NEW` writes the file for FSDP2; HybridFSDPPlugin(fsdp_version=1) "
            "asks for FSDP1.",
            stacklevel=4,
        )
    if not is_hybrid or machines < 2:
        return None
    return ParallelismConfig(dp_replicate_size=machines, dp_shard_size=size)


def check_gpus(*, cpu: bool) -> None:
    """Refuse to train on the CPU where `accelerate launch` was given a config for GPUs.

    A file for the CPU hides the GPUs (`gpu_ids: ''`); `use_cpu` alone does not reach the processes.
    """
    if cpu or not _is_by_launcher() or gpus_are_hidden() or local_device().type != "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"The config of `accelerate launch` is for GPUs, and torch {torch.__version__} finds none on this machine "
        f"(CUDA_VISIBLE_DEVICES {'is not set' if visible is None else f'is {visible}'}). Look at nvidia-smi and the "
        "driver; or train on the CPU: launch with a file of `hf-fsdp config --cpu` (beside use_cpu it says gpu_ids: "
        "''), or pass cpu=True to make_accelerator, use_cpu=True to TrainingArguments."
    )


def _is_by_launcher() -> bool:
    """Whether `accelerate launch` made the variables, not TrainingArguments or a user: it alone sets the second."""
    return is_set("ACCELERATE_USE_FSDP") and "ACCELERATE_DYNAMO_USE_FULLGRAPH" in os.environ
