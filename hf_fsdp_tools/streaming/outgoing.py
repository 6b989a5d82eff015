"""The tensors of the checkpoint that a model would be saved as, and the boxes of them that a box of the model holds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import all_ranks, rank_and_size
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError, library_errors
from hf_fsdp_tools.loading.adapter_state import tensors_by_peft
from hf_fsdp_tools.loading.conversion import map_saving
from hf_fsdp_tools.loading.regions import Piece, slice_view
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.tree_copy import is_adapted


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of the checkpoint that a model would be saved as."""

    symbol: PieceTensor
    """The model elements that it is made of; bytes, of a weight that is quantised as stored."""
    element: torch.dtype
    """The dtype in which an element of `symbol` goes out."""

    @classmethod
    def of(cls, symbol: PieceTensor, dtype: torch.dtype | None) -> "SavedTensor":
        """One that goes out in `dtype`, if it is of floats and that is not None; otherwise in its own."""
        return cls(symbol=symbol, element=dtype if dtype and symbol.is_floating_point() else symbol.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the checkpoint."""
        return self.symbol.look[0] if self.symbol.look else self.element

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        return self.symbol.look[1] if self.symbol.look else tuple(self.symbol.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.symbol.numel() * self.element.itemsize

    @property
    def is_computed(self) -> bool:
        """Whether the way back to the checkpoint's layout does more than move elements."""
        return self.symbol.pieces is None

    def as_stored(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole tensor as the checkpoint has it, of all its elements (`symbol`); shares the memory."""
        return whole.view(self.dtype).reshape(self.shape) if self.symbol.look else whole


def outgoing_tensors(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, SavedTensor]:
    """The tensors of a model, or of a PEFT model's adapters, by the names that they have in its checkpoint.

    `dtype` is that of floating-point tensors; None keeps the model's. Every rank must call for a PEFT model.
    """
    if is_adapted(model):
        state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        found = chosen_by_peft(model, state)
        symbols = {name: PieceTensor.named(key, state[key].shape, state[key].dtype) for name, key in found.items()}
    else:
        symbols = map_saving(model)
    return {name: SavedTensor.of(symbol, dtype) for name, symbol in symbols.items()}


def refuse_empty(tensors: Mapping[str, torch.Tensor], doing: str) -> None:
    """Refuse tensors of a model that was never loaded, or whose loading failed."""
    if empty := [key for key, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{len(empty)} tensors are on meta and have no values, {empty[0]!r} first. Load the model with "
            f"load_weights or from_pretrained before {doing}; after a failed load, load it again."
        )


def chosen_by_peft(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """The keys of the tensors that PEFT writes of a model's state, by the names under which it writes them.

    Every rank must call. Rank 0 decides for all, as PEFT may ask the hub which vocabulary the base has.
    """
    found: dict[str, str] = {}
    if rank_and_size()[0] == 0:
        keys = {id(tensor): key for key, tensor in state.items()}
        with library_errors("PEFT cannot say what belongs to the adapter", "What was saved before is unchanged."):
            found = {name: keys[id(tensor)] for name, tensor in tensors_by_peft(model, state).items()}
    return all_ranks(found, "asking PEFT what belongs to the adapter")[0]


def views_of_piece(
    piece: Piece, memory: torch.Tensor, box: Box, shape: Sequence[int]
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a tensor that a box of the source of a piece holds, each with its elements, as views of the
    contiguous memory of that box; `shape` is the source's."""
    view = piece.view
    if shape:  # most experts of a stack lie in none of a rank's rows
        row = math.prod(shape[1:])
        last = view.offset + sum((n - 1) * step for n, step in zip(view.length, view.strides, strict=True))
        if last < box.start[0] * row or view.offset >= (box.start[0] + box.length[0]) * row:
            return
    for part, view in slice_view(piece.view, shape, box):
        start = tuple(a + b for a, b in zip(piece.box.start, part.start, strict=True))
        data = memory.as_strided(view.length, view.strides, memory.storage_offset() + view.offset)
        yield Box(start=start, length=part.length), data
