"""Slow storage, simulated: each read call takes as long as it would there, cached or not."""

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REAL_PREADV = os.preadv


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How slow it is. A value that all ranks share; `clock` is what they meet at."""

    request_s: float = 0.005
    """What a request takes before its first byte comes."""

    stream_bytes_s: float = 100e6
    """What one request brings at most."""

    shared_bytes_s: float | None = None
    """What all requests of all ranks together bring at most, first come, first served; None: no such limit."""

    clock: Path | None = None
    """A small file on which ranks note until when the shared bandwidth is taken; needed where there is a limit."""

    def __str__(self) -> str:
        shared = f"{self.shared_bytes_s / 1e6:.0f} MB/s for all" if self.shared_bytes_s else "no limit for all together"
        return f"{self.request_s * 1e3:g} ms per request, {self.stream_bytes_s / 1e6:.0f} MB/s per stream, {shared}"

    @contextmanager
    def reads(self, module_os: object = os) -> Iterator[Callable[..., int]]:
        """`preadv` on this storage, also in the place of the system's own in a module's `os`."""
        clock = _Clock(self.clock, self.shared_bytes_s) if self.shared_bytes_s and self.clock else None

        def preadv(descriptor: int, buffers: list[memoryview], position: int) -> int:
            began, size = time.monotonic(), sum(len(buffer) for buffer in buffers)
            ready = began + size / self.stream_bytes_s
            if clock is not None:
                ready = max(ready, clock.take(size))
            done = REAL_PREADV(descriptor, buffers, position)  # its processor time runs while bytes "arrive"
            time.sleep(max(0.0, ready + self.request_s - time.monotonic()))
            return done

        module_os.preadv = preadv  # type: ignore[attr-defined]
        try:
            yield preadv
        finally:
            module_os.preadv = REAL_PREADV  # type: ignore[attr-defined]
            if clock is not None:
                clock.close()


class _Clock:
    """Until when the shared bandwidth is taken: a double in a file that all ranks map."""

    def __init__(self, file: Path, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._file = os.open(file, os.O_RDWR)
        self._memory = mmap.mmap(self._file, 8)
        self._lock = threading.Lock()  # the file's lock holds between processes only

    def take(self, size: int) -> float:
        """When so many bytes have come, after all that was asked for before. Microseconds of processor time."""
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                free = max(time.monotonic(), struct.unpack("d", self._memory[:8])[0]) + size / self._bytes_s
                self._memory[:8] = struct.pack("d", free)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        return free

    def close(self) -> None:
        """Of this process; the file stays."""
        self._memory.close()
        os.close(self._file)
