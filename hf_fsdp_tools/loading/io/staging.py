"""Staging buffers on the host: few, reused, and never given out again before a copy from them is done."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from hf_fsdp_tools.accelerator import SideStream
from hf_fsdp_tools.loading.io.transfer import Batch, Route

_HOST_BUFFER_BYTES = 8 * 2**20
"""Bytes of the largest buffer that the CPU casts from, and of the largest request. (assumed)"""

_PINNED_BUFFER_BYTES = 16 * 2**20
"""Bytes of the largest pinned buffer. At 50 GB/s a GPU takes them in 0.3 ms, compared with which the 0.1 ms of Python
per batch on some other thread is small; a power of two, to which PyTorch rounds pinned memory up. (assumed)"""

_STRAIGHT_COPIES = 8
"""Runs of one batch up to which each is copied by itself between pinned memory and its place. A copy costs the host
about 10 µs, and 8 of 2 MiB take the bus 300 µs. More runs go in one copy to the device, and from there in one kernel.
(assumed)"""


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


class Staging:
    """The staging buffers of one load or save, and the copies between them and the memory of transfers.

    For an accelerator they are pinned, and copies run on its side stream, which every thread that calls has entered.
    """

    def __init__(self, *, staging_bytes: int, in_flight: int, side: SideStream | None) -> None:
        """Make no buffer yet."""
        count, self.buffer_bytes = buffer_sizes(staging_bytes, in_flight, pinned=side is not None)
        self._side = side
        new_bytes = partial(torch.empty, dtype=torch.uint8, device="cpu") if side is None else side.pinned
        self._ring = Ring(partial(new_bytes, self.buffer_bytes), count)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.buffer_bytes * self._ring.made

    def free(self) -> None:
        """Free all buffers; call it when no copy is under way."""
        self._ring.clear()

    def read(self, batch: Batch, fill: Callable[[torch.Tensor], int]) -> int:
        """Let `fill` read the bytes of a batch into a buffer, and cast and scatter them; what `fill` gives.

        Copies to an accelerator are queued, and not waited for before the buffer is taken again.
        """
        buffer, copied = self._ring.take(), None
        try:
            calls = fill(buffer)
            if self._side is None or batch.route is Route.HOST:
                for transfer, staged in zip(batch.transfers, batch.staged(buffer), strict=True):
                    transfer.memory.copy_(staged)
            else:
                _copy_on_device(batch, buffer, self._side, to_device=True)
                copied = self._side.mark()
            return calls
        finally:  # after an error nobody wants what the buffer brings next
            self._ring.give_back(buffer, copied)

    def write(self, batch: Batch, empty: Callable[[torch.Tensor], int]) -> int:
        """Gather and cast the memory of a batch into a buffer, and let `empty` write it; what `empty` gives."""
        buffer = self._ring.take()
        try:
            if self._side is None or batch.route is Route.HOST:
                for transfer, staged in zip(batch.transfers, batch.staged(buffer), strict=True):
                    staged.copy_(transfer.memory)
            else:
                _copy_on_device(batch, buffer, self._side, to_device=False)
                self._side.mark().synchronize()
            return empty(buffer)
        finally:
            self._ring.give_back(buffer, None)


def _copy_on_device(batch: Batch, buffer: torch.Tensor, side: SideStream, *, to_device: bool) -> None:
    """Queue the copies between a pinned buffer and the memory of a batch."""
    memory = [transfer.memory for transfer in batch.transfers]
    if len(memory) <= _STRAIGHT_COPIES and all(transfer.is_run for transfer in batch.transfers):
        for place, staged in zip(memory, batch.staged(buffer), strict=True):
            side.copy(*((place, staged) if to_device else (staged, place)))
        return
    between, used = side.empty(batch.buffer_bytes), buffer[: batch.buffer_bytes]
    if to_device:
        side.copy(between, used)
        side.copy_each(memory, batch.staged(between))
    else:
        side.copy_each(batch.staged(between), memory)
        side.copy(used, between)
