"""Which bytes of a file belong to which memory, cut into requests that one system call moves each.

Words used here:

    transfer   elements of a file, at regular steps, and the same elements in memory
    request    transfers of one file that are read or written together, small enough for one system call
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint.formats.stored import StoredTensor
from hf_fsdp_tools.checkpoint.regions import slice_piece
from hf_fsdp_tools.checkpoint.symbolic import PieceTensor
from hf_fsdp_tools.distributed.boxes import Box

__all__ = ["Request", "Transfer", "cut_requests", "transfers_into"]

_MAX_RUNS = 1024
"""Memory regions that one `preadv` or `pwritev` takes (IOV_MAX on Linux)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Elements of a file, and their place in memory."""

    file: Path
    """The file."""

    start: int
    """Position of the first element's first byte in the file."""

    dtype: torch.dtype
    """Dtype of the elements in the file."""

    strides: tuple[int, ...]
    """Steps in the file per dimension of `memory`, in elements."""

    memory: torch.Tensor
    """The elements in memory: a view of any strides, dtype and device."""

    @property
    def stop(self) -> int:
        """Position after the last element in the file."""
        steps = sum((n - 1) * step for n, step in zip(self.memory.shape, self.strides, strict=True))
        return self.start + (steps + 1) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in the file; gaps between them do not count."""
        return self.memory.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes in memory are the bytes in the file, in one run."""
        return (
            self.memory.dtype == self.dtype
            and self.memory.device.type == "cpu"
            and self.strides in ((), (1,))
            and self.memory.is_contiguous()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Transfers that one system call moves."""

    file: Path
    """The file."""

    transfers: tuple[Transfer, ...]
    """In file order."""

    start: int
    """Position of the first byte."""

    stop: int
    """Position after the last byte."""

    is_direct: bool
    """Whether the bytes go between file and final memory without a staging buffer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in the file; gaps between them do not count."""
        return sum(transfer.num_bytes for transfer in self.transfers)


def transfers_into(
    memory: torch.Tensor, tensor: PieceTensor, box: Box, stored_at: Callable[[str], StoredTensor]
) -> Iterator[Transfer]:
    """Yield the transfers that fill `memory` with one box of a tensor.

    Args:
        memory: a view of any strides, of the box's shape. Elements that no piece of the tensor fills keep their values.
        tensor: must not be opaque.
        box: which part of the tensor.
        stored_at: gives the place of a source by its name (`CheckpointIndex.source`).
    """
    for piece in tensor.pieces or ():
        part = slice_piece(piece, box)
        if part is None:
            continue
        stored = stored_at(part.source)
        skipped = ((p - b) * step for p, b, step in zip(part.box.start, box.start, memory.stride(), strict=True))
        yield Transfer(
            file=stored.file,
            start=stored.offset + part.view.offset * stored.dtype.itemsize,
            dtype=stored.dtype,
            strides=part.view.strides,
            memory=memory.as_strided(part.box.length, memory.stride(), memory.storage_offset() + sum(skipped)),
        )


def cut_requests(
    transfers: Iterable[Transfer], *, request_bytes: int, buffer_bytes: int, max_gap_bytes: int
) -> Iterator[Request]:
    """Yield requests that together move the transfers, in file order.

    Args:
        transfers: of any files.
        request_bytes: bytes of the largest direct request.
        buffer_bytes: bytes of its file that a staged request may span.
        max_gap_bytes: unwanted bytes between wanted ones up to which a request moves both; 0 for writing.
    """
    parts: dict[Path, list[Transfer]] = {}
    for transfer in transfers:
        # Half the buffer each, so that two parts that interleave in the file fit into it together.
        for part in _cut_to_fit(_merged(transfer), buffer_bytes // 2, max_gap_bytes) if transfer.memory.numel() else ():
            parts.setdefault(transfer.file, []).extend(_divided(part, request_bytes))
    for file in sorted(parts):
        in_order = sorted(((part.start, part.stop, i) for i, part in enumerate(parts[file])))
        placed = ((start, stop, parts[file][i]) for start, stop, i in in_order)
        yield from _join_neighbours(file, placed, request_bytes, buffer_bytes)


def _merged(transfer: Transfer) -> Transfer:
    """The transfer with dimensions in file order, and with dimensions that are contiguous in file and memory merged."""
    shape, memory = transfer.memory.shape, transfer.memory.stride()
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -transfer.strides[d])
    merged: list[tuple[int, int, int]] = []  # length, step in the file, step in memory
    for d in order:
        dim = (shape[d], transfer.strides[d], memory[d])
        if merged and merged[-1][1:] == (dim[0] * dim[1], dim[0] * dim[2]):
            dim = (merged.pop()[0] * dim[0], dim[1], dim[2])
        merged.append(dim)
    return Transfer(
        file=transfer.file,
        start=transfer.start,
        dtype=transfer.dtype,
        strides=tuple(dim[1] for dim in merged),
        memory=transfer.memory.as_strided([dim[0] for dim in merged], [dim[2] for dim in merged]),
    )


def _cut_to_fit(transfer: Transfer, limit: int, max_gap_bytes: int) -> Iterator[Transfer]:
    """Cut along the dimension with the largest step until each part fits `limit` and has no gap that is too large."""
    if transfer.is_direct or not transfer.strides:
        yield transfer
        return
    size, strides, memory = transfer.dtype.itemsize, transfer.strides, transfer.memory
    steps = [(n - 1) * step for n, step in zip(memory.shape, strides, strict=True)]
    gaps = [(step - 1 - sum(steps[d + 1 :])) * size for d, step in enumerate(strides)]
    span = (sum(steps) + 1) * size
    # Writing (no gap allowed) must not touch a byte that belongs to somebody else, so there must be no hole at all.
    is_whole = max(gaps) <= max_gap_bytes and (max_gap_bytes > 0 or span == transfer.num_bytes)
    if is_whole and span <= limit:
        yield transfer
        return
    many = min(max(1, limit // (strides[0] * size)), memory.shape[0] - 1) if is_whole else 1
    for i in range(0, memory.shape[0], many):
        part = memory.narrow(0, i, min(many, memory.shape[0] - i))
        inner, steps_in = (part.select(0, 0), strides[1:]) if part.shape[0] == 1 else (part, strides)
        start = transfer.start + i * strides[0] * size
        cut = Transfer(file=transfer.file, start=start, dtype=transfer.dtype, strides=steps_in, memory=inner)
        yield from _cut_to_fit(cut, limit, max_gap_bytes)


def _divided(transfer: Transfer, request_bytes: int) -> Iterator[Transfer]:
    """Yield a direct transfer in parts of at most `request_bytes`, so that several requests move it at once."""
    if transfer.num_bytes <= request_bytes or not transfer.is_direct:
        yield transfer
        return
    start = transfer.start
    for part in torch.split(transfer.memory, max(1, request_bytes // transfer.dtype.itemsize)):
        yield Transfer(file=transfer.file, start=start, dtype=transfer.dtype, strides=transfer.strides, memory=part)
        start += part.numel() * transfer.dtype.itemsize


def _join_neighbours(
    file: Path, parts: Iterable[tuple[int, int, Transfer]], request_bytes: int, buffer_bytes: int
) -> Iterator[Request]:
    """Yield neighbours as one request: direct transfers while they touch, staged ones while they touch or overlap.

    Args:
        file: of all parts.
        parts: (start, stop, transfer) in file order.
        request_bytes: bytes of the largest direct request.
        buffer_bytes: bytes of the largest staged request.
    """
    joined: list[Transfer] = []
    first = last = 0
    direct = False
    for start, stop, part in parts:
        is_direct = part.is_direct
        touches = bool(joined) and is_direct == direct and (start == last if direct else start <= last)
        fits = max(last, stop) - first <= (request_bytes if direct else buffer_bytes) and len(joined) < _MAX_RUNS
        is_aligned = direct or (start - first) % part.dtype.itemsize == 0
        if not (touches and fits and is_aligned):
            if joined:
                yield Request(file=file, transfers=tuple(joined), start=first, stop=last, is_direct=direct)
            joined, first, last, direct = [], start, stop, is_direct
        joined.append(part)
        last = max(last, stop)
    if joined:
        yield Request(file=file, transfers=tuple(joined), start=first, stop=last, is_direct=direct)
