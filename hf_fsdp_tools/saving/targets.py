"""The places to which a checkpoint is saved that are no folders: a class for each, `TARGETS` has all.

A place takes whole files, one after another, and shows each when it is complete; whatever else is asked of a save
(which rank writes what, that the former checkpoint stays until the new one is there) is done in `saving.streamed`.
"""

from collections.abc import Mapping
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol, Self

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.stores import STATE_FOLDER_PREFIXES, Upload, as_url, files_at, open_store, store_errors, told


class Stream(Protocol):
    """What takes the bytes of one file in order; it appears with `commit` and not before."""

    def write(self, data: memoryview) -> object:
        """Take the next bytes."""

    def commit(self) -> object:
        """Let the file appear."""

    def discard(self) -> object:
        """Forget what was written; no error."""


class Target(Protocol):
    """A place, as each rank has it. What it raises is a `CheckpointError` or a `ConfigError`."""

    where: str
    """Its name for messages."""

    @classmethod
    def at(cls, place: str) -> Self | None:
        """The place of this name, if it is one of these. No rank communicates."""

    def check(self) -> None:
        """Refuse a place of which this rank lacks what it needs."""

    def files(self) -> Mapping[str, int]:
        """The sizes of the files that are there now, by their names; of a training state, also those in its folders."""

    def open(self, name: str, size: int) -> Stream:
        """A new file of so many bytes."""

    def read(self, name: str) -> bytes | None:
        """A small file as it is now; None where there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in one step."""

    def put_file(self, name: str, file: Path) -> None:
        """Write a file of a disk."""

    def remove(self, name: str) -> None:
        """Remove a file."""


class Store:
    """A place in a store of `fsspec`."""

    def __init__(self, url: str) -> None:
        self._url, self.where = url, told(url)

    @classmethod
    def at(cls, place: str) -> Self | None:
        """Of a URL ("s3://bucket/run")."""
        url = as_url(place)
        return None if url is None else cls(url)

    def check(self) -> None:
        """Each rank must have the protocol's package."""
        open_store(self._url)

    def files(self) -> Mapping[str, int]:
        """By one request for each folder."""
        return {name: file.size for name, file in files_at(self._url, below=STATE_FOLDER_PREFIXES).items()}

    def open(self, name: str, size: int) -> Stream:
        """Blocks go to the store while more come."""
        return Upload(f"{self._url}/{name}", size)

    def read(self, name: str) -> bytes | None:
        """Past what fsspec remembers."""
        with store_errors("read", f"{self._url}/{name}"), suppress(FileNotFoundError):
            self._fs.invalidate_cache(f"{self._path}/{name}")
            content: bytes = self._fs.cat_file(f"{self._path}/{name}")
            return content
        return None

    def put(self, name: str, content: bytes) -> None:
        """By one request."""
        with store_errors("write", f"{self._url}/{name}"):
            self._fs.pipe_file(f"{self._path}/{name}", content)

    def put_file(self, name: str, file: Path) -> None:
        """By as many requests as fsspec makes of it."""
        url = f"{self._url}/{name}"
        with store_errors("write", url), watched(Path(url)):
            self._fs.put_file(str(file), f"{self._path}/{name}")

    def remove(self, name: str) -> None:
        """By one request."""
        with store_errors("remove", f"{self._url}/{name}"):
            self._fs.rm_file(f"{self._path}/{name}")

    @property
    def _fs(self) -> Any:
        return open_store(self._url)[0]

    @property
    def _path(self) -> str:
        return open_store(self._url)[1]


TARGETS: list[type[Target]] = [Store]
"""In the order in which they are asked whether a name is theirs."""


def target_of(place: str | PathLike[str]) -> Target | Path:
    """The place of this name; the path of a folder, where it is no other."""
    text = fspath(place)
    return next((found for kind in TARGETS if (found := kind.at(text)) is not None), Path(text.removeprefix("file://")))
