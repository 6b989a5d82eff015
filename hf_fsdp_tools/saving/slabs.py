"""Files of a checkpoint as streams: each written from its beginning to its end by one rank, a bounded slab at a time.

Ranks hold boxes of tensors, and a stream wants bytes in order. So files are dealt to ranks, and cut into slabs. In each
round every rank sends what it holds of the slabs that the others write now: parts of tensors as they lie in its memory,
each with its place in the file, so that boxes along any dimension cost no call for every few bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.cpu_backend import has_cpu_backend
from hf_fsdp_tools.loading.formats.safetensors import DTYPES
from hf_fsdp_tools.loading.io.transfer import Limits, Transfer, cut_batches

_DTYPES = tuple(DTYPES.values())

_ALIGNMENT = 64
"""Slabs, and parts in a message, begin at multiples of so many bytes: enough for every dtype."""


@dataclass(frozen=True)
class Part:
    """Elements that a rank sends to the rank that writes their file."""

    transfer: Transfer
    """Their place; on meta where `load` gives the memory."""
    load: Callable[[], torch.Tensor] | None = None
    """Makes the contiguous tensor of which the transfer's memory is a view, when it is wanted."""

    def values(self) -> torch.Tensor:
        """The elements, on any device and in any dtype."""
        memory = self.transfer.memory
        if self.load is None:
            return memory
        return self.load().as_strided(memory.shape, memory.stride(), memory.storage_offset())


class Stream(Protocol):
    """What takes the bytes of one file in order; it appears with `commit` and not before."""

    def write(self, data: memoryview) -> object:
        """Take the next bytes."""

    def commit(self) -> object:
        """Let the file appear."""

    def discard(self) -> object:
        """Forget what was written."""


