"""Cast the inputs of modules that compute with weights, in place of FSDP1's cast of all that enters the root."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.fsdp1.flat_shards import flat_parts
from hf_fsdp_tools.sharding.hooks import cast_inputs


def cast_where_computed(model: FullyShardedDataParallel) -> None:
    """Let units and modules of the root cast their inputs, and the root none; called again, nothing changes.

    FSDP1 casts every float that enters the root: labels of a regression, token counts and masks. Inputs are cast as
    FSDP2 models of this package cast them (see `sharding.hooks`). A model without mixed precision, and one whose policy
    says `cast_root_forward_inputs=False`, stays as it is. Nothing is communicated.
    """
    if model.mixed_precision.param_dtype is None or not model.mixed_precision.cast_root_forward_inputs:
        return
    model.mixed_precision = replace(model.mixed_precision, cast_root_forward_inputs=False)
    for module, unit in _that_compute(model):
        if unit.mixed_precision.param_dtype is not None:
            module.register_forward_pre_hook(partial(_cast_inputs, unit), with_kwargs=True)


def _that_compute(root: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, FullyShardedDataParallel]]:
    """The outermost units below the root, and the modules whose parameters lie in the root's own unit."""
    yield from {module: root for part in flat_parts(root) for module, _ in part.places}.items()
    inner: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and module is not root and module not in inner:
            inner.update(module.modules())
            yield module, module


def _cast_inputs(unit: FullyShardedDataParallel, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
    if unit._use_full_prec_in_eval and not unit.training:  # a variable of torch's: evaluation in fp32
        return args, kwargs
    dtype = unit.mixed_precision.param_dtype
    assert isinstance(dtype, torch.dtype)
    return cast_inputs(module, args, kwargs, dtype=dtype)
