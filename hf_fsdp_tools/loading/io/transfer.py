"""Which bytes of a file belong to which memory, cut into requests that share buffers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

import torch

from hf_fsdp_tools.loading.formats.stored import StoredTensor
from hf_fsdp_tools.loading.regions import View

_MAX_RUNS = 1024
"""Memory regions that one `preadv` or `pwritev` takes (IOV_MAX on Linux)."""

_MAX_REQUESTS = 64
"""Requests of one batch, which one thread moves one after the other; so that many small ones keep all threads busy.
(assumed)"""

_ALIGNMENT = 64
"""Each request of a batch begins at a multiple of so many bytes of the buffer: enough for every dtype, and for copies
in words of 16 bytes."""


class Route(Enum):
    """How bytes travel between a file and memory."""

    DIRECT = auto()
    """Straight: the bytes in memory on the host are those in the file, in one run."""
    HOST = auto()
    """Through a staging buffer, cast and scattered by the CPU."""
    DEVICE = auto()
    """Through a pinned staging buffer, cast and scattered by the accelerator that holds the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Elements of a file, and their place in memory."""

    file: Path
    """The file."""
    start: int
    """Position of the first element's first byte in the file."""
    dtype: torch.dtype
    """Dtype of the elements in the file."""
    strides: tuple[int, ...]
    """Steps in the file per dimension of `memory`, in elements."""
    memory: torch.Tensor
    """The elements in memory: a view of any strides, dtype and device."""

    @property
    def stop(self) -> int:
        """Position after the last element in the file."""
        steps = sum((n - 1) * step for n, step in zip(self.memory.shape, self.strides, strict=True))
        return self.start + (steps + 1) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in the file; gaps between them do not count."""
        return self.memory.numel() * self.dtype.itemsize

    @property
    def is_run(self) -> bool:
        """Whether the bytes in memory are the bytes in the file, in one run."""
        return self.memory.dtype == self.dtype and self.strides in ((), (1,)) and self.memory.is_contiguous()

    def staged(self, buffer: torch.Tensor, begin: int) -> torch.Tensor:
        """The elements, with the shape of the memory, in a buffer in which the first one lies at byte `begin`."""
        raw = buffer[begin : begin + self.stop - self.start].view(self.dtype)
        return raw.as_strided(self.memory.shape, self.strides, raw.storage_offset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Transfers that one system call moves."""

    file: Path
    """The file."""
    transfers: tuple[Transfer, ...]
    """In file order."""
    start: int
    """Position of the first byte to move."""
    stop: int
    """Position after the last byte to move."""
    route: Route
    """The way of all transfers."""
    place: int = 0
    """Where its bytes begin in the buffer of its batch."""

    def bytes_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its bytes in that buffer."""
        return buffer[self.place : self.place + self.stop - self.start]

    def staged(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The memory of each transfer, with its elements in a buffer."""
        begin = self.place - self.start
        return [(each.memory, each.staged(buffer, begin + each.start)) for each in self.transfers]


Batch = list[Request]
"""Requests that share a staging buffer, all by one route; or one direct request."""