@dataclass(frozen=True)
class Slabs:
    """Which rank writes which slab in which round; the same on every rank."""

    sizes: Mapping[str, int]
    """File to its length."""
    slab_bytes: int
    queues: Sequence[Sequence[str]]
    """The files of each rank, which it writes one after another."""

    @classmethod
    def deal(cls, sizes: Mapping[str, int], *, slab_bytes: int, num_ranks: int) -> "Slabs":
        """Deal files to ranks, the largest first, each to the rank with the fewest bytes."""
        queues: list[list[str]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
            rank = loads.index(min(loads))
            queues[rank].append(file)
            loads[rank] += sizes[file]
        return cls(sizes, max(_ALIGNMENT, slab_bytes // _ALIGNMENT * _ALIGNMENT), queues)

    def count(self, file: str) -> int:
        """Slabs of a file."""
        return max(1, -(-self.sizes[file] // self.slab_bytes))

    @property
    def num_rounds(self) -> int:
        """Rounds in which all is written."""
        return max(sum(map(self.count, queue)) for queue in self.queues)

    def first_round(self, file: str) -> tuple[int, int]:
        """The rank that writes a file, and the round in which it writes the first slab."""
        rank = next(rank for rank, queue in enumerate(self.queues) if file in queue)
        queue = self.queues[rank]
        return rank, sum(map(self.count, queue[: queue.index(file)]))

    def of(self, rank: int, round: int) -> tuple[str, int] | None:
        """File and number of the slab that a rank writes in a round; None for none."""
        for file in self.queues[rank]:
            if round < self.count(file):
                return file, round
            round -= self.count(file)
        return None


def cut_parts(parts: Iterable[Part], slabs: Slabs) -> dict[tuple[int, int], list[Part]]:
    """Parts that each span less of its file than a slab, by the round and the rank to which they are sent."""
    limits = Limits(
        request_bytes=slabs.slab_bytes,
        buffer_bytes=slabs.slab_bytes,
        host_gap_bytes=2**62,  # what lies in gaps comes from other ranks
        device_gap_bytes=2**62,
    )
    starts = {file: slabs.first_round(file) for file in slabs.sizes}
    cut: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        for batch in cut_batches([part.transfer], limits, on_device=lambda memory: False):
            for transfer in batch.transfers:
                rank, first = starts[str(transfer.file)]
                cut.setdefault((first + transfer.start // slabs.slab_bytes, rank), []).append(
                    replace(part, transfer=transfer)
                )
    return cut


# ---- messages ----


def _header(parts: Sequence[Part]) -> list[int]:
    """Number of parts; and of each, place in the file, dtype, and lengths and steps of each dimension."""
    header = [len(parts)]
    for part in parts:
        t = part.transfer
        header += [t.start, _DTYPES.index(t.dtype), t.memory.ndim, *t.memory.shape, *t.strides]
    return header


def _message_bytes(parts: Sequence[Part]) -> int:
    return _aligned(8 * len(_header(parts))) + sum(_aligned(part.transfer.num_bytes) for part in parts) if parts else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _packed(parts: Sequence[Part]) -> torch.Tensor:
    """The message of some parts."""
    message = torch.empty(_message_bytes(parts), dtype=torch.uint8)
    header = torch.tensor(_header(parts)).view(torch.uint8)
    message[: len(header)] = header
    at = _aligned(len(header))
    for part in parts:
        t = part.transfer
        message[at : at + t.num_bytes].view(t.dtype).view(t.memory.shape).copy_(part.values())
        at += _aligned(t.num_bytes)
    return message


def _packed_or_empty(
    parts: Mapping[tuple[int, int], Sequence[Part]], round: int, failures: list[Exception], to: int
) -> torch.Tensor:
    """The message to a rank; where it cannot be made, one that says nothing, for the other rank waits for it."""
    try:
        return _packed(parts[round, to])
    except Exception as error:
        failures.append(error)
        return torch.zeros(_message_bytes(parts[round, to]), dtype=torch.uint8)


def _unpack(message: torch.Tensor, buffer: torch.Tensor, first: int) -> None:
    """Put what a message holds to its places in a buffer that begins at byte `first` of the file."""
    words = message[: message.numel() // 8 * 8].view(torch.int64)
    places, at = [], 1
    for _ in range(int(words[0])):
        start, dtype, ndim = words[at : at + 3].tolist()
        shape, strides = words[at + 3 : at + 3 + ndim].tolist(), words[at + 3 + ndim : at + 3 + 2 * ndim].tolist()
        places.append((start, _DTYPES[dtype], shape, strides))
        at += 3 + 2 * ndim
    at = _aligned(8 * at)
    for start, kind, shape, strides in places:
        num_bytes = kind.itemsize * torch.Size(shape).numel()
        values = message[at : at + num_bytes].view(kind).view(shape)
        # The last slab's buffer may end where the file does.
        target = buffer[start - first :]
        whole = target[: len(target) // kind.itemsize * kind.itemsize].view(kind)
        whole.as_strided(shape, strides, whole.storage_offset()).copy_(values)
        at += _aligned(num_bytes)


class _Exchange:
    """Sends messages between all ranks, one pair of them at a time, so that a rank holds one of each way."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Learn how many bytes each rank sends to whom in which round. Every rank must call."""
        self.rank, self.num_ranks = rank_and_size()
        self._device = torch.device("cpu")
        own = torch.tensor(counts)
        self._counts = [own]
        if self.num_ranks > 1:
            if not has_cpu_backend():
                self._device = find_accelerator() or self._device
            own = own.to(self._device)
            every = [torch.empty_like(own) for _ in range(self.num_ranks)]
            dist.all_gather(every, own)
            self._counts = [one.cpu() for one in every]

    def bytes_of(self, round: int, sender: int, receiver: int) -> int:
        """Bytes of a message."""
        return int(self._counts[sender][round * self.num_ranks + receiver])

    def messages(self, round: int, message: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's messages of a round, while it sends those that `message` makes for the others."""
        for step in range(self.num_ranks):
            to, sender = (self.rank + step) % self.num_ranks, (self.rank - step) % self.num_ranks
            outgoing = message(to) if self.bytes_of(round, self.rank, to) else None
            if step == 0:
                if outgoing is not None:
                    yield outgoing
                continue
            works = []
            if outgoing is not None:
                outgoing = outgoing.to(self._device)
                works.append(dist.isend(outgoing, dst=to))
            incoming = torch.empty(self.bytes_of(round, sender, self.rank), dtype=torch.uint8, device=self._device)
            if incoming.numel():
                works.append(dist.irecv(incoming, src=sender))
            for work in works:
                if work is not None:
                    work.wait()
            if incoming.numel():
                yield incoming.cpu()


# ---- writing ----


def stream_files(
    parts: Mapping[tuple[int, int], Sequence[Part]],
    slabs: Slabs,
    headers: Mapping[str, bytes],
    open_stream: Callable[[str], Stream],
    *,
    before: Callable[[int], None] = lambda round: None,
    doing: str,
    where: str,
) -> tuple[int, int]:
    """Stream this rank's files; the bytes of them, and the number of slabs. All of them have appeared then, or none.

    `parts` are those that this rank sends, as `cut_parts` gives them. `before` is called before each round on every
    rank, and may run collectives. Every rank must call; the ranks exchange parts, and agree once in each round, so that
    all stop with the error of one. A rank holds a slab that it fills, one that is written meanwhile, and two messages.
    """
    rank, num_ranks = rank_and_size()
    every_pair = [parts.get((i, to), ()) for i in range(slabs.num_rounds) for to in range(num_ranks)]
    with agreed(doing, where):
        counts = [_message_bytes(one) for one in every_pair]
    exchange = _Exchange(counts)
    streams: dict[str, Stream] = {}
    rest = torch.empty(0, dtype=torch.uint8)
    written = num_slabs = 0
    failures: list[Exception] = []
    writing: Future[object] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="store") as pool:
        try:
            for i in range(slabs.num_rounds):
                before(i)
                slab, first = slabs.of(rank, i), 0
                if slab is not None:
                    file, number = slab
                    first = number * slabs.slab_bytes
                    buffer = torch.empty(min(2 * slabs.slab_bytes, slabs.sizes[file] - first), dtype=torch.uint8)
                    buffer[: len(rest)] = rest
                    _put_header(buffer, headers[file], first)
                try:
                    for message in exchange.messages(i, partial(_packed_or_empty, parts, i, failures)):
                        _unpack(message, buffer, first)
                except Exception as error:  # as a rule of the network: another rank is gone, which all name below
                    failures.append(error)
                with agreed(doing, where):
                    if failures:
                        raise failures[0]
                    if writing is not None:
                        writing.result()
                if slab is not None:
                    here, rest = buffer[: slabs.slab_bytes], buffer[slabs.slab_bytes :].clone()
                    writing = pool.submit(_write, streams, file, here, open_stream)
                    written, num_slabs = written + len(here), num_slabs + 1
            with agreed(doing, where):
                if writing is not None:
                    writing.result()
                for stream in streams.values():
                    stream.commit()
        except BaseException:
            if writing is not None:
                writing.cancel()
            pool.shutdown()
            for stream in streams.values():
                with suppress(Exception):  # the error that led here is the one to show
                    stream.discard()
            raise
    assert sum(all_ranks(written, doing)) == sum(slabs.sizes.values()), "not all bytes of the files were written"
    return written, num_slabs


def _put_header(buffer: torch.Tensor, header: bytes, first: int) -> None:
    part = header[first : first + len(buffer)]
    if part:
        buffer[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)


def _write(streams: dict[str, Stream], file: str, slab: torch.Tensor, open_stream: Callable[[str], Stream]) -> None:
    if file not in streams:
        streams[file] = open_stream(file)
    streams[file].write(slab.numpy().data)
