"""The layout of a checkpoint before it is written: file, offset and dtype of every tensor, equal on every rank."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from hf_fsdp_tools.distributed.shards import Box, refuse_ended
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import map_saving
from hf_fsdp_tools.loading.formats.safetensors import DTYPES
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor
from hf_fsdp_tools.loading.heads import Heads
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.regions import Piece, row_major_strides, slice_view
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.weight_files import WEIGHTS
from hf_fsdp_tools.modeling.notes import note_of
from hf_fsdp_tools.text import dtype_name, listed

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one saved tensor."""

    tensor: PieceTensor
    """The model elements that the tensor is made of."""

    dtype: torch.dtype
    """Stored dtype."""

    file: Path
    """Its file, relative to the folder in which the checkpoint is made."""

    offset: int
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.tensor.numel() * self.dtype.itemsize

    def transfer(self, whole: torch.Tensor) -> Transfer:
        """What writes the whole tensor."""
        strides = row_major_strides(whole.shape)
        return Transfer(file=self.file, start=self.offset, dtype=self.dtype, strides=strides, memory=whole)

    def transfers(self, piece: Piece, memory: torch.Tensor, box: Box, shape: Sequence[int]) -> Iterator[Transfer]:
        """Yield what writes the part of a piece that lies in a box of a model tensor of that shape.

        `memory` holds the box and is contiguous.
        """
        strides = row_major_strides(self.tensor.shape)
        for part, view in slice_view(piece.view, shape, box):
            start = [a + b for a, b in zip(piece.box.start, part.start, strict=True)]
            first = sum(i * s for i, s in zip(start, strides, strict=True))
            yield Transfer(
                file=self.file,
                start=self.offset + first * self.dtype.itemsize,
                dtype=self.dtype,
                strides=strides,
                memory=memory.as_strided(view.length, view.strides, memory.storage_offset() + view.offset),
            )


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


def plan_layout(
    model: nn.Module, dtype: torch.dtype | None, max_shard_size: int | str, *, carry_heads: bool = True
) -> Layout:
    """The layout with keys, dtypes and shapes as transformers saves them, split into files as huggingface_hub splits.

    `dtype` is that of floating-point tensors in the files; None keeps the model's. No rank communicates.
    """
    refuse_ended(model)
    tensors = map_saving(model)
    heads: Heads | None = note_of(model).heads
    carried: dict[str, PieceTensor] = {}
    if heads is not None and not (index := heads.of(model, carry=carry_heads)).tensors:
        heads = None
    if heads is not None:
        heads.refuse_changed()
        of_rest = cast(torch.dtype, getattr(model, "dtype", None))
        for key in index.tensors.keys() - tensors.keys():
            stored = index.tensors[key]
            own = of_rest if isinstance(stored, QuantizedTensor) else stored.dtype
            carried[key] = PieceTensor.stored(stored, own)
        tensors |= {key: carried[key] for key in sorted(carried)}
    dtypes = {k: dtype if dtype and t.is_floating_point() else t.dtype for k, t in tensors.items()}
    num_parameters = sum(tensor.numel() for tensor in (*model.parameters(), *carried.values()))
    layout = lay_out(tensors, dtypes, max_shard_size, num_parameters)
    return replace(
        layout,
        places={key: place for key, place in layout.places.items() if key not in carried},
        carried={key: layout.places[key] for key in carried},
        heads=None if heads is None else (heads, index),
    )


def lay_out(
    tensors: Mapping[str, PieceTensor],
    dtypes: Mapping[str, torch.dtype],
    max_shard_size: int | str,
    num_parameters: int,
) -> Layout:
    """The layout of these tensors in these dtypes, none of them carried."""
    # such as float8_e4m3fnuz and complex128
    if unnamed := [key for key, saved in dtypes.items() if saved not in _DTYPE_NAMES]:
        unknown = dtypes[unnamed[0]]
        cure = "save with dtype=torch.bfloat16" if unknown.is_floating_point else "convert it first"
        raise CheckpointError(
            f"{unnamed[0]!r} is {dtype_name(unknown)}, for which safetensors files have no name; so are {len(unnamed)} "
            f"of {len(dtypes)} tensors. They hold {listed(_DTYPE_NAMES.values(), 20)}: {cure}."
        )
    looks = {k: t.look or (dtypes[k], tuple(t.shape)) for k, t in tensors.items()}
    blanks = {k: torch.empty(shape, dtype=look, device="meta") for k, (look, shape) in looks.items()}
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
        order = sorted(keys, key=lambda k: (-looks[k][0].itemsize, k))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for key in order:
            offsets = [position, position + blanks[key].nbytes]
            entries[key] = {
                "dtype": _DTYPE_NAMES[looks[key][0]], "shape": list(blanks[key].shape), "data_offsets": offsets
            }  # fmt: skip
            position = offsets[1]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file] = len(headers[file]) + position
        for key in order:
            offset = len(headers[file]) + entries[key]["data_offsets"][0]
            places[key] = Place(tensor=tensors[key], dtype=dtypes[key], file=Path(file), offset=offset)
    return Layout(places=places, carried={}, heads=None, headers=headers, sizes=sizes, num_parameters=num_parameters)
