"""A checkpoint straight into a place that takes whole files: weights as streams, then what lies next to them, the index
last.

Until the index is put, in one step, whoever opens the place gets the checkpoint that was there: the weight files
have names that no save before had, and every checkpoint there has an index, also of one file. Files next to the
weights that differ are put right before it; if that fails, the former ones are put back.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size, refuse_too_large
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError, FSDPToolsError, warn
from hf_fsdp_tools.hub import CARD
from hf_fsdp_tools.loading.fill import read_into
from hf_fsdp_tools.loading.weight_files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.saving.copies import COPIED
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.publish import ADAPTER_WEIGHTS, WEIGHTS_OF_A_SAVE, SavedNames, SaveReport, index_text
from hf_fsdp_tools.saving.targets import Stream, Target
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.stores import temporary_folder
from hf_fsdp_tools.streaming.exchange import deliver
from hf_fsdp_tools.streaming.live import LiveWeights, live_weights
from hf_fsdp_tools.streaming.routes import Arrival, Bucket, joined
from hf_fsdp_tools.text import grouped, listed

_WRITING = "writing the checkpoint"


@dataclass(frozen=True, kw_only=True)
class StreamedSave:
    """A save to such a place of which writing and the index are left."""

    target: Target
    layout: Layout
    names: SavedNames
    beside: Mapping[str, bytes]
    """On rank 0, the files next to the weights."""
    stream: Callable[[], tuple[int, int]]
    """Writes this rank's weight files; the bytes and the calls."""
    copied_bytes: int = 0

    @property
    def report(self) -> SaveReport:
        """What is known before anything is written."""
        return SaveReport(folder=self.target.where, total_bytes=self.layout.num_bytes, copied_bytes=self.copied_bytes)

    def finish(self) -> SaveReport:
        """Write, and make what is written the checkpoint of the place. Every rank must call; once."""
        num_bytes, calls = self.stream()
        with agreed("finishing the save", self.target.where):
            if self.layout.heads is not None:
                self.layout.heads[0].refuse_changed()
            if rank_and_size()[0] == 0:
                sizes = {name: self.layout.sizes[file] for file, name in self.names.weights.items()}
                _publish(self.target, sizes, self.beside, index_text(self.names, self.layout).encode())
        files, others = tuple(self.names.weights.values()), self.names.others
        return replace(self.report, files=files, others=others, bytes_written=num_bytes, write_calls=calls)


def begin_streamed(
    model: nn.Module,
    target: Target,
    *,
    check: Callable[[], None],
    plan: Callable[[], Layout],
    stage: Callable[[Path], None],
    dtype: torch.dtype | None,
    staging_bytes: int,
    blocking: bool,
) -> StreamedSave:
    """Do of a save to such a place what needs the model or the process group. Every rank must call.

    Without `blocking`, that is the exchange of all parts: each rank then holds its weight files in host memory.
    """
    rank, num_ranks = rank_and_size()
    beside: dict[str, bytes] = {}
    with agreed("preparing the save", target.where):
        target.check()
        check()
        layout = plan()
        shared: tuple[str, tuple[str, ...]] = ("", ())
        if rank == 0:
            there = target.files()
            if ADAPTER_CONFIG in there:
                raise CheckpointError(
                    f"{target.where!r} holds an adapter, which would be put on weights next to it. Save to another "
                    "place."
                )
            with temporary_folder() as folder:
                stage(folder)
                beside = _contents(folder)
            if CARD in there:
                beside.pop(CARD, None)
            shared = (secrets.token_hex(4), (*beside, WEIGHTS_INDEX))
        mark, others = all_ranks(shared, "preparing the save")[0]
    single = f"model.{mark}-00001-of-00001.safetensors"
    weights = {f: single if f == WEIGHTS else f.replace("model", f"model.{mark}", 1) for f in layout.sizes}
    files = deal(layout.sizes, num_ranks)
    stream = partial(stream_files, live_weights(model, dtype=dtype), layout, files, staging_bytes, where=target.where)
    uploads = {file: target.open(weights[file], layout.sizes[file]) for file in files[rank]}
    own = [weights[file] for file in files[rank]]
    names, sent = SavedNames(weights=weights, others=others), partial(stream, uploads.__getitem__)
    stream_all = partial(_removing, target, own, sent)
    save = StreamedSave(target=target, layout=layout, names=names, beside=beside, stream=stream_all)
    if blocking:
        return save
    num_bytes = sum(layout.sizes[file] for file in uploads)
    with agreed("copying what is saved"):
        refuse_too_large(num_bytes, *COPIED)
    copied = {file: _Held() for file in uploads}
    stream(copied.__getitem__)
    later = partial(_removing, target, own, partial(_write, copied, uploads, target.where))
    return replace(save, copied_bytes=num_bytes, stream=later)


