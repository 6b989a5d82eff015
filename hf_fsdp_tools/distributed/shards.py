"""This rank's shard of a tensor: its boxes, its memory, and views of the memory. No other file asks a live mesh."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.boxes import Box, local_boxes

__all__ = [
    "LocalBoxes",
    "is_first_replica",
    "is_sharded",
    "local_boxes_of",
    "local_tensor",
    "memory_view",
    "replicated_axes",
]


@runtime_checkable
class LocalBoxes(Protocol):
    """A sharded tensor that knows its own local boxes and is no DTensor: FSDP1's flat shards."""

    is_first_replica: bool
    """Whether this rank writes its shard; other ranks that hold the same elements do not."""

    def local_boxes(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """As `local_boxes_of`; `as_strided` of the tensor must then give real memory for these boxes."""


def local_boxes_of(tensor: torch.Tensor) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The boxes of a tensor that this rank holds, each with its start in the local tensor; none for an empty shard."""
    if isinstance(tensor, LocalBoxes):
        return tensor.local_boxes()
    if not isinstance(tensor, DTensor):
        return local_boxes(tensor.shape, (), (), ())
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh holds nothing
        return ()
    return local_boxes(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of the tensor."""
    if isinstance(tensor, LocalBoxes):
        return True
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def replicated_axes(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(axis, this rank's coordinate) of each mesh axis that replicates a sharded DTensor.

    Empty for a tensor that every rank holds whole.
    """
    if not isinstance(tensor, DTensor) or not is_sharded(tensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    placed = zip(tensor.placements, coordinate, strict=False)
    return tuple((axis, index) for axis, (placement, index) in enumerate(placed) if placement.is_replicate())


def is_first_replica(tensor: torch.Tensor) -> bool:
    """Whether this rank writes its part of a tensor: of replicas, the first one does; of a plain tensor, rank 0.

    The first replica has coordinate 0 on every mesh axis that replicates. A mesh cut out of a larger mesh (FSDP's,
    beside tensor parallelism) is repeated along the axes that it lacks; the repetition with the larger mesh's first
    rank is the first one.
    """
    if isinstance(tensor, LocalBoxes):
        return tensor.is_first_replica
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    replicas = zip(tensor.placements, coordinate or (), strict=False)
    if coordinate is None or any(index != 0 for p, index in replicas if p.is_replicate()):
        return False
    first = tensor.device_mesh._get_root_mesh().mesh.min()  # no public name in torch 2.11 to 2.13
    return bool((tensor.device_mesh.mesh == first).any())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor, without autograd."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach()


def memory_view(local: torch.Tensor, start: Sequence[int], length: Sequence[int]) -> torch.Tensor:
    """The box of a local tensor that begins at `start`; shares its memory."""
    offset = local.storage_offset() + sum(i * s for i, s in zip(start, local.stride(), strict=True))
    return local.as_strided(tuple(length), local.stride(), offset)