def transfer_of(stored: StoredTensor, view: View, memory: torch.Tensor) -> Transfer:
    """The transfer that fills `memory` with a view of a stored tensor."""
    return Transfer(
        file=stored.file,
        start=stored.offset + view.offset * stored.dtype.itemsize,
        dtype=stored.dtype,
        strides=view.strides,
        memory=memory,
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large requests and batches may be, and the cutting of transfers to such."""

    request_bytes: int
    """Bytes of the largest direct request."""
    buffer_bytes: int
    """Bytes of a staging buffer."""
    host_gap_bytes: int
    """Unwanted bytes between wanted ones up to which a request of the CPU moves both; 0 for writing."""
    device_gap_bytes: int
    """The same for an accelerator."""
    on_device: Callable[[torch.Tensor], bool]
    """Whether memory is that of the accelerator."""

    def batches(self, transfers: Iterable[Transfer]) -> Iterator[Batch]:
        """Yield batches that together move the transfers, in file order."""
        batch: Batch = []
        for request in self._requests(transfers):
            if request.route is not Route.DEVICE:
                yield [request]
                continue
            place = -(-(batch[-1].place + batch[-1].stop - batch[-1].start) // _ALIGNMENT) * _ALIGNMENT if batch else 0
            if batch and (place + request.stop - request.start > self.buffer_bytes or len(batch) == _MAX_REQUESTS):
                yield batch
                batch, place = [], 0
            batch.append(replace(request, place=place))
        if batch:
            yield batch

    def _requests(self, transfers: Iterable[Transfer]) -> Iterator[Request]:
        """Yield requests that together move the transfers, in file order."""
        parts: dict[Path, list[tuple[Transfer, Route]]] = {}
        for transfer in transfers:
            if transfer.memory.numel():
                parts.setdefault(transfer.file, []).extend(self._parts(_merged(transfer)))
        for file in sorted(parts):
            in_order = sorted((part.start, part.stop, i) for i, (part, _) in enumerate(parts[file]))
            yield from self._joined(file, ((start, stop, *parts[file][i]) for start, stop, i in in_order))

    def _parts(self, transfer: Transfer) -> Iterator[tuple[Transfer, Route]]:
        """Yield parts of a transfer, each with its route, of which each fits a request."""
        is_on_device = self.on_device(transfer.memory)
        gap_bytes = self.device_gap_bytes if is_on_device else self.host_gap_bytes
        # Half the buffer each, so that two parts that interleave in the file fit into it together.
        for part in _cut_to_fit(transfer, self.buffer_bytes // 2, gap_bytes):
            route = Route.DEVICE if is_on_device else Route.HOST
            if part.is_run and part.memory.device.type == "cpu" and not is_on_device:
                route = Route.DIRECT
            num_bytes = self.request_bytes if route is Route.DIRECT else self.buffer_bytes
            if not part.is_run or part.num_bytes <= num_bytes:
                yield part, route
                continue
            start = part.start  # several requests at once
            for memory in torch.split(part.memory, max(1, num_bytes // part.dtype.itemsize)):
                yield replace(part, start=start, memory=memory), route
                start += memory.numel() * part.dtype.itemsize

    def _joined(self, file: Path, parts: Iterable[tuple[int, int, Transfer, Route]]) -> Iterator[Request]:
        """Yield neighbours as one request: direct transfers while they touch, staged ones while they touch or
        overlap."""
        joined: list[Transfer] = []
        first = last = 0
        way = Route.DIRECT
        for start, stop, part, route in parts:
            is_direct = route is Route.DIRECT
            touches = route is way and (start == last if is_direct else start <= last)
            largest = self.request_bytes if is_direct else self.buffer_bytes
            fits = max(last, stop) - first <= largest and len(joined) < _MAX_RUNS
            is_aligned = is_direct or (start - first) % part.dtype.itemsize == 0
            if joined and not (touches and fits and is_aligned):
                yield Request(file=file, transfers=tuple(joined), start=first, stop=last, route=way)
                joined = []
            if not joined:
                first, last, way = start, stop, route
            joined.append(part)
            last = max(last, stop)
        if joined:
            yield Request(file=file, transfers=tuple(joined), start=first, stop=last, route=way)


def _merged(transfer: Transfer) -> Transfer:
    """The transfer with dimensions in file order, and with dimensions that are contiguous in file and memory merged."""
    shape, memory = transfer.memory.shape, transfer.memory.stride()
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -transfer.strides[d])
    merged: list[tuple[int, int, int]] = []  # length, step in the file, step in memory
    for d in order:
        dim = (shape[d], transfer.strides[d], memory[d])
        if merged and merged[-1][1:] == (dim[0] * dim[1], dim[0] * dim[2]):
            dim = (merged.pop()[0] * dim[0], dim[1], dim[2])
        merged.append(dim)
    view = transfer.memory.as_strided([dim[0] for dim in merged], [dim[2] for dim in merged])
    return replace(transfer, strides=tuple(dim[1] for dim in merged), memory=view)


def _cut_to_fit(transfer: Transfer, limit: int, max_gap_bytes: int) -> Iterator[Transfer]:
    """Cut along the dimension with the largest step until each part is one run, or fits `limit` without large gaps."""
    if transfer.is_run or not transfer.strides:
        yield transfer
        return
    size, strides, memory = transfer.dtype.itemsize, transfer.strides, transfer.memory
    steps = [(n - 1) * step for n, step in zip(memory.shape, strides, strict=True)]
    gaps = [(step - 1 - sum(steps[d + 1 :])) * size for d, step in enumerate(strides)]
    span = (sum(steps) + 1) * size
    # Writing (no gap allowed) must not touch a byte that belongs to somebody else, so there must be no hole at all.
    is_whole = max(gaps) <= max_gap_bytes and (max_gap_bytes > 0 or span == transfer.num_bytes)
    if is_whole and span <= limit:
        yield transfer
        return
    many = min(max(1, limit // (strides[0] * size)), memory.shape[0] - 1) if is_whole else 1
    for i in range(0, memory.shape[0], many):
        part = memory.narrow(0, i, min(many, memory.shape[0] - i))
        inner, steps_in = (part.select(0, 0), strides[1:]) if part.shape[0] == 1 else (part, strides)
        start = transfer.start + i * strides[0] * size
        cut = Transfer(file=transfer.file, start=start, dtype=transfer.dtype, strides=steps_in, memory=inner)
        yield from _cut_to_fit(cut, limit, max_gap_bytes)
