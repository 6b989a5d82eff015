"""Read and write transfers: straight where the bytes agree, through a small staging buffer where they do not."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint.io.staging import BUFFERS_PER_THREAD, Staging
from hf_fsdp_tools.checkpoint.io.transfer import Request, Transfer, cut_requests
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError

__all__ = ["MAX_GAP_BYTES", "REQUESTS_IN_FLIGHT", "TransferStats", "read_transfers", "write_transfers"]

REQUESTS_IN_FLIGHT = 16
"""Requests that one rank has under way at a time. The page cache and a local disk need few; on a network file system,
where a request waits for milliseconds, the rate grows with their number. (assumed)"""

MAX_GAP_BYTES = 4096
"""Unwanted bytes between wanted ones up to which one request reads both: a page, which is read whole anyway."""

_REQUEST_BYTES = 8 * 2**20
"""Bytes of the largest request. Large, so that its latency is small beside its transfer (80 ms at 100 MB/s); small, so
that one tensor (an embedding) occupies several requests at once. (assumed)"""

_READING = ("read", "the disk and permissions")
_WRITING = ("written", "space and permissions")


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """The cost of a set of transfers on this rank."""

    num_bytes: int = 0
    """Bytes between files and memory, gaps that were read through included."""

    calls: int = 0
    """System calls that moved the bytes."""

    staging_bytes: int = 0
    """Bytes of staging buffers."""

    def __add__(self, other: "TransferStats") -> "TransferStats":
        """The cost of two sets one after the other; their buffers are not alive at the same time."""
        return TransferStats(
            num_bytes=self.num_bytes + other.num_bytes,
            calls=self.calls + other.calls,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
        )


def read_transfers(
    transfers: Iterable[Transfer],
    *,
    staging_bytes: int,
    in_flight: int = REQUESTS_IN_FLIGHT,
    read_ahead: bool = False,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> TransferStats:
    """Fill the memory of every transfer from its file, in file order.

    A run of bytes that is the same in memory is read straight into it (CPU only). Everything else goes through staging
    buffers, pinned for a GPU, from which it is cast and scattered.

    Args:
        transfers: what to read; memory of any dtype, strides and device.
        staging_bytes: upper bound of all staging buffers together.
        in_flight: requests at a time, one thread each.
        read_ahead: whether the system may read on behind each request, for other ranks of this node that want the bytes
            there. Where no rank wants them, reading on costs the disk about twice a rank's share.
        on_bytes: told how many bytes (as stored) arrived since the last call; all calls together give the size of the
            transfers, gaps left out. Called by the reading threads, one at a time.

    Raises:
        CheckpointError: a file cannot be read, or is shorter than its header said.
    """
    return _move(
        transfers,
        partial(_open_to_read, read_ahead=read_ahead),
        _read,
        staging_bytes=staging_bytes,
        in_flight=in_flight,
        max_gap_bytes=MAX_GAP_BYTES,
        on_bytes=on_bytes,
    )


def write_transfers(
    transfers: Iterable[Transfer], *, staging_bytes: int, in_flight: int = REQUESTS_IN_FLIGHT
) -> TransferStats:
    """Write the memory of every transfer to its place in its file, which must exist at full length.

    No byte outside the transfers is touched, so that several ranks can write to one file.

    Args:
        transfers: what to write; memory of any dtype, strides and device.
        staging_bytes: upper bound of all staging buffers together.
        in_flight: requests at a time, one thread each.

    Raises:
        CheckpointError: a file cannot be written, on a full disk for example.
    """
    return _move(transfers, _open_to_write, _write, staging_bytes=staging_bytes, in_flight=in_flight, max_gap_bytes=0)


def _move(
    transfers: Iterable[Transfer],
    open_file: Callable[[Path], int],
    handle: Callable[[int, Request, Staging], int],
    *,
    staging_bytes: int,
    in_flight: int,
    max_gap_bytes: int,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> TransferStats:
    """Cut transfers into requests, open each file once, and handle all requests on a few threads."""
    buffer_bytes = min(staging_bytes // (in_flight * BUFFERS_PER_THREAD), _REQUEST_BYTES)
    requests = list(
        cut_requests(transfers, request_bytes=_REQUEST_BYTES, buffer_bytes=buffer_bytes, max_gap_bytes=max_gap_bytes)
    )
    staged = [request for request in requests if not request.is_direct]
    devices = (transfer.memory.device for request in staged for transfer in request.transfers)
    staging = Staging(
        num_bytes=max((request.stop - request.start for request in staged), default=0),
        device=next((device for device in devices if device.type == "cuda"), None),
    )
    with ExitStack() as stack:
        stack.callback(staging.finish)  # after an error too
        descriptors: dict[Path, int] = {}
        for file in {request.file: None for request in requests}:
            descriptors[file] = open_file(file)
            stack.callback(os.close, descriptors[file])
        calls = _on_threads(
            requests, lambda request: handle(descriptors[request.file], request, staging), in_flight, on_bytes
        )
    num_bytes = sum(request.stop - request.start for request in requests)
    return TransferStats(num_bytes=num_bytes, calls=calls, staging_bytes=staging.allocated_bytes)


def _on_threads(
    requests: Sequence[Request], handle: Callable[[Request], int], in_flight: int, on_bytes: Callable[[int], object]
) -> int:
    """The sum of `handle(request)` over all requests, run on threads; after a failure no further request is begun."""
    waiting = deque(requests)
    one_at_a_time = threading.Lock()

    def work() -> int:
        done = 0
        while True:
            try:
                request = waiting.popleft()
            except IndexError:
                return done
            try:
                done += handle(request)
            except BaseException:
                waiting.clear()
                raise
            with one_at_a_time:
                on_bytes(request.num_bytes)

    count = max(1, min(in_flight, len(requests)))
    with ThreadPoolExecutor(count, thread_name_prefix="checkpoint") as pool:
        try:
            return sum(pool.map(lambda _: work(), range(count)))
        finally:
            waiting.clear()  # after an interrupt, too


def _open_to_read(file: Path, *, read_ahead: bool) -> int:
    """A descriptor of the file; without `read_ahead`, the system reads from the disk only the bytes asked for."""
    with _io_errors(file, *_READING), watched(file):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if not read_ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _open_to_write(file: Path) -> int:
    with _io_errors(file, *_WRITING), watched(file):
        return os.open(file, os.O_WRONLY | os.O_CLOEXEC)


def _read(descriptor: int, request: Request, staging: Staging) -> int:
    """Read one request; the number of system calls."""
    with _io_errors(request.file, *_READING):
        if request.is_direct:
            return _all_bytes(os.preadv, descriptor, request, [transfer.memory for transfer in request.transfers])
        buffer = staging.next_buffer()[: request.stop - request.start]
        calls = _all_bytes(os.preadv, descriptor, request, [buffer])
    staging.hand_over(buffer, partial(_scatter, request))
    return calls


def _write(descriptor: int, request: Request, staging: Staging) -> int:
    """Write one request; the number of system calls."""
    with _io_errors(request.file, *_WRITING):
        if request.is_direct:
            return _all_bytes(os.pwritev, descriptor, request, [transfer.memory for transfer in request.transfers])
        buffer = staging.next_buffer()[: request.stop - request.start]
        staging.collect(buffer, partial(_gather, request))
        return _all_bytes(os.pwritev, descriptor, request, [buffer])


def _scatter(request: Request, buffer: torch.Tensor) -> None:
    """Cast the bytes of a request into the memory of its transfers."""
    for transfer in request.transfers:
        transfer.memory.copy_(_staged(transfer, buffer, request.start))  # within a GPU: queued, not waited for


def _gather(request: Request, buffer: torch.Tensor) -> None:
    """Cast the memory of a request's transfers into a buffer with the layout of the file."""
    for transfer in request.transfers:
        _staged(transfer, buffer, request.start).copy_(transfer.memory)


