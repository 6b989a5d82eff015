"""Which rank sends what to whom, bucket by bucket, as data: no tensor and no process group is needed to make it.

A plan has one entry for each tensor that a rank gets, whatever the number of ranks that hold parts of it: a rank works
out from it, when the bucket travels, what it sends and gets itself.
"""

import math
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from operator import add
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hf_fsdp_tools.distributed.shards import Box, local_boxes, repetitions
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.regions import Piece, View, slice_view
from hf_fsdp_tools.streaming.outgoing import SavedTensor
from hf_fsdp_tools.text import grouped, show_bytes

EVERY = -1
"""In the place of a rank: all of them."""

APART_BYTES = 2**16
"""From how many bytes on a box travels by itself; smaller ones of two ranks travel as one message. (assumed)"""


class Spread(list[tuple[Box, tuple[int, ...]]]):
    """Boxes of a tensor, disjoint and complete, each with the ranks that hold it; what is worked out of them is kept,
    for all tensors that lie alike."""

    def __init__(self, boxes: Iterable[tuple[Box, tuple[int, ...]]]) -> None:
        super().__init__(boxes)
        self._sums: dict[tuple[Box, int, int], tuple[Any, Any, int]] = {}

    @cached_property
    def of_rank(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the boxes that a rank holds."""
        return grouped((rank, i) for i, (_, ranks) in enumerate(self) for rank in ranks)

    @cached_property
    def of_all(self) -> tuple[int, ...]:
        """The ranks that hold all boxes."""
        return tuple(rank for rank in self[0][1] if len(self.of_rank[rank]) == len(self))

    @cached_property
    def elements(self) -> int:
        """Bytes of all boxes on all ranks that hold them."""
        return sum(box.numel * len(ranks) for box, ranks in self)

    @cached_property
    def turns(self) -> int:
        """After how many turns the same ranks send again what several hold."""
        return math.lcm(*{len(ranks) for _, ranks in self})

    def sums(self, want: Box, itemsize: int, turn: int) -> tuple[Any, Any, int]:
        """Who sends how many elements of a box to a rank that holds nothing of it, and how many that receives apart."""
        key = want, itemsize, turn % self.turns
        if key not in self._sums:
            parts = [(ranks[turn % len(ranks)], part) for box, ranks in self if (part := box.intersect(want)).numel]
            apart = sum(part.numel for _, part in parts if not is_direct(part, want, itemsize))
            sources, sizes = ([rank for rank, _ in parts], [part.numel for _, part in parts])
            self._sums[key] = np.array(sources, np.int64), np.array(sizes, np.int64), apart
        return self._sums[key]


def is_direct(part: Box, box: Box, itemsize: int) -> bool:
    """Whether a part of a box is received where it belongs: it travels by itself, and its elements are neighbours in
    the box, stored row-major on its own."""
    cut = next((d for d, n in enumerate(part.length) if n > 1), len(part.length))
    return part.length[cut + 1 :] == box.length[cut + 1 :] and part.numel * itemsize >= APART_BYTES


@dataclass(frozen=True, slots=True)
class Arrival:
    """A box of a tensor that a rank gets whole."""

    to: int
    """The rank, or `EVERY`."""
    key: str
    """What the caller calls it."""
    name: str
    """That of the tensor."""
    box: Box
    dtype: torch.dtype
    spread: Spread
    """Who holds the tensor."""

    @property
    def turn(self) -> int:
        """Which of several ranks that hold the same sends it."""
        return zlib.crc32(self.key.encode()) + self.to

    def parts(self, rank: int) -> Iterator[tuple[Box, int]]:
        """Yield what a rank sends or gets of it, in an order that all ranks share: parts of the box, with the rank that
        sends each. A rank that holds what it gets copies it."""
        is_there, turn = self.to in (rank, EVERY), self.turn
        for i in range(len(self.spread)) if is_there else self.spread.of_rank.get(rank, ()):
            box, ranks = self.spread[i]
            source = self.to if self.to in ranks else ranks[turn % len(ranks)]
            if (is_there or source == rank) and (part := box.intersect(self.box)).numel:
                yield part, source

    def sizes(self) -> tuple[Any, Any, int]:
        """Which ranks send how many elements to the one rank that gets it, and how many that receives apart."""
        size, turn = self.dtype.itemsize, self.turn
        sources, sizes, apart = self.spread.sums(self.box, size, turn)
        for box, ranks in (self.spread[i] for i in self.spread.of_rank.get(self.to, ())):  # which it copies
            part = box.intersect(self.box)
            sources, sizes = np.append(sources, ranks[turn % len(ranks)]), np.append(sizes, -part.numel)
            apart -= 0 if is_direct(part, self.box, size) else part.numel
        return sources, sizes, apart

    def add_costs(self, costs: Any) -> None:
        """Add the bytes of memory that each rank needs to get and to give its boxes."""
        sources, sizes, apart = self.sizes()
        if self.to != EVERY:
            np.add.at(costs, sources, sizes * self.dtype.itemsize)
        costs[slice(None) if self.to == EVERY else self.to] += (self.box.numel + apart) * self.dtype.itemsize


@dataclass(kw_only=True)
class Bucket:
    """What travels together: no rank gets and gives more than the bound of bytes."""

    arrivals: list[Arrival]
    most_bytes: int
    """The bytes that some rank needs."""


class Holders(list[tuple[Box, tuple[int, ...]]]):
    """The boxes of a model tensor, disjoint and complete, each with the ranks that hold it."""

    def __init__(self, shape: Sequence[int], boxes: Iterable[tuple[Box, tuple[int, ...]]]) -> None:
        super().__init__(boxes)
        self._shape = tuple(shape)
        self._starts = [sorted({box.start[dim] for box, _ in self}) for dim in range(len(shape))]
        self._cells = {box.start: (box, ranks) for box, ranks in self}
        self._is_grid = math.prod(map(len, self._starts)) == len(self)  # shards of FSDP1 are none
        self._cut = next((dim for dim, starts in enumerate(self._starts) if len(starts) > 1), 0)
        self._spreads: dict[View, Spread] = {}

    def spread_of(self, piece: Piece) -> Spread:
        """The boxes that a piece of the tensor makes up elsewhere, with the ranks that hold them.

        Experts of a stack that is cut within them meet the same boxes alike, and are worked out once: in the first of
        the rows before the first dimension that is cut.
        """
        view, row = piece.view, math.prod(self._shape[self._cut :])
        offset = view.offset % row if self._cut else view.offset
        first = View(offset=offset, length=view.length, strides=view.strides)
        if first not in self._spreads:
            near = self._near(first) if self._is_grid else self
            self._spreads[first] = Spread(
                (part, ranks) for held, ranks in near for part, _ in slice_view(first, self._shape, held)
            )
        if not any(begin := piece.box.start):
            return self._spreads[first]
        parts = self._spreads[first]
        return Spread((Box(start=tuple(map(add, begin, box.start)), length=box.length), each) for box, each in parts)

    def _near(self, view: View) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield the boxes between the first and the last element of a view, in each dimension."""
        starts = []
        for dim, all_starts in enumerate(self._starts):
            inner = math.prod(self._shape[dim + 1 :])
            row = inner * self._shape[dim] if dim else math.prod(self._shape)
            first = view.offset % row
            last = first + sum((n - 1) * s for n, s in zip(view.length, view.strides, strict=True) if s % row)
            low, high = (first // inner, last // inner) if last < row else (0, self._shape[dim])
            starts.append(all_starts[bisect_right(all_starts, low) - 1 : bisect_right(all_starts, high)])
        yield from (self._cells[start] for start in product(*starts))


Key = TypeVar("Key")


def holders_of(
    tensors: Mapping[Key, torch.Tensor],
    num_ranks: int,
    boxes: Mapping[Key, Sequence[Sequence[Box]]] = MappingProxyType({}),
) -> dict[Key, Holders]:
    """The boxes of model tensors with the ranks that hold them, by arithmetic alone, once for those sharded alike.

    Every rank holds all of a plain tensor. A mesh that was cut out of a larger one is repeated along the axes that it
    lacks. `boxes` are those of each rank, of tensors that alone know their own.
    """
    everyone, grids = tuple(range(num_ranks)), cache(repetitions)

    @cache
    def of(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh) -> Holders:
        ranks = ((grid, coordinate) for grid in grids(mesh) for coordinate in product(*map(range, grid.shape)))
        boxes_of = ((int(grid[at]), local_boxes(shape, placements, grid.shape, at)) for grid, at in ranks)
        return _held(shape, ((rank, box) for rank, some in boxes_of for box, _ in some))

    found = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if key in boxes:
            found[key] = _held(shape, ((rank, box) for rank, some in enumerate(boxes[key]) for box in some))
        elif isinstance(tensor, DTensor):
            found[key] = of(shape, tensor.placements, tensor.device_mesh)
        else:
            found[key] = Holders(shape, [(Box.whole(shape), everyone)])
    return found


def _held(shape: tuple[int, ...], boxes: Iterable[tuple[int, Box]]) -> Holders:
    ranks_of: dict[Box, dict[int, None]] = defaultdict(dict)
    for rank, box in boxes:
        ranks_of[box][rank] = None
    return Holders(shape, ((box, tuple(ranks)) for box, ranks in ranks_of.items()))


def spread_of(tensor: SavedTensor, held: Mapping[str, Holders]) -> Spread:
    """The boxes of a tensor of the checkpoint with the ranks that hold them."""
    spreads = [held[piece.source].spread_of(piece) for piece in tensor.symbol.pieces or ()]
    return spreads[0] if len(spreads) == 1 else Spread(each for spread in spreads for each in spread)


def plan_buckets(
    to: Sequence[int],
    tensors: Mapping[str, tuple[Box, torch.dtype]],
    spread: Callable[[str], Spread],
    num_ranks: int,
    bucket_bytes: int,
) -> list[Bucket]:
    """The buckets in which the ranks `to` get whole tensors, the same wherever it is computed.

    Tensors go out in their order, in the dtypes given. Where all ranks get them, each box is broadcast. A bucket takes
    half of the bound, so that the next one can travel while it is used, or one larger tensor.

    Raises:
        ConfigError: a tensor does not fit into a bucket.
    """
    if len(to) == num_ranks > 1:
        to = (EVERY,)

    def one_by_one() -> Iterator[list[Arrival]]:
        for name, (whole, dtype) in tensors.items():
            yield [Arrival(rank, name, name, whole, dtype, spread(name)) for rank in to]

    buckets = joined(one_by_one(), bucket_bytes // 2, num_ranks)
    for bucket in buckets:
        if (most := bucket.most_bytes) > bucket_bytes:  # it has one tensor
            raise ConfigError(
                f"bucket_bytes={bucket_bytes} does not hold {bucket.arrivals[0].name!r}, for which a rank needs "
                f"{most}: give bucket_bytes={most} ({show_bytes(most)}) at least."
            )
    return buckets


def joined(parts: Iterable[list[Arrival]], num_bytes: int, num_ranks: int) -> list[Bucket]:
    """Buckets of what arrives together, in its order, while no rank needs more than these bytes."""
    buckets: list[Bucket] = []
    filled = np.zeros(num_ranks, np.int64)
    for part in parts:
        costs = np.zeros(num_ranks, np.int64)
        for each in part:
            each.add_costs(costs)
        if not buckets or (filled + costs).max() > num_bytes:
            buckets.append(Bucket(arrivals=[], most_bytes=0))
            filled[:] = 0
        filled += costs
        buckets[-1].arrivals += part
        buckets[-1].most_bytes = int(filled.max())
    return buckets
