"""A tensor without data that remembers where each of its elements would come from.

Running somebody else's stack, cat, chunk, transpose or reshape on `PieceTensor`s gives the index map of that
operation, as boxes of the result that are strided views of the named inputs. Slicing the map then tells which bytes of
a file a shard needs. An operation that does not only move data gives a result of the right shape that is *opaque*: it
knows which inputs it came from, not how.

An example: a checkpoint has two experts, matrices "a" and "b" of shape (2, 3), and the model has them stacked.

    stacked = torch.stack([PieceTensor.named(name, (2, 3), torch.float32) for name in "ab"])     # shape (2, 2, 3)

    piece   box in `stacked`                     source   view of the source, flat
    0       start (0, 0, 0), length (1, 2, 3)    "a"      offset 0, strides (0, 3, 1)
    1       start (1, 0, 0), length (1, 2, 3)    "b"      offset 0, strides (0, 3, 1)

The shard `stacked[1:, :, 2:]` cuts the last column out of piece 1 and does not meet piece 0. One piece remains: length
(1, 2, 1), from "b" at offset 2 with strides (0, 3, 1). So the rank that holds this shard reads the elements 2 and 5 of
"b", and nothing of "a".
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.loading.formats.stored import Stored
from hf_fsdp_tools.loading.regions import Piece, View, row_major_strides, slice_piece

_MAX_PIECES = 65536
"""Pieces of one tensor beyond which its index map costs more than it saves; the tensor is opaque then. (assumed)"""


class PieceTensor(torch.Tensor):
    """A symbolic tensor: shape, dtype, and the pieces that it is made of."""

    pieces: tuple[Piece, ...] | None
    """Boxes of this tensor, disjoint and complete, each a view of a named input; None when opaque."""
    sources: frozenset[str]
    """Names of all inputs that any element may depend on."""
    look: tuple[torch.dtype, tuple[int, ...]] | None = None
    """The dtype and shape that a file says for bytes."""

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece] | None, sources: frozenset[str]
    ) -> "PieceTensor":
        """Make one from its parts; `named` is the usual way in."""
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        self.pieces = None if pieces is None or len(pieces) > _MAX_PIECES else tuple(pieces)
        self.sources = sources
        return self

    @classmethod
    def named(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> "PieceTensor":
        """The input called `name`: one piece, which is the whole input."""
        return cls(shape, dtype, [Piece.whole(name, shape)], frozenset([name]))

    @classmethod
    def stored(cls, tensor: Stored, dtype: torch.dtype) -> "PieceTensor":
        """A tensor of a checkpoint, as it will be once it is cast to `dtype`."""
        return cls(tensor.shape, dtype, tensor.pieces(), frozenset(tensor.sources))

    def extended(self, dim: int, size: int) -> "PieceTensor":
        """This tensor cut or extended to `size` indices along `dim`; no piece fills added indices."""
        kept = _slice(self, dim, 0, size)
        assert kept is not None
        return _moved(self, [size if d == dim else n for d, n in enumerate(self.shape)], kept.pieces or ())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's names differ
        """Shape, dtype and number of pieces."""
        count = "opaque" if self.pieces is None else f"{len(self.pieces)} pieces"
        return f"PieceTensor({tuple(self.shape)}, {self.dtype}, {count} of {len(self.sources)} inputs)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow an operation that moves data; any other gives opaque results with the shapes it would have."""
        move = _MOVES.get(func)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, PieceTensor)]
        if move is not None and all(t.pieces is not None for t in inputs):
            moved = move(*args, **(kwargs or {}))
            if moved is not None:
                return moved
        return _opaque(func, inputs, args, kwargs or {})


