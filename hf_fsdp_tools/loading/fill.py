"""Fill this rank's shards of an allocated model: read, also with neighbours, convert, pack, and under HSDP receive from
the first replica."""

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.accelerator import side_stream_for
from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.shards import Box, Held, local_boxes
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import ConversionGroup, convert_group, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT, STAGING_BYTES, Reader, TransferStats
from hf_fsdp_tools.loading.match import Match
from hf_fsdp_tools.loading.quantized.dequantize import (
    Place,
    batches,
    check_order,
    dequantize,
    reads_of,
    whole_place,
)
from hf_fsdp_tools.loading.quantized.four_bits import Weights4Bit
from hf_fsdp_tools.loading.report import loading_bar
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.sharding.allocate import allocate


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The cost of filling this rank's shards."""

    stats: TransferStats
    """Reads straight into shards, and of values to pack."""
    converted: TransferStats
    """Reads of whole stored tensors, for conversions that compute."""
    share_bytes: int
    """Bytes of this rank's shards as they are stored; of quantised tensors, with their part of the scales."""
    host_bytes: int
    """Bytes of host memory that the shards take."""


def fill_shards(
    model: nn.Module,
    index: CheckpointIndex,
    loaded: Mapping[str, PieceTensor],
    match: Match | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    doing: str,
    staging_bytes: int = STAGING_BYTES,
    in_flight: int = REQUESTS_IN_FLIGHT,
    progress: bool | None = None,
) -> Filled:
    """Fill the shards of a model, as `load_weights` says; `loaded` has the stored elements of each tensor by model key.

    The `match` says how to get those that are computed. Without a `device` all tensors have storage. Every rank must
    call. The ranks exchange errors, and under HSDP, over the mesh's own process group, shards.
    """
    rank, world_size = rank_and_size()
    groups, computed = (match.load_map.groups, match.computed) if match is not None else ({}, Weights4Bit())
    with ExitStack() as stack:
        with agreed(doing):
            if device is not None:
                allocate(model, device=device, dtype=dtype)
            state = persistent_tensors(model)
            places, bands, opaque, received, share_bytes = _share_of(state, index, loaded, groups)
            transfers, quantized = reads_of(places, index)
            whole_bytes = sum(index.tensors[key].num_bytes for group in opaque for key, _ in group.members)
            others = computed.shares(state, index)
            shards = [Held.of(tensor).memory for tensor in state.values()]
            side = side_stream_for([*shards, torch.empty(0, device=others.device)])
            if side is not None:
                stack.callback(side.release)
            to_read = sum(t.num_bytes for t in transfers) + sum(slab.stored_bytes for slab in quantized) + whole_bytes
            to_read += others.num_bytes + sum(band.num_bytes for band in bands if band)
            bar = stack.enter_context(loading_bar(to_read, rank=rank, world_size=world_size, progress=progress))
            ahead = rank_on_node()[1] == world_size  # another rank of this machine wants the bytes that this one skips
            options: dict[str, Any] = {"staging_bytes": staging_bytes, "in_flight": in_flight, "read_ahead": ahead}
            reader = stack.enter_context(Reader(side=side, on_bytes=bar, **options))
            stats = reader.read(transfers) + dequantize(quantized, reader, staging_bytes=staging_bytes)
            converted = _convert_whole(model, state, index, loaded, opaque, reader, staging_bytes)
            stats += others.read(reader)
        if bands:
            with agreed(doing):
                stats += _read_bands(filter(None, bands), index, reader, staging_bytes=staging_bytes)
        stats += others.pack(reader, doing=doing, staging_bytes=staging_bytes)
    _receive(state, received)
    on_host = {shard.data_ptr(): shard.nbytes for shard in shards if shard.device.type == "cpu"}  # tied ones once
    share_bytes += others.num_bytes
    return Filled(stats=stats, converted=converted, share_bytes=share_bytes, host_bytes=sum(on_host.values()))


def _share_of(
    state: Mapping[str, torch.Tensor],
    index: CheckpointIndex,
    loaded: Mapping[str, PieceTensor],
    groups: Mapping[str, ConversionGroup],
) -> "tuple[list[Place], list[Band | None], list[ConversionGroup], list[str], int]":
    """What this rank fills: places in its shards, shards that neighbours fill together (None: another replica does),
    conversions that need whole tensors, and keys of what replicas get.

    Last the bytes of its shards, in stored dtypes. The keys are equal on all ranks of a replica group.
    """
    places: list[Place] = []
    bands: list[Band | None] = []
    opaque: dict[str, ConversionGroup] = {}
    received: list[str] = []
    num_bytes = 0
    for key, tensor in loaded.items():
        parts = Held.of(state[key]).parts()
        stored_size = index.stored_bytes(min(tensor.sources)) if tensor.sources else 0
        num_bytes += round(sum(box.numel for box, _ in parts) * stored_size)
        axes = Held.of(state[key]).replicated_axes
        if axes:
            received.append(key)
        is_read = not any(coordinate for _, coordinate in axes)  # else by another replica
        if (band := band_of(state[key], tensor, stored_size)) is not None:
            bands.append(band if is_read else None)
        elif not is_read:
            continue
        elif tensor.pieces is None:
            opaque[groups[key].target] = groups[key]
        else:
            places += [(memory, tensor, box) for box, memory in parts]
    return places, bands, list(opaque.values()), received, num_bytes


