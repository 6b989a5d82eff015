"""Read and write transfers: straight where the bytes agree, through a staging buffer where they do not.

Staging buffers are few, reused, and never given out again before a copy from them is done.
"""

import ctypes
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.loading.io.transfer import Batch, Limits, Request, Route, Transfer
from hf_fsdp_tools.stores import stored_object

REQUESTS_IN_FLIGHT = 16
"""Requests that one rank has under way at a time. The page cache and a local disk need few; on a network file system,
where a request waits for milliseconds, the rate grows with their number. (assumed)"""

STAGING_BYTES = 64 * 2**20
"""Staging buffers of one rank where the CPU casts: half of it, 2 MiB for each of 16 threads. (assumed)"""

STAGING_BYTES_PINNED = 320 * 2**20
"""Staging buffers of one rank that reads to an accelerator: 20 of 16 MiB, of which 16 are read into while the others
are copied from. Eight ranks of a machine pin 2.5 GiB while they load. (assumed)"""

MAX_GAP_BYTES = 4096
"""Unwanted bytes between wanted ones up to which one request reads both: a page, which is read whole anyway."""

_DEVICE_GAP_BYTES = 64 * 2**10
"""The same for an accelerator where all ranks share the machine, so that the page cache gets every byte anyway. A
request costs about 20 µs of Python, in which a thread reads so many bytes at 4 GB/s; and one request of many rows is
scattered by one kernel. (assumed)"""

_REQUEST_BYTES = 8 * 2**20
"""Bytes of the largest request straight into memory. Large, so that its latency is small compared with its transfer (80
ms at 100 MB/s); small, so that one tensor (an embedding) occupies several requests at once. (assumed)"""

_HOST_BUFFER_BYTES = 8 * 2**20
"""Bytes of the largest buffer that the CPU casts from, and of the largest request. (assumed)"""

_PINNED_BUFFER_BYTES = 16 * 2**20
"""Bytes of the largest pinned buffer. At 50 GB/s a GPU takes them in 0.3 ms, compared with which the 0.1 ms of Python
per batch on some other thread is small; a power of two, to which PyTorch rounds pinned memory up. (assumed)"""

_STRAIGHT_COPIES = 8
"""Runs of one batch up to which each is copied by itself between pinned memory and its place. A copy costs the host
about 10 µs, and 8 of 2 MiB take the bus 300 µs. More runs go in one copy to the device, and from there in one kernel.
(assumed)"""

_SYNC_FILE_RANGE_WRITE = 2
"""Source: Linux, fs.h."""

_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None

_EARLY_BYTES = 2**20
"""Bytes written by one call from which on the disk begins with them at once, and not when the system sees fit, so that
it works while the next ones are copied: plain writes of 1.8 GB by 2 processes were on disk in 0.7 of the time. Smaller
ones are left to the system, which joins neighbours. (assumed)"""


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
        """The cost of two sets that used the same buffers, or were not moved at the same time."""
        return TransferStats(
            num_bytes=self.num_bytes + other.num_bytes,
            calls=self.calls + other.calls,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
        )


def write_transfers(transfers: Iterable[Transfer], *, staging_bytes: int) -> TransferStats:
    """Write the memory of every transfer to its place in its file, which must exist at full length.

    No byte outside the transfers is touched, so that several ranks can write to one file.
    """
    transfers = list(transfers)
    side = side_stream_for(transfer.memory for transfer in transfers)
    with Writer(staging_bytes=staging_bytes, side=side) as writer:
        return writer.begin(transfers)()


def write_in_turn(transfers: Iterable[Transfer]) -> TransferStats:
    """Write as `write_transfers` does, one request after the other on the calling thread; from memory on the host.

    No thread is begun, which the interpreter refuses while it ends, and no memory is taken for runs of bytes.
    """
    with Writer(staging_bytes=_REQUEST_BYTES, side=None, in_flight=1) as writer:
        return writer.move_in_turn(transfers)


