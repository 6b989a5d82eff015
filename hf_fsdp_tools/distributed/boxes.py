"""Which part of a sharded tensor a rank holds: arithmetic without mesh or tensors.

A box is a rectangular region of a tensor: start and length per dimension, in elements.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangular region of a tensor, in elements."""

    start: tuple[int, ...]
    """First index per dimension."""

    length: tuple[int, ...]
    """Number of indices per dimension; a zero makes the box empty."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor of this shape."""
        return cls(start=(0,) * len(shape), length=tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements the box holds; 1 for a 0-d tensor."""
        return math.prod(self.length)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.length, strict=True))

    def intersect(self, other: "Box") -> "Box":
        """The region in both boxes of the same tensor; empty where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = (
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.length, other.start, other.length, strict=True)
        )
        return Box(start=start, length=tuple(max(0, e - s) for s, e in zip(start, stop, strict=True)))

    def slabs(self, num_bytes: int, itemsize: int) -> Iterator["Box"]:
        """Yield the box in parts along dimension 0, each of at most `num_bytes` or a single row."""
        if not self.length:
            yield self
            return
        rows = self.length[0]
        step = max(1, num_bytes * rows // max(1, self.numel * itemsize))
        for i in range(0, rows, step):
            start, length = (self.start[0] + i, *self.start[1:]), (min(step, rows - i), *self.length[1:])
            yield Box(start=start, length=length)


def local_boxes(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The boxes of a global tensor that one rank holds, each with its start in the rank's local tensor.

    `Shard` and `Replicate` give one box, an empty shard none. FSDP over tensor parallelism (`_StridedShard`) can leave
    a rank with disjoint ranges, and so with several boxes. Shards follow `torch.chunk`: ceil(n / ranks) indices each,
    and the last shards short or empty.
    """
    ranges: list[list[tuple[int, int]]] = [[(0, n)] for n in shape]  # per dim: (start, length), in local order
    for placement, ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise AssertionError(f"{placement} is not a way to hold weights; expected Shard or Replicate")
        dim = placement.dim % len(shape)
        factor = getattr(placement, "split_factor", 1)
        parts = [_torch_chunk(ranges[dim], factor, i) for i in range(factor)]
        ranges[dim] = [r for part in parts for r in _torch_chunk(part, ranks, index)]
    located = [list(_with_local_starts(dim)) for dim in ranges]
    boxes = []
    for combination in product(*located):
        box = Box(start=tuple(r[0] for r in combination), length=tuple(r[1] for r in combination))
        if box.numel:
            boxes.append((box, tuple(r[2] for r in combination)))
    return tuple(boxes)


def _torch_chunk(ranges: list[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """What chunk `index` of `torch.chunk(count)` holds of the indices in `ranges`, laid end to end."""
    total = sum(length for _, length in ranges)
    size = -(-total // count)
    first, last = min(total, index * size), min(total, (index + 1) * size)
    kept, position = [], 0
    for start, length in ranges:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            kept.append((start + low - position, high - low))
        position += length
    return _with_neighbours_joined(kept)


def _with_neighbours_joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges with neighbours joined to one range."""
    joined: list[tuple[int, int]] = []
    for start, length in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _with_local_starts(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (global start, length, local start) of each range; one empty range where there is none."""
    local = 0
    for start, length in _with_neighbours_joined(ranges) or [(0, 0)]:
        yield start, length, local
        local += length
