"""What a checkpoint holds: a tensor, and where its bytes lie. The same words for every format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from hf_fsdp_tools.checkpoint.regions import (
    Box,
    Piece,
    View,
    row_major_strides,
)

__all__ = ["ChunkedTensor", "StoredTensor", "TensorChunk", "leaves_folder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint that lies in one file."""

    key: str
    """Its name in the file."""

    file: Path
    """The file that holds it."""

    dtype: torch.dtype
    """As stored."""

    shape: tuple[int, ...]
    """As stored."""

    offset: int
    """Position of its first byte in the file."""

    num_bytes: int
    """Length of its data in bytes."""

    strides: tuple[int, ...] | None = None
    """Steps in elements per dimension; None where the data is row-major, as it always is but in pickled files."""

    @property
    def sources(self) -> Mapping[str, torch.dtype]:
        """The names and dtypes of what it is made of: itself."""
        return {self.key: self.dtype}

    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as boxes that are views of its sources."""
        view = View(offset=0, length=self.shape, strides=self.strides or row_major_strides(self.shape))
        return (Piece(box=Box.whole(self.shape), source=self.key, view=view),)


@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """A box of a tensor that was saved by itself, somewhere in a file."""

    name: str
    """Unique in the checkpoint: key and start."""

    box: Box
    """Which part of the tensor it is."""

    file: Path
    """The file that holds it."""

    offset: int
    """Position of the saved object, of which the data is a part, in the file."""

    length: int
    """Length of the saved object in bytes."""


@dataclass(frozen=True, kw_only=True)
class ChunkedTensor:
    """One tensor of a checkpoint that was saved in chunks; they do not overlap, and together they are the tensor."""

    key: str
    """Its name in the checkpoint."""

    file: Path
    """The file that says where its chunks are."""

    dtype: torch.dtype
    """As stored."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    chunks: tuple[TensorChunk, ...]
    """Those that hold anything."""

    @property
    def num_bytes(self) -> int:
        """Length of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> Mapping[str, torch.dtype]:
        """The names and dtypes of what it is made of: its chunks."""
        return {chunk.name: self.dtype for chunk in self.chunks}

    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as boxes that are views of its sources; each chunk is row-major."""
        return tuple(
            Piece(
                box=chunk.box,
                source=chunk.name,
                view=View(offset=0, length=chunk.box.length, strides=row_major_strides(chunk.box.length)),
            )
            for chunk in self.chunks
        )


def leaves_folder(name: str) -> bool:
    """Whether a file name that a checkpoint gives points out of its own folder, or is no plain path at all."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not name
