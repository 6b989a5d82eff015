"""All kinds of places to which a checkpoint is saved: folders, stores of `fsspec`, and what is added to `TARGETS`."""

from collections.abc import Mapping
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Self

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.target import Stream, Target, WholeFiles
from hf_fsdp_tools.stores import STATE_FOLDER_PREFIXES, Upload, as_url, files_at, open_store, store_errors, told


class Store(WholeFiles):
    """A place in a store of `fsspec`."""

    def __init__(self, url: str) -> None:
        self._url, self.where = url, told(url)

    @classmethod
    def at(cls, place: str) -> Self | None:
        """A URL ("s3://bucket/run")."""
        url = as_url(place)
        return None if url is None else cls(url)

    def check(self) -> None:
        """Each rank must have the protocol's package."""
        open_store(self._url)

    def files(self) -> Mapping[str, int]:
        """By one request for each folder."""
        return {name: file.size for name, file in files_at(self._url, below=STATE_FOLDER_PREFIXES).items()}

    def lists(self, name: str) -> bool:
        """Folders of a state are listed, no others."""
        return "/" not in name or name.startswith(STATE_FOLDER_PREFIXES)

    def open(self, name: str, size: int) -> Stream:
        """Blocks go to the store while more come."""
        return Upload(f"{self._url}/{name}", size)

    def read(self, name: str) -> bytes | None:
        """Past what fsspec remembers."""
        with store_errors("read", f"{self._url}/{name}"), suppress(FileNotFoundError):
            fs, path = open_store(self._url)
            fs.invalidate_cache(f"{path}/{name}")
            content: bytes = fs.cat_file(f"{path}/{name}")
            return content
        return None

    def put(self, name: str, content: bytes) -> None:
        """By one request."""
        with store_errors("write", f"{self._url}/{name}"):
            fs, path = open_store(self._url)
            fs.pipe_file(f"{path}/{name}", content)

    def put_file(self, name: str, file: Path) -> None:
        """By as many requests as fsspec makes of it."""
        url = f"{self._url}/{name}"
        with store_errors("write", url), watched(Path(url)):
            fs, path = open_store(self._url)
            fs.put_file(str(file), f"{path}/{name}")

    def remove(self, name: str) -> None:
        """By one request."""
        with store_errors("remove", f"{self._url}/{name}"):
            fs, path = open_store(self._url)
            fs.rm_file(f"{path}/{name}")


TARGETS: list[type[Target]] = [Store, Folder]
"""In the order in which they are asked whether a name is theirs; a folder has any name."""


def target_of(place: str | PathLike[str]) -> Target:
    """The place of this name, for one save."""
    return next(found for kind in TARGETS if (found := kind.at(fspath(place))) is not None)
