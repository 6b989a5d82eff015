"""Which bytes of a saved model this rank writes, and where."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.shards import local_boxes_of, local_tensor, memory_view, replica_of
from hf_fsdp_tools.loading.conversion import saved_tensors
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.regions import Piece, row_major_strides, slice_view
from hf_fsdp_tools.saving.layout import Layout, Place

_MIN_RUN_BYTES = 2048
"""Mean bytes of a run in the file below which a tensor is gathered instead: one system call per run costs more than
sending the tensor to rank 0. (assumed)"""

_MIN_PART_BYTES = 2**20
"""Bytes that each replica of a shard must get to write for the replicas to share the shard; less is written by one of
them. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """What this rank writes of a saved model."""

    in_place: list[Transfer]
    """From this rank's shards straight to their places in the files."""

    gathered: list[str]
    """Keys of tensors that rank 0 gathers and writes, the same on every rank."""


def plan_outgoing(model: nn.Module, layout: Layout) -> Outgoing:
    """What this rank writes of a model. Every rank must call; the ranks exchange which tensors must be gathered."""
    with agreed("planning the checkpoint"):
        transfers = _plan_transfers(model, layout)
        scattered = {key for key, held in transfers.items() if is_scattered([transfer for transfer, _ in held])}
    # A tensor is gathered by all ranks or by none, so they must agree on which.
    scattered = scattered.union(*all_ranks(scattered, "planning the checkpoint"))
    gathered = sorted({*scattered, *(key for key in layout.places if key not in transfers)})
    in_place = [
        own
        for key, held in transfers.items()
        if key not in gathered
        for transfer, replica in held
        for own in _part_of_replica(key, transfer, replica)
    ]
    return Outgoing(in_place=in_place, gathered=gathered)


def _plan_transfers(model: nn.Module, layout: Layout) -> dict[str, list[tuple[Transfer, tuple[int, int]]]]:
    """This rank's transfers by hub key, each with (index, number) of the replica that this rank holds.

    Keys whose reverse conversion does more than move data are left out.
    """
    state = saved_tensors(model)
    held = cache(lambda source: _held(state[source]))
    path = cache(layout.path)
    return {
        key: list(_transfers(place, path(place.file), held))
        for key, place in layout.places.items()
        if place.tensor.pieces is not None
    }


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What this rank holds of a model tensor. It is asked for once: hundreds of experts are saved from one tensor."""

    shape: torch.Size
    """Of the whole tensor."""

    replica: tuple[int, int]
    """(index, number) of this rank's replica."""

    boxes: tuple[tuple[Box, torch.Tensor], ...]
    """Boxes of the tensor, each with its elements in contiguous memory."""


def _held(source: torch.Tensor) -> _Held | None:
    """What this rank holds of a model tensor; None where its part is left to other ranks."""
    replica = replica_of(source)
    if replica is None:
        return None
    local = local_tensor(source)
    # A copy only where a rank holds several ranges of one dimension.
    boxes = ((box, memory_view(local, start, box.length).contiguous()) for box, start in local_boxes_of(source))
    return _Held(shape=source.shape, replica=replica, boxes=tuple(boxes))


def _transfers(
    place: Place, file: Path, held: Callable[[str], _Held | None]
) -> Iterator[tuple[Transfer, tuple[int, int]]]:
    """Yield what this rank holds of one saved tensor: its boxes of each model tensor that the saved one is made of."""
    for piece in place.tensor.pieces or ():
        source = held(piece.source)
        if source is None:
            continue
        for box, memory in source.boxes:
            for transfer in transfers_from(memory, box, source.shape, piece, place, file):
                yield transfer, source.replica


def transfers_from(
    held: torch.Tensor, box: Box, shape: Sequence[int], piece: Piece, place: Place, file: Path
) -> Iterator[Transfer]:
    """Yield the transfers that write what is held of a model tensor to its places in one piece of a saved tensor."""
    strides = row_major_strides(place.tensor.shape)
    for part, view in slice_view(piece.view, shape, box):
        start = [a + b for a, b in zip(piece.box.start, part.start, strict=True)]
        first = sum(i * s for i, s in zip(start, strides, strict=True))
        yield Transfer(
            file=file,
            start=place.offset + first * place.dtype.itemsize,
            dtype=place.dtype,
            strides=strides,
            memory=held.as_strided(view.length, view.strides, held.storage_offset() + view.offset),
        )


def _part_of_replica(key: str, transfer: Transfer, replica: tuple[int, int]) -> Iterator[Transfer]:
    """Yield the part of a transfer that this rank writes, if any; its replicas, which hold the same, write the rest.

    A large transfer is cut along the dimension with the longest steps in the file, so that each replica writes about
    one run of it. Small ones are dealt out by the tensor's name.
    """
    index, number = replica
    longest = sorted(zip(transfer.strides, range(len(transfer.strides)), strict=True), reverse=True)
    dim = next((d for _, d in longest if transfer.memory.shape[d] >= number), None)
    if number == 1:
        yield transfer
    elif dim is None or transfer.num_bytes < number * _MIN_PART_BYTES:
        if zlib.crc32(key.encode()) % number == index:
            yield transfer
    else:
        size = transfer.memory.shape[dim]
        first, stop = size * index // number, size * (index + 1) // number
        yield replace(
            transfer,
            start=transfer.start + first * transfer.strides[dim] * transfer.dtype.itemsize,
            memory=transfer.memory.narrow(dim, first, stop - first),
        )


def is_scattered(transfers: list[Transfer]) -> bool:
    """Whether writing a tensor in place takes one system call for every few bytes; up to 64 calls do not matter."""
    num_bytes = sum(t.memory.numel() for t in transfers) * transfers[0].dtype.itemsize if transfers else 0
    runs = 0
    for t in transfers:
        run = 1
        for n, stride in sorted(zip(t.memory.shape, t.strides, strict=True), key=lambda d: d[1]):
            if stride == run:
                run *= n
        runs += t.memory.numel() // run
    return runs > 64 and num_bytes < runs * _MIN_RUN_BYTES
