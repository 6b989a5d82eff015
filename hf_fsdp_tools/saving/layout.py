"""The layout of a checkpoint before it is written: file, offset and dtype of every tensor, equal on every rank."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from hf_fsdp_tools.distributed.shards import refuse_ended
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import map_saving
from hf_fsdp_tools.loading.formats.safetensors import DTYPES
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.weight_files import WEIGHTS
from hf_fsdp_tools.text import dtype_name, listed

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4} | {
    "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4,
}  # fmt: skip
"""Bytes of each unit, by its name in capitals."""

_SIZE = re.compile(rf"(?P<number>\d+(\.\d+)?)\s*(?P<unit>{'|'.join(_UNITS)})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one saved tensor."""

    tensor: PieceTensor
    """The model elements that the tensor is made of."""

    dtype: torch.dtype
    """Stored dtype."""

    file: str
    """Name of its file."""

    offset: int
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of a checkpoint and the place of every tensor, the same on every rank."""

    folder: Path
    """Folder in which the files are made."""

    places: Mapping[str, Place]
    """Hub key to place."""

    headers: Mapping[str, bytes]
    """File name to everything before its data."""

    files: Mapping[str, int]
    """File name to its full length in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(self.files.values()) - sum(len(header) for header in self.headers.values())

    def path(self, file: str) -> Path:
        """Path of a file while it is made."""
        return self.folder / file


def plan_layout(model: nn.Module, dtype: torch.dtype | None, max_shard_size: int | str, folder: Path) -> Layout:
    """The layout with keys, dtypes and shapes as transformers saves them, split into files as huggingface_hub splits.

    Args:
        model: to save.
        dtype: of floating-point tensors in the files; None keeps the model's.
        max_shard_size: largest file, in bytes or as "5GB"; a larger tensor has a file of its own.
        folder: in which the files are made.

    No rank communicates.

    Raises:
        CheckpointError: safetensors has no name for a tensor's dtype.
        ConfigError: `max_shard_size` is no size.
        RanksError: the process group of a sharded model has ended.
    """
    refuse_ended(model)
    most_bytes = _shard_bytes(max_shard_size)
    tensors = map_saving(model)
    dtypes = {k: dtype if dtype and t.is_floating_point() else t.dtype for k, t in tensors.items()}
    _refuse_unnamed(dtypes)
    blanks = {k: torch.empty(t.shape, dtype=dtypes[k], device="meta") for k, t in tensors.items()}
    split = split_torch_state_dict_into_shards(
        blanks, filename_pattern=WEIGHTS.replace(".", "{suffix}."), max_shard_size=most_bytes
    )
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    files: dict[str, int] = {}
    for file, keys in split.filename_to_tensors.items():
        # Wide dtypes first, as safetensors itself does, so that every tensor is aligned.
        order = sorted(keys, key=lambda k: (-dtypes[k].itemsize, k))
        sizes = [blanks[k].numel() * dtypes[k].itemsize for k in order]
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for key, size in zip(order, sizes, strict=True):
            entries[key] = {
                "dtype": _DTYPE_NAMES[dtypes[key]],
                "shape": list(blanks[key].shape),
                "data_offsets": [position, position + size],
            }
            position += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        files[file] = len(headers[file]) + position
        for key in order:
            offset = len(headers[file]) + entries[key]["data_offsets"][0]
            places[key] = Place(tensor=tensors[key], dtype=dtypes[key], file=file, offset=offset)
    return Layout(folder=folder, places=places, headers=headers, files=files)


def _shard_bytes(size: int | str) -> int:
    """A size in bytes, of "5GB", "1.5 GiB" or a number; "b" is no bit."""
    found = _SIZE.fullmatch(str(size).strip())
    num_bytes = int(float(found["number"]) * _UNITS[found["unit"].upper()]) if found else 0
    if num_bytes < 1 or isinstance(size, bool):
        raise ConfigError(
            f"max_shard_size={size!r} is no size of a file. Give a number of bytes, or one with a unit "
            f'({", ".join(filter(None, _UNITS))}), as in "5GB".'
        )
    return num_bytes


def _refuse_unnamed(dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse dtypes that a safetensors file cannot hold, of which `float8_e4m3fnuz` and `complex128` are two."""
    unnamed = {key: dtype for key, dtype in dtypes.items() if dtype not in _DTYPE_NAMES}
    if unnamed:
        key, dtype = next(iter(unnamed.items()))
        cure = "save with dtype=torch.bfloat16" if dtype.is_floating_point else "convert it first"
        raise CheckpointError(
            f"{key!r} is {dtype_name(dtype)}, for which safetensors files have no name; so are {len(unnamed)} of "
            f"{len(dtypes)} tensors. They hold {listed(_DTYPE_NAMES.values(), 20)}: {cure}."
        )
