"""Which bytes of a saved model this rank writes, and where."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_fsdp_tools.checkpoint.conversion import saved_tensors
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.layout import Layout, Place
from hf_fsdp_tools.checkpoint.regions import row_major_strides, slice_view
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.distributed.shards import local_boxes_of, local_tensor, memory_view, replica_of

__all__ = ["Outgoing", "plan_outgoing"]

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
        scattered = {key for key, held in transfers.items() if _is_scattered([transfer for transfer, _ in held])}
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
    return {
        key: list(_transfers(key, place, state, layout))
        for key, place in layout.places.items()
        if place.tensor.pieces is not None
    }


def _transfers(
    key: str, place: Place, state: Mapping[str, torch.Tensor], layout: Layout
) -> Iterator[tuple[Transfer, tuple[int, int]]]:
    """Yield what this rank holds of one saved tensor: its boxes of each model tensor that the saved one is made of."""
    strides = row_major_strides(place.tensor.shape)
    for piece in place.tensor.pieces or ():
        source = state[piece.source]
        replica = replica_of(source)
        if replica is None:
            continue
        local = local_tensor(source)
        for box, local_start in local_boxes_of(source):
            held = memory_view(local, local_start, box.length)
            for part, view in slice_view(piece.view, source.shape, box):
                start = [a + b for a, b in zip(piece.box.start, part.start, strict=True)]
                first = sum(i * s for i, s in zip(start, strides, strict=True))
                held = held.contiguous()  # a copy only where a rank holds several ranges of one dimension
                transfer = Transfer(
                    file=layout.path(place.file),
                    start=place.offset + first * place.dtype.itemsize,
                    dtype=place.dtype,
                    strides=strides,
                    memory=held.as_strided(view.length, view.strides, held.storage_offset() + view.offset),
                )
                yield transfer, replica


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


def _is_scattered(transfers: list[Transfer]) -> bool:
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
