"""Weights straight into a place that takes whole files: each rank streams its share of the files, to which the others
send their slabs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest

import torch

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size, refuse_too_large
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.loading.fill import read_into
from hf_fsdp_tools.loading.io.files import TransferStats
from hf_fsdp_tools.saving.copies import COPIED
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.target import Stream, WholeFiles
from hf_fsdp_tools.streaming.exchange import deliver
from hf_fsdp_tools.streaming.live import LiveWeights
from hf_fsdp_tools.streaming.routes import Arrival, Bucket, joined
from hf_fsdp_tools.text import grouped


def begin_stream(
    weights: LiveWeights, target: WholeFiles, layout: Layout, *, staging_bytes: int, blocking: bool
) -> tuple[Callable[[], Exception | None], Callable[[], TransferStats], int]:
    """What exchanges the weights, what completes this rank's files, and the bytes of copies from which it does so.

    Every rank must call, and call the first. Without `blocking`, all parts are exchanged here: each rank then holds its
    files in host memory.
    """
    rank, num_ranks = rank_and_size()
    files = deal(layout.sizes, num_ranks)
    num_bytes = 0 if blocking else sum(layout.sizes[file] for file in files[rank])
    if not blocking:
        with agreed("copying what is saved"):
            refuse_too_large(num_bytes, *COPIED)
    own = _Files(target, layout, files[rank], is_held=not blocking)
    doing = f"writing the checkpoint ({target.where!r})"
    exchange = partial(_exchange, weights, layout, files, staging_bytes, own.put, doing)
    if not blocking:
        exchange()
    return exchange if blocking else lambda: None, own.finish, num_bytes


def deal(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The files of each rank, which it writes one after another: the largest first, each to whom has fewest bytes."""
    files: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = loads.index(min(loads))
        files[rank].append(file)
        loads[rank] += sizes[file]
    return files


class _Files:
    """This rank's files: streams that are opened when their first bytes come, or, if they are held, at the end."""

    def __init__(self, target: WholeFiles, layout: Layout, files: Iterable[str], *, is_held: bool) -> None:
        self._target, self._layout = target, layout
        self._held: dict[str, list[bytes]] | None = {} if is_held else None
        self._streams: dict[str, Stream | None] = dict.fromkeys(files)
        self._stats = TransferStats()

    def put(self, file: str, data: memoryview) -> None:
        if self._held is None:
            self._stream(file).write(data)
            self._stats += TransferStats(num_bytes=len(data), calls=1)
        else:
            self._held.setdefault(file, []).append(bytes(data))

    def finish(self) -> TransferStats:
        """Let all of them appear; what was written but for headers. No rank communicates, and no thread begins."""
        held, self._held = self._held or {}, None
        for file, slabs in held.items():
            while slabs:
                self.put(file, memoryview(slabs.pop(0)))
        for file in self._streams:
            self._stream(file).commit()
        return self._stats

    def _stream(self, file: str) -> Stream:
        if (stream := self._streams[file]) is None:
            stream = self._streams[file] = self._target.stream(self._target.weights[file], self._layout.sizes[file])
            stream.write(memoryview(self._layout.headers[file]))
        return stream


def _exchange(
    weights: LiveWeights,
    layout: Layout,
    files: Sequence[Sequence[str]],
    staging_bytes: int,
    put: Callable[[str, memoryview], None],
    doing: str,
) -> None:
    """Put the bytes of this rank's files, of those of each rank, in their order. Every rank must call.

    Slabs of tensors go from the ranks that hold them to the rank that writes their file, a bucket of at most half of
    `staging_bytes` at a time, while what arrived before is put.
    """
    rank = rank_and_size()[0]
    slabs = [list(_slabs_of(layout, own, staging_bytes // 8)) for own in files]
    buckets = _buckets(weights, slabs, staging_bytes // 4)
    failures: list[Exception] = []
    done = 0
    passing = deliver(
        buckets,
        weights.held(buckets),
        torch.device("cpu"),
        staging_bytes // 2,
        lambda: failures[0] if failures else None,
        doing,
    )
    for arrived in passing:
        try:
            while done < len(slabs[rank]) and not failures:
                file, name, box = slabs[rank][done]
                if name in layout.carried:
                    slab = _read_head(layout, layout.carried[name], box)
                elif (key := str(done)) in arrived:
                    slab = arrived.pop(key)
                else:
                    break
                put(file, memoryview(slab.reshape(-1).view(torch.uint8).numpy().data))
                done += 1
        except Exception as error:
            failures.append(error)


Slab = tuple[str, str, Box]
"""File, name of the tensor, and box of it."""


def _slabs_of(layout: Layout, files: Iterable[str], num_bytes: int) -> Iterator[Slab]:
    """Yield what is written to files, in their order."""
    places = sorted({**layout.places, **layout.carried}.items(), key=lambda item: item[1].offset)
    of_files = grouped((str(place.file), (name, place)) for name, place in places)
    for file in files:
        for name, place in of_files.get(file, ()):
            for slab in Box.whole(place.symbol.shape).slabs(num_bytes, place.element.itemsize):
                if slab.numel:
                    yield file, name, slab


def _buckets(weights: LiveWeights, slabs: Sequence[Sequence[Slab]], num_bytes: int) -> list[Bucket]:
    """The buckets in which slabs go to the ranks that write them, all ranks side by side. Every rank must call."""
    spread = weights.spread()

    def one_by_one() -> Iterator[list[Arrival]]:
        for i, of_ranks in enumerate(zip_longest(*slabs)):
            for rank, slab in enumerate(of_ranks):
                if slab is not None and (name := slab[1]) in weights.tensors:
                    yield [Arrival(rank, str(i), name, slab[2], weights.tensors[name].element, spread(name))]

    # heads are written next to what arrives
    return joined(one_by_one(), num_bytes, len(slabs)) or [Bucket(arrivals=[], most_bytes=0)]


def _read_head(layout: Layout, place: Place, slab: Box) -> torch.Tensor:
    assert layout.heads is not None
    heads, index = layout.heads
    memory = torch.empty(slab.length, dtype=place.element)
    with heads.reader() as reader:
        read_into([(memory, place.symbol, slab)], index, reader, staging_bytes=memory.nbytes)
    return memory
