"""The slice arithmetic against torch itself: chunks, strided views and their intersections with shards."""

import math
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hf_fsdp_tools.loading.regions import slice_piece
from tests.api import Box, Piece, View, local_boxes, slice_view

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@given(shape=shapes, ranks=st.integers(1, 6), data=st.data())
def test_a_shard_is_what_torch_chunk_gives(shape: list[int], ranks: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    chunks = list(torch.chunk(tensor, ranks, dim))
    for rank in range(ranks):
        boxes = local_boxes(shape, [Shard(dim)], [ranks], [rank])
        if rank >= len(chunks) or not chunks[rank].numel():
            assert boxes == ()
            continue
        ((box, start),) = boxes
        assert set(start) == {0}
        held = tensor[box.slices]
        assert torch.equal(held, chunks[rank])


@given(rows=st.integers(1, 24), outer=st.integers(1, 4), inner=st.integers(1, 4), last=st.booleans())
def test_fsdp_over_tensor_parallel_holds_what_dtensor_splits(rows: int, outer: int, inner: int, last: bool) -> None:
    """`_StridedShard` leaves a rank with several ranges; its own way to split a tensor is the reference."""
    placements: list[Placement] = [_StridedShard(0, split_factor=inner), *([Shard(0)] if last else [])]
    mesh_shape = [outer, inner][: len(placements)]
    tensor = torch.arange(rows)
    for i in range(outer):
        for j in range(inner if last else 1):
            expected = placements[0]._split_tensor(tensor, outer, with_padding=False, contiguous=True)[0][i]
            if last:
                parts = placements[1]._split_tensor(expected, inner, with_padding=False, contiguous=True)[0]
                expected = parts[j] if j < len(parts) else expected[:0]
            boxes = local_boxes([rows], placements, mesh_shape, [i, j][: len(placements)])
            found = torch.full_like(expected, -1)
            for box, (start,) in boxes:
                found[start : start + box.length[0]] = tensor[box.start[0] : box.start[0] + box.length[0]]
            assert torch.equal(found, expected)


@st.composite
def strided_views(draw: Callable[..., int]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    base = torch.arange(math.prod(shape)).reshape(shape)
    view = base
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from(["permute", "slice", "split", "flatten"]))
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if step == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif step == "slice":
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            view = view[(slice(None),) * dim + (slice(start, stop, draw(st.sampled_from([1, 2]))),)]
        elif step == "split":
            part = draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0]))
            view = view.unflatten(dim, (part, size // part))
        elif view.is_contiguous():
            view = view.view(-1)
    return base, view


@settings(max_examples=150)
@given(tensors=strided_views(), data=st.data())
def test_the_part_of_a_view_in_a_box_is_found(tensors: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    base, tensor = tensors
    start = tuple(data.draw(st.integers(0, n - 1)) for n in base.shape)
    length = tuple(data.draw(st.integers(0, n - s)) for s, n in zip(start, base.shape, strict=True))
    inside = base[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))].clone()
    view = View(offset=tensor.storage_offset(), length=tuple(tensor.shape), strides=tensor.stride())
    found: list[int] = []
    for part, local in slice_view(view, base.shape, Box(start=start, length=length)):
        wanted = tensor[part.slices]
        assert torch.equal(inside.as_strided(local.length, local.strides, local.offset), wanted)
        found += wanted.flatten().tolist()
    assert sorted(found) == sorted(set(inside.flatten().tolist()) & set(tensor.flatten().tolist()))


@settings(max_examples=150)
@given(tensors=strided_views(), data=st.data())
def test_the_part_of_a_piece_in_a_box_is_found(tensors: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    """Pieces and boxes that meet, that touch, that lie apart, and boxes with nothing in them."""
    base, tensor = tensors
    places = st.tuples(*[st.integers(0, 6)] * tensor.dim())
    box = Box(start=data.draw(places), length=data.draw(places))
    view = View(offset=tensor.storage_offset(), length=tuple(tensor.shape), strides=tensor.stride())
    at = data.draw(places)
    piece = Piece(box=Box(start=at, length=view.length), source="w", view=view)
    whole = torch.full([s + n for s, n in zip(at, view.length, strict=True)], -1)  # what the piece is a part of
    whole[tuple(slice(s, s + n) for s, n in zip(at, view.length, strict=True))] = tensor
    wanted = whole[box.slices]
    found = slice_piece(piece, box)
    if found is None:
        assert (wanted == -1).all()
        return
    assert found.source == "w" and found.box.length == found.view.length
    place = found.box.slices
    part = base.as_strided(found.view.length, found.view.strides, found.view.offset)
    assert torch.equal(part, whole[place]) and part.numel() == int((wanted != -1).sum()) > 0
