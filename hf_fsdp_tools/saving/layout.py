"""The layout of a checkpoint before it is written: file, offset and dtype of every tensor, equal on every rank."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from hf_fsdp_tools.distributed.shards import Box, refuse_ended
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.formats.safetensors import DTYPES
from hf_fsdp_tools.loading.heads import Heads, WithHeads
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.regions import Piece, row_major_strides
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.weight_files import WEIGHTS
from hf_fsdp_tools.streaming.held import Part
from hf_fsdp_tools.streaming.outgoing import SavedTensor, outgoing_tensors, views_of_piece
from hf_fsdp_tools.text import dtype_name, listed

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Place(SavedTensor):
    """A saved tensor and its place."""

    file: Path
    """Its file, relative to the folder in which the checkpoint is made."""
    offset: int
    """Position of its first byte in the file."""

    def transfer(self, data: torch.Tensor, box: Box | None = None) -> Transfer:
        """What writes a box of the tensor, or all of it."""
        strides = row_major_strides(data.shape if box is None else self.symbol.shape)
        first = 0 if box is None else sum(i * s for i, s in zip(box.start, strides, strict=True))
        start = self.offset + first * self.element.itemsize
        return Transfer(file=self.file, start=start, dtype=self.element, strides=strides, memory=data)

    def transfers(self, piece: Piece, memory: torch.Tensor, box: Box, shape: Sequence[int]) -> Iterator[Transfer]:
        """Yield what writes the part of a piece that lies in a box of a model tensor of that shape.

        `memory` holds the box and is contiguous.
        """
        for part, data in views_of_piece(piece, memory, box, shape):
            yield self.transfer(data, part)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of a checkpoint and the place of every tensor, the same on every rank."""

    places: Mapping[str, Place]
    """Hub key to place."""
    carried: Mapping[str, Place]
    """The same of heads that are copied from files; their places are made of stored elements."""
    heads: tuple[Heads, CheckpointIndex] | None
    """Where these are stored."""
    headers: Mapping[str, bytes]
    """File to everything before its data."""
    sizes: Mapping[str, int]
    """File to its full length in bytes."""
    num_parameters: int
    """Elements of the model's parameters, and of what is carried."""

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(self.sizes.values()) - sum(map(len, self.headers.values()))

    def transfers(self, parts: Iterable[Part]) -> list[Transfer]:
        """What writes parts of the saved tensors."""
        return [self.places[part.name].transfer(part.data, part.box) for part in parts]


def plan_layout(
    model: nn.Module, dtype: torch.dtype | None, max_shard_size: int | str, *, carry_heads: bool = True
) -> Layout:
    """The layout with keys, dtypes and shapes as transformers saves them, split into files as huggingface_hub splits.

    `dtype` is that of floating-point tensors in the files; None keeps the model's. No rank communicates.
    """
    refuse_ended(model)
    tensors = outgoing_tensors(model, dtype)
    heads: Heads | None = WithHeads.of(model).heads
    carried: dict[str, SavedTensor] = {}
    if heads is not None and not (index := heads.of(model, carry=carry_heads)).tensors:
        heads = None
    if heads is not None:
        heads.refuse_changed()
        of_rest = cast(torch.dtype, getattr(model, "dtype", None))
        for key in sorted(index.tensors.keys() - tensors.keys()):
            symbol = PieceTensor.stored(index.tensors[key], index.source_dtype(key, floats=of_rest))
            carried[key] = SavedTensor.of(symbol, dtype)
    num_parameters = sum(each.numel() for each in (*model.parameters(), *(head.symbol for head in carried.values())))
    layout = lay_out(tensors | carried, max_shard_size, num_parameters)
    return replace(
        layout,
        places={key: place for key, place in layout.places.items() if key not in carried},
        carried={key: layout.places[key] for key in carried},
        heads=None if heads is None else (heads, index),
    )


def lay_out(tensors: Mapping[str, SavedTensor], max_shard_size: int | str, num_parameters: int) -> Layout:
    """The layout of these tensors, none of them carried."""
    # such as float8_e4m3fnuz and complex128
    if unnamed := [key for key, tensor in tensors.items() if tensor.element not in _DTYPE_NAMES]:
        unknown = tensors[unnamed[0]].element
        cure = "save with dtype=torch.bfloat16" if unknown.is_floating_point else "convert it first"
        raise CheckpointError(
            f"{unnamed[0]!r} is {dtype_name(unknown)}, for which safetensors files have no name; so are {len(unnamed)} "
            f"of {len(tensors)} tensors. They hold {listed(_DTYPE_NAMES.values(), 20)}: {cure}."
        )
    blanks = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in tensors.items()}
    try:
        pattern = WEIGHTS.replace(".", "{suffix}.")
        split = split_torch_state_dict_into_shards(blanks, filename_pattern=pattern, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size={max_shard_size!r} is no size of a file: {error}") from None
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for file, keys in split.filename_to_tensors.items():
        # Wide dtypes first, as safetensors itself does, so that every tensor is aligned.
        order = sorted(keys, key=lambda k: (-tensors[k].dtype.itemsize, k))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for key in order:
            offsets = [position, position + blanks[key].nbytes]
            entries[key] = {
                "dtype": _DTYPE_NAMES[tensors[key].dtype], "shape": list(tensors[key].shape), "data_offsets": offsets
            }  # fmt: skip
            position = offsets[1]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file] = len(headers[file]) + position
        for key in order:
            offset = len(headers[file]) + entries[key]["data_offsets"][0]
            symbol, element = tensors[key].symbol, tensors[key].element
            places[key] = Place(symbol=symbol, element=element, file=Path(file), offset=offset)
    return Layout(places=places, carried={}, heads=None, headers=headers, sizes=sizes, num_parameters=num_parameters)