def _convert_whole(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    index: CheckpointIndex,
    loaded: Mapping[str, PieceTensor],
    opaque: Iterable[ConversionGroup],
    reader: Reader,
    staging_bytes: int,
) -> TransferStats:
    """Run conversions that compute, one at a time: read whole tensors, convert them, keep this rank's shards."""
    stats = TransferStats()
    for group in opaque:
        dtype = state[group.target].dtype
        results, cost = read_converted(model, group, index, reader, dtype=dtype, staging_bytes=staging_bytes)
        stats += cost
        for key, result in results.items():
            if key in loaded and loaded[key].pieces is None:
                Held.of(state[key]).fill(result)
    return stats


def _receive(state: Mapping[str, torch.Tensor], keys: Iterable[str]) -> None:
    """Broadcast shards along each axis of their mesh that replicates them, from the first rank of the axis."""
    for key in keys:
        tensor = state[key]
        assert isinstance(tensor, DTensor)
        local = Held.of(tensor).memory
        # A CPU-offloaded shard of a mesh of GPUs travels between GPUs.
        sent = local.to(tensor.device_mesh.device_type).contiguous()
        if sent.numel():
            for axis, _ in Held.of(tensor).replicated_axes:
                dist.broadcast(sent, group=tensor.device_mesh.get_group(axis), group_src=0)
            if sent is not local:
                local.copy_(sent)


# ---- thin shards ----

NEIGHBOURS = 8
"""Ranks that read together at most: the GPUs of a node. (assumed; others exchange over the network, no less right)"""

LEAST_RUN = 2**16
"""Bytes of a run in the file below which neighbours read together: what parallel file systems take for small. (Lustre's
and GPFS's smallest stripes and sub-blocks are 64 KiB and less)"""


@dataclass(frozen=True, kw_only=True)
class Band:
    """What this rank reads of a weight for its neighbours, and where it puts what they read for it.

    A weight that is split along a later dimension is many short runs of the file for each rank: of DeepSeek-V3's
    experts on 2,048 ranks 256 runs of 28 KB in each layer. Runs of neighbours follow each other in the file. So each of
    eight neighbours of the mesh, a node as a rule, reads the runs of all for its eighth of dimension 0, eight times as
    long and an eighth as many, and sends the others theirs.
    """

    tensor: PieceTensor
    """The stored weight."""
    memory: torch.Tensor
    """This rank's shard, contiguous."""
    group: dist.ProcessGroup
    """That of the neighbours' axis of the mesh."""
    ranks: tuple[int, ...]
    """The neighbours, this rank among them."""
    boxes: tuple[Box, ...]
    """What each of them gets from this rank."""
    num_bytes: int
    """Bytes of the shard as it is stored, and so of what is read."""

    def begin(self, rank: int) -> tuple[list[Place], list[dist.P2POp]]:
        """New memory for what this rank reads, and what it sends and receives once that is filled."""
        read: list[Place] = []
        moves: list[dist.P2POp] = []
        for neighbour, box, own in zip(self.ranks, self.boxes, self.memory.chunk(len(self.ranks)), strict=True):
            memory = own if neighbour == rank else torch.empty_like(own)
            read.append((memory, self.tensor, box))
            if neighbour != rank:
                for move, part in ((dist.isend, memory), (dist.irecv, own)):  # backends do not know every dtype
                    content = part.reshape(-1).view(torch.uint8)
                    moves.append(dist.P2POp(move, content, neighbour, self.group))
        return read, moves


