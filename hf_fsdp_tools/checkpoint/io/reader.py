"""Byte ranges of files into memory and back: straight where bytes agree, through a small staging buffer where they do
not.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint.io.staging import BUFFERS_PER_THREAD, Staging
from hf_fsdp_tools.checkpoint.io.transfer import (
    Batch,
    Chunk,
    Transfer,
    cut_batches,
)
from hf_fsdp_tools.checkpoint.io.watch import ReadThreads, close_unless_read, reading
from hf_fsdp_tools.errors import CheckpointError

__all__ = [
    "MAX_GAP_BYTES",
    "Pace",
    "TransferStats",
    "opened",
    "prefetch",
    "read_transfers",
    "scatter",
    "write_transfers",
]

MAX_GAP_BYTES = 4096
"""Unwanted bytes that are read through rather than skipped with another system call: a page, which is read whole anyway."""

THREADS = 4
"""Transfers in flight per rank (measured: 2 to 8 make no difference on a local disk; slow storage needs some)."""

_BUFFER_BYTES = 8 * 2**20
"""Largest staging buffer of one thread (measured, bfloat16 to float32: 8 MiB is fastest, 64 MiB takes twice the time).
"""

PREFETCH_BYTES = 256 * 2**20
"""What `prefetch` asks for per node: a fast disk gives that much while a model is built and sharded (assumed)."""

_CALL_BYTES = 64 * 2**20
"""Largest system call: where a rank has 10 MB/s, one is completed every 7 s, so that slow is told from stuck."""

_UNIT_BYTES = 4 * 2**20
"""What a thread takes at a time: enough that small batches do not each pay for a hand-over, and little enough that the
threads stay near each other in the file, where read-ahead helps all (16 MiB was 5 to 10 % slower from a cold disk)."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many requests are made at once, and how large they are. The defaults suit storage that answers quickly."""

    threads: int = THREADS
    """Requests in flight."""

    max_gap_bytes: int = MAX_GAP_BYTES
    """Unwanted bytes between two parts of one tensor that are read through."""

    join_bytes: int = 0
    """Parts up to this size are read with their neighbours in one request, across gaps up to this size."""

    request_bytes: int = 8 * 2**20
    """Where a part of a tensor that is read straight into place is divided, so that several requests bring it. In one, an
    embedding's part of 311 MB was faulted in and read by one thread, and the disk waited: a cold 1.5 GB took 1.73 s on 2 ranks
    instead of 1.16 (measured). At 100 MB/s one takes 80 ms, beside which what a request costs on slow storage is little."""


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What a set of transfers cost on this rank."""

    num_bytes: int = 0
    """Bytes that went between file and memory, read-through gaps included."""

    calls: int = 0
    """System calls that moved them."""

    staging_bytes: int = 0
    """Bytes of staging buffers that were made."""

    def __add__(self, other: "TransferStats") -> "TransferStats":
        """Two sets one after the other; buffers are not alive at the same time."""
        return TransferStats(
            num_bytes=self.num_bytes + other.num_bytes,
            calls=self.calls + other.calls,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
        )


def read_transfers(
    transfers: Iterable[Transfer],
    *,
    staging_bytes: int,
    pace: Pace = Pace(),
    read_ahead: bool = False,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> TransferStats:
    """Fill the memory of every transfer from its file, in file order.

    A run of bytes that is the same in memory is read straight into it (CPU only). Everything else goes through staging
    buffers, pinned for a GPU, which are cast and scattered from.

    Args:
        transfers: What to read; memory of any dtype, strides and device.
        staging_bytes: Upper bound of all staging buffers together.
        pace: Reads in flight, and which ones become one.
        read_ahead: Whether the system may read on behind each request: right where other ranks of this node want those
            bytes. It is faster by a tenth from a cold disk (larger pages in the cache), but where they do not want
            them, it drags them from the disk for nothing: rank 3 of 8 alone took 2.05 times its share of an expert
            checkpoint with it, and 1.003 times without (measured).
        on_bytes: Told how many bytes (as stored) arrived since the last call, on the calling thread; all calls together
            give the size of the transfers, gaps left out.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header said.
    """
    batches = cut_batches(
        transfers,
        staging_bytes=_buffer_bytes(staging_bytes, pace.threads),
        max_gap_bytes=pace.max_gap_bytes,
        join_bytes=pace.join_bytes,
        direct_bytes=pace.request_bytes,
    )
    return _run(
        list(batches),
        partial(_open_to_read, read_ahead=read_ahead),
        pace.threads,
        _read_batch,
        on_bytes,
    )


def write_transfers(
    transfers: Iterable[Transfer],
    *,
    staging_bytes: int,
    threads: int = THREADS,
) -> TransferStats:
    """Write the memory of every transfer to its place in its file, which must exist at full length.

    Not a byte beside the transfers' own is touched, so that ranks can write to one file together. Arguments as for
    ``read_transfers``; ``threads`` is the number of writes in flight.

    Raises:
        CheckpointError: A file cannot be written; a full disk for example.
    """
    batches = cut_batches(transfers, staging_bytes=_buffer_bytes(staging_bytes, threads), max_gap_bytes=0)
    return _run(list(batches), _open_to_write, threads, _write_batch, is_writing=True)


@contextmanager
def opened(files: Iterable[Path], *, read_ahead: bool) -> Iterator[Callable[[Path, int, torch.Tensor], int]]:
    """Some files, open to read.

    Yields:
        A function of (file, position, contiguous CPU tensor) that fills the tensor from there and returns the number of
        system calls. For any thread.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header said.
    """
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        with ReadThreads(1) as threads:
            for file in files:
                descriptors[file] = threads.submit(partial(_open_to_read, file, read_ahead=read_ahead)).result()
                stack.callback(close_unless_read, descriptors[file])

        def read(file: Path, position: int, memory: torch.Tensor) -> int:
            with _io_errors(file, *_READING):
                return _all_bytes(os.preadv, descriptors[file], [_memory_of(memory)], file, position)

        yield read


def prefetch(files: Sequence[Path], *, part: int, parts: int, num_bytes: int = PREFETCH_BYTES) -> None:
    """Ask the system to bring the first bytes of some files into its cache, while there is other work to do.

    Of ``num_bytes``, this process asks for one part, so that the ranks of a node together ask for all. A hint: nothing is
    waited for, a thread asks and ends, and files that cannot be read are left to those who will read them.
    """

    def ask() -> None:
        begin, end = num_bytes * part // parts, num_bytes * (part + 1) // parts
        for file in files:
            with suppress(OSError), open(file, "rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                if begin < size and end > 0:
                    os.posix_fadvise(
                        stream.fileno(), max(begin, 0), min(end, size) - max(begin, 0), os.POSIX_FADV_WILLNEED
                    )
                begin, end = begin - size, end - size

    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=ask, name="prefetch", daemon=True).start()


def _run(
    batches: Sequence[Batch],
    open_file: Callable[[Path], int],
    threads: int,
    handle: Callable[[int, Batch, Staging], int],
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
    is_writing: bool = False,
) -> TransferStats:
    """Open each file once and handle all batches on a few threads."""
    staged = [batch for batch in batches if not batch.is_direct]
    devices = (chunk.memory.device for batch in staged for chunk in batch.chunks)
    staging = Staging(
        num_bytes=max((batch.stop - batch.start for batch in staged), default=0),
        device=next((device for device in devices if device.type == "cuda"), None),
    )
    units = list(_units(batches))
    count = max(1, min(threads, len(units)))
    with ExitStack() as stack, ReadThreads(count, never=is_writing) as pool:
        stack.callback(staging.finish)  # after an error too
        descriptors: dict[Path, int] = {}
        for file in {batch.file: None for batch in batches}:
            descriptors[file] = pool.submit(open_file, file).result()
            stack.callback(close_unless_read, descriptors[file])

        def work(unit: Sequence[Batch]) -> tuple[int, int]:
            num_bytes = calls = 0
            for batch in unit:
                calls += handle(descriptors[batch.file], batch, staging)
                num_bytes += batch.stop - batch.start
            return num_bytes, calls

        futures = [pool.submit(work, unit) for unit in units]
        done = []
        try:
            for unit, future in zip(units, futures, strict=True):
                done.append(future.result())
                on_bytes(sum(chunk.num_bytes for batch in unit for chunk in batch.chunks))
        finally:
            for future in futures:
                future.cancel()  # after a failure the rest is of no use
    return TransferStats(
        num_bytes=sum(n for n, _ in done), calls=sum(c for _, c in done), staging_bytes=staging.allocated_bytes
    )


def _buffer_bytes(staging_bytes: int, threads: int) -> int:
    """What each buffer may hold, so that all of them together stay within the bound."""
    return min(staging_bytes // (threads * BUFFERS_PER_THREAD), _BUFFER_BYTES)


def _open_to_read(file: Path, *, read_ahead: bool) -> int:
    """A descriptor; without ``read_ahead`` it reads from the disk exactly what it is asked for."""
    with _io_errors(file, *_READING), reading(file):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if not read_ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _open_to_write(file: Path) -> int:
    with _io_errors(file, *_WRITING), reading(file):
        return os.open(file, os.O_WRONLY | os.O_CLOEXEC)


def _units(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Runs of batches worth handing to a thread."""
    unit: list[Batch] = []
    size = 0
    for batch in batches:
        unit.append(batch)
        size += batch.stop - batch.start
        if size >= _UNIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _read_batch(descriptor: int, batch: Batch, staging: Staging) -> int:
    """Read one batch; the number of system calls."""
    with _io_errors(batch.file, *_READING):
        if batch.is_direct:
            return _all_bytes(
                os.preadv, descriptor, [_memory_of(chunk.memory) for chunk in batch.chunks], batch.file, batch.start
            )
        buffer = staging.next_buffer()[: batch.stop - batch.start]
        calls = _all_bytes(os.preadv, descriptor, [_memory_of(buffer)], batch.file, batch.start)
    staging.hand_over(buffer, partial(scatter, batch))
    return calls


