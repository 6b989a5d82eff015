"""Stored tensors: name, dtype, shape, and where the bytes lie; the same classes for every format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.regions import Piece, View, row_major_strides
from hf_fsdp_tools.modeling.packed_weight import PackedForm
from hf_fsdp_tools.text import listed


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint that lies in one file."""

    key: str
    """Its name in the file."""
    file: Path
    """The file that holds it."""
    dtype: torch.dtype
    """Stored dtype."""
    shape: tuple[int, ...]
    """Stored shape."""
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int
    """Length of its data in bytes."""
    strides: tuple[int, ...] | None = None
    """Steps in elements per dimension; None for row-major data. Only pickled files hold other data."""
    start: tuple[int, ...] | None = None
    """Where it begins in the tensor that it is a chunk of, if its file says so; None for a tensor of its own."""
    is_archive: bool = False
    """Whether its data lies somewhere in an archive of `torch.save`, which begins at `offset`."""

    @property
    def box(self) -> Box:
        """Which part it is of the tensor that it is a chunk of; all of a tensor of its own."""
        return Box(start=self.start or (0,) * len(self.shape), length=self.shape)

    @property
    def parts(self) -> tuple["StoredTensor", ...]:
        """Everything that is stored of it."""
        return (self,)

    @property
    def sources(self) -> Mapping[str, torch.dtype]:
        """Name and dtype of the one source of its elements, which is itself."""
        return {self.key: self.dtype}

    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as boxes that are views of its sources."""
        return (Piece(start=self.box.start, source=self.key, view=View.whole(self.shape, self.strides)),)


@dataclass(frozen=True, kw_only=True)
class ChunkedTensor:
    """One tensor of a checkpoint that was saved in chunks; the chunks cover the tensor and do not overlap."""

    key: str
    """Its name in the checkpoint."""
    file: Path
    """The file that says where its chunks are."""
    dtype: torch.dtype
    """Stored dtype."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: tuple[StoredTensor, ...]
    """The chunks that hold any elements."""

    @property
    def num_bytes(self) -> int:
        """Length of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> Mapping[str, torch.dtype]:
        """Names and dtypes of the sources of its elements, which are its chunks."""
        return {chunk.key: self.dtype for chunk in self.parts}

    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as boxes that are views of its sources; each chunk is row-major."""
        return tuple(piece for chunk in self.parts for piece in chunk.pieces())


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A tensor that is stored as low-precision values and scales per block, seen as the floats that they stand for.

    The values are a matrix: all dimensions but the last one are its rows. A source of this tensor is that matrix, once
    it is dequantised, row-major.
    """

    key: str
    """The name that the plain tensor would have in the checkpoint."""
    form: PackedForm
    """How it is packed. It passes for a tensor of the form's dtype, and is dequantised to that of its place in memory.
    """
    stored: Mapping[str, StoredTensor]
    """The values ("packed"), and what lies next to them by the codec's names; all row-major."""
    groups: StoredTensor | None = None
    """The number of the group of each row, where a file says it: as its scales have it, which its values must show."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor passes for."""
        return self.form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, dequantised."""
        return self.form.shape

    @property
    def values(self) -> StoredTensor:
        """The low-precision values."""
        return self.stored["packed"]

    @property
    def file(self) -> Path:
        """The file that holds the values."""
        return self.values.file

    @property
    def offset(self) -> int:
        """Position of the first byte of the values in their file."""
        return self.values.offset

    @property
    def packed(self) -> int:
        """Values in one stored element: of a row, or of a column where the form's values have `bits`."""
        return math.prod(self.form.values.block) // self.form.values.elements

    def elements(self, name: str) -> int:
        """Elements in a row of the values ("packed") or of one kind of scales."""
        part = self.form.values if name == "packed" else self.form.scales[name]
        return -(-self.form.columns // part.block[1]) * part.elements

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Everything that is stored of it."""
        return (*self.stored.values(), *([self.groups] if self.groups else []))

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales as they are stored."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps in the matrix per dimension."""
        if not self.form.is_transposed:
            return row_major_strides(self.shape)
        *outer, a, b = self.shape
        *steps, row, one = row_major_strides((*outer, b, a))
        return (*steps, one, row)

    @property
    def sources(self) -> Mapping[str, torch.dtype]:
        """Name and dtype of the one source of its elements, which is itself."""
        return {self.key: self.dtype}

    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as a view of its source."""
        return (Piece.whole(self.key, self.shape, self.strides),)


Stored = StoredTensor | ChunkedTensor | QuantizedTensor
"""A tensor of a checkpoint."""


def leaves_folder(name: str) -> bool:
    """Whether a file name that a checkpoint gives points out of its own folder, or is no plain path at all."""
    return not name or name[0] == "/" or ".." in name.split("/") or "\\" in name or "\0" in name


def check_cover(file: Path, key: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse chunks that do not form a grid over the tensor: their ranges must follow each other in each dimension."""
    if not math.prod(shape):
        return
    cells, is_whole = 1, True
    for dim, size in enumerate(shape):
        ranges = sorted({(box.start[dim], box.length[dim]) for box in boxes})
        ends = list(accumulate(length for _, length in ranges))
        is_whole &= [start for start, _ in ranges] == [0, *ends[:-1]] and ends[-1:] == [size]
        cells *= len(ranges)
    if not is_whole or cells != len(boxes) or len(set(boxes)) != len(boxes):
        raise CheckpointError(
            f"{file}: the chunks of {key!r} {list(shape)} leave something out or overlap: "
            f"{listed((box.start, box.length) for box in boxes)}. Some rank did not finish; save it again."
        )