def band_of(tensor: torch.Tensor, stored: PieceTensor, itemsize: float) -> Band | None:
    """The band of a weight whose shards are thin in a file of elements of so many bytes; None for any other, the same
    on every rank."""
    if stored.pieces is None or not isinstance(tensor, DTensor):
        return None
    mesh, shape, local = tensor.device_mesh, tensor.shape, Held.of(tensor).memory
    splits = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    placement = tensor.placements[splits[0]] if len(splits) == 1 else None
    if type(placement) is not Shard or local.device.type != mesh.device_type or not local.is_contiguous():
        return None  # shards of several axes are not neighbours, and those of offloaded weights have no network
    axis, dim, coordinate = splits[0], placement.dim, mesh.get_coordinate()
    ranks = mesh.size(axis)
    count = math.gcd(NEIGHBOURS, ranks, shape[0])
    run = math.prod(shape[dim:]) // ranks * itemsize
    if not dim or shape[dim] % ranks or count == 1 or run >= LEAST_RUN or coordinate is None:
        return None
    own, rows = coordinate[axis], shape[0] // count
    first = own - own % count
    part = Box(start=(own % count * rows, *[0] * (len(shape) - 1)), length=(rows, *shape[1:]))
    places = [[*coordinate[:axis], i, *coordinate[axis + 1 :]] for i in range(first, first + count)]
    shards = (local_boxes(shape, tensor.placements, mesh.shape, place) for place in places)
    return Band(
        tensor=stored,
        memory=local,
        group=mesh.get_group(axis),
        ranks=tuple(int(mesh.mesh[tuple(place)]) for place in places),
        boxes=tuple(box.intersect(part) for ((box, _),) in shards),
        num_bytes=round(local.numel() * itemsize),
    )


def _read_bands(bands: Iterable[Band], index: CheckpointIndex, reader: Reader, *, staging_bytes: int) -> TransferStats:
    """Read what neighbours need of thin shards, some at a time, and exchange it. An error is raised at the end: until
    then the neighbours wait for what this rank sends."""
    stats, error, rank = TransferStats(), None, rank_and_size()[0]
    for some in batches(bands, staging_bytes // 2, lambda band: band.memory.nbytes):  # files take the other half
        read, moves = zip(*(band.begin(rank) for band in some), strict=True)
        try:
            if error is None:
                stats += read_into(chain(*read), index, reader, staging_bytes=staging_bytes)
        except Exception as failed:
            error = failed
        for work in dist.batch_isend_irecv(list(chain(*moves))):
            work.wait()
    if error is not None:
        raise error
    return stats


# ---- values ----


def read_into(places: Iterable[Place], index: CheckpointIndex, reader: Reader, *, staging_bytes: int) -> TransferStats:
    """Fill memory with boxes of stored tensors: read, and dequantise what is stored quantised."""
    transfers, slabs = reads_of(places, index)
    return reader.read(transfers) + dequantize(slabs, reader, staging_bytes=staging_bytes)


def read_converted(
    model: nn.Module,
    group: ConversionGroup,
    index: CheckpointIndex,
    reader: Reader,
    *,
    dtype: torch.dtype,
    staging_bytes: int,
) -> tuple[dict[str, torch.Tensor], TransferStats]:
    """The results of a conversion of whole stored tensors, cast to the model's dtype before as transformers does."""
    whole = {key: torch.empty(index.tensors[key].shape, dtype=dtype) for key, _ in group.members}
    places = [whole_place(memory, index.tensors[key]) for key, memory in whole.items()]
    stats = read_into(places, index, reader, staging_bytes=staging_bytes)
    with original_classes(model):
        return convert_group(model, group, whole), stats


def check_values(match: Match, *, staging_bytes: int) -> TransferStats:
    """Compare the two stored values of each tied pair, and look for columns of quantised weights that are ordered by
    activation; each rank compares its own shards, and looks at some weights, which costs what is returned."""
    index, (rank, world_size) = match.index, rank_and_size()
    ordered = [each for each in index.tensors.values() if isinstance(each, QuantizedTensor) and each.groups is not None]
    if not match.tied_pairs and not ordered:
        return TransferStats()
    with Reader(staging_bytes=staging_bytes // 2, side=None) as reader:
        stats = check_order(ordered[rank::world_size], reader, staging_bytes=staging_bytes // 4)
        for name, other in match.tied_pairs:
            first, second = match.loaded[name], match.load_map.tensors[other]
            if first.pieces is None or second.pieces is None:
                continue  # what a conversion computes has no bytes in the file to compare
            for box, _ in Held.of(match.state[name]).boxes:
                for slab in box.slabs(staging_bytes // 4, first.dtype.itemsize):
                    values = torch.zeros(2, *slab.length, dtype=first.dtype)  # rows of added tokens stay 0
                    places = [(value, tensor, slab) for tensor, value in zip((first, second), values, strict=True)]
                    read_into(places, index, reader, staging_bytes=staging_bytes // 2)
                    if not torch.equal(values[0], values[1]):
                        raise CheckpointError(
                            f"{index.name!r}: the config ties {name!r} and {other!r}, but the checkpoint holds "
                            "different values for them. Set tie_word_embeddings=False in the config to keep both."
                        )
    return stats