def scatter(batch: Batch, filled: torch.Tensor) -> None:
    """Cast a batch's bytes, wherever they came from, and put them where they belong."""
    for chunk in batch.chunks:
        chunk.memory.copy_(_staged(chunk, filled, batch.start))  # within a GPU that is queued, not waited for


def _gather(batch: Batch, buffer: torch.Tensor) -> None:
    """Cast what a batch writes into the layout of its file."""
    for chunk in batch.chunks:
        _staged(chunk, buffer, batch.start).copy_(chunk.memory)


def _write_batch(descriptor: int, batch: Batch, staging: Staging) -> int:
    """Write one batch; the number of system calls."""
    with _io_errors(batch.file, *_WRITING):
        if batch.is_direct:
            return _all_bytes(
                os.pwritev, descriptor, [_memory_of(chunk.memory) for chunk in batch.chunks], batch.file, batch.start
            )
        buffer = staging.next_buffer()
        staging.collect(buffer, partial(_gather, batch))
        return _all_bytes(
            os.pwritev, descriptor, [_memory_of(buffer[: batch.stop - batch.start])], batch.file, batch.start
        )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to read into or write from."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _staged(chunk: Chunk, buffer: torch.Tensor, batch_start: int) -> torch.Tensor:
    """The chunk's elements within the staging buffer, with the shape of its memory."""
    begin = chunk.start - batch_start
    raw = buffer[begin : begin + chunk.stop - chunk.start].view(chunk.dtype)
    return raw.as_strided(chunk.memory.shape, chunk.strides, raw.storage_offset())


def _first(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The first of some buffers, so many bytes at most."""
    first, size = [], 0
    for buffer in buffers:
        if size >= num_bytes:
            break
        first.append(buffer[: num_bytes - size])
        size += len(first[-1])
    return first


def _all_bytes(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    buffers: list[memoryview],
    file: Path,
    position: int,
) -> int:
    """Repeat a vectored call until every byte went; the number of calls. The system may do less than asked."""
    stop, calls = position + sum(len(buffer) for buffer in buffers), 0
    while buffers:
        with reading(file, position, descriptor):
            done = call(descriptor, _first(buffers, _CALL_BYTES), position)
        calls += 1
        if done <= 0:
            raise CheckpointError(
                f"{file}: ends at byte {position}, expected {stop} or more; it shrank since its header "
                "was read. "
                "Download or save it again."
            )
        position += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        if done:
            buffers[0] = buffers[0][done:]
    return calls


_READING = ("read", "the disk and permissions")
_WRITING = ("written", "space and permissions")


@contextmanager
def _io_errors(file: Path, verb: str, cure: str) -> Iterator[None]:
    """The system's errors with the file and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be {verb}: {error}. Check {cure}, then try again.") from error
