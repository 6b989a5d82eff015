"""What a rank writes of a saved model, and copies of it in host memory, from which a background save writes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.agreement import agreed, refuse_too_large
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.io.files import Ring
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.text import first_line, show_bytes

_BUFFER_BYTES = 8 * 2**20
"""Bytes of a pinned buffer, and of a tensor that is cast or gathered on an accelerator at a time, in memory of the
accelerator; so many for each of the threads. (assumed)"""

THREADS = 8
"""Threads that copy within host memory: about what saturates the memory of one socket. (assumed)"""

COPIED = (
    CheckpointError,
    "Saving with blocking=False writes from a copy",
    "Save with blocking=True, which needs no copy, or in a smaller dtype, or free memory.",
)
"""The error where host memory does not hold the copies: kind, fact and cure."""


class ToHost:
    """Copies from a device to host memory that is not pinned, each by the thread that asks for it.

    They go through small pinned buffers: one H200 filled new memory at 16 GB/s so (8 threads), at 1.3 GB/s without
    buffers, as the driver takes page after page, and pinned new memory at 1.4 GB/s.
    """

    def __init__(self, side: SideStream, *, threads: int) -> None:
        """Make no buffer yet; copies wait for what the calling thread's current stream has to do until now."""
        self._side, self._ring = side, Ring(partial(side.pinned, _BUFFER_BYTES), threads)
        side.follow()

    def parts(self, source: torch.Tensor, to: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same copy in parts that a buffer holds: runs of bytes where both are contiguous."""
        if source.is_contiguous() and to.is_contiguous():
            source, to = source.view(-1), to.view(-1)
        if to.nbytes <= _BUFFER_BYTES:
            yield source, to
            return
        dim = max(range(to.ndim), key=to.shape.__getitem__)
        count = max(1, to.shape[dim] * _BUFFER_BYTES // to.nbytes)
        for some, place in zip(torch.split(source, count, dim), torch.split(to, count, dim), strict=True):
            yield from self.parts(some, place)

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy one part, cast if dtypes differ; it is complete when the call returns."""
        self._side.enter()
        buffer = self._ring.take()
        try:
            staged = buffer[: to.nbytes].view(to.dtype).view(to.shape)
            if source.dtype == to.dtype and source.is_contiguous():
                self._side.copy(staged, source)
            else:
                made = self._side.empty(to.nbytes).view(to.dtype).view(to.shape)
                self._side.copy_each([made], [source])
                self._side.copy(staged, made)
            self._side.mark().synchronize()
            to.copy_(staged)
        finally:
            self._ring.give_back(buffer, None)


@torch.inference_mode(False)  # memory that is made in it cannot be written by other threads, nor later
def host_copies(sources: Sequence[tuple[torch.Tensor, torch.dtype]], *, beside_bytes: int = 0) -> list[torch.Tensor]:
    """Copies of tensors in these dtypes, contiguous, in host memory; complete when the call returns. Every rank must
    call."""
    num_bytes = sum(tensor.numel() * dtype.itemsize for tensor, dtype in sources)
    side = side_stream_for(tensor for tensor, _ in sources)
    to_host = None if side is None else ToHost(side, threads=THREADS)
    with agreed("copying what is saved"):
        refuse_too_large(num_bytes + beside_bytes, *COPIED)
        try:
            copies = [torch.empty(tensor.shape, dtype=dtype) for tensor, dtype in sources]
        except RuntimeError as error:  # of torch's allocator, which has no class of its own for it
            raise CheckpointError(
                f"The system does not give {show_bytes(num_bytes)} of host memory for a copy of what is saved "
                f"({first_line(error)}). Save with blocking=True, which needs no copy."
            ) from error
        with ThreadPoolExecutor(THREADS, thread_name_prefix="copy") as pool:
            works: list[Future[Any]] = []
            for (source, _), copy in zip(sources, copies, strict=True):
                if to_host is None or side is None or not side.holds(source):
                    works.append(pool.submit(copy.copy_, source.detach()))
                elif copy.numel():
                    works += [pool.submit(to_host.copy, *part) for part in to_host.parts(source.detach(), copy)]
            for work in works:
                work.result()
        return copies


def copied_transfers(transfers: Sequence[Transfer], *, beside_bytes: int = 0) -> list[Transfer]:
    """Transfers that write copies of the same values: in the dtype and, within a transfer, the order of the file.

    Every rank must call.
    """
    transfers = [transfer for transfer in transfers if transfer.memory.numel()]
    orders = [sorted(range(t.memory.ndim), key=t.strides.__getitem__, reverse=True) for t in transfers]
    sources = [(t.memory.permute(order), t.dtype) for t, order in zip(transfers, orders, strict=True)]
    copies = host_copies(sources, beside_bytes=beside_bytes)
    return [
        replace(t, strides=tuple(t.strides[dim] for dim in order), memory=copy)
        for t, order, copy in zip(transfers, orders, copies, strict=True)
    ]


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
