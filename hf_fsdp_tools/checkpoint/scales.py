"""The scales of 4-bit weights, which every rank holds whole: joined from all ranks, or read."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.quantization import Packing, packed_linears, packing_of, set_quant_state

from .fit import transfers_of
from .index import CheckpointIndex
from .packed import PackedShare, compute_device
from .pieces import PieceTensor
from .reader import TransferStats, read_transfers
from .shares import local_boxes_of
from .transfer import Transfer

__all__ = ["forget_scales", "join_scales", "make_quant_state", "read_scales"]

_NESTED_BLOCKSIZE = 256
"""Scales that share a scale of their own under double quantisation (bitsandbytes 0.50: `functional.quantize_4bit`)."""


def forget_scales(model: nn.Module) -> None:
    """Take the scales from all 4-bit layers, so that a load which fails leaves none that can be used."""
    for module in packed_linears(model).values():
        set_quant_state(module, None)


def join_scales(scales: torch.Tensor, sharded: torch.Tensor) -> None:
    """Every rank's scales of one weight, in place: the larger of what a rank made itself and of the others' zeros.

    Every rank of the parameter's mesh must call.
    """
    if not isinstance(sharded, DTensor):
        return
    bits = scales.view(torch.int32)  # ordered as the numbers are, which are not negative; NaN comes last
    for axis, placement in enumerate(sharded.placements):
        if not placement.is_replicate() and sharded.device_mesh.size(axis) > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(axis))


def make_quant_state(scales: torch.Tensor, packing: Packing) -> Any:
    """What bitsandbytes keeps beside a packed weight (`functional.quantize_4bit` of 0.50), from the scales of all blocks."""
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

    common = {
        "shape": torch.Size(packing.shape),
        "dtype": packing.dtype,
        "blocksize": packing.blocksize,
        "code": get_4bit_type(packing.quant_type, device=scales.device),
        "quant_type": packing.quant_type,
    }
    if not packing.is_nested:
        return QuantState(absmax=scales, **common)
    offset = scales.mean()
    nested, of_scales = quantize_blockwise(scales - offset, blocksize=_NESTED_BLOCKSIZE)
    return QuantState(absmax=nested, offset=offset, state2=of_scales, **common)


def read_scales(share: PackedShare, index: CheckpointIndex, *, staging_bytes: int) -> TransferStats:
    """Give the layers whose packed weights are stored their scales, read whole.

    Raises:
        CheckpointError: they cannot be read, are none, or belong to a weight of another shape.
    """
    read = [
        (
            module,
            keys,
            {name: torch.empty(index.tensors[key].shape, dtype=index.tensors[key].dtype) for name, key in keys.items()},
        )
        for module, keys in share.scales
    ]
    transfers: list[Transfer] = []
    for _, keys, tensors in read:
        for name, memory in tensors.items():
            stored = PieceTensor.stored(index.tensors[keys[name]], memory.dtype)
            for box, start in local_boxes_of(memory):
                transfers += transfers_of(stored, box, memory, start, index)
    stats = read_transfers(transfers, staging_bytes=staging_bytes)
    for module, keys, tensors in read:
        set_quant_state(module, _checked(module, keys, tensors, index))
    return stats


def _checked(
    module: nn.Module, keys: Mapping[str, str], tensors: dict[str, torch.Tensor], index: CheckpointIndex
) -> Any:
    """bitsandbytes' own reading of stored scales, which must belong to the layer's weight."""
    from bitsandbytes.functional import QuantState

    packing = packing_of(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    try:
        state = QuantState.from_dict(qs_dict=tensors, device=compute_device(weight))
        found = (tuple(state.shape), state.absmax.numel())
        expected = (packing.shape, -(-packing.numel // int(state.blocksize)))
    except (ArithmeticError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{index.name!r}: {', '.join(sorted(keys.values()))} are no scales of bitsandbytes ({type(error).__name__}: "
            f"{error}). Download or save the checkpoint again."
        ) from error
    if found != expected:
        raise CheckpointError(
            f"{index.name!r}: {min(keys.values())!r} belongs to a weight of shape {list(found[0])} with {found[1]} scales, "
            f"expected {list(expected[0])} with {expected[1]}. Use the config that belongs to the checkpoint."
        )
    return state
