"""Accelerate's shared state, brought up with FSDP in it."""

import os
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import DistributedType, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from hf_fsdp_tools.distributed.mesh import ensure_process_group, local_device
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.plugin import HybridFSDPPlugin
from hf_fsdp_tools.integrations.settings import is_set

__all__ = ["start_state"]


def start_state(
    plugin: HybridFSDPPlugin,
    *,
    mixed_precision: str | None,
    cpu: bool,
    parallelism_config: Any,
    dynamo_plugin: TorchDynamoPlugin | None = None,
) -> None:
    """Bring Accelerate's shared state up with FSDP in it, before an Accelerator is made.

    Accelerate 1.15 promotes only GPU-like process groups to FSDP: on CPUs, or in a world of 1, it drops the plugin without
    a word, and with `use_cpu` under `accelerate launch` each process trains alone. Its state is one dictionary shared by all
    its instances, and an Accelerator takes it as it finds it, so it is enough to fill it first.
    """
    cpu = cpu or local_device().type == "cpu"
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        if state.distributed_type != DistributedType.FSDP or not isinstance(state.fsdp_plugin, HybridFSDPPlugin):
            raise ConfigError(
                f"An Accelerator of distributed type {state.distributed_type} exists already in this process. "
                "Call make_accelerator() before anything else makes one."
            )
        if dynamo_plugin is not None and dynamo_plugin.backend != DynamoBackend.NO:
            state.dynamo_plugin = dynamo_plugin
        return
    if PartialState._shared_state and PartialState().distributed_type == DistributedType.NO and _is_launched():
        PartialState._reset_state()  # TrainingArguments without use_cpu made it, where each process would train alone
    if not cpu:
        ensure_process_group(local_device().type)  # with gloo beside NCCL, which Accelerate does on some variables only
    PartialState(cpu=cpu)
    if PartialState().distributed_type == DistributedType.NO:
        ensure_process_group("cpu" if cpu else local_device().type)
    if parallelism_config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = ParallelismConfig()  # fills itself from the variables beside that one
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        dynamo_plugin=dynamo_plugin or TorchDynamoPlugin(),
        fsdp_plugin=plugin,
        parallelism_config=parallelism_config,
        _from_accelerator=True,
    )
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        plugin.set_mixed_precision(state.mixed_precision)
        for shared in (state, PartialState()):
            shared.distributed_type = DistributedType.FSDP
            if cpu:
                shared.device = torch.device("cpu")  # FSDP1 takes cpu:0 for another device
        state.fsdp_plugin = plugin
    _check_state(plugin)
    _check_axes(state.parallelism_config)


def _check_state(plugin: HybridFSDPPlugin) -> None:
    """Stop where an Accelerate that keeps its state otherwise would train without FSDP."""
    state = AcceleratorState()
    found = (state.distributed_type, getattr(state, "fsdp_plugin", None), state.num_processes)
    if found != (DistributedType.FSDP, plugin, dist.get_world_size()):
        raise ConfigError(
            f"Accelerate {accelerate.__version__} did not take up FSDP: distributed type {found[0]}, {found[2]} process(es) of "
            f"{dist.get_world_size()}. hf_fsdp_tools knows Accelerate 1.15; install it, or report this version."
        )


def _check_axes(config: Any) -> None:
    """Tensor, context and sequence parallelism change the model or its batches before it is sharded; we do neither yet."""
    asked = [name for name in ("tp_size", "cp_size", "sp_size") if config is not None and getattr(config, name, 1) > 1]
    if asked:
        raise ConfigError(
            f"{', '.join(f'{name}={getattr(config, name)}' for name in asked)}: only dp_replicate_size and dp_shard_size can be "
            "above 1 here. Leave the others out of the parallelism config."
        )


def _is_launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
