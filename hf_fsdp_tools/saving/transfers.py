"""Which bytes of a saved model this rank writes, and where; and tensors that rank 0 gathers instead."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.cpu_backend import has_cpu_backend
from hf_fsdp_tools.distributed.shards import is_first_replica, local_boxes_of, local_tensor, memory_view, replica_of
from hf_fsdp_tools.loading.conversion import saved_tensors
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.saving.layout import Layout, Place

_MIN_RUN_BYTES = 2048
"""Mean bytes of a run in the file below which a tensor is gathered instead: one system call per run costs more than
sending the tensor to rank 0. (assumed)"""

_MIN_PART_BYTES = 2**20
"""Bytes that each replica of a shard must get to write for the replicas to share the shard; less is written by one of
them. (assumed)"""

Replica = tuple[int, int]
"""(index, number) of the replica of a shard that this rank holds."""

Held = dict[str, list[tuple[Transfer, Replica]]]
"""What this rank holds of each saved tensor, by hub key."""


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What this rank holds of a model tensor. It is made once: hundreds of experts are saved from one tensor."""

    shape: torch.Size
    """Of the whole tensor."""

    replica: Replica

    boxes: tuple[tuple[Box, torch.Tensor], ...]
    """Boxes of the tensor, each with its elements in contiguous memory."""


def held_transfers(model: nn.Module, layout: Layout) -> Held:
    """This rank's transfers, without those of keys whose reverse conversion does more than move data."""
    state = saved_tensors(model)
    share = cache(lambda source: _share(state[source]))

    def transfers(place: Place) -> Iterator[tuple[Transfer, Replica]]:
        for piece in place.tensor.pieces or ():
            if (own := share(piece.source)) is not None:
                for box, memory in own.boxes:
                    for transfer in place.transfers(piece, memory, box, own.shape):
                        yield transfer, own.replica

    return {key: list(transfers(place)) for key, place in layout.places.items() if place.tensor.pieces is not None}


def _share(source: torch.Tensor) -> _Share | None:
    """What this rank holds of a model tensor; None where its part is left to other ranks."""
    replica = replica_of(source)
    if replica is None:
        return None
    local = local_tensor(source)
    # A copy only where a rank holds several ranges of one dimension.
    boxes = ((box, memory_view(local, start, box.length).contiguous()) for box, start in local_boxes_of(source))
    return _Share(shape=source.shape, replica=replica, boxes=tuple(boxes))


def scattered_keys(held: Held) -> set[str]:
    """The keys of tensors that this rank would write in one system call for every few bytes; 64 calls do not matter."""
    return {key for key, transfers in held.items() if _is_scattered([transfer for transfer, _ in transfers])}


def _is_scattered(transfers: list[Transfer]) -> bool:
    runs = 0
    for transfer in transfers:
        run = 1
        for n, stride in sorted(zip(transfer.memory.shape, transfer.strides, strict=True), key=lambda d: d[1]):
            if stride == run:
                run *= n
        runs += transfer.memory.numel() // run
    return runs > 64 and sum(transfer.num_bytes for transfer in transfers) < runs * _MIN_RUN_BYTES


def parts_of_replica(key: str, held: list[tuple[Transfer, Replica]]) -> Iterator[Transfer]:
    """Yield what this rank writes of a saved tensor; the other replicas, which hold the same, write the rest.

    A large transfer is cut along the dimension with the longest steps in the file, so that each replica writes about
    one run of it. Small ones are dealt out by the tensor's name.
    """
    for transfer, (index, number) in held:
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


def gather_to_first(tensor: torch.Tensor, *, staging_bytes: int) -> torch.Tensor | None:
    """The whole of a sharded (or plain) tensor on the host of rank 0; None on every other rank.

    Every rank of the default process group must call. Each first replica sends its shard to rank 0, at most
    `staging_bytes` at a time, so that no other rank holds more than its shard and one such part. Shards travel between
    CPUs, by gloo as a rule; in a group that has no backend for them (`has_cpu_backend`), between devices: NCCL then
    makes a communicator for each sender, which takes memory of rank 0's GPU.
    """
    rank, whole = rank_and_size()[0], None
    parts = list(_bounded_parts(tensor, staging_bytes)) if is_first_replica(tensor) else []
    with agreed("gathering a tensor"):
        if rank == 0:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        every = all_ranks([box for box, _ in parts], "gathering a tensor")
    device = torch.device("cpu")
    if dist.is_initialized() and not has_cpu_backend() and isinstance(tensor, DTensor):
        device = torch.device(tensor.device_mesh.device_type)
    for sender, boxes in enumerate(every):
        for i, box in enumerate(boxes):
            if rank == sender:
                part = parts[i][1]
                if rank != 0:
                    dist.send(part.to(device).contiguous(), dst=0)
            elif rank == 0:
                part = torch.empty(box.length, dtype=tensor.dtype, device=device)
                dist.recv(part, src=sender)
            if whole is not None:
                memory_view(whole, box.start, box.length).copy_(part)
    return whole


def _bounded_parts(tensor: torch.Tensor, num_bytes: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's boxes and their memory in parts along dimension 0 of at most `num_bytes`, or single rows."""
    local = local_tensor(tensor)
    for box, start in local_boxes_of(tensor):
        for slab in box.slabs(num_bytes, tensor.element_size()):
            at = [a + s - b for a, s, b in zip(start, slab.start, box.start, strict=True)]
            yield slab, memory_view(local, at, slab.length)
