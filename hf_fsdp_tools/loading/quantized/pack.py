"""Pack plain weights of a checkpoint into 4-bit shards: each rank reads and packs its blocks, and gets all scales.

A block of the flattened weight depends on nothing outside it, so the shards together are, bit for bit, what
bitsandbytes makes of the whole weight; scales are joined before they are quantised too, which subtracts their mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Place, Transfer, reads_of, whole_place
from hf_fsdp_tools.loading.quantized.dequantize import Bounds, batches, dequantize, work_in_windows
from hf_fsdp_tools.loading.quantized.weights_4bit import PackedWeight, Span, Weights4Bit, compute_device
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.modeling.linear4bit import Packing, packing_of, set_quant_state

_NESTED_BLOCKSIZE = 256
"""Scales per scale of their own under double quantisation (source: `functional.quantize_4bit` of bitsandbytes 0.50)."""


def quantize_weights(
    weights: Sequence[PackedWeight], index: CheckpointIndex, reader: Reader, *, doing: str, staging_bytes: int
) -> TransferStats:
    """Pack weights of 4-bit layers into their shards, and give the layers their scales.

    Every rank must call. The ranks exchange errors, and add up the scales of some weights at a time.
    """
    stats = TransferStats()
    device = compute_device(weights[0].sharded)
    bounds = Bounds.of(device, staging_bytes)
    # The scales of one batch of weights are joined together; the batches are the same on every rank.
    for batch in batches(weights, bounds.scale_bytes, lambda w: 4 * w.packing.num_blocks):
        scales = [torch.zeros(weight.packing.num_blocks, dtype=torch.float32, device=device) for weight in batch]
        with agreed(doing):
            stats += _pack(batch, scales, index, reader, staging_bytes)
        for weight, own in zip(batch, scales, strict=True):
            _join_scales(own, weight.sharded)
            set_quant_state(weight.module, _make_quant_state(own, weight.packing))
    return stats


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Whole blocks of a span that are packed at a time."""

    weight: PackedWeight
    span: Span
    scales: torch.Tensor
    """Scales of the whole weight."""
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.packing.dtype


def _pack(
    weights: Sequence[PackedWeight],
    scales: Sequence[torch.Tensor],
    index: CheckpointIndex,
    reader: Reader,
    staging_bytes: int,
) -> TransferStats:
    """Read and pack this rank's blocks of some weights: packed bytes go to the shards, scales to `scales`.

    Packing stays on the calling thread and its stream: bitsandbytes packs on the device's default stream.
    """
    device = scales[0].device
    bounds = Bounds.of(device, staging_bytes)
    dequantized = TransferStats()

    def begin(window: Sequence[_Part]) -> tuple[list[tuple[_Part, torch.Tensor]], list[Transfer]]:
        nonlocal dequantized
        values = torch.empty(sum(part.numel for part in window), dtype=window[0].dtype, device=device)
        placed = list(zip(window, torch.split(values, [part.numel for part in window]), strict=True))
        transfers, quantized = reads_of((place for part, region in placed for place in _places_of(part, region)), index)
        dequantized += dequantize(quantized, reader, staging_bytes=staging_bytes)
        return placed, transfers

    parts = _parts_of(weights, scales, bounds.part_values)
    windows = batches(parts, bounds.window_bytes, lambda p: p.numel * p.dtype.itemsize, lambda p: p.dtype)
    stats = work_in_windows(windows, reader, begin=begin, work=lambda arrived: _pack_part(*arrived))
    return stats + dequantized


