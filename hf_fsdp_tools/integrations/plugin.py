"""Accelerate's FSDP plugin with our wrap policy and our precision."""

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.fsdp1_policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.mesh import local_device
from hf_fsdp_tools.wrap import HybridPolicy

__all__ = ["LOW_PRECISION", "HybridFSDPPlugin", "is_set"]

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Accelerate's names of the precisions in which trainable weights are kept in fp32 beside the computation."""


@dataclass
class HybridFSDPPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]  # accelerate is not typed
    """Accelerate's FSDP plugin with a `HybridPolicy`, for FSDP2 and FSDP1.

    What differs from the plugin that it extends: version 2 is the default; the units are those of `policy`, on every
    model and for both versions (`TRANSFORMER_BASED_WRAP` with class names and `SIZE_BASED_WRAP` with a size are
    translated into it); mixed precision reduces gradients in fp32 and leaves outputs and buffers as they are
    (Accelerate's own reduces in low precision and rounds them); CPU offload works where there is no device to pin for;
    RAM-efficient loading is off, because `from_pretrained` reads shards and never a whole model.

    FSDP1 (`fsdp_version=1`, deprecated in PyTorch) shards plain models in `prepare`; `from_pretrained` is for FSDP2.

    Raises:
        ConfigError: a setting that torch cannot honour here, or would honour wrongly without a word.
    """

    policy: HybridPolicy | None = field(default=None, metadata={"help": "What becomes a unit."})
    """What becomes a unit; None: what the other fields and variables ask for, else `HybridPolicy()`."""

    def __post_init__(self) -> None:
        self.fsdp_version = int(self.fsdp_version or os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version == 2 and self.reshard_after_forward is None:
            self.reshard_after_forward = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
        if self.cpu_ram_efficient_loading or is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            warnings.warn(
                "cpu_ram_efficient_loading is off: from_pretrained reads each rank's shards and needs no full copy on rank 0.",
                stacklevel=3,
            )
        self.cpu_ram_efficient_loading = False
        on_cpu = local_device().type == "cpu"
        if self.fsdp_version == 1 and on_cpu and self.sync_module_states is None:
            self.sync_module_states = False  # torch can broadcast weights between accelerators only
        if self.fsdp_version == 1 and on_cpu and "FSDP_STATE_DICT_TYPE" not in os.environ:
            self.state_dict_type = self.state_dict_type or "SHARDED_STATE_DICT"  # the other one crashes on CPUs
        super().__post_init__()
        self.policy = self.policy or _policy_of(self)
        self.auto_wrap_policy = None  # ours decides, when it sees the model
        if self.fsdp_version == 1:
            _check_fsdp1(self, on_cpu=on_cpu)
        elif isinstance(self.cpu_offload, CPUOffloadPolicy) and on_cpu:
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Accelerate calls this with the model that it is about to wrap with FSDP1; FSDP2 models are sharded by then."""
        if self.fsdp_version == 1:
            policy = hybrid_auto_wrap_policy(model, policy=self.policy)
            if policy.ignored:
                raise ConfigError(
                    f"FSDP1 cannot shard {', '.join(policy.ignored)}, and Accelerate cannot leave single parameters out. "
                    "Use fsdp_version 2, or wrap_fsdp1(model, plan) in place of prepare."
                )
            self.auto_wrap_policy = policy  # type: ignore[assignment]  # the field takes any callable

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision`, reduce gradients in fp32, cast neither outputs nor buffers."""
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = LOW_PRECISION.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        kind = MixedPrecisionPolicy if self.fsdp_version == 2 else MixedPrecision
        self.mixed_precision_policy = kind(param_dtype=dtype, reduce_dtype=dtype and torch.float32)


def is_set(variable: str) -> bool:
    """Whether a variable of Accelerate's is switched on."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def _policy_of(plugin: FullyShardedDataParallelPlugin) -> HybridPolicy:
    """What Accelerate's own fields and variables ask for, as a HybridPolicy."""
    settings: dict[str, Any] = {}
    wrap = getattr(plugin.auto_wrap_policy, "__name__", None)
    if wrap == "transformer_auto_wrap_policy" and plugin.transformer_cls_names_to_wrap:
        settings["block_types"] = tuple(name.strip() for name in plugin.transformer_cls_names_to_wrap)
    elif wrap == "size_based_auto_wrap_policy" and plugin.min_num_params:
        settings["min_unit_params"] = plugin.min_num_params
    elif plugin.auto_wrap_policy is not None and wrap not in (
        "transformer_auto_wrap_policy",
        "size_based_auto_wrap_policy",
    ):
        raise ConfigError(
            f"auto_wrap_policy is {plugin.auto_wrap_policy!r}, which this plugin would not use. Give a HybridPolicy as "
            "`policy`: it takes classes, class names, patterns, sizes and predicates."
        )
    if plugin.reshard_after_forward is False:
        settings["reshard_after_forward"] = {"*": False}
    return HybridPolicy(**settings)


def _check_fsdp1(plugin: FullyShardedDataParallelPlugin, *, on_cpu: bool) -> None:
    """Refuse what FSDP1 does wrongly without a word, or dies of. Sources: pytorch issue 154888; the rest measured."""
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    problems = []
    if getattr(strategy, "name", "").upper().startswith(("HYBRID", "_HYBRID")) and (on_cpu or _is_alone_on_node()):
        problems.append(
            f"sharding strategy {strategy.name} with one device per node stops averaging gradients. Use FULL_SHARD, or FSDP2 "
            "with dp_replicate_size"
        )
    if on_cpu and "FULL" in str(plugin.state_dict_type):
        problems.append("state_dict_type FULL_STATE_DICT crashes the process on CPUs. Use SHARDED_STATE_DICT, or FSDP2")
    if on_cpu and plugin.sync_module_states:
        problems.append(
            "sync_module_states needs accelerators. Set it to False: every rank has the same weights already"
        )
    if on_cpu and getattr(plugin.cpu_offload, "offload_params", False):
        problems.append("CPU offload needs an accelerator to offload from. Set it to False")
    if problems:
        raise ConfigError("FSDP1: " + "; ".join(problems) + ".")


def _is_alone_on_node() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
