"""This rank's shard of a tensor: its boxes, its memory, and how one is cut from a whole tensor.

No other file asks a live mesh for what a rank holds. Nothing here moves a tensor to another device, unless the name of
the function says so; `DTensor.from_local` and `distribute_tensor` move it to the mesh's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

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

    def start_in(self, around: "Box") -> tuple[int, ...]:
        """Where it begins in a box around it."""
        return tuple(a - b for a, b in zip(self.start, around.start, strict=True))

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


Boxes: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes of a tensor, each with its start in memory."""


def local_boxes(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Boxes:
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


def refuse_ended(model: nn.Module) -> None:
    """Refuse shards whose ranks cannot meet any more: each would take itself for the only one."""
    ranks = max((each.device_mesh.size() for each in model.parameters() if isinstance(each, DTensor)), default=1)
    if ranks > 1 and not dist.is_initialized():
        raise RanksError(
            f"{type(model).__name__} is sharded over {ranks} processes, whose process group has ended "
            "(accelerator.end_training() or destroy_process_group()). Save before it ends."
        )


class Held:
    """What this rank holds of a tensor: all of a plain one. A DTensor's is a `HeldShard`, FSDP1's says its own class.

    No other code of the package asks what kind of tensor it has in order to know what of it is where.
    """

    mesh: DeviceMesh | None = None
    """The ranks that hold it, if it is sharded over a mesh."""
    is_derived: bool = True
    """Whether its mesh says what other ranks hold; otherwise each rank alone knows its own."""

    @staticmethod
    def of(tensor: torch.Tensor) -> "Held":
        """What this rank holds of any tensor."""
        kind: type[Held] = getattr(tensor, "held_as", HeldShard if isinstance(tensor, DTensor) else Held)
        return kind(tensor)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def memory(self) -> torch.Tensor:
        """The memory of it, without autograd."""
        detached: torch.Tensor = self.tensor.detach()
        return detached

    @property
    def device(self) -> torch.device:
        """Where whole tensors and what travels are: the mesh's device, also where shards are offloaded."""
        device: torch.device = self.tensor.device
        return device

    @property
    def boxes(self) -> Boxes:
        """The boxes of it that this rank holds, each with its start in the local tensor; none for an empty shard."""
        return local_boxes(self.tensor.shape, (), (), ())

    @property
    def replica(self) -> tuple[int, int] | None:
        """(index, number) of this rank's replica of its part; None where its part is left to other ranks.

        Of a plain tensor, rank 0 has the only replica. A mesh cut out of a larger mesh (FSDP's, next to tensor
        parallelism) is repeated along the axes that it lacks; only the repetition with the larger mesh's first rank
        counts.
        """
        return (0, 1) if not dist.is_initialized() or dist.get_rank() == 0 else None

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for its part where one rank alone must: sums, and what is sent to rank 0."""
        replica = self.replica
        return replica is not None and replica[0] == 0

    @property
    def replicated_axes(self) -> tuple[tuple[int, int], ...]:
        """(axis, this rank's coordinate) of each mesh axis that replicates it; () for a whole tensor."""
        return ()

    def parts(self, region: Box | None = None) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of it, or of a region of it, each with its memory."""
        local, parts = self.memory, []
        for box, start in self.boxes:
            part = box if region is None else box.intersect(region)
            if part.numel:
                place = [a + b for a, b in zip(start, part.start_in(box), strict=True)]
                parts.append((part, memory_view(local, place, part.length)))
        return parts

    def fill(self, whole: torch.Tensor) -> None:
        """Fill it with a whole tensor's values. Nothing is communicated."""
        for box, memory in self.parts():
            memory.copy_(whole[box.slices])

    def fill_from_first(self, whole: torch.Tensor, mesh: DeviceMesh) -> None:
        """Fill it with this rank's part of the first rank's whole tensor.

        Every rank of the mesh must call; one piece (`_SLAB_BYTES`) after another is broadcast along each of its axes.
        """
        if not self.tensor.numel():
            return
        is_first = not any(mesh.get_coordinate() or ())
        for slab in Box.whole(self.tensor.shape).slabs(_SLAB_BYTES, self.tensor.element_size()):
            sent = torch.empty(slab.length, dtype=self.tensor.dtype, device=mesh.device_type)
            if is_first:
                sent.copy_(whole.detach()[slab.slices])
            for axis in reversed(range(mesh.ndim)):
                dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
            for part, memory in self.parts(slab):
                memory.copy_(memory_view(sent, part.start_in(slab), part.length))

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that is to be held like this one: a view, unless this rank holds several
        ranges of one dimension. Nothing is communicated."""
        boxes = self.boxes
        if len(boxes) == 1:
            return whole[boxes[0][0].slices]
        part = whole.new_empty(self.memory.shape)
        for box, start in boxes:
            memory_view(part, start, box.length).copy_(whole[box.slices])
        return part

    def around(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is held like this one, around this rank's part of it, which keeps its device, its dtype and its
        memory. Nothing is communicated."""
        return part

    def cut(
        self, whole: torch.Tensor, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A whole tensor, held like this one in new memory. Nothing is communicated."""
        part = self.part_of(whole.detach())
        memory = torch.empty(part.shape, dtype=dtype or whole.dtype, device=device or self.tensor.device)
        return self.around(memory.copy_(part))

    def gather(self) -> torch.Tensor:
        """The whole of it on `device`; of a plain tensor, itself. Every rank of the mesh must call."""
        return self.memory


class HeldShard(Held):
    """What this rank holds of a DTensor."""

    def __init__(self, tensor: DTensor) -> None:
        super().__init__(tensor)
        self.mesh: DeviceMesh = tensor.device_mesh

    @property
    def memory(self) -> torch.Tensor:
        with torch.no_grad():
            local: torch.Tensor = self.tensor.to_local().detach()
            return local

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    @property
    def boxes(self) -> Boxes:
        coordinate = self.mesh.get_coordinate()  # None: a rank outside the mesh holds nothing
        if coordinate is None:
            return ()
        return local_boxes(self.tensor.shape, self.tensor.placements, self.mesh.shape, coordinate)

    @property
    def replica(self) -> tuple[int, int] | None:
        coordinate = self.mesh.get_coordinate()
        if coordinate is None or not bool((self.mesh.mesh == _root_of(self.mesh).min()).any()):
            return None
        index, number = 0, 1
        for placement, i, ranks in zip(self.tensor.placements, coordinate, self.mesh.shape, strict=True):
            if placement.is_replicate():
                index, number = index * ranks + i, number * ranks
        return index, number

    @property
    def replicated_axes(self) -> tuple[tuple[int, int], ...]:
        placements = self.tensor.placements
        if all(placement.is_replicate() for placement in placements):
            return ()
        placed = zip(placements, self.mesh.get_coordinate() or (), strict=False)
        return tuple((axis, index) for axis, (placement, index) in enumerate(placed) if placement.is_replicate())

    def around(self, part: torch.Tensor) -> DTensor:
        return as_dtensor(part, self.mesh, self.tensor.placements, self.tensor)

    def gather(self) -> torch.Tensor:
        whole: torch.Tensor = self.tensor.detach().to(self.mesh.device_type).full_tensor()
        return whole


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


def memory_view(local: torch.Tensor, start: Sequence[int], length: Sequence[int]) -> torch.Tensor:
    """The box of a local tensor that begins at `start`; shares its memory."""
    offset = local.storage_offset() + sum(i * s for i, s in zip(start, local.stride(), strict=True))
    return local.as_strided(tuple(length), local.stride(), offset)


def as_dtensor(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> DTensor:
    """A DTensor of the shape of `like` around this rank's part of it, which keeps its device, its dtype and its memory.
    Nothing is communicated."""
    spec = DTensor.from_local(
        torch.empty_like(part, device="meta"),  # which it leaves on meta
        mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )._spec
    return DTensor(part.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's own


def cut_whole(values: dict[str, Any], shards: Iterable[tuple[str, Any]], *, views: bool = False) -> None:
    """Put this rank's part, in new memory or as a view, in the place of each whole value that is for a shard."""
    for name, shard in ((name, shard) for name, shard in shards if isinstance(shard, DTensor)):
        whole = values.get(name)
        if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor) and whole.shape == shard.shape:
            own = Held.of(shard)
            values[name] = own.around(own.part_of(whole.detach())) if views else own.cut(whole)