def _parts_of(weights: Sequence[PackedWeight], scales: Sequence[torch.Tensor], many: int) -> Iterator[_Part]:
    """Yield this rank's blocks in parts of at most `many` values."""
    for weight, own in zip(weights, scales, strict=True):
        block = weight.packing.blocksize
        step = max(1, many // block) * block
        for span in weight.spans:
            for start in range(span.start, span.stop, step):
                yield _Part(weight=weight, span=span, scales=own, start=start, stop=min(start + step, span.stop))


def _places_of(part: _Part, region: torch.Tensor) -> Iterator[Place]:
    """Yield the boxes of a run of the flattened weight: the rest of a row, whole rows, the beginning of a row."""
    at, columns = part.start, part.weight.packing.shape[1]
    while at < part.stop:
        row, column = divmod(at, columns)
        rows = 1 if column else max(1, (part.stop - at) // columns)
        box = Box(start=(row, column), length=(rows, min(columns - column, part.stop - at)))
        local = region[at - part.start :].as_strided(box.length, row_major_strides(box.length))
        yield local, part.weight.plain, box
        at += box.numel


def _pack_part(part: _Part, values: torch.Tensor) -> None:
    """Pack whole blocks; keep the bytes inside the shard, and the scales of all blocks."""
    from bitsandbytes.functional import quantize_4bit

    packing, span = part.weight.packing, part.span
    packed, state = quantize_4bit(
        values, blocksize=packing.blocksize, quant_type=packing.quant_type, quant_storage=torch.uint8
    )
    first = part.start // packing.blocksize
    part.scales[first : first + state.absmax.numel()] = state.absmax
    offset = part.start // 2
    begin = max(offset, span.first_byte)
    end = min(offset + packed.numel(), span.first_byte + span.memory.numel())
    span.memory[begin - span.first_byte : end - span.first_byte] = packed.view(-1)[begin - offset : end - offset]


def _join_scales(scales: torch.Tensor, sharded: torch.Tensor) -> None:
    """Join every rank's scales of one weight, in place, by an all-reduce: zeros stand for blocks of other ranks."""
    if not isinstance(sharded, DTensor):
        return
    bits = scales.view(torch.int32)  # scales are not negative, so their bits are in their order; NaN comes last
    for axis, placement in enumerate(sharded.placements):
        if not placement.is_replicate() and sharded.device_mesh.size(axis) > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(axis))


def _make_quant_state(scales: torch.Tensor, packing: Packing) -> Any:
    """bitsandbytes' `QuantState` of a weight from the scales of all blocks, as `quantize_4bit` of 0.50 makes it."""
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


def read_scales(weights_4bit: Weights4Bit, index: CheckpointIndex, reader: Reader) -> TransferStats:
    """Read the stored scales, whole, and give them to the layers whose packed weights are stored."""
    memory = {
        name: torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype)
        for stored in weights_4bit.scales.values()
        for name in stored.values()
    }
    places = [whole_place(tensor, index.tensors[name]) for name, tensor in memory.items()]
    stats = reader.read(reads_of(places, index)[0])
    for key, stored in weights_4bit.scales.items():
        tensors = {name: memory[source] for name, source in stored.items()}
        module = weights_4bit.layers[key]
        set_quant_state(module, _checked_state(module, stored, tensors, index))
    return stats


def _checked_state(
    module: nn.Module, keys: Mapping[str, str], tensors: dict[str, torch.Tensor], index: CheckpointIndex
) -> Any:
    """The `QuantState` that bitsandbytes reads from stored scales, which must belong to the layer's weight."""
    from bitsandbytes.functional import QuantState

    packing = packing_of(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    try:
        state = QuantState.from_dict(qs_dict=tensors, device=compute_device(weight))
        actual = (tuple(state.shape), state.absmax.numel())
        expected = (packing.shape, -(-packing.numel // int(state.blocksize)))
    except (ArithmeticError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{index.name!r}: {', '.join(sorted(keys.values()))} are no scales of bitsandbytes "
            f"({type(error).__name__}: {error}). Download or save the checkpoint again."
        ) from error
    if actual != expected:
        raise CheckpointError(
            f"{index.name!r}: {min(keys.values())!r} belongs to a weight of shape {list(actual[0])} with {actual[1]} "
            f"scales, expected {list(expected[0])} with {expected[1]}. Use the config that belongs to the checkpoint."
        )
    return state