def _opaque(func: Any, inputs: list[PieceTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on meta tensors: shapes and dtypes are right, contents unknown."""
    sources = frozenset[str]().union(*(t.sources for t in inputs))

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device="meta")

    kwargs = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in kwargs.items()}
    result = func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
    return tree_map_only(torch.Tensor, lambda t: PieceTensor(t.shape, t.dtype, None, sources), result)


def _moved(t: PieceTensor, shape: Sequence[int], pieces: Sequence[Piece]) -> PieceTensor:
    """A tensor with the dtype and inputs of `t`, and another shape and other pieces."""
    return PieceTensor(shape, t.dtype, pieces, t.sources)


def _pick(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[i] for i in order)


def _permute(t: PieceTensor, order: Sequence[int]) -> PieceTensor:
    """Reorder the dimensions; those that are left out must have length one, and are dropped."""
    order = [d % t.dim() for d in order]
    return _mapped(t, lambda values, _: _pick(values, order))


def _mapped(t: PieceTensor, change: Callable[[Sequence[int], int], tuple[int, ...]]) -> PieceTensor:
    """A tensor with other dimensions: `change` gives what they have, and is told what a new one of length one has."""
    pieces = [
        Piece(
            start=change(p.start, 0),
            source=p.source,
            view=View(offset=p.view.offset, length=change(p.view.length, 1), strides=change(p.view.strides, 0)),
        )
        for p in t.pieces or ()
    ]
    return _moved(t, change(t.shape, 1), pieces)


def _transpose(t: PieceTensor, dim0: int, dim1: int) -> PieceTensor:
    order = list(range(t.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(t, order)


def _slice(
    t: PieceTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> PieceTensor | None:
    """Keep indices `start:end` of one dimension; steps other than one are not followed."""
    if step != 1:
        return None
    dim %= t.dim()
    low, high, _ = slice(start, end).indices(t.shape[dim])
    high = max(low, high)
    shape = [high - low if d == dim else n for d, n in enumerate(t.shape)]
    keep = Box(start=tuple(low if d == dim else 0 for d in range(t.dim())), length=tuple(shape))
    parts = (slice_piece(p, keep) for p in t.pieces or ())
    return _moved(t, shape, [replace(part, start=part.box.start_in(keep)) for part in parts if part])


def _split(t: PieceTensor, size: int, dim: int = 0) -> list[PieceTensor | None]:
    return [_slice(t, dim, i, i + size) for i in range(0, t.shape[dim], size)]


def _split_with_sizes(t: PieceTensor, sizes: Sequence[int], dim: int = 0) -> list[PieceTensor | None] | None:
    if sum(sizes) != t.shape[dim]:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(t, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _select(t: PieceTensor, dim: int, index: int) -> PieceTensor | None:
    if not -t.shape[dim] <= index < t.shape[dim]:
        return None
    index %= t.shape[dim]
    kept = _slice(t, dim, index, index + 1)
    return None if kept is None else _drop_dims(kept, [dim % t.dim()])


def _unbind(t: PieceTensor, dim: int = 0) -> list[PieceTensor | None]:
    return [_select(t, dim, i) for i in range(t.shape[dim])]


def _drop_dims(t: PieceTensor, dims: Sequence[int]) -> PieceTensor:
    """Remove dimensions of length one."""
    return _permute(t, [d for d in range(t.dim()) if d not in dims])


def _squeeze(t: PieceTensor, dims: int | Sequence[int] | None = None) -> PieceTensor:
    wanted = range(t.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    return _drop_dims(t, [d % t.dim() for d in wanted if t.shape[d] == 1])


def _unsqueeze(t: PieceTensor, dim: int) -> PieceTensor:
    """Add a dimension of length one."""
    dim %= t.dim() + 1
    return _mapped(t, lambda values, new: (*values[:dim], new, *values[dim:]))


def _cat(tensors: Sequence[PieceTensor], dim: int = 0) -> PieceTensor | None:
    """Lay tensors one after another along `dim`."""
    tensors = [t for t in tensors if t.shape != (0,)]
    if not tensors or any(not isinstance(t, PieceTensor) or t.dtype != tensors[0].dtype for t in tensors):
        return None
    dim %= tensors[0].dim()
    if len({(*t.shape[:dim], *t.shape[dim + 1 :], t.dim()) for t in tensors}) > 1:
        return None  # torch itself says what is wrong with the shapes
    pieces, offset = [], 0
    for t in tensors:
        for p in t.pieces or ():
            start = tuple(s + offset if d == dim else s for d, s in enumerate(p.start))
            pieces.append(replace(p, start=start))
        offset += t.shape[dim]
    shape = [offset if d == dim else n for d, n in enumerate(tensors[0].shape)]
    return PieceTensor(shape, tensors[0].dtype, pieces, frozenset[str]().union(*(t.sources for t in tensors)))


def _stack(tensors: Sequence[PieceTensor], dim: int = 0) -> PieceTensor | None:
    """Lay tensors of one shape one after another along a new dimension."""
    if not all(isinstance(t, PieceTensor) for t in tensors):
        return None
    return _cat([_unsqueeze(t, dim) for t in tensors], dim)


def _reshape(t: PieceTensor, shape: Sequence[int]) -> PieceTensor | None:
    """The elements of `t` in row-major order under another shape; None where it holds another number of them."""
    known = math.prod(n for n in shape if n != -1)
    shape = [t.numel() // known if n == -1 and known else n for n in shape]
    if math.prod(shape) != t.numel():
        return None
    pieces = [new for p in t.pieces or () if t.numel() for new in _reshape_piece(p, t.shape, shape)]
    return _moved(t, shape, pieces)


def _reshape_piece(piece: Piece, old: Sequence[int], new: Sequence[int]) -> Iterator[Piece]:
    """Yield the piece under the new shape, split where its box is none there; untouched dimensions stay whole."""
    parts: list[tuple[tuple[Box, View], ...]] = [()]
    for old_dims, new_dims in _dim_groups(old, new):
        box = Box(start=_pick(piece.start, old_dims), length=_pick(piece.view.length, old_dims))
        view = View(offset=0, length=box.length, strides=_pick(piece.view.strides, old_dims))
        outer, inner = _pick(old, old_dims), _pick(new, new_dims)
        found = [(box, view)]
        if outer != inner:
            found = [option for run in _even_runs(box, view, outer) for option in boxes_of_run(*run, inner)]
        parts = [(*part, option) for part in parts for option in found]
    for part in parts:
        start, length = sum((b.start for b, _ in part), ()), sum((b.length for b, _ in part), ())
        strides = sum((v.strides for _, v in part), ())
        offset = piece.view.offset + sum(v.offset for _, v in part)
        yield Piece(start=start, source=piece.source, view=View(offset=offset, length=length, strides=strides))


def _dim_groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The finest pairing of runs of old and new dimensions that hold equally many elements, at least one."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, first_new = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := math.prod(old[first:i])) != (b := math.prod(new[first_new:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield range(first, i), range(first_new, j)


def _even_runs(box: Box, view: View, old: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the box as its longest runs of elements that are neighbours in the tensor and evenly spaced in the view.

    A run is (flat index of its first element in the old dimensions, its offset in the view, count, step in the view).
    """
    place = row_major_strides(old)
    dims = [d for d in range(len(old)) if box.length[d] > 1]
    base = sum(s * p for s, p in zip(box.start, place, strict=True))
    tail, run, step = len(dims), 1, 1
    if dims and place[dims[-1]] == 1:  # the last one, and each before it that goes on where it ends, in both orders
        tail, run, step = len(dims) - 1, box.length[dims[-1]], view.strides[dims[-1]]
        while tail and run > 1 and place[dims[tail - 1]] == run and view.strides[dims[tail - 1]] == run * step:
            tail, run = tail - 1, run * box.length[dims[tail - 1]]
    counts = [box.length[d] for d in dims[:tail]]
    for n in range(math.prod(counts)):
        flat, offset = base, view.offset
        for d, count in zip(reversed(dims[:tail]), reversed(counts), strict=True):
            n, i = divmod(n, count)
            flat, offset = flat + i * place[d], offset + i * view.strides[d]
        yield flat, offset, run, step


def boxes_of_run(flat: int, offset: int, run: int, step: int, new: Sequence[int]) -> Iterator[tuple[Box, View]]:
    """Yield the boxes of a tensor of shape `new` that make up its `run` elements from flat index `flat` on."""
    if not new:
        yield Box(start=(), length=()), View(offset=offset, length=(), strides=())
        return
    inner = math.prod(new[1:])
    while run:
        index, rest = divmod(flat, inner)
        if rest == 0 and run >= inner:
            count = run // inner
            start, length = (index, *(0 for _ in new[1:])), (count, *new[1:])
            strides = tuple(s * step for s in row_major_strides(new))
            yield Box(start=start, length=length), View(offset=offset, length=length, strides=strides)
            taken = count * inner
        else:
            taken = min(run, inner - rest)
            for box, view in boxes_of_run(rest, offset, taken, step, new[1:]):
                start, length = (index, *box.start), (1, *box.length)
                strides = (inner * step, *view.strides)
                yield Box(start=start, length=length), View(offset=view.offset, length=length, strides=strides)
        flat, offset, run = flat + taken, offset + taken * step, run - taken


def _same(t: PieceTensor, *_: Any, **__: Any) -> PieceTensor:
    """A copy holds the same elements."""
    return _moved(t, t.shape, t.pieces or ())


def _to_copy(t: PieceTensor, *, dtype: torch.dtype | None = None, **_: Any) -> PieceTensor | None:
    """A copy on another device holds the same elements; a copy in another dtype does not."""
    return None if dtype not in (None, t.dtype) else _same(t)


_aten = torch.ops.aten
_MOVES: dict[Any, Callable[..., Any]] = {
    _aten._reshape_alias.default: lambda t, shape, strides: _reshape(t, shape),
    _aten._to_copy.default: _to_copy,
    _aten._unsafe_view.default: _reshape,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: lambda t: _transpose(t, 0, 1) if t.dim() == 2 else _same(t),
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _reshape,
}
