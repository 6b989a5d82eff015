"""Which rank sends what to whom, bucket by bucket, as data: no tensor and no process group is needed to make it."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Box, local_boxes, repetitions
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.streaming.outgoing import SavedTensor, boxes_of_piece
from hf_fsdp_tools.text import show_bytes

Holders = list[tuple[Box, tuple[int, ...]]]
"""Boxes of a tensor, disjoint and complete, each with the ranks that hold it."""

EVERY = -1
"""In the place of a rank: all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
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

    def add(self, to: int, key: str, name: str, want: Box, dtype: torch.dtype, holders: Holders) -> None:
        """Let a box of a tensor go to a rank, or to `EVERY` one.

        A rank that holds what it wants copies it; what several ranks hold is sent by one of them, in turns.
        """
        self.arrivals[to][key] = want, dtype
        for box, ranks in holders:
            if (common := box.intersect(want)).numel:
                source = to if to in ranks else ranks[(zlib.crc32(key.encode()) + to) % len(ranks)]
                self.routes.append(Route(key=key, name=name, box=common, source=source, to=to))

    def arrivals_at(self, rank: int) -> Mapping[str, tuple[Box, torch.dtype]]:
        """What a rank gets."""
        return self.arrivals.get(rank) or self.arrivals.get(EVERY) or {}

    def bytes_of(self) -> dict[int, int]:
        """Bytes of memory that each rank, or `EVERY` one, needs to get and to give its boxes."""
        found: dict[int, int] = defaultdict(int)
        for rank, boxes in self.arrivals.items():
            found[rank] += sum(box.numel * dtype.itemsize for box, dtype in boxes.values())
        for route in self.routes:
            box, dtype = self.arrivals[route.to][route.key]
            num_bytes = route.box.numel * dtype.itemsize
            if route.source == route.to:
                continue
            if not _is_run(route.box, box):  # it is received apart
                found[route.to] += num_bytes
            if route.to != EVERY:
                found[route.source] += num_bytes
        return found


def _is_run(part: Box, box: Box) -> bool:
    """Whether the elements of a part are neighbours in a box that is stored row-major on its own."""
    cut = next((d for d, n in enumerate(part.length) if n > 1), len(part.length))
    return part.length[cut + 1 :] == box.length[cut + 1 :]


def holders_of(tensor: torch.Tensor, num_ranks: int, boxes: Sequence[Sequence[Box]] | None = None) -> Holders:
    """The boxes of a model tensor with the ranks that hold them, by arithmetic alone.

    Of a plain tensor every rank holds all. A mesh that was cut out of a larger one is repeated along the axes that it
    lacks. `boxes` are those of each rank, of a tensor that alone knows its own.
    """
    ranks_of: dict[Box, list[int]] = defaultdict(list)
    if boxes is not None:
        for rank, some in enumerate(boxes):
            for box in some:
                ranks_of[box].append(rank)
    elif isinstance(tensor, DTensor):
        for grid in repetitions(tensor.device_mesh):
            for coordinate in product(*map(range, grid.shape)):
                for box, _ in local_boxes(tensor.shape, tensor.placements, grid.shape, coordinate):
                    ranks_of[box].append(int(grid[coordinate]))
    else:
        return [(Box.whole(tensor.shape), tuple(range(num_ranks)))]
    return [(box, tuple(dict.fromkeys(ranks))) for box, ranks in ranks_of.items()]


def spread_of(tensor: SavedTensor, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Holders]) -> Holders:
    """The boxes of a tensor of the checkpoint with the ranks that hold them."""
    return [
        (part, ranks)
        for piece in tensor.symbol.pieces or ()
        for box, ranks in held[piece.source]
        for part, _ in boxes_of_piece(piece, shapes[piece.source], box)
    ]


def plan_buckets(
    to: Sequence[int],
    tensors: Mapping[str, tuple[Box, torch.dtype]],
    spread: Callable[[str], Holders],
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
            if (most := most_of(one.bytes_of())) > bucket_bytes:
                raise ConfigError(
                    f"bucket_bytes={bucket_bytes} does not hold {name!r}, for which a rank needs {most}: give "
                    f"bucket_bytes={most} ({show_bytes(most)}) at least."
                )
            yield one

    return joined(one_by_one(), bucket_bytes // 2)


def joined(parts: Iterable[Bucket], num_bytes: int) -> list[Bucket]:
    """Buckets put together, in their order, while no rank needs more than these bytes."""
    buckets: list[Bucket] = []
    filled: dict[int, int] = {}
    for part in parts:
        costs = part.bytes_of()
        total = {rank: filled.get(rank, 0) + costs.get(rank, 0) for rank in (*filled, *costs)}
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