def buffer_sizes(staging_bytes: int, in_flight: int, *, pinned: bool) -> tuple[int, int]:
    """How many buffers there may be, and bytes of each; together at most `staging_bytes`.

    Each thread needs one where the CPU copies; they take half of the bound, the rest is for values that wait to be
    packed. For an accelerator there are a quarter more: while those are copied from, all threads read.
    """
    if not pinned:
        return in_flight, min(staging_bytes // (2 * in_flight), _HOST_BUFFER_BYTES)
    count = in_flight + max(1, in_flight // 4)
    size = min(staging_bytes // count, _PINNED_BUFFER_BYTES)
    return count, 1 << max(0, size.bit_length() - 1)


class Ring:
    """Buffers that threads take and give back."""

    def __init__(self, make: Callable[[], torch.Tensor], count: int) -> None:
        """Make no buffer yet."""
        self._make = make
        self._count = count
        self._lock = threading.Lock()
        self._free: deque[tuple[torch.Tensor, torch.Event | None]] = deque()
        self.made = 0

    def take(self) -> torch.Tensor:
        """The buffer given back longest ago; while that is copied from, a new one, if there are fewer than `count`."""
        with self._lock:
            is_idle = bool(self._free) and (self._free[0][1] is None or self._free[0][1].query())
            is_new = not is_idle and self.made < self._count
            if is_new:
                self.made += 1
            else:
                buffer, copied = self._free.popleft()
        if is_new:
            try:
                return self._make()
            except BaseException:  # where there is no memory for one, the others must not wait for it
                with self._lock:
                    self.made -= 1
                raise
        if copied is not None and not is_idle:
            copied.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, copied: torch.Event | None) -> None:
        """Note that a buffer can be taken again after `copied`."""
        with self._lock:
            self._free.append((buffer, copied))

    def clear(self) -> None:
        """Forget the buffers that were given back."""
        self._free.clear()


class _Mover(ABC):
    """Threads, open files and staging buffers that move transfers, kept until the block that it manages ends.

    For an accelerator the buffers are pinned, and copies run on its side stream, which every thread enters.
    """

    _writes: bool
    _device_gap_bytes = MAX_GAP_BYTES

    def __init__(
        self,
        *,
        staging_bytes: int,
        side: SideStream | None,
        in_flight: int = REQUESTS_IN_FLIGHT,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Start nothing yet."""
        count, self._buffer_bytes = buffer_sizes(staging_bytes, in_flight, pinned=side is not None)
        new_bytes = partial(torch.empty, dtype=torch.uint8, device="cpu") if side is None else side.pinned
        self._ring = Ring(partial(new_bytes, self._buffer_bytes), count)
        self._side = side
        self._in_flight = in_flight
        self._on_bytes = on_bytes
        self._one_at_a_time = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(in_flight, thread_name_prefix="checkpoint")
        self._waiting: deque[Batch] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiting.clear()
        self._pool.shutdown()
        try:
            if self._side is not None:
                self._side.wait()  # the memory of copies must not be freed before
        finally:
            self._ring.clear()
            for descriptor in self._descriptors.values():
                os.close(descriptor)

    def begin(self, transfers: Iterable[Transfer]) -> Callable[[], TransferStats]:
        """Begin to move transfers; the returned function waits until all are moved, and returns the cost.

        One set at a time: wait for it before the next one begins. The memory must stay alive until then.
        """
        batches = self._cut(transfers)
        if self._side is not None:  # the memory may be in use by what was queued before, or not be written yet
            self._side.follow()
        num_bytes = _bytes_moved(batches)
        self._waiting = deque(batches)
        count = max(1, min(self._in_flight, len(batches)))
        works = [self._pool.submit(self._work, self._waiting) for _ in range(count)]
        return partial(self._wait, works, num_bytes)

    def move_in_turn(self, transfers: Iterable[Transfer]) -> TransferStats:
        """Move transfers on the calling thread, which has entered the side stream if there is one."""
        batches = self._cut(transfers)
        return self._stats(_bytes_moved(batches), sum(self._move(batch) for batch in batches))

    def _stats(self, num_bytes: int, calls: int) -> TransferStats:
        return TransferStats(num_bytes=num_bytes, calls=calls, staging_bytes=self._buffer_bytes * self._ring.made)

    def _cut(self, transfers: Iterable[Transfer]) -> list[Batch]:
        """Batches whose files are open."""
        transfers = list(transfers)
        is_stored = any(stored_object(file) for file in {transfer.file for transfer in transfers})
        limits = Limits(
            # What comes from a store is kept once more on its way.
            request_bytes=min(_REQUEST_BYTES, self._buffer_bytes) if is_stored else _REQUEST_BYTES,
            buffer_bytes=self._buffer_bytes,
            host_gap_bytes=0 if self._writes else MAX_GAP_BYTES,
            device_gap_bytes=0 if self._writes else self._device_gap_bytes,
            on_device=(lambda memory: False) if self._side is None else self._side.holds,
        )
        batches = list(limits.batches(transfers))
        for file in {request.file: None for batch in batches for request in batch}:
            if file not in self._descriptors:
                with storage_errors("open", file), watched(file):
                    self._descriptors[file] = self._open(file)
        return batches

    def _wait(self, works: list[Future[int]], num_bytes: int) -> TransferStats:
        try:
            wait(works)
            calls = 0
            while works:  # no name for a work: its error would keep itself alive through its traceback
                calls += works.pop().result()
        finally:
            self._waiting.clear()  # after an interrupt, too
            if self._side is not None:
                self._side.wait()
        return self._stats(num_bytes, calls)

    def _work(self, waiting: deque[Batch]) -> int:
        """Move batches until none is left; the number of system calls. After a failure no further batch is begun."""
        if self._side is not None:
            self._side.enter()
        calls = 0
        while True:
            try:
                batch = waiting.popleft()
            except IndexError:
                return calls
            try:
                calls += self._move(batch)
            except BaseException:
                waiting.clear()
                raise
            with self._one_at_a_time:
                self._on_bytes(sum(transfer.num_bytes for request in batch for transfer in request.transfers))

    def _move(self, batch: Batch) -> int:
        """Move a batch, through a staging buffer or straight; the number of system calls.

        Copies to an accelerator are queued, and not waited for before the buffer is taken again.
        """
        if batch[0].route is Route.DIRECT:
            return self._io(batch[0], *(transfer.memory for transfer in batch[0].transfers))
        buffer, copied = self._ring.take(), None
        try:
            if self._writes and (gathered := self._copy(batch, buffer)) is not None:
                gathered.synchronize()
            calls = sum(self._io(request, request.bytes_in(buffer)) for request in batch)
            if not self._writes:
                copied = self._copy(batch, buffer)
            return calls
        finally:  # after an error nobody wants what the buffer brings next
            self._ring.give_back(buffer, copied)

    def _copy(self, batch: Batch, buffer: torch.Tensor) -> torch.Event | None:
        """Copy and cast between a buffer and the memory of a batch; the event after copies that are queued."""

        def copies(buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            pairs = (pair for request in batch for pair in request.staged(buffer))
            return [(staged, memory) if self._writes else (memory, staged) for memory, staged in pairs]

        if self._side is None or batch[0].route is Route.HOST:
            for to, source in copies(buffer):
                to.copy_(source)
            return None
        transfers = [transfer for request in batch for transfer in request.transfers]
        if len(transfers) <= _STRAIGHT_COPIES and all(transfer.is_run for transfer in transfers):
            for to, source in copies(buffer):
                self._side.copy(to, source)
            return self._side.mark()
        used = buffer[: batch[-1].place + batch[-1].stop - batch[-1].start]
        between = self._side.empty(len(used))
        if not self._writes:
            self._side.copy(between, used)
        self._side.copy_each(*map(list, zip(*copies(between), strict=True)))
        if self._writes:
            self._side.copy(used, between)
        return self._side.mark()

    def _io(self, request: Request, *memory: torch.Tensor) -> int:
        """Repeat a vectored call, which may move less than asked, until a request is done; the number of calls."""
        descriptor, position, calls = self._descriptors[request.file], request.start, 0
        buffers = [tensor.detach().reshape(-1).view(torch.uint8).numpy().data for tensor in memory]
        with storage_errors("write" if self._writes else "read", request.file):
            while buffers:
                with watched(request.file, position):
                    done = self._call(descriptor, buffers, position)
                calls += 1
                if done <= 0:
                    raise CheckpointError(
                        f"{request.file}: ends at byte {position}, expected {request.stop} or more; it shrank since "
                        "its header was read. Download or save it again."
                    )
                position += done
                while buffers and done >= len(buffers[0]):
                    done -= len(buffers.pop(0))
                if done:
                    buffers[0] = buffers[0][done:]
        return calls

    @abstractmethod
    def _open(self, file: Path) -> int: ...

    @abstractmethod
    def _call(self, descriptor: int, buffers: list[memoryview], position: int) -> int: ...


class Reader(_Mover):
    """Fills the memory of transfers from their files, in file order."""

    _writes = False

    def __init__(self, *, read_ahead: bool = False, **options: Any) -> None:
        """Start nothing yet; without `read_ahead`, the system reads from the disk only the bytes asked for."""
        super().__init__(**options)
        self._read_ahead = read_ahead
        if read_ahead:
            self._device_gap_bytes = _DEVICE_GAP_BYTES

    def read(self, transfers: Iterable[Transfer]) -> TransferStats:
        """Fill the memory of every transfer."""
        return self.begin(transfers)()

    def _io(self, request: Request, *memory: torch.Tensor) -> int:
        """One request for the range, where the file is in a store."""
        if (there := stored_object(request.file)) is None:
            return super()._io(request, *memory)
        with watched(Path(there.url), request.start):
            content = memoryview(there.read(request.start, request.stop))
        for tensor in memory:
            buffer = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
            buffer[:], content = content[: len(buffer)], content[len(buffer) :]
        return 1

    def _open(self, file: Path) -> int:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if not self._read_ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def _call(self, descriptor: int, buffers: list[memoryview], position: int) -> int:
        return os.preadv(descriptor, buffers, position)


class Writer(_Mover):
    """Writes the memory of transfers to their places in files, as `write_transfers` says."""

    _writes = True

    def _open(self, file: Path) -> int:
        return os.open(file, os.O_WRONLY | os.O_CLOEXEC)

    def _call(self, descriptor: int, buffers: list[memoryview], position: int) -> int:
        done = os.pwritev(descriptor, buffers, position)
        if done >= _EARLY_BYTES and _SYNC_FILE_RANGE is not None:
            # Waits for nothing. `sync` is still needed: it finds less to do, and tells of errors, which this does not.
            _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(position), ctypes.c_int64(done), _SYNC_FILE_RANGE_WRITE)
        return done


def _bytes_moved(batches: Iterable[Batch]) -> int:
    return sum(request.stop - request.start for batch in batches for request in batch)
