"""Memory on the host for many tensors, in large pages where the system gives them."""

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

__all__ = ["FaultIn", "empty_on_host"]

_LARGE_PAGE_BYTES = 2 * 2**20
"""Of x86-64, and of arm64 with 4 KiB pages."""

_BLOCK_BYTES = 256 * 2**20
"""Of one mapping, unless a tensor is larger: it goes back to the system when its last tensor is gone (assumed)."""

_ALIGNMENT = 64
"""Bytes; what torch gives its own tensors."""

_SLOW_PAGE_S = 0.5e-3
"""CPU time for one large page from which on small ones are taken, which take 0.55 ms for as much: 0.2 ms is usual, 2 to 5 ms
where the host of a virtual machine has taken the memory back and must bring it again (measured)."""

_POPULATE_WRITE = 23  # of linux/mman.h, since 5.14; Python's mmap module does not have it


class FaultIn:
    """Makes the pages of uninitialised memory present before it is written, which is cheaper than one fault after another.

    In large pages, as long as these come quickly; after the first slow one, all memory of `empty_on_host` comes in small
    pages. Contents stay as they are, so memory that holds something may be given. Does nothing where the system cannot do
    it. Threads may share one.
    """

    def __init__(self) -> None:
        self._large = True
        self._lock = threading.Lock()
        self._madvise = None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._madvise = ctypes.CDLL(None).madvise
            self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, memory: torch.Tensor) -> None:
        """Fault in the whole pages of a contiguous CPU tensor."""
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._madvise is None or memory.device.type != "cpu" or not memory.is_contiguous():
            return
        while self._large and start < stop:
            end = min(stop, (start // _LARGE_PAGE_BYTES + 1) * _LARGE_PAGE_BYTES)
            began = time.thread_time()
            self._madvise(start, end - start, _POPULATE_WRITE)
            if time.thread_time() - began >= _SLOW_PAGE_S:
                self._take_small_pages()
            start = end
        if start < stop:
            self._madvise(start, stop - start, _POPULATE_WRITE)

    def _take_small_pages(self) -> None:
        """For whole mappings and once: each such call waits for every thread that is faulting pages in, and they for it.

        Part by part, as the parts were read, it took as much of four threads' time as the faults themselves (measured).
        """
        with self._lock:
            if self._large:
                self._large = False
                for mapping in list(_mappings):
                    mapping.madvise(mmap.MADV_NOHUGEPAGE)


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of `empty_on_host`, as long as a tensor is in them


def empty_on_host(wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Uninitialised CPU tensors of these (shape, dtype), each with a storage of its own.

    Together they fill a few mappings of whole large pages, which the kernel is asked for (`MADV_HUGEPAGE`, as numpy does
    for its arrays). Memory that is new to the process then costs a fault per 2 MiB instead of one per 4 KiB: filling
    0.5 GB from the page cache takes 0.14 s instead of 0.31 (measured). No more memory is used than the tensors need.
    Where the system knows no such pages these are plain `torch.empty`. The storages cannot be resized.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in wanted]
    tensors: list[torch.Tensor] = []
    for block in _blocks(wanted):
        memory = _mapped(sum(_padded_bytes(shape, dtype) for shape, dtype in block))
        position = 0
        for shape, dtype in block:
            # A slice per tensor, so that each storage begins and ends with its tensor, as saving code expects.
            part = memory[position : position + math.prod(shape) * dtype.itemsize]
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            tensors.append(flat.view(tuple(shape)))
            position += _padded_bytes(shape, dtype)
    return tensors


def _blocks(wanted: Iterable[tuple[Sequence[int], torch.dtype]]) -> list[list[tuple[Sequence[int], torch.dtype]]]:
    """Neighbours that share a mapping."""
    blocks: list[list[tuple[Sequence[int], torch.dtype]]] = []
    size = 0
    for shape, dtype in wanted:
        size += _padded_bytes(shape, dtype)
        if not blocks or size > _BLOCK_BYTES:
            blocks.append([])
            size = _padded_bytes(shape, dtype)
        blocks[-1].append((shape, dtype))
    return blocks


def _padded_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _mapped(num_bytes: int) -> memoryview:
    """Private memory that begins at a large page. The space before it is never touched, so it costs nothing."""
    mapping = mmap.mmap(-1, num_bytes + _LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
        _mappings.add(mapping)
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _LARGE_PAGE_BYTES
    return memoryview(mapping)[start : start + num_bytes]
