"""This rank's shard of a tensor: its boxes, its memory, and how one is cut from a whole tensor.

No other file asks a live mesh for what a rank holds. Nothing here moves a tensor to another device, unless the name of
the function says so; `DTensor.from_local` and `distribute_tensor` move it to the mesh's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hf_fsdp_tools.errors import RanksError


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
    boxes = []
    for combination in product(*map(_located, ranges)):
        box = Box(start=tuple(r[0] for r in combination), length=tuple(r[1] for r in combination))
        if box.numel:
            boxes.append((box, tuple(r[2] for r in combination)))
    return tuple(boxes)


def _torch_chunk(ranges: list[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """What chunk `index` of `torch.chunk(count)` holds of the indices in `ranges`, laid end to end."""
    total = sum(length for _, length in ranges)
    size = -(-total // count)
    first, last = min(total, index * size), min(total, (index + 1) * size)
    kept, position = list[tuple[int, int]](), 0
    for start, length in ranges:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            kept.append((start + low - position, high - low))
        position += length
    return kept


def _located(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Global start, length and local start of each range, neighbours as one; one empty range where there is none."""
    located, local = list[tuple[int, int, int]](), 0
    for start, length in ranges:
        if located and located[-1][0] + located[-1][1] == start:
            first, joined, place = located[-1]
            located[-1] = (first, joined + length, place)
        else:
            located.append((start, length, local))
        local += length
    return located or [(0, 0, 0)]


_SLAB_BYTES = 64 * 2**20
"""Largest piece of a whole tensor that is sent at a time, unless one index of its first dimension is larger.
(assumed)"""


