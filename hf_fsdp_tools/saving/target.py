"""A place to save to: what each does in a save, and what is done for all that take whole files one after another."""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir
from threading import current_thread, main_thread
from typing import Protocol, Self

from hf_fsdp_tools.distributed.agreement import all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, FSDPToolsError, storage_errors, warn
from hf_fsdp_tools.folders import temporary_folder
from hf_fsdp_tools.hub import CARD
from hf_fsdp_tools.loading.weight_files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.saving.layout import Layout
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.text import listed

WEIGHTS_OF_A_SAVE = re.compile(r"model(\.[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weight files and index of this package's saves and of transformers'."""

_STRANGERS = {
    ADAPTER_CONFIG: "an adapter, which would be put on weights next to it",
    CONFIG: "a model, which the adapter would be put on",
}


class Target(ABC):
    """A place, as each rank has it for one save: from `begin` to `publish`, or to `discard` after an error.

    Every rank must call these, in `agreed`. What they raise is a `CheckpointError` or a `ConfigError`.
    """

    where: str
    """Its name for messages."""
    mark = ""
    """What no other save has in the names of its files, after `prepare`."""
    new: Path
    """On rank 0, a folder for all files but weights, under the names that they will have in the place."""
    weights: Mapping[str, str]
    """After `prepare`, the names of weight files in the place, by those in the layout."""
    others: tuple[str, ...]
    """After `prepare`, the names of all other files."""
    shows_all_at_once = False
    """Whether `publish` replaces any number of files in one step."""

    @classmethod
    @abstractmethod
    def at(cls, place: str) -> Self | None:
        """The place of this name, if it is one of these. No rank communicates."""

    @abstractmethod
    def files(self) -> Mapping[str, int]:
        """The sizes of the files that are there now, by their names; of a training state, also those in its folders."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file as it is now; None where there is none."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    def begin(self, stranger: str = "") -> None:
        """Make `new`. A `stranger` is a file that would be opened with what is saved."""

    @abstractmethod
    def publish(self, last: str, sizes: Mapping[str, int], stranger: str = "") -> None:
        """Make what was written the checkpoint of the place: files of these sizes, by their names, and what lies in
        `new`, of which the `last` one leads to all others. Next to an index, weights of other saves go."""

    @abstractmethod
    def discard(self) -> None:
        """Leave what was there as it was, unless something is published; no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def prepare(self, layout: Layout) -> None:
        """Make place for weights under the names that transformers gives to their files, next to what is in `new`.

        Where the place holds weights of an earlier save, or is not replaced at once, the mark of this save is part of
        the names (`model.1b0f5e9a-00001-of-00006.safetensors`), so that whoever has read an index never opens files of
        another save.
        """
        weights, others = {file: file for file in layout.sizes}, tuple[str, ...]()
        if rank_and_size()[0] == 0:
            others = self.new_names()
            if len(weights) > 1 or not self.shows_all_at_once:
                is_marked = not self.shows_all_at_once or any(map(WEIGHTS_OF_A_SAVE.fullmatch, self.files()))
                marked, single = f"model.{self.mark}" if is_marked else "model", "model-00001-of-00001.safetensors"
                weights = {f: (single if f == WEIGHTS else f).replace("model", marked, 1) for f in weights}
                others = (*others, WEIGHTS_INDEX)
        self.mark, self.weights, self.others = all_ranks((self.mark, weights, others), "preparing the save")[0]

    def new_names(self) -> tuple[str, ...]:
        """Names that the files in `new` will have in the place."""
        return tuple(sorted(f.relative_to(self.new).as_posix() for f in self.new.rglob("*") if f.is_file()))

    def _remove_weights(self, kept: Collection[str]) -> None:
        """Remove weight files to which nothing leads any more; warn if that fails, for the save has succeeded.

        Side by side if it may be: freeing the pages and blocks of a large file takes the system a while.
        """
        may_thread = self.shows_all_at_once and current_thread() is main_thread()  # or the interpreter may be ending
        try:
            names = [name for name in self.files() if WEIGHTS_OF_A_SAVE.fullmatch(name) and name not in kept]
            with ThreadPoolExecutor() if may_thread else nullcontext() as pool:
                list(pool.map(self.remove, names) if pool else map(self.remove, names))
        except (OSError, CheckpointError) as error:
            warn(
                f"{self.where!r} is saved, but weight files of an earlier save cannot be removed: {error}. They are "
                "not opened, but take space."
            )


class Stream(Protocol):
    """What takes the bytes of one file in order; it appears with `commit` and not before."""

    def write(self, data: memoryview) -> object:
        """Take the next bytes."""

    def commit(self) -> object:
        """Let the file appear."""

    def discard(self) -> object:
        """Forget what was written; no error."""


class WholeFiles(Target):
    """A place that takes whole files, and shows each when it is complete.

    Until the last file is put, in one step, whoever opens the place gets the checkpoint that was there: weight files
    have names that no save before had, and every checkpoint there has an index, also of one file. Files next to the
    weights that differ are put right before it; if that fails, the former ones are put back.
    """

    def check(self) -> None:
        """Refuse a place of which this rank lacks what it needs."""

    @abstractmethod
    def open(self, name: str, size: int) -> Stream:
        """A new file of so many bytes."""

    def lists(self, name: str) -> bool:
        """Whether `files` would have a file of this name."""
        return True

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in one step."""
        stream = self.open(name, len(content))
        stream.write(memoryview(content))
        stream.commit()

    def put_file(self, name: str, file: Path) -> None:
        """Write a file of a disk."""
        self.put(name, file.read_bytes())

    @cached_property
    def _held(self) -> ExitStack:
        return ExitStack()

    @cached_property
    def _own(self) -> dict[str, Stream | None]:
        """What this rank has written, which goes again if nothing is published."""
        return {}

    def begin(self, stranger: str = "") -> None:
        """Check, and refuse a place in which there is another kind of model; each rank has a folder of its own."""
        self.check()
        if stranger and rank_and_size()[0] == 0 and stranger in self.files():
            raise CheckpointError(f"{self.where!r} holds {_STRANGERS[stranger]}. Save to another place.")
        with storage_errors("write to", Path(gettempdir())):
            self.mark, self.new = secrets.token_hex(4), self._held.enter_context(temporary_folder())

    def stream(self, name: str, size: int) -> Stream:
        """A new file of this rank's. No rank communicates."""
        self._own[name] = stream = self.open(name, size)
        return stream

    def copy(self, name: str, file: Path) -> None:
        """Write a file of this rank's disk. No rank communicates."""
        self._own[name] = None
        self.put_file(name, file)

    def publish(self, last: str, sizes: Mapping[str, int], stranger: str = "") -> None:
        """Put all files, the last one last; if that fails, put back what was there."""
        self._own.clear()  # rank 0 has to remove it from now on
        if rank_and_size()[0] != 0:
            return
        former, gone = dict[str, bytes | None](), list[str]()
        try:
            there = self.files()
            wrong = [name for name, size in sizes.items() if self.lists(name) and there.get(name) != size]
            if wrong:
                found = listed((f"{name} has {there.get(name, 0)} of {sizes[name]} bytes" for name in wrong), 3)
                raise CheckpointError(
                    f"{self.where!r} does not hold what the ranks wrote: {found}. It must be the same store for all "
                    "ranks, and keep what is written there."
                )
            if last == WEIGHTS_INDEX and WEIGHTS in there:  # which would be opened in place of the index
                gone = [WEIGHTS]
            for name in (*(name for name in self.new_names() if name not in sizes and name != last), last):
                content, now = (self.new / name).read_bytes(), self.read(name)
                if now != content and (now is None or name != CARD):
                    former[name] = now
                    self.put(name, content)
            for name in gone:
                self.remove(name)
        except FSDPToolsError:
            if last not in former or not self._is_there(last, gone):
                for name, old in {**dict.fromkeys(sizes), **former}.items():
                    with suppress(Exception):  # the error that led here is the one to show
                        self.remove(name) if old is None else self.put(name, old)
                raise
        if last == WEIGHTS_INDEX:
            self._remove_weights({*sizes, last})
        self.discard()

    def _is_there(self, name: str, gone: Collection[str]) -> bool:
        """Whether requests of which one failed were done all the same."""
        try:
            return self.read(name) == (self.new / name).read_bytes() and not self.files().keys() & {*gone}
        except CheckpointError as error:
            raise CheckpointError(f"{name!r} may be written or not: {error} Look there.") from error

    def discard(self) -> None:
        """Remove what this rank has written."""
        for name, stream in self._own.items():
            if stream is not None:
                stream.discard()
            with suppress(Exception):  # nothing leads to it, and the error that led here is the one to show
                self.remove(name)
        self._own.clear()
        self._held.close()
