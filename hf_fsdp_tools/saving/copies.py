"""What a rank writes of a saved model, and copies of it in host memory, from which a background save writes."""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.agreement import agreed, refuse_too_large
from hf_fsdp_tools.distributed.mesh import pinned_bytes
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.text import first_line, show_bytes

_BLOCK_BYTES = 256 * 2**20
"""Bytes of one allocation, of which many tensors get a part. A power of two, to which PyTorch rounds pinned memory up:
one allocation of 9 GB would take 16. (assumed)"""

_ALIGNMENT = 64
"""Each copy begins at a multiple of so many bytes: enough for every dtype."""

_SLAB_BYTES = 16 * 2**20
"""Bytes of a tensor that are cast or gathered on an accelerator at a time, in memory of the accelerator. (assumed)"""

_THREADS = 8
"""Threads that copy within host memory: about what saturates the memory of one socket. (assumed)"""

COPIED = (
    CheckpointError,
    "Saving with blocking=False writes from a copy",
    "Save with blocking=True, which needs no copy, or in a smaller dtype, or free memory.",
)
"""The error where host memory does not hold the copies: kind, fact and cure."""


class HostCopies:
    """Copies of tensors, contiguous, in host memory that is pinned where an accelerator holds some of the tensors.

    The memory is kept for the next copies when these are given back (`free_kept_memory` frees it).
    """

    @torch.inference_mode(False)  # memory that is made in it cannot be written by other threads, nor later
    def __init__(self, sources: Sequence[tuple[torch.Tensor, torch.dtype]], *, beside_bytes: int = 0) -> None:
        """Copy tensors, and return once the copies are complete. Every rank must call."""
        side = side_stream_for(tensor for tensor, _ in sources)
        self._is_pinned = side is not None
        num_bytes = [tensor.numel() * dtype.itemsize for tensor, dtype in sources]
        places, sizes = _packed(num_bytes, is_pinned=self._is_pinned)
        self._blocks: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        """The copies, in the order of their sources."""
        self.num_bytes = sum(sizes)
        """Bytes of host memory that the copies take, pinned or not."""
        try:
            with agreed("copying what is saved"):
                refuse_too_large(_missing_bytes(sizes, is_pinned=self._is_pinned) + beside_bytes, *COPIED)
                self._blocks = _blocks(sizes, side)
                self.tensors = [
                    self._blocks[block][start : start + size].view(dtype).view(tensor.shape)
                    for (block, start), size, (tensor, dtype) in zip(places, num_bytes, sources, strict=True)
                ]
                _copy([tensor.detach() for tensor, _ in sources], self.tensors, side)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Keep the memory for the next copies; these must not be used any more."""
        self.tensors = []
        with _lock:
            _kept.extend((self._is_pinned, block) for block in self._blocks)
        self._blocks = []


_kept: list[tuple[bool, torch.Tensor]] = []
"""Memory that was given back, and whether it is pinned: asking the system makes a context on device 0."""

_lock = threading.Lock()


def free_kept_memory() -> None:
    """Free the memory that was given back."""
    with _lock:
        _kept.clear()


def copied_transfers(transfers: Sequence[Transfer], *, beside_bytes: int = 0) -> tuple[list[Transfer], HostCopies]:
    """Transfers that write copies of the same values: in the dtype and, within a transfer, the order of the file.

    Every rank must call.
    """
    transfers = [transfer for transfer in transfers if transfer.memory.numel()]
    orders = [sorted(range(t.memory.ndim), key=t.strides.__getitem__, reverse=True) for t in transfers]
    sources = [(t.memory.permute(order), t.dtype) for t, order in zip(transfers, orders, strict=True)]
    copies = HostCopies(sources, beside_bytes=beside_bytes)
    copied = [
        replace(t, strides=tuple(t.strides[dim] for dim in order), memory=copy)
        for t, order, copy in zip(transfers, orders, copies.tensors, strict=True)
    ]
    return copied, copies


# ---- memory ----


def _packed(num_bytes: Sequence[int], *, is_pinned: bool) -> tuple[list[tuple[int, int]], list[int]]:
    """A place (block, and first byte in it) for each copy, and the size of each block: the largest copies first, each
    into the first with room."""
    places = [(0, 0)] * len(num_bytes)
    sizes: list[int] = []
    used: list[int] = []
    first = 0  # block that may have room
    for i in sorted(range(len(num_bytes)), key=lambda i: -num_bytes[i]):
        size = -(-num_bytes[i] // _ALIGNMENT) * _ALIGNMENT
        block = next((b for b in range(first, len(sizes)) if used[b] + size <= sizes[b]), len(sizes))
        if block == len(sizes):
            sizes.append(max(_BLOCK_BYTES, pinned_bytes(size)))
            used.append(0)
        places[i] = (block, used[block])
        used[block] += size
        while first < len(sizes) and sizes[first] - used[first] < _ALIGNMENT:
            first += 1
    return places, [pinned_bytes(n) if is_pinned else n for n in used]


def _blocks(sizes: Sequence[int], side: SideStream | None) -> list[torch.Tensor]:
    """Blocks of these sizes: kept ones where they fit, else new ones; kept ones that do not fit are freed before."""
    with _lock:
        kept, _kept[:] = [block for is_pinned, block in _kept if is_pinned == (side is not None)], []
    fitting: list[torch.Tensor | None] = []
    for size in sizes:
        i = next((i for i, block in enumerate(kept) if block.numel() == size), None)
        fitting.append(None if i is None else kept.pop(i))
    kept.clear()
    try:
        return [
            block if block is not None else torch.empty(size, dtype=torch.uint8) if side is None else side.pinned(size)
            for size, block in zip(sizes, fitting, strict=True)
        ]
    except RuntimeError as error:  # of torch's allocators, which have no class of their own for it on every device
        raise CheckpointError(
            f"The system does not give {show_bytes(sum(sizes))} of {'pinned ' if side else ''}host memory for a copy "
            f"of what is saved ({first_line(error)}). Save with blocking=True, which needs no copy."
        ) from error


def _missing_bytes(sizes: Sequence[int], *, is_pinned: bool) -> int:
    """Bytes of memory that is not kept yet."""
    kept = Counter(block.numel() for was_pinned, block in _kept if was_pinned == is_pinned)
    return sum((Counter(sizes) - kept).elements())


# ---- copying ----


def _copy(sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], side: SideStream | None) -> None:
    """Copy, and return when all is copied: what a device holds by that device, all else by the CPU at the same time."""
    pairs = [(source, copy) for source, copy in zip(sources, copies, strict=True) if copy.numel()]
    on_device = [(source, copy) for source, copy in pairs if side is not None and side.holds(source)]
    on_host = [(source, copy) for source, copy in pairs if side is None or not side.holds(source)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="copy") as pool:
        works: list[Future[Any]] = []
        if side is not None:
            side.follow()  # what was queued before changes the tensors still
            works.append(pool.submit(_copy_from_device, on_device, side))
        works += [pool.submit(copy.copy_, source) for source, copy in on_host]
        for work in works:
            work.result()


def _copy_from_device(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], side: SideStream) -> None:
    """Copy from a device to pinned memory: as it lies there where it is contiguous, or else in slabs made there."""
    side.enter()
    try:
        for source, copy in pairs:
            if source.dtype == copy.dtype and source.is_contiguous():
                side.copy(copy, source)
                continue
            rows = max(1, _SLAB_BYTES * len(source) // (copy.numel() * copy.itemsize)) if source.ndim else 1
            parts = zip(*(torch.split(t, rows) if t.ndim else (t,) for t in (source, copy)), strict=True)
            for part, to in parts:
                made = side.empty(to.numel() * to.itemsize).view(to.dtype).view(to.shape)
                side.copy_each([made], [part])
                side.copy(to, made)
    finally:
        side.wait()


_MIN_RUN_BYTES = 2048
"""Mean bytes of a run in the file below which a tensor is gathered instead: one system call per run costs more than
sending the tensor to rank 0. (assumed)"""


def is_scattered(transfers: Sequence[Transfer]) -> bool:
    """Whether this rank would write a tensor in one system call for every few bytes; 64 calls do not matter."""
    runs = 0
    for transfer in transfers:
        run = 1
        for n, stride in sorted(zip(transfer.memory.shape, transfer.strides, strict=True), key=lambda d: d[1]):
            if stride == run:
                run *= n
        runs += transfer.memory.numel() // run
    return runs > 64 and sum(transfer.num_bytes for transfer in transfers) < runs * _MIN_RUN_BYTES
