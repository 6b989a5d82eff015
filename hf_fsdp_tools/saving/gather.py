"""Gather a sharded tensor on rank 0 alone, for conversions that need whole values."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.cpu_backend import has_cpu_backend
from hf_fsdp_tools.distributed.shards import is_first_replica, local_boxes_of, local_tensor, memory_view


def gather_to_first(tensor: torch.Tensor, *, staging_bytes: int) -> torch.Tensor | None:
    """The whole of a sharded (or plain) tensor on the host of rank 0; None on every other rank.

    Every rank of the default process group must call. Each first replica sends its shard to rank 0, at most
    `staging_bytes` at a time, so that no other rank holds more than its shard and one such part. Shards travel between
    CPUs, by gloo as a rule; in a group that has no backend for them (`has_cpu_backend`), between devices: NCCL then
    makes a communicator for each sender, which takes memory of rank 0's GPU.
    """
    rank, _ = rank_and_size()
    whole = None
    with agreed("gathering a tensor"):
        if rank == 0:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    parts = list(_bounded_parts(tensor, staging_bytes)) if is_first_replica(tensor) else []
    device = torch.device("cpu")
    if dist.is_initialized() and not has_cpu_backend() and isinstance(tensor, DTensor):
        device = torch.device(tensor.device_mesh.device_type)
    for sender, boxes in enumerate(all_ranks([box for box, _ in parts], "gathering a tensor")):
        for i, box in enumerate(boxes):
            if rank == sender:
                part = parts[i][1]
                if rank != 0:
                    dist.send(part.to(device).contiguous(), dst=0)
            elif rank == 0:
                part = torch.empty(box.length, dtype=tensor.dtype, device=device)
                dist.recv(part, src=sender)
            if whole is not None:
                place = tuple(slice(s, s + n) for s, n in zip(box.start, box.length, strict=True))
                whole[place] = part.to("cpu")
    return whole


def _bounded_parts(tensor: torch.Tensor, num_bytes: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's boxes and their memory in parts along dimension 0 of at most `num_bytes`, or single rows."""
    local = local_tensor(tensor)
    for box, start in local_boxes_of(tensor):
        for slab in box.slabs(num_bytes, tensor.element_size()):
            inside = [s + b - a for s, a, b in zip(start, box.start, slab.start, strict=True)]
            yield slab, memory_view(local, inside, slab.length)
