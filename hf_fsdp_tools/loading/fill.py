"""Fill this rank's shards of an allocated model: read, convert, pack, and under HSDP receive from the first replica."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.shards import is_sharded, local_boxes_of, local_tensor, memory_view, replicated_axes
from hf_fsdp_tools.loading.conversion import ConversionGroup, convert_group, persistent_tensors
from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.match import Match
from hf_fsdp_tools.loading.quantized.dequantize import (
    Place,
    QuantizedPart,
    dequantize,
    read_into,
    reads_of,
    whole_place,
)
from hf_fsdp_tools.loading.quantized.pack import quantize_weights
from hf_fsdp_tools.loading.quantized.share import PackedShare, compute_device, share_of_packed
from hf_fsdp_tools.loading.report import loading_bar


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The cost of filling this rank's shards."""

    stats: TransferStats
    """Reads straight into shards, and of values to pack."""

    converted: TransferStats
    """Reads of whole stored tensors, for conversions that compute."""

    share_bytes: int
    """Bytes of this rank's shards as they are stored; of quantised tensors, with their part of the scales."""

    replicated_bytes: int
    """The part of `share_bytes` that every rank holds."""

    host_bytes: int
    """Bytes of host memory that the shards take."""


@dataclass(frozen=True, kw_only=True)
class _Share:
    """This rank's shards of the model, and how to fill them."""

    transfers: tuple[Transfer, ...]
    """Reads straight into shards."""

    quantized: tuple[QuantizedPart, ...]
    """Values to dequantise into shards."""

    opaque: tuple[ConversionGroup, ...]
    """Conversions that compute, and so need whole tensors."""

    received: tuple[str, ...]
    """Keys of tensors that the first replica broadcasts; equal on all ranks of a replica group."""

    read_bytes: int
    """Bytes to read for `transfers`, `quantized` and `opaque`, gaps left out."""

    num_bytes: int
    """Bytes of the shards in stored dtypes."""

    replicated_bytes: int
    """The part of `num_bytes` that every rank holds."""

    host_bytes: int
    """Bytes of host memory that the shards take."""


def fill_shards(
    model: nn.Module,
    match: Match,
    *,
    doing: str,
    staging_bytes: int,
    in_flight: int,
    progress: bool | None,
) -> Filled:
    """Fill the shards of an allocated model, as `load_weights` says.

    Under HSDP (a parameter is sharded along one axis of its mesh and replicated along another) the first replica reads,
    and each shard is broadcast along the replicate axis, over the mesh's own process group: each byte is read once.

    All reads share one set of threads, open files and staging buffers. On an accelerator, memory that PyTorch's
    allocators then keep for later is given back.

    Every rank must call. The ranks exchange errors, and under HSDP shards.

    Raises:
        CheckpointError: reading fails on some rank; the same on every rank.
    """
    rank, world_size = rank_and_size()
    with agreed(doing):
        share = _share_of(model, match)
        packed = share_of_packed(model, match.to_pack, match.load_map, match.index)
        side = _side_stream_of(model, packed)
    to_read = share.read_bytes + packed.read_bytes
    with ExitStack() as stack:
        if side is not None:
            stack.callback(side.release)
        bar = loading_bar(to_read, rank=rank, world_size=world_size, progress=progress)
        reader = Reader(
            staging_bytes=staging_bytes,
            side=side,
            in_flight=in_flight,
            # Where all ranks share this machine, another rank wants the bytes that this one skips.
            read_ahead=rank_on_node()[1] == world_size,
            on_bytes=stack.enter_context(bar),
        )
        stack.enter_context(reader)
        with agreed(doing):
            stats = reader.read(share.transfers)
            stats += dequantize(share.quantized, reader, staging_bytes=staging_bytes)
            converted = _convert_whole(model, match, share.opaque, reader, staging_bytes)
        stats += quantize_weights(packed, match.index, reader, doing=doing, staging_bytes=staging_bytes)
    _receive(persistent_tensors(model), share.received)
    return Filled(
        stats=stats,
        converted=converted,
        share_bytes=share.num_bytes + packed.num_bytes,
        replicated_bytes=share.replicated_bytes + packed.replicated_bytes,
        host_bytes=share.host_bytes + packed.host_bytes,
    )


