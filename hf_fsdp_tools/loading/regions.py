"""Pieces: boxes of one tensor that are strided views of another one; arithmetic without tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_fsdp_tools.distributed.shards import Box


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A strided region of a flat tensor, in elements."""

    offset: int
    """Flat index of the first element."""
    length: tuple[int, ...]
    """Number of indices per dimension."""
    strides: tuple[int, ...]
    """Step in the flat tensor per dimension."""

    @classmethod
    def whole(cls, shape: Sequence[int], strides: Sequence[int] | None = None) -> "View":
        """All of a tensor of this shape, which is row-major where no strides are given."""
        return cls(offset=0, length=tuple(shape), strides=tuple(strides or row_major_strides(shape)))

    def crop(self, start: Sequence[int], length: Sequence[int]) -> "View":
        """The part of the view that begins at index `start` and has `length` indices per dimension."""
        offset = self.offset + sum(i * s for i, s in zip(start, self.strides, strict=True))
        return View(offset=offset, length=tuple(length), strides=self.strides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of one tensor that equals, index by index, a view of the tensor named `source`."""

    start: tuple[int, ...]
    """Where the box begins in the tensor that is put together from pieces."""
    source: str
    """Name of the tensor that the elements come from."""
    view: View
    """Where they lie in it; its lengths are those of the box."""

    @classmethod
    def whole(cls, source: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> "Piece":
        """A tensor of this shape that is all of its source, which is row-major where no strides are given."""
        return cls(start=(0,) * len(shape), source=source, view=View.whole(shape, strides))

    @property
    def box(self) -> Box:
        """Where the piece lies in the tensor that is put together from pieces."""
        return Box(start=self.start, length=self.view.length)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def slice_piece(piece: Piece, box: Box) -> Piece | None:
    """The part of `piece` inside `box`, a box of the same tensor; None where the two do not meet."""
    common = piece.box.intersect(box)
    if not common.numel:
        return None
    view = piece.view.crop(common.start_in(piece.box), common.length)
    return Piece(start=common.start, source=piece.source, view=view)


def slice_view(view: View, shape: Sequence[int], box: Box) -> Iterator[tuple[Box, View]]:
    """Yield where elements of a view of a row-major tensor lie in a box of the tensor: a box of indices of `view`, and
    where its elements lie once the box of the tensor is stored row-major on its own.
    """
    if not box.numel or not math.prod(view.length):
        return
    # Seen as (outer, cut, inner) with the only cut dimension in the middle, the box is one run of `width` elements in
    # each row of `row` elements. A cut of dimension 0 needs no rows: the tensor is one row then.
    cut = [d for d in range(len(shape)) if box.length[d] != shape[d]]
    if len(cut) > 1:
        yield from _slice_twice(view, shape, box, cut[-1])
        return
    dim = cut[0] if cut else 0
    inner = math.prod(shape[dim + 1 :])
    row = math.prod(shape[dim:])
    low = box.start[dim] * inner if cut else 0
    width = box.length[dim] * inner if cut else row
    whole = Box.whole(view.length)
    order = sorted(range(len(view.length)), key=lambda d: -view.strides[d])
    for part in _restrict(view, whole, order, row if dim else math.prod(shape), low, low + width):
        first = view.crop(part.start, part.length).offset
        outer, rest = divmod(first, row)
        strides = tuple(s // row * width if s >= row and dim else s for s in view.strides)
        yield part, View(offset=outer * width + rest - low, length=part.length, strides=strides)


def _restrict(view: View, part: Box, order: list[int], row: int, low: int, high: int) -> Iterator[Box]:
    """Yield boxes of view indices within `part` whose elements have low <= flat index % row < high.

    The flat tensor of 3 rows of 8 elements, with low 3 and high 6, of which `x` are wanted:

        index    0 1 2 3 4 5 6 7   8 9 . . .         16 . . .
                 . . . x x x . . | . . . x x x . . | . . . x x x . .
        view     o   o   o   o     o   o   o   o     o   o   o   o       strides (8, 2), length (3, 4)
        yielded          *                 *                 *           box start (0, 2), length (3, 1)

    A dimension that steps by whole rows, as this view's first, is never cut.
    """
    first = view.crop(part.start, part.length).offset
    small = [d for d in range(len(view.length)) if view.strides[d] % row or row == 1]
    begin = first % row
    end = begin + sum((part.length[d] - 1) * view.strides[d] for d in small)
    if end < row:  # no index of the small dimensions leaves the row of the first element
        if low <= begin and end < high:
            yield part
            return
        if end < low or begin >= high:
            return
    dim = next(d for d in order if d in small and part.length[d] > 1)
    for start, length in _index_ranges(view, part, dim, small, row, low, high):
        box = Box(
            start=tuple(start if d == dim else s for d, s in enumerate(part.start)),
            length=tuple(length if d == dim else n for d, n in enumerate(part.length)),
        )
        yield from _restrict(view, box, order, row, low, high)


def _index_ranges(
    view: View, part: Box, dim: int, small: list[int], row: int, low: int, high: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, length) of `dim`: one that lies wholly inside, and single indices to look into.

    With the other small dimensions, each index of `dim` spans `extent` + 1 positions of a row, `step` apart:

                    low                      high
                     |                        |
        [- 0 -]  [- 1 -]  [- 2 -]  [- 3 -]  [- 4 -]  [- 5 -]

    Indices 2 and 3 are one range, 1 and 4 are yielded one by one, as all are that wrap into the next row.
    """
    begin = view.crop(part.start, part.length).offset % row
    step, count, origin = view.strides[dim], part.length[dim], part.start[dim]
    extent = sum((part.length[d] - 1) * view.strides[d] for d in small if d != dim)
    if begin + (count - 1) * step + extent >= row:  # wraps: index by index
        yield from ((origin + i, 1) for i in range(count))
        return
    inside_from = max(0, -(-(low - begin) // step))
    inside_to = min(count, (high - 1 - extent - begin) // step + 1)
    touch_from = max(0, -(-(low - extent - begin) // step))
    touch_to = min(count, (high - 1 - begin) // step + 1)
    if inside_from >= inside_to:
        yield from ((origin + i, 1) for i in range(touch_from, touch_to))
        return
    yield from ((origin + i, 1) for i in range(touch_from, inside_from))
    yield origin + inside_from, inside_to - inside_from
    yield from ((origin + i, 1) for i in range(inside_to, touch_to))


def _slice_twice(view: View, shape: Sequence[int], box: Box, last: int) -> Iterator[tuple[Box, View]]:
    """`slice_view` for a box that cuts several dimensions: by the last one first, then by the others."""
    first_cut = Box(
        start=tuple(s if d == last else 0 for d, s in enumerate(box.start)),
        length=tuple(n if d == last else m for d, (n, m) in enumerate(zip(box.length, shape, strict=True))),
    )
    rest = Box(start=tuple(0 if d == last else s for d, s in enumerate(box.start)), length=box.length)
    for outer, cut in slice_view(view, shape, first_cut):
        for inner, final in slice_view(cut, first_cut.length, rest):
            yield Box(start=tuple(map(sum, zip(outer.start, inner.start, strict=True))), length=inner.length), final