def _staged(transfer: Transfer, buffer: torch.Tensor, request_start: int) -> torch.Tensor:
    """The elements of a transfer within the staging buffer, with the shape of its memory."""
    begin = transfer.start - request_start
    raw = buffer[begin : begin + transfer.stop - transfer.start].view(transfer.dtype)
    return raw.as_strided(transfer.memory.shape, transfer.strides, raw.storage_offset())


def _all_bytes(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    request: Request,
    memory: Iterable[torch.Tensor],
) -> int:
    """Repeat a vectored call, which may move less than asked, until a request is done; give the number of calls."""
    buffers = [_bytes_of(tensor) for tensor in memory]
    position, calls = request.start, 0
    while buffers:
        with watched(request.file, position):
            done = call(descriptor, buffers, position)
        calls += 1
        if done <= 0:
            raise CheckpointError(
                f"{request.file}: ends at byte {position}, expected {request.stop} or more; it shrank since its "
                "header was read. Download or save it again."
            )
        position += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        if done:
            buffers[0] = buffers[0][done:]
    return calls


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, sharing its memory."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


@contextmanager
def _io_errors(file: Path, verb: str, cure: str) -> Iterator[None]:
    """Turn errors of the system into `CheckpointError`, with the file and a cure."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be {verb}: {error}. Check {cure}, then try again.") from error
