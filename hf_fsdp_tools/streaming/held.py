"""What this rank holds of each tensor of the checkpoint that a model would be saved as: views of its shards."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from hf_fsdp_tools.distributed.shards import Box, Held, memory_view
from hf_fsdp_tools.streaming.outgoing import SavedTensor, views_of_piece

_MIN_PART_BYTES = 2**20
"""Bytes that each replica of a shard must get to give for the replicas to share it; less is given by one. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a tensor of the checkpoint that this rank holds."""

    name: str
    """The tensor's name in the checkpoint."""
    box: Box
    """Where the part lies in the tensor; of a weight that is quantised as stored, in its bytes."""
    data: torch.Tensor
    """A view of the model's shard, of the box's lengths and any strides, in the model's dtype."""
    dtype: torch.dtype
    """The dtype in which its elements go out."""
    replica: tuple[int, int] = (0, 1)
    """(index, number) of the replica of the shard that this rank holds."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the dtype in which it goes out."""
        return self.data.numel() * self.dtype.itemsize

    def values(self) -> torch.Tensor:
        """The part contiguous and in its dtype: a copy, unless it is both already."""
        return self.data.to(self.dtype).contiguous()

    def within(self, box: Box) -> "Part":
        """The part of it that lies in a box of the tensor, which it must meet."""
        common = self.box.intersect(box)
        return replace(self, box=common, data=memory_view(self.data, common.start_in(self.box), common.length))


def parts_of(
    tensors: Mapping[str, SavedTensor], state: Mapping[str, torch.Tensor], *, every_replica: bool = False
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the name of each tensor that is not computed, and this rank's parts of it.

    `state` has the model tensors that they are made of. A shard that other ranks hold too is left to the first mesh
    (`Held.replica`), and belongs to each of its replicas (`shares`); with `every_replica`, to whoever has it. No rank
    communicates, and nothing is copied, unless a rank holds several ranges of one dimension.
    """

    @cache  # hundreds of experts are saved from one tensor
    def held_of(source: str) -> list[tuple[Box, torch.Tensor, tuple[int, int]]]:
        own = Held.of(state[source])
        replica = (0, 1) if every_replica else own.replica
        if replica is None:
            return []
        return [(box, memory.contiguous(), replica) for box, memory in own.parts()]

    def cut(tensor: SavedTensor, name: str) -> Iterator[Part]:
        for piece in tensor.symbol.pieces or ():
            for box, memory, replica in held_of(piece.source):
                for part, data in views_of_piece(piece, memory, box, state[piece.source].shape):
                    yield Part(name=name, box=part, data=data, dtype=tensor.element, replica=replica)

    for name, tensor in tensors.items():
        if not tensor.is_computed:
            yield name, list(cut(tensor, name))


def shares(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield what this rank gives of its parts; the other replicas, which hold the same, give the rest.

    A large part is cut along the first dimension that has an index for each replica. Small ones are dealt out by the
    tensor's name.
    """
    for part in parts:
        index, number = part.replica
        dim = next((d for d, n in enumerate(part.box.length) if n >= number), None)
        if number == 1:
            yield part
        elif dim is None or part.num_bytes < number * _MIN_PART_BYTES:
            if zlib.crc32(part.name.encode()) % number == index:
                yield part
        else:
            size = part.box.length[dim]
            first, stop = size * index // number, size * (index + 1) // number
            start = tuple(s + (first if d == dim else 0) for d, s in enumerate(part.box.start))
            length = tuple(stop - first if d == dim else n for d, n in enumerate(part.box.length))
            yield part.within(Box(start=start, length=length))
