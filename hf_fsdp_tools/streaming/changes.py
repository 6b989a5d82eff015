"""What has changed of a rank's weights since it was last asked, element by element."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.streaming.held import Part
from hf_fsdp_tools.streaming.outgoing import SavedTensor

_BLOCK_BYTES = 16 * 2**20
"""Bytes that are compared at a time, beside the snapshot. (assumed)"""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element: two NaNs are equal, and zeros of two signs are not."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The elements of a tensor of the checkpoint that have changed on this rank."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape; of a weight that stays quantised, that of its bytes."""
    indices: torch.Tensor
    """Where they lie in the whole tensor, row-major; int64, 1-d."""
    values: torch.Tensor
    """Their values now, in the dtype in which they go out; 1-d."""


class Changes:
    """Finds what has changed of a rank's parts; made by `LiveWeights.changes`.

    It keeps a snapshot of the parts in host memory, in the dtype in which they go out: `num_bytes`, of this rank.
    """

    def __init__(self, parts: Callable[[], Iterator[tuple[str, SavedTensor, list[Part]]]]) -> None:
        """Take the first snapshot."""
        self._parts = parts
        self._snapshot = {name: [part.values().cpu().clone() for part in own] for name, _, own in parts()}
        self.num_bytes = sum(each.nbytes for own in self._snapshot.values() for each in own)
        """Bytes of the snapshot."""
        self.share = 1.0
        """Share of this rank's elements that the last pass found changed; 1 before the first."""

    def __iter__(self) -> Iterator[Change]:
        """Yield each tensor's changes since the last pass, in the same order on every rank; an empty one where nothing
        of it has changed here. The snapshot follows."""
        changed = total = 0
        for name, tensor, parts in self._parts():
            shape = tuple(tensor.symbol.shape)
            found = [
                each
                for part, old in zip(parts, self._snapshot[name], strict=True)
                for each in _differ(part, old, shape)
            ]
            none = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=tensor.element)
            indices, values = (torch.cat(each) for each in zip(none, *found, strict=True))
            changed, total = changed + len(indices), total + sum(part.data.numel() for part in parts)
            yield Change(name=name, shape=shape, indices=indices, values=values)
        self.share = changed / max(1, total)


def _differ(part: Part, old: torch.Tensor, shape: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield indices and values of what differs from a snapshot, which is changed, block by block."""
    strides = row_major_strides(shape)
    for block in Box.whole(part.box.length).slabs(_BLOCK_BYTES, part.dtype.itemsize):
        now, before = part.data[block.slices].to(part.dtype), old[block.slices]
        bits = _BITS[now.element_size()]
        differs = now.contiguous().view(bits) != before.to(now.device).view(bits)
        places = differs.nonzero()
        starts = [a + b for a, b in zip(part.box.start, block.start, strict=True)]
        indices = sum(
            ((places[:, d] + start) * stride for d, (start, stride) in enumerate(zip(starts, strides, strict=True))),
            torch.zeros(len(places), dtype=torch.int64, device=places.device),
        )
        if len(places):
            before.copy_(now)
            yield indices.cpu(), now[differs].cpu()
