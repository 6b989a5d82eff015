"""Thin shards: neighbours each read a band of a weight, and exchange its rows.

A weight that is split along a later dimension is many short runs of the file for each rank: of DeepSeek-V3's experts on
2,048 ranks 256 runs of 28 KB in each layer. Runs of neighbours follow each other in the file. So each of eight
neighbours of the mesh, a node as a rule, reads the runs of all for its eighth of dimension 0, eight times as long and
an eighth as many, and sends the others theirs.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.distributed.shards import Box, Held, local_boxes
from hf_fsdp_tools.loading.quantized.dequantize import Place
from hf_fsdp_tools.loading.symbolic import PieceTensor

NEIGHBOURS = 8
"""Ranks that read together at most: the GPUs of a node. (assumed; others exchange over the network, no less right)"""

LEAST_RUN = 2**16
"""Bytes of a run in the file below which neighbours read together: what parallel file systems take for small. (Lustre's
and GPFS's smallest stripes and sub-blocks are 64 KiB and less)"""


@dataclass(frozen=True, kw_only=True)
class Band:
    """What this rank reads of a weight for its neighbours, and where it puts what they read for it."""

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
