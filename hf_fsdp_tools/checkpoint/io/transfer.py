"""Ranges of files and the places in memory that belong to them: cut to size, put in file order, neighbours together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint.regions import View

__all__ = ["Batch", "Chunk", "Transfer", "cut_batches"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Elements of a stored tensor and where they are in memory."""

    key: str
    """Name of the stored tensor, for messages."""

    file: Path
    """The file that holds it."""

    offset: int
    """Position in the file of the stored tensor's first byte."""

    dtype: torch.dtype
    """As stored."""

    stored: View
    """Which elements of the stored tensor."""

    memory: torch.Tensor
    """The same elements in memory, a view of any strides with shape ``stored.length``; any dtype and device."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a transfer that is small enough to stage, or one run that needs no staging."""

    start: int
    """Position of its first byte in the file."""

    stop: int
    """Position after its last byte."""

    dtype: torch.dtype
    """As stored."""

    strides: tuple[int, ...]
    """Steps in the file, in elements, per dimension of ``memory``."""

    memory: torch.Tensor
    """The elements in memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements in the file; gaps between them do not count."""
        return self.memory.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes in memory are the bytes in the file, in one run."""
        same = self.memory.dtype == self.dtype and self.memory.device.type == "cpu"
        return (
            same
            and self.stop - self.start == self.num_bytes
            and self.strides in ((), (1,))
            and self.memory.is_contiguous()
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Chunks of one file that one system call handles."""

    file: Path
    """The file."""

    chunks: tuple[Chunk, ...]
    """In file order; all direct, or together no longer than the staging buffer."""

    is_direct: bool
    """Whether the batch goes between file and final memory without staging."""

    @property
    def start(self) -> int:
        """Position of the first byte."""
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        """Position after the last byte."""
        return max(chunk.stop for chunk in self.chunks)


_MAX_RUNS = 1024  # what one preadv or pwritev takes: IOV_MAX on Linux


def cut_batches(
    transfers: Iterable[Transfer],
    *,
    staging_bytes: int,
    max_gap_bytes: int,
    join_bytes: int = 0,
    direct_bytes: int | None = None,
) -> Iterator[Batch]:
    """Batches that together are the transfers, in file order.

    Args:
        transfers: Of any files.
        staging_bytes: What a batch that is not direct may span in its file.
        max_gap_bytes: Unwanted bytes between wanted ones up to which a chunk runs on across them; 0 for writing.
        join_bytes: Direct chunks up to this size are staged all the same, and staged ones share a batch across gaps up to
            this size: fewer requests for more bytes and copies. 0 for writing.
        direct_bytes: What a direct batch may span; None is without limit.
    """
    chunks: dict[Path, list[Chunk]] = {}
    for transfer in transfers:
        # Half the buffer each, so that two chunks that interleave in the file fit into it together.
        cut = _cut(transfer, staging_bytes // 2, max_gap_bytes)
        chunks.setdefault(transfer.file, []).extend(part for chunk in cut for part in _divide(chunk, direct_bytes))
    for file in sorted(chunks):
        in_order = sorted(chunks[file], key=lambda c: (c.start, c.stop))
        yield from _join(file, in_order, staging_bytes, join_bytes, direct_bytes)


def _divide(chunk: Chunk, direct_bytes: int | None) -> Iterator[Chunk]:
    """A direct chunk in parts of so many bytes."""
    if direct_bytes is None or chunk.num_bytes <= direct_bytes or not chunk.is_direct:
        yield chunk
        return
    start = chunk.start
    for part in torch.split(chunk.memory, max(1, direct_bytes // chunk.dtype.itemsize)):
        stop = start + part.numel() * chunk.dtype.itemsize
        yield Chunk(start=start, stop=stop, dtype=chunk.dtype, strides=chunk.strides, memory=part)
        start = stop


def _join(
    file: Path, chunks: list[Chunk], staging_bytes: int, join_bytes: int, direct_bytes: int | None
) -> Iterator[Batch]:
    """Put neighbouring chunks together: direct ones while they touch, staged ones while they touch or overlap."""
    batch: list[Chunk] = []
    start = stop = 0
    direct = False
    for chunk in chunks:
        is_direct = chunk.is_direct and not chunk.num_bytes <= min(join_bytes, staging_bytes)
        touches = batch and (chunk.start == stop if direct else chunk.start <= stop + join_bytes)
        limit = direct_bytes if direct else staging_bytes
        fits = (len(batch) < _MAX_RUNS or not direct) and (limit is None or max(stop, chunk.stop) - start <= limit)
        aligned = direct or (chunk.start - start) % chunk.dtype.itemsize == 0
        if not (touches and fits and aligned and is_direct == direct):
            if batch:
                yield Batch(file=file, chunks=tuple(batch), is_direct=direct)
            batch, start, stop, direct = [], chunk.start, chunk.stop, is_direct
        batch.append(chunk)
        stop = max(stop, chunk.stop)
    if batch:
        yield Batch(file=file, chunks=tuple(batch), is_direct=direct)


def _cut(transfer: Transfer, limit: int, max_gap_bytes: int) -> Iterator[Chunk]:
    """The transfer as chunks: dimensions in file order, those that run on in file and memory made one."""
    if not transfer.memory.numel():
        return
    order = sorted(
        (d for d, n in enumerate(transfer.stored.length) if n > 1), key=lambda d: -transfer.stored.strides[d]
    )
    length: list[int] = []
    stored: list[int] = []
    memory: list[int] = []
    for d in order:
        n, step, place = transfer.stored.length[d], transfer.stored.strides[d], transfer.memory.stride(d)
        if length and stored[-1] == n * step and memory[-1] == n * place:
            length[-1], stored[-1], memory[-1] = length[-1] * n, step, place
        else:
            length, stored, memory = [*length, n], [*stored, step], [*memory, place]
    view = transfer.memory.as_strided(length, memory)
    start = transfer.offset + transfer.stored.offset * transfer.dtype.itemsize
    yield from _cut_dims(start, tuple(stored), view, transfer.dtype, limit, max_gap_bytes)


def _cut_dims(
    start: int, strides: tuple[int, ...], memory: torch.Tensor, dtype: torch.dtype, limit: int, max_gap_bytes: int
) -> Iterator[Chunk]:
    """Cut along the dimension with the largest step until a chunk fits ``limit`` and has no gap that is too large."""
    size = dtype.itemsize
    spans = [(n - 1) * step for n, step in zip(memory.shape, strides, strict=True)]
    gaps = [(step - 1 - sum(spans[d + 1 :])) * size for d, step in enumerate(strides)]
    chunk = Chunk(start=start, stop=start + (sum(spans) + 1) * size, dtype=dtype, strides=strides, memory=memory)
    span = chunk.stop - chunk.start
    # Writing (no gap allowed) must not touch a byte that belongs to somebody else, so there must be no hole at all.
    whole = max(gaps, default=0) <= max_gap_bytes and (max_gap_bytes > 0 or span == chunk.num_bytes)
    if not strides or chunk.is_direct or (whole and span <= limit):
        yield chunk
        return
    many = min(max(1, limit // (strides[0] * size)), memory.shape[0] - 1) if whole else 1
    for i in range(0, memory.shape[0], many):
        part = memory.narrow(0, i, min(many, memory.shape[0] - i))
        inner = (part.select(0, 0), strides[1:]) if part.shape[0] == 1 else (part, strides)
        yield from _cut_dims(start + i * strides[0] * size, inner[1], inner[0], dtype, limit, max_gap_bytes)