def _side_stream_of(model: nn.Module, packed: PackedShare) -> SideStream | None:
    """The side stream of the accelerator that values are read to; None where all of them go to the host."""
    shards = [local_tensor(tensor) for tensor in persistent_tensors(model).values()]
    computed = [torch.empty(0, device=compute_device(weight.sharded)) for weight in packed.weights[:1]]
    return side_stream_for([*shards, *computed])


def _share_of(model: nn.Module, match: Match) -> _Share:
    """Plan what this rank reads: for each loaded tensor, the transfers into the memory of its local boxes."""
    state, index = persistent_tensors(model), match.index  # allocation made new tensors
    places: list[Place] = []
    opaque: dict[str, ConversionGroup] = {}
    received: list[str] = []
    num_bytes = replicated_bytes = 0
    for key, tensor in match.loaded.items():
        local, boxes = local_tensor(state[key]), local_boxes_of(state[key])
        stored_size = index.stored_bytes(min(tensor.sources)) if tensor.sources else 0
        size = round(sum(box.numel for box, _ in boxes) * stored_size)
        num_bytes += size
        replicated_bytes += 0 if is_sharded(state[key]) else size
        axes = replicated_axes(state[key])
        if axes:
            received.append(key)
        if any(coordinate for _, coordinate in axes):
            continue  # another replica reads it
        if tensor.pieces is None:
            opaque[match.load_map.groups[key].target] = match.load_map.groups[key]
            continue
        places += [(memory_view(local, start, box.length), tensor, box) for box, start in boxes]
    transfers, quantized = reads_of(places, index)
    opaque_bytes = sum(index.tensors[key].num_bytes for group in opaque.values() for key, _ in group.members)
    distinct = {id(t): local_tensor(t) for t in state.values()}.values()
    return _Share(
        transfers=tuple(transfers),
        quantized=tuple(quantized),
        opaque=tuple(opaque.values()),
        received=tuple(received),
        read_bytes=sum(t.num_bytes for t in transfers) + sum(part.num_bytes for part in quantized) + opaque_bytes,
        num_bytes=num_bytes,
        replicated_bytes=replicated_bytes,
        host_bytes=sum(t.numel() * t.element_size() for t in distinct if t.device.type == "cpu"),
    )


def _convert_whole(
    model: nn.Module,
    match: Match,
    opaque: Iterable[ConversionGroup],
    reader: Reader,
    staging_bytes: int,
) -> TransferStats:
    """Run conversions that compute, one at a time: read whole tensors, convert them, keep this rank's shards."""
    state, index = persistent_tensors(model), match.index
    stats = TransferStats()
    for group in opaque:
        # transformers casts what it reads to the dtype of the model before it converts
        dtype = state[group.target].dtype
        whole = {key: torch.empty(index.tensors[key].shape, dtype=dtype) for key, _ in group.members}
        places = [whole_place(memory, index.tensors[key]) for key, memory in whole.items()]
        stats += read_into(places, index, reader, staging_bytes=staging_bytes)
        for key, result in convert_group(model, group, whole).items():
            if key not in match.loaded or match.loaded[key].pieces is not None:
                continue
            local = local_tensor(state[key])
            for box, start in local_boxes_of(state[key]):
                part = result[tuple(slice(s, s + n) for s, n in zip(box.start, box.length, strict=True))]
                memory_view(local, start, box.length).copy_(part)
    return stats


def _receive(state: Mapping[str, torch.Tensor], keys: Iterable[str]) -> None:
    """Broadcast shards along each axis of their mesh that replicates them, from the first rank of the axis."""
    for key in keys:
        tensor = state[key]
        assert isinstance(tensor, DTensor)
        local = local_tensor(tensor)
        # A CPU-offloaded shard of a mesh of GPUs travels between GPUs.
        sent = local.to(tensor.device_mesh.device_type).contiguous()
        if sent.numel():
            for axis, _ in replicated_axes(tensor):
                dist.broadcast(sent, group=tensor.device_mesh.get_group(axis), group_src=0)
            if sent is not local:
                local.copy_(sent)
