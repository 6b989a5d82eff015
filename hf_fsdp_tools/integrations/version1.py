"""Version 1 of FSDP under Accelerate and the Trainer, deprecated in PyTorch: all that differs from version 2."""

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.extensions.fsdp1.flat_shards import plain_view
from hf_fsdp_tools.extensions.fsdp1.wrap import load_weights_fsdp1
from hf_fsdp_tools.integrations.settings import is_set, warn_on_node
from hf_fsdp_tools.loading.heads import WithHeads
from hf_fsdp_tools.loading.load import load_weights


def is_version1(model: nn.Module) -> bool:
    """Whether a model is sharded by FSDP1."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def prefer_possible_settings(plugin: Any, *, on_cpu: bool) -> None:
    """Turn off RAM-efficient loading, and change defaults with which FSDP1 crashes on CPUs, in place."""
    if plugin.cpu_ram_efficient_loading or is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        warn_on_node("cpu_ram_efficient_loading is off under FSDP1: every rank reads the model. FSDP2 honours it.")
    plugin.cpu_ram_efficient_loading = False
    if not on_cpu:
        return
    if plugin.sync_module_states or is_set("FSDP_SYNC_MODULE_STATES"):
        warn_on_node(
            "sync_module_states is off on CPUs, where torch's FSDP1 cannot send weights: each rank trains the weights "
            "that it loaded itself."
        )
    plugin.sync_module_states = False
    if "FSDP_STATE_DICT_TYPE" not in os.environ:
        plugin.state_dict_type = plugin.state_dict_type or "SHARDED_STATE_DICT"  # FULL_STATE_DICT crashes on CPUs


def saveable(model: nn.Module) -> nn.Module:
    """The model that `save_pretrained` takes: inside `torch.compile`'s wrapper, with the names and shapes of a plain
    one."""
    model = getattr(model, "_orig_mod", model)
    return plain_view(model) if is_version1(model) else model


def load_into(model: nn.Module, folder: Path) -> None:
    """Load a checkpoint of the Trainer into a model of either version; missing and unexpected keys are refused."""
    if is_version1(model):
        load_weights_fsdp1(model, folder, strict=True)
        return
    model = getattr(model, "_orig_mod", model)
    heads = WithHeads.of(model).heads  # not the folder's, which has copies of them and may be deleted
    load_weights(model, folder, strict=True)
    WithHeads.put(model, heads=heads)
