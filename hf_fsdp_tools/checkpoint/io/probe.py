"""How quickly storage answers, measured on a few of the bytes that are wanted anyway, and what follows for reading."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hf_fsdp_tools.checkpoint.io.reader import Pace, opened
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.io.watch import ReadThreads

__all__ = ["SLOW_REQUEST_S", "SLOW_STREAM_BYTES_S", "Speed", "measure", "measure_flow", "slowest"]

SLOW_REQUEST_S = 2e-3
"""Time for a small request from which on storage is slow per request (assumed: a cached page takes 0.01 ms, an SSD 0.1, a
network block device 0.5 to 1, network file systems and object stores 2 to 100)."""

SLOW_STREAM_BYTES_S = 0.5e9
"""Bytes per second of one stream below which it is worth a second measurement, of all ranks at once, whether they should read
together: above it, a core does not even pass bytes on as quickly (measured: 0.46 to 0.61 GB/s, see ``read_mode``)."""

_POINTS = 5  # small requests; with the median of five, two may be odd ones
_SMALL_BYTES = 4096
_LARGE_BYTES = 2**20
_MIN_LARGE_BYTES = 2**16  # a shorter one says nothing about bytes per second

_SLOW_THREADS = 16  # requests in flight where they are slow (assumed)
_MAX_JOIN_BYTES = 2**20  # of bytes read for nothing (assumed)

_FLOW_BYTES = (2**16, 2**20)  # of each request where all ranks are timed at once: at least, at most
_FLOW_PART = 1 / 128  # of what a rank wants, between these two (assumed)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a few requests took."""

    request_s: float = 0.0
    """Median time of a request for 4 KiB; 0.0: nothing was measured."""

    stream_bytes_s: float = 0.0
    """Bytes per second of one request for 1 MiB, beyond that time; 0.0: not measured, nothing wanted is as large."""

    num_bytes: int = 0
    """Bytes read for this, and read again by the load."""

    @property
    def is_slow(self) -> bool:
        """Whether a request takes so long that there should be few, and many at once."""
        return self.request_s >= SLOW_REQUEST_S

    @property
    def worth_bytes(self) -> int:
        """Bytes that a stream brings in the time that a request costs: a gap of that size costs as much as a request."""
        return int(self.request_s * (self.stream_bytes_s or SLOW_STREAM_BYTES_S))

    def pace(self) -> Pace:
        """How to read from such storage."""
        if not self.is_slow:
            return Pace()
        gap = min(self.worth_bytes, _MAX_JOIN_BYTES)
        return Pace(threads=_SLOW_THREADS, max_gap_bytes=gap, join_bytes=gap)

    def __str__(self) -> str:
        stream = f", {self.stream_bytes_s / 1e9:.2f} GB/s per stream" if self.stream_bytes_s else ""
        return f"a request takes {self.request_s * 1e3:.2f} ms{stream}"


def measure(transfers: Sequence[Transfer]) -> Speed:
    """Time five requests for 4 KiB, far apart in what this rank wants, and one for 1 MiB. No rank communicates.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header said.
    """
    wanted = [transfer for transfer in transfers if transfer.memory.numel()]
    if not wanted:
        return Speed()
    points = [wanted[i * len(wanted) // _POINTS] for i in range(_POINTS)]
    largest = max(wanted, key=_span)
    buffer = torch.empty(_LARGE_BYTES, dtype=torch.uint8, device="cpu")
    with opened({t.file: None for t in [*points, largest]}, read_ahead=False) as read:

        def timed(transfer: Transfer, num_bytes: int, part: float) -> tuple[float, int]:
            count = min(num_bytes, _span(transfer))
            start = _start(transfer) + int((_span(transfer) - count) * part)
            began = time.perf_counter()
            read(transfer.file, start, buffer[:count])
            return time.perf_counter() - began, count

        small = [timed(transfer, _SMALL_BYTES, i / _POINTS) for i, transfer in enumerate(points)]
        request_s = statistics.median(seconds for seconds, _ in small)
        num_bytes = sum(count for _, count in small)
        if _span(largest) < _MIN_LARGE_BYTES:
            return Speed(request_s=request_s, num_bytes=num_bytes)
        seconds, count = timed(largest, _LARGE_BYTES, 0.5)
    stream = count / max(seconds - request_s, seconds / 10)
    return Speed(request_s=request_s, stream_bytes_s=stream, num_bytes=num_bytes + count)


def measure_flow(
    transfers: Sequence[Transfer], *, pace: Pace, part: float, together: Callable[[], object]
) -> tuple[int, float]:
    """Bytes and seconds of as many requests at once as a load makes, all over what this rank wants: a 128th part of it, but
    64 KiB to 1 MiB with each.

    Args:
        transfers: What this rank wants.
        pace: How many requests are made at once.
        part: Between 0 and 1; ranks that want the same bytes read others of them where it differs.
        together: Returns on all ranks at the same time, right before the requests, so that ranks feel what they leave to each
            other; called whatever happens on this rank.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header said.
    """
    wanted = [transfer for transfer in transfers if transfer.memory.numel()]
    total = sum(transfer.memory.numel() * transfer.dtype.itemsize for transfer in wanted)
    size = min(max(int(total * _FLOW_PART) // pace.threads, _FLOW_BYTES[0]), _FLOW_BYTES[1])
    points = [wanted[i * len(wanted) // pace.threads] for i in range(pace.threads)] if wanted else []
    buffer = torch.zeros((pace.threads, size), dtype=torch.uint8, device="cpu")

    def request(i: int) -> int:
        count = min(size, _span(points[i]))
        place = _start(points[i]) + int((_span(points[i]) - count) * (i + part) / pace.threads)
        read(points[i].file, place, buffer[i, :count])
        return count

    with ExitStack() as stack:
        try:
            read = stack.enter_context(opened({t.file: None for t in points}, read_ahead=False))
            pool = stack.enter_context(ReadThreads(pace.threads))
        finally:
            together()
        began = time.perf_counter()
        num_bytes = sum(pool.map(request, range(len(points))))
        return num_bytes, time.perf_counter() - began


def slowest(speeds: Iterable[Speed]) -> Speed:
    """The slowest of what several ranks measured, each figure by itself."""
    speeds = list(speeds)
    return Speed(
        request_s=max(speed.request_s for speed in speeds),
        stream_bytes_s=min((speed.stream_bytes_s for speed in speeds if speed.stream_bytes_s), default=0.0),
        num_bytes=max(speed.num_bytes for speed in speeds),
    )


def _start(transfer: Transfer) -> int:
    """Position in the file of the first element that is wanted."""
    return transfer.offset + transfer.stored.offset * transfer.dtype.itemsize


def _span(transfer: Transfer) -> int:
    """Bytes from the first to the last of them; elements between may be unwanted."""
    steps = zip(transfer.stored.length, transfer.stored.strides, strict=True)
    return (sum((n - 1) * step for n, step in steps) + 1) * transfer.dtype.itemsize
