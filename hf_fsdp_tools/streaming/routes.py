"""Which rank sends what to whom, bucket by bucket, as data: no tensor and no process group is needed to make it."""

import math
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from operator import add
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hf_fsdp_tools.distributed.shards import Box, local_boxes, repetitions
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.regions import Piece, View, slice_view
from hf_fsdp_tools.streaming.outgoing import SavedTensor
from hf_fsdp_tools.text import show_bytes

Spread = Sequence[tuple[Box, tuple[int, ...]]]
"""Boxes of a tensor, disjoint and complete, each with the ranks that hold it."""

EVERY = -1
"""In the place of a rank: all of them."""


class Route(NamedTuple):
    """A box of a tensor on its way."""

    key: str
    """What it belongs to (`Bucket.arrivals`)."""
    name: str
    box: Box
    source: int
    """The rank that sends it; the same as `to` where it only copies."""
    to: int
    """The rank that gets it, or `EVERY`."""


@dataclass(kw_only=True)
class Bucket:
    """What travels together: no rank gets and gives more than the bound of bytes."""

    arrivals: dict[int, dict[str, tuple[Box, torch.dtype]]] = field(default_factory=lambda: defaultdict(dict))
    """The boxes that a rank gets whole, by a name that the caller gives each, and their dtypes; by rank or `EVERY`."""
    routes: list[Route] = field(default_factory=list)
    """In the order in which every rank enters them."""

    def add(self, to: int, key: str, name: str, want: Box, dtype: torch.dtype, spread: Spread) -> None:
        """Let a box of a tensor go to a rank, or to `EVERY` one.

        A rank that holds what it wants copies it; what several ranks hold is sent by one of them, in turns.
        """
        self.arrivals[to][key] = want, dtype
        turn, is_whole = zlib.crc32(key.encode()) + to, want.numel == sum(box.numel for box, _ in spread)
        for box, ranks in spread:
            if is_whole or (box := box.intersect(want)).numel:
                source = to if to in ranks else ranks[turn % len(ranks)]
                self.routes.append(Route(key, name, box, source, to))

    def arrivals_at(self, rank: int) -> Mapping[str, tuple[Box, torch.dtype]]:
        """What a rank gets."""
        return self.arrivals.get(rank) or self.arrivals.get(EVERY) or {}

    @cached_property
    def bytes_of(self) -> Mapping[int, int]:
        """Bytes of memory that each rank, or `EVERY` one, needs to get and to give its boxes; once all are added."""
        found: dict[int, int] = defaultdict(int)
        for rank, boxes in self.arrivals.items():
            found[rank] += sum(box.numel * dtype.itemsize for box, dtype in boxes.values())
        for route in self.routes:
            box, dtype = self.arrivals[route.to][route.key]
            if route.source == route.to:
                continue
            num_bytes = route.box.numel * dtype.itemsize
            if not _is_run(route.box, box):  # it is received apart
                found[route.to] += num_bytes
            if route.to != EVERY:
                found[route.source] += num_bytes
        return found


def _is_run(part: Box, box: Box) -> bool:
    """Whether the elements of a part are neighbours in a box that is stored row-major on its own."""
    cut = next((d for d, n in enumerate(part.length) if n > 1), len(part.length))
    return part.length[cut + 1 :] == box.length[cut + 1 :]


class Holders(list[tuple[Box, tuple[int, ...]]]):
    """The boxes of a model tensor, disjoint and complete, each with the ranks that hold it."""

    def __init__(self, shape: Sequence[int], boxes: Iterable[tuple[Box, tuple[int, ...]]]) -> None:
        super().__init__(boxes)
        self._shape = tuple(shape)
        self._starts = [sorted({box.start[dim] for box, _ in self}) for dim in range(len(shape))]
        self._cells = {box.start: (box, ranks) for box, ranks in self}
        self._is_grid = math.prod(map(len, self._starts)) == len(self)  # shards of FSDP1 are none
        self._cut = next((dim for dim, starts in enumerate(self._starts) if len(starts) > 1), 0)
        self._parts: dict[View, list[tuple[Box, View, Box, tuple[int, ...]]]] = {}

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box, View, Box, tuple[int, ...]]]:
        """Yield where a piece of the tensor meets these boxes: the box that the meeting makes up elsewhere, where that
        lies in one of these, stored row-major on its own, this one, and the ranks that hold it."""
        parts, outer = self._parts_in(piece.view)
        for (box, ranks), (_, view, held, _) in zip(self.spread_of(piece), parts, strict=True):
            if outer:
                offset = view.offset + outer * math.prod(held.length[self._cut :])
                view = View(offset=offset, length=view.length, strides=view.strides)
            yield box, view, held, ranks

    def spread_of(self, piece: Piece) -> Spread:
        """The boxes that a piece of the tensor makes up elsewhere, with the ranks that hold them."""
        parts, _ = self._parts_in(piece.view)
        if not any(first := piece.box.start):
            return [(box, ranks) for box, _, _, ranks in parts]
        return [(Box(start=tuple(map(add, first, box.start)), length=box.length), ranks) for box, _, _, ranks in parts]

    def _parts_in(self, view: View) -> tuple[list[tuple[Box, View, Box, tuple[int, ...]]], int]:
        """What `parts_of` yields of a view in the first of the rows before the first dimension that is cut; its row.

        Experts of a stack that is cut within them meet the same boxes alike, and are worked out once.
        """
        row = math.prod(self._shape[self._cut :])
        outer, offset = divmod(view.offset, row) if self._cut else (0, view.offset)
        first = View(offset=offset, length=view.length, strides=view.strides)
        if first not in self._parts:
            self._parts[first] = [
                (part, inside, held, ranks)
                for held, ranks in (self._met_by(first) if self._is_grid else self)
                for part, inside in slice_view(first, self._shape, held)
            ]
        return self._parts[first], outer

    def _met_by(self, view: View) -> Iterator[tuple[Box, tuple[int, ...]]]:
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
    pieces = tensor.symbol.pieces or ()
    return [each for piece in pieces for each in held[piece.source].spread_of(piece)]


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

    def one_by_one() -> Iterator[Bucket]:
        for name, (whole, dtype) in tensors.items():
            one = Bucket()
            for rank in to:
                one.add(rank, name, name, whole, dtype, spread(name))
            if (most := most_of(one.bytes_of)) > bucket_bytes:
                raise ConfigError(
                    f"bucket_bytes={bucket_bytes} does not hold {name!r}, for which a rank needs {most}: give "
                    f"bucket_bytes={most} ({show_bytes(most)}) at least."
                )
            yield one

    return joined(one_by_one(), bucket_bytes // 2)


def joined(parts: Iterable[Bucket], num_bytes: int) -> list[Bucket]:
    """Buckets put together, in their order, while no rank needs more than these bytes."""
    buckets: list[Bucket] = []
    filled: Mapping[int, int] = {}
    for part in parts:
        costs = part.bytes_of
        total: Mapping[int, int] = {rank: filled.get(rank, 0) + costs.get(rank, 0) for rank in (*filled, *costs)}
        if not buckets or most_of(total) > num_bytes:
            buckets.append(Bucket())
            total = costs
        filled = total
        for rank, arrivals in part.arrivals.items():
            buckets[-1].arrivals[rank] |= arrivals
        buckets[-1].routes += part.routes
    return buckets


def most_of(costs: Mapping[int, int]) -> int:
    """The bytes that some rank needs, of those that `Bucket.bytes_of` gives."""
    return costs.get(EVERY, 0) + max((n for rank, n in costs.items() if rank != EVERY), default=0)