# ---- weights ----


def deal(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The files of each rank, which it writes one after another: the largest first, each to whom has fewest bytes."""
    files: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = loads.index(min(loads))
        files[rank].append(file)
        loads[rank] += sizes[file]
    return files


class _Streams:
    """The streams of this rank's files, opened when their first bytes come, behind their headers."""

    def __init__(self, open_stream: Callable[[str], Stream], headers: Mapping[str, bytes]) -> None:
        self._open, self._headers = open_stream, headers
        self._streams: dict[str, Stream] = {}
        self.written = 0
        """Bytes of all of them."""

    def put(self, file: str, data: memoryview) -> None:
        if file not in self._streams:
            self._streams[file] = self._open(file)
            self.put(file, memoryview(self._headers[file]))
        self._streams[file].write(data)
        self.written += len(data)

    def commit(self, file: str) -> None:
        if file not in self._streams:  # of empty tensors
            self.put(file, memoryview(b""))
        self._streams[file].commit()

    def discard(self) -> None:
        for each in self._streams.values():
            with suppress(Exception):  # the error that led here is the one to show
                each.discard()


def stream_files(
    weights: LiveWeights,
    layout: Layout,
    files: Sequence[Sequence[str]],
    staging_bytes: int,
    open_stream: Callable[[str], Stream],
    *,
    where: str,
) -> tuple[int, int]:
    """Stream this rank's files, of those of each rank; their bytes, and the number of slabs. All appear, or none.

    Every rank must call. Slabs of tensors go from the ranks that hold them to the rank that writes their file, a bucket
    of at most half of `staging_bytes` at a time, while what arrived before is written.
    """
    rank = rank_and_size()[0]
    slabs = [list(_slabs_of(layout, own, staging_bytes // 8)) for own in files]
    buckets = _buckets(weights, slabs, staging_bytes // 4)
    streams = _Streams(open_stream, layout.headers)
    failures: list[Exception] = []
    done = 0
    passing = deliver(
        buckets,
        weights.held(buckets),
        torch.device("cpu"),
        staging_bytes // 2,
        lambda: failures[0] if failures else None,
        f"{_WRITING} ({where!r})",
    )
    try:
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
                    streams.put(file, memoryview(slab.reshape(-1).view(torch.uint8).numpy().data))
                    done += 1
            except Exception as error:
                failures.append(error)
        with agreed(_WRITING, where):
            written, size = sum(all_ranks(streams.written, _WRITING)), sum(layout.sizes.values())
            if written != size:
                raise CheckpointError(f"Saving to {where!r} wrote {written} of {size} bytes.")
            for file in files[rank]:
                streams.commit(file)
    except BaseException:
        streams.discard()
        raise
    return streams.written, done


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


class _Held:
    """A stream into host memory."""

    def __init__(self) -> None:
        self.slabs: list[bytes] = []

    def write(self, data: memoryview) -> None:
        self.slabs.append(bytes(data))

    def commit(self) -> None:
        """It is complete."""

    def discard(self) -> None:
        self.slabs.clear()


def _write(copied: Mapping[str, _Held], uploads: Mapping[str, Stream], where: str) -> tuple[int, int]:
    """Write this rank's weight files from copies, and begin no thread. Every rank must call."""
    num_bytes = calls = 0
    try:
        with agreed(_WRITING, where):
            for file, held in copied.items():
                while held.slabs:
                    num_bytes, calls = num_bytes + len(held.slabs[0]), calls + 1
                    uploads[file].write(memoryview(held.slabs.pop(0)))
        with agreed(_WRITING, where):
            for upload in uploads.values():
                upload.commit()
    except BaseException:
        for upload in uploads.values():
            upload.discard()
        raise
    return num_bytes, calls


def _removing(target: Target, names: Iterable[str], stream: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Write, and where that fails remove what has appeared."""
    try:
        return stream()
    except BaseException:
        _remove(target, names)
        raise


def _remove(target: Target, names: Iterable[str]) -> None:
    for name in names:
        with suppress(Exception):  # nothing leads to it, and the error that led here is the one to show
            target.remove(name)


# ---- what lies next to them ----


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _publish(target: Target, sizes: Mapping[str, int], beside: Mapping[str, bytes], index: bytes) -> None:
    """Let complete weight files and what lies next to them be the checkpoint of a place; remove the former one's."""
    there, former = target.files(), dict[str, bytes | None]()
    found = {name: there.get(name) for name in sizes}
    try:
        if found != sizes:
            raise CheckpointError(
                f"{target.where!r} does not hold what the ranks wrote: expected {listed(sizes.items())}, found "
                f"{listed(found.items())}. It must be the same store for all ranks, and keep what is written there."
            )
        former = _put(target, beside, (WEIGHTS_INDEX, index))
    except FSDPToolsError:
        if not _is_there(target, WEIGHTS_INDEX, index):
            _remove(target, sizes)
            raise
    outdated = [name for name in there if WEIGHTS_OF_A_SAVE.fullmatch(name) and name not in {*sizes, WEIGHTS_INDEX}]
    outdated.sort(key=lambda name: name != WEIGHTS)  # which would be opened in place of the index
    try:
        for name in outdated:
            target.remove(name)
    except CheckpointError as error:
        if WEIGHTS in outdated and WEIGHTS in target.files():
            _put_back(target, former)
            _remove(target, sizes)
            raise
        warn(f"{target.where!r} is saved, but weight files of an earlier save take space: {error}")


def _put(target: Target, beside: Mapping[str, bytes], last: tuple[str, bytes]) -> dict[str, bytes | None]:
    """Put files that are new or differ, and one last, and return what they were; if that fails, put these back."""
    former: dict[str, bytes | None] = {}
    try:
        for name, content in (*beside.items(), last):
            now = target.read(name)
            if now != content:
                former[name] = now
                target.put(name, content)
    except CheckpointError:
        if not _is_there(target, *last):
            _put_back(target, former)
            raise
    return former


def _put_back(target: Target, former: Mapping[str, bytes | None]) -> None:
    for name, old in former.items():
        with suppress(Exception):  # the error that led here is the one to show
            target.remove(name) if old is None else target.put(name, old)


def _is_there(target: Target, name: str, content: bytes) -> bool:
    """Whether a request that failed was done all the same."""
    try:
        return target.read(name) == content
    except CheckpointError as error:
        raise CheckpointError(f"{name!r} may be written or not: {error} Look there.") from error


def stream_adapter(write: Callable[[Path], SaveReport], target: Target) -> SaveReport:
    """Save an adapter by a function that writes a folder, and put its files, the weights last. Every rank must call."""
    with temporary_folder() as own:
        is_first = rank_and_size()[0] == 0
        with agreed("preparing the save", target.where):
            target.check()
            if is_first and CONFIG in target.files():
                raise CheckpointError(
                    f"{target.where!r} holds a model, which the adapter would be put on. Save to another place."
                )
        report = write(own)
        with agreed("writing the adapter", target.where):
            if is_first:
                files, there = _contents(own), target.files()
                if ADAPTER_CONFIG in there and any(name.startswith("adapter_model.") for name in there):
                    _refuse_other_config(target, files[ADAPTER_CONFIG])
                if CARD in there:
                    del files[CARD]
                _put(target, files, (ADAPTER_WEIGHTS, files.pop(ADAPTER_WEIGHTS)))
    return replace(report, folder=target.where)


def _refuse_other_config(target: Target, config: bytes) -> None:
    """Refuse to replace an adapter by one of another configuration, of which a reader could get one file of each."""
    known, new = (
        {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in json.loads(text).items()}
        for text in (target.read(ADAPTER_CONFIG) or b"{}", config)  # PEFT writes sets as lists, in any order
    )
    if other := [key for key in known | new if known.get(key) != new.get(key)]:
        raise CheckpointError(
            f"{target.where!r} holds an adapter of another configuration ({listed(other)}), and no store replaces two "
            "files at once. Save to another place, or remove that adapter first."
        )