@runtime_checkable
class LocalBoxes(Protocol):
    """A sharded tensor that knows its own local boxes and is no DTensor."""

    is_first_replica: bool
    """Whether this rank writes its shard; other ranks that hold the same elements do not."""

    def local_boxes(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """As `local_boxes_of`; `as_strided` of the tensor must then give real memory for these boxes."""


def refuse_ended(model: nn.Module) -> None:
    """Refuse shards whose ranks cannot meet any more: each would take itself for the only one."""
    ranks = max((each.device_mesh.size() for each in model.parameters() if isinstance(each, DTensor)), default=1)
    if ranks > 1 and not dist.is_initialized():
        raise RanksError(
            f"{type(model).__name__} is sharded over {ranks} processes, whose process group has ended "
            "(accelerator.end_training() or destroy_process_group()). Save before it ends."
        )


def local_boxes_of(tensor: torch.Tensor) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The boxes of a tensor that this rank holds, each with its start in the local tensor; none for an empty shard."""
    if isinstance(tensor, LocalBoxes):
        return tensor.local_boxes()
    if not isinstance(tensor, DTensor):
        return local_boxes(tensor.shape, (), (), ())
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()  # None: a rank outside the mesh holds nothing
    return () if coordinate is None else local_boxes(tensor.shape, tensor.placements, mesh.shape, coordinate)


def replicated_axes(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(axis, this rank's coordinate) of each mesh axis that replicates a sharded DTensor; () for a whole tensor."""
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    placed = zip(tensor.placements, coordinate, strict=False)
    return tuple((axis, index) for axis, (placement, index) in enumerate(placed) if placement.is_replicate())


def replica_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(index, number) of this rank's replica of its part of a tensor; None where its part is left to other ranks.

    Of a plain tensor, rank 0 has the only replica. A mesh cut out of a larger mesh (FSDP's, next to tensor parallelism)
    is repeated along the axes that it lacks; only the repetition with the larger mesh's first rank counts.
    """
    if isinstance(tensor, LocalBoxes):
        return (0, 1) if tensor.is_first_replica else None
    if not isinstance(tensor, DTensor):
        return (0, 1) if not dist.is_initialized() or dist.get_rank() == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not bool((tensor.device_mesh.mesh == _root_of(tensor.device_mesh).min()).any()):
        return None
    index, number = 0, 1
    for placement, i, ranks in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            index, number = index * ranks + i, number * ranks
    return index, number


def _root_of(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of the mesh that a mesh was cut out of; it has no public name in torch 2.11 to 2.13."""
    return mesh._get_root_mesh().mesh


def repetitions(mesh: DeviceMesh) -> list[torch.Tensor]:
    """The ranks of a mesh and, each of the same shape, of its repetitions along the axes that it lacks of the larger
    mesh out of which it was cut. No rank communicates."""
    grid, root = mesh.mesh, _root_of(mesh)
    place = {int(rank): index for index, rank in zip(product(*map(range, root.shape)), root.flatten(), strict=True)}
    places = torch.tensor([place[int(rank)] for rank in grid.flatten()])
    lacking = [dim for dim in range(root.ndim) if bool((places[:, dim] == places[0, dim]).all())]
    found = []
    for index in product(*(range(root.shape[dim]) for dim in lacking)):
        places[:, lacking] = torch.tensor(index, dtype=torch.int64)
        found.append(root[tuple(places.T)].reshape(grid.shape))
    return found


def is_first_replica(tensor: torch.Tensor) -> bool:
    """Whether this rank stands for its part of a tensor where one rank alone must: sums, and what is sent to rank 0."""
    replica = replica_of(tensor)
    return replica is not None and replica[0] == 0


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor, without autograd."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach()


def memory_view(local: torch.Tensor, start: Sequence[int], length: Sequence[int]) -> torch.Tensor:
    """The box of a local tensor that begins at `start`; shares its memory."""
    offset = local.storage_offset() + sum(i * s for i, s in zip(start, local.stride(), strict=True))
    return local.as_strided(tuple(length), local.stride(), offset)


def local_parts(tensor: torch.Tensor, region: Box | None = None) -> list[tuple[Box, torch.Tensor]]:
    """What this rank holds of a tensor, or of a region of it: boxes, each with its memory."""
    local, parts = local_tensor(tensor), []
    for box, start in local_boxes_of(tensor):
        part = box if region is None else box.intersect(region)
        if part.numel:
            place = [i + p - b for i, p, b in zip(start, part.start, box.start, strict=True)]
            parts.append((part, memory_view(local, place, part.length)))
    return parts


def keep_part(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill what this rank holds of a tensor with a whole tensor's values. Nothing is communicated."""
    for box, memory in local_parts(tensor):
        memory.copy_(whole[box.slices])


# ---- whole tensors and shards ----


def as_dtensor(
    part: torch.Tensor,
    like: DTensor,
    *,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor around this rank's part of a tensor, which keeps its device, its dtype and its memory. Nothing is
    communicated."""
    spec = DTensor.from_local(
        torch.empty_like(part, device="meta"),  # which it leaves on meta
        mesh or like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )._spec
    return DTensor(part.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's own


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor that is to be sharded like `like`: a view, unless this rank holds several
    ranges of one dimension. Nothing is communicated."""
    boxes = local_boxes_of(like)
    if len(boxes) == 1:
        return whole[boxes[0][0].slices]
    part = whole.new_empty(local_tensor(like).shape)
    for box, start in boxes:
        memory_view(part, start, box.length).copy_(whole[box.slices])
    return part


def cut(
    whole: torch.Tensor, like: DTensor, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> DTensor:
    """A shard of a whole tensor, sharded like `like`, in new memory. Nothing is communicated."""
    part = part_of(whole.detach(), like)
    memory = torch.empty(part.shape, dtype=dtype or whole.dtype, device=device or like.device)
    return as_dtensor(memory.copy_(part), like)


def cut_whole(values: dict[str, Any], shards: Iterable[tuple[str, Any]], *, views: bool = False) -> None:
    """Put this rank's part, in new memory or as a view, in the place of each whole value that is for a shard."""
    for name, shard in ((name, shard) for name, shard in shards if isinstance(shard, DTensor)):
        whole = values.get(name)
        if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor) and whole.shape == shard.shape:
            values[name] = as_dtensor(part_of(whole.detach(), shard), shard) if views else cut(whole, shard)


def gather_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the mesh's device, also where the shards are on the CPU; any other tensor as it
    is. Every rank of the mesh must call."""
    if isinstance(tensor, LocalBoxes):
        flat = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        for box, start in tensor.local_boxes() if tensor.is_first_replica else ():
            memory_view(flat.view(tensor.shape), box.start, box.length).copy_(memory_view(tensor, start, box.length))
        dist.all_reduce(flat.view(torch.uint8))  # bytes, to which all others add zeros
        return flat.view(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    moved: Any = tensor.detach().to(tensor.device_mesh.device_type)
    whole: torch.Tensor = moved.full_tensor()
    return whole


def fill_from_first(tensor: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> None:
    """Fill this rank's part of a tensor with that of the first rank's whole tensor, in place.

    Every rank of the mesh must call; one piece (`_SLAB_BYTES`) after another is broadcast along each axis of the mesh.
    """
    if not tensor.numel():
        return
    is_first = not any(mesh.get_coordinate() or ())
    for slab in Box.whole(tensor.shape).slabs(_SLAB_BYTES, tensor.element_size()):
        sent = torch.empty(slab.length, dtype=tensor.dtype, device=mesh.device_type)
        if is_first:
            sent.copy_(whole.detach()[slab.slices])
        for axis in reversed(range(mesh.ndim)):
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
        for part, memory in local_parts(tensor, slab):
            held = Box(start=tuple(b - a for a, b in zip(slab.start, part.start, strict=True)), length=part.length)
            memory.copy_(sent[held.slices])
