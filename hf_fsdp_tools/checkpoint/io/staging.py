"""Staging buffers on the host: few, reused, and never given out again before a copy from them is done."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["BUFFERS_PER_THREAD", "CopyDone", "Ring", "Staging"]

BUFFERS_PER_THREAD = 2
"""Buffers of one thread for a GPU: one is filled while the other is copied from. The CPU needs one, since its copies
are done when they return."""


class CopyDone(Protocol):
    """Knows when a copy is done: an event of a CUDA stream."""

    def synchronize(self) -> None:
        """Wait until the copy is done."""


class Ring:
    """Buffers of one thread, used in turn."""

    def __init__(self, make: Callable[[], torch.Tensor], count: int) -> None:
        self._make = make
        self._count = count
        self._used: deque[tuple[torch.Tensor, CopyDone | None]] = deque()

    def next(self) -> torch.Tensor:
        """A buffer to fill: a new one while there are fewer than `count`, then the one used longest ago.

        Waits until the last copy from the buffer is done.
        """
        if len(self._used) < self._count:
            buffer, done = self._make(), None
        else:
            buffer, done = self._used.popleft()
        if done is not None:
            done.synchronize()
        self._used.append((buffer, None))
        return buffer

    def copied_when(self, done: CopyDone) -> None:
        """Note that the buffer given out last is being copied from until `done`."""
        self._used[-1] = (self._used[-1][0], done)

    def drain(self) -> None:
        """Wait until all copies are done."""
        for _, done in self._used:
            if done is not None:
                done.synchronize()


class Staging:
    """The staging buffers of all threads; for a GPU they are pinned, and each thread copies on a stream of its own."""

    def __init__(self, *, num_bytes: int, device: torch.device | None) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._local = threading.local()
        self._rings: list[Ring] = []
        self._made = 0
        # The memory that is copied may be in use by what was queued before, or not be written yet.
        self._before = torch.cuda.current_stream(device).record_event() if device is not None else None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self._num_bytes * self._made

    def next_buffer(self) -> torch.Tensor:
        """A buffer for the calling thread to fill."""
        return self._ring().next()

    def hand_over(self, filled: torch.Tensor, scatter: Callable[[torch.Tensor], None]) -> None:
        """Let `scatter` copy from the calling thread's last buffer.

        For a GPU, the bytes are first copied there as they are in the file, from pinned memory, queued and not waited
        for. `scatter` gets the copy, and its casts run on the GPU, on the thread's own stream.
        """
        if self._device is None:
            scatter(filled)
            return
        stream = self._stream()
        try:
            with torch.cuda.stream(stream):
                scatter(filled.to(self._device, non_blocking=True))
        finally:  # what was queued before an error is waited for, too
            self._ring().copied_when(stream.record_event())

    def collect(self, buffer: torch.Tensor, gather: Callable[[torch.Tensor], None]) -> None:
        """Let `gather` fill a buffer of the calling thread, and return when it is full.

        From a GPU, `gather` runs on the thread's own stream, after the work that was queued when this object was made.
        """
        if self._device is None:
            gather(buffer)
            return
        stream = self._stream()
        with torch.cuda.stream(stream):
            gather(buffer)
        stream.synchronize()

    def finish(self) -> None:
        """Wait until all copies have arrived, also after an error: their memory must not be freed before.

        Call it from the thread that made this object.
        """
        for ring in self._rings:
            ring.drain()

    def _ring(self) -> Ring:
        if not hasattr(self._local, "ring"):
            self._local.ring = Ring(self._new_buffer, 1 if self._device is None else BUFFERS_PER_THREAD)
            self._rings.append(self._local.ring)
        ring: Ring = self._local.ring
        return ring

    def _new_buffer(self) -> torch.Tensor:
        self._made += 1
        return torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._device is not None)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own
            self._local.stream.wait_event(self._before)
        stream: torch.cuda.Stream = self._local.stream
        return stream
