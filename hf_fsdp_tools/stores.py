"""Object stores and other file systems of `fsspec`: a checkpoint there as a local folder whose weights stay there.

A name with a protocol (`s3://bucket/run`) becomes a local stub: small files whole, and each weight file as a sparse
file of the same length that holds its header alone. So everything that looks at a checkpoint looks at a folder, and
what reads the bytes of weights (`loading.io.files`, `modeling.pickles`) asks here where they are. Credentials,
endpoints, timeouts and retries are fsspec's own settings (`fsspec.config`, `FSSPEC_S3_…`), and those of the protocol's
package.
"""

import io
import re
import shutil
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, cast

from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError
from hf_fsdp_tools.folders import temporary_folder
from hf_fsdp_tools.text import first_lines, listed, printable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?P<second>/?)(?P<rest>.*)")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".pkl")
"""How names of files end whose bytes are read by ranges; among them all that a training state has for each rank."""

_WHOLE = (".json", ".jinja", ".txt", ".model", ".py", ".metadata")
"""How names of files end that are fetched whole, next to those of an adapter (`adapter_model.*`), which PEFT reads."""

_MOST_WHOLE_BYTES = 10**9
"""Bytes of the largest file that is fetched whole: an adapter of a large model. (assumed)"""

_BLOCK_BYTES = 16 * 2**20
"""Bytes that one request writes, which are kept until it is done; S3 takes no fewer than 5 MiB. (assumed)"""

_MOST_HEADER_BYTES = 10**8
"""Bytes of the largest header that safetensors opens."""

STATE_FOLDER_PREFIXES = ("pytorch_model_fsdp_", "optimizer_")
"""How names of folders begin that hold models and optimizers of a training state."""

_GAP_BYTES = 4096
"""Unwanted bytes up to which ranges of a file are one request."""

_PARENT_CONFIGS = ("config.json", "adapter_config.json")
"""Files that belong to a training state and may lie up to two folders above it."""

_CURE = "Check the name, credentials, endpoint and network; what was there before is as it was."


def as_url(name: str | PathLike[str]) -> str | None:
    """The name of a place in a store (`s3://bucket/run`), without a slash at its end; None for other names."""
    text = fspath(name)
    found = _URL.fullmatch(text)
    if found is None or text.startswith(("file:", "local:")):
        return None
    if not found["second"]:
        with suppress(ImportError):  # without fsspec there are no stores, and the name is a folder's
            from fsspec.registry import known_implementations

            if text.partition(":")[0] in known_implementations:
                raise ConfigError(
                    f"{text!r} has one slash after the protocol, as a pathlib.Path makes of two. Give it as a text: "
                    f"{text.replace(':/', '://', 1)!r}."
                )
        return None
    return text.rstrip("/")


def local_folder(name: str | PathLike[str], what: str) -> Path:
    """A folder on a disk, for what is not written to or read from stores."""
    text = fspath(name)
    if _URL.fullmatch(text) and not text.startswith(("file:", "local:")):
        raise ConfigError(
            f"{what} and {text!r} is in a store. Give a folder on a disk, and copy it there or from there (fsspec's "
            "put and get). save_pretrained(model, url), from_pretrained(url), and an Accelerator's save_state(url) and "
            "load_state(url) take such names."
        )
    return Path(text.removeprefix("file://"))


@contextmanager
def store_errors(doing: str, url: str) -> Iterator[None]:
    """Turn any error of fsspec, or of the package of a protocol, into one error that names the place.

    They fail in many ways, and may answer what is no name or size of a file: a block holds their calls alone.
    """
    try:
        yield
    except (FSDPToolsError, MemoryError):
        raise
    except Exception as error:
        user = url.partition("://")[2].partition("/")[0].rpartition("@")[0]  # which the error may name on its own
        said = f"{type(error).__name__}: {first_lines(error)}".replace(f"{user}@", "" if user else "@")
        raise CheckpointError(f"Cannot {doing} {url!r}: {said}. {_CURE}") from None


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a place, and the place's name in it."""
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0].partition("::")[0]
    with store_errors("open", url):
        try:
            return cast(tuple[Any, str], url_to_fs(url))
        except ImportError as error:
            package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
            package = protocol if package in ("", "fsspec") else package
            raise ConfigError(
                f"{url!r} needs a package for {protocol}://, which is not installed ({first_lines(error)}): "
                f"pip install {package}"
            ) from None
        except ValueError as error:
            known = listed(sorted(known_implementations), 8)
            raise ConfigError(f"{url!r} cannot be opened: {first_lines(error)}. fsspec knows {known}, …") from None


@dataclass
class Upload:
    """A new file in a store, written from its beginning to its end; it appears with `commit` and not before."""

    url: str
    size: int
    _file: Any = None

    def write(self, data: memoryview) -> None:
        """Take the next bytes; a block at a time goes to the store, which may hold ten thousand blocks of a file."""
        with store_errors("write", self.url):
            if self._file is None:
                fs, path = open_store(self.url)
                block = max(_BLOCK_BYTES, -(-self.size // 9000 // 2**20) * 2**20)
                self._file = fs.open(path, "wb", block_size=block, autocommit=False)
                with suppress(AttributeError, ValueError):  # where fsspec keeps it for a transaction that is none
                    fs.transaction.files.remove(self._file)
            self._file.write(data)

    def commit(self) -> None:
        """Let the file appear."""
        with store_errors("write", self.url):
            self._file.close()
            if hasattr(self._file, "commit"):  # file systems without a commit show what is being written, unnamed
                self._file.commit()

    def discard(self) -> None:
        """Forget what was written; no error."""
        with suppress(Exception):  # the error that led here is the one to show
            self._file.discard()
            self._file.closed = True  # what collects garbage would write the rest


# ---- what is there ----


@dataclass(frozen=True)
class StoredObject:
    """One file in a store, as it was when it was listed."""

    fs: Any
    path: str
    """Its name in the file system."""
    url: str
    size: int
    version: tuple[int, int]
    """A number that changes when it is replaced, where the store tells it; and its length."""
    _held: list[tuple[int, bytes]] = field(default_factory=list, compare=False, repr=False)
    """Ranges that were fetched ahead (`at_hand`), each with its beginning, in order."""

    def read(self, start: int, stop: int) -> bytes:
        """A range of its bytes; an error where it has fewer. Any number of threads may call."""
        if start >= stop:  # stores refuse empty ranges
            return b""
        if (i := bisect_right(self._held, start, key=itemgetter(0))) > 0:
            first, block = self._held[i - 1]
            if stop <= first + len(block):
                return block[start - first : stop - first]
        with store_errors("read", self.url):
            content: bytes = self.fs.cat_file(self.path, start=start, end=stop)
        if len(content) != stop - start:
            raise CheckpointError(
                f"{self.url}: ends at byte {start + len(content)}, expected {stop} or more; it was replaced since it "
                "was opened. Load the checkpoint again."
            )
        return content

    def version_now(self) -> tuple[int, int]:
        """Its version as the store says it now; (0, 0) for a file that is gone."""
        with store_errors("read", self.url):
            try:
                self.fs.invalidate_cache(self.path)
                return _version(self.fs.info(self.path))
            except FileNotFoundError:
                return 0, 0


def _version(info: Mapping[str, Any]) -> tuple[int, int]:
    """What changes when a file is replaced, by whichever of these the file system tells (all of fsspec's differ)."""
    names = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
    first = next((str(info[name]) for name in names if info.get(name)), "")
    return zlib.crc32(first.encode()) + 1, int(info["size"] or 0)


def files_at(url: str, *, below: tuple[str, ...] = ()) -> dict[str, StoredObject]:
    """The files directly in a folder, by name; of a file, itself. Empty where there is nothing.

    With `below`, also those of folders whose names begin with one of these, by their paths.
    """
    fs, path = open_store(url)
    found: dict[str, StoredObject] = {}
    with store_errors("list", url), suppress(FileNotFoundError):
        fs.invalidate_cache(path)
        for entry in fs.ls(path, detail=True):
            name = str(entry["name"]).rstrip("/")
            last = name.rpartition("/")[2]
            place = url if name == path.rstrip("/") else f"{url}/{last}"
            if entry["type"] == "file" and not str(entry["name"]).endswith("/"):
                found[last] = StoredObject(fs, name, place, int(entry["size"] or 0), _version(entry))
            elif last.startswith(below) and place != url:
                found |= {f"{last}/{file}": there for file, there in files_at(place).items()}
    return found


# ---- a stub of it ----

_held = ExitStack()
_root = cache(lambda: _held.enter_context(temporary_folder()))
_stubs: dict[str, tuple[dict[str, StoredObject], Path]] = {}
_replaced: dict[str, Path] = {}
"""By URL: what was there and the folder (or file) that stands for it; the stub of what was there before that."""

_objects: dict[Path, StoredObject] = {}
"""By the stub of a weight file."""

_pinned: ContextVar[dict[str, Path] | None] = ContextVar("_pinned", default=None)


@contextmanager
def pinned() -> Iterator[None]:
    """Let each URL mean one version of what is there for a block, and errors of it name URLs in place of stubs."""
    held = _pinned.get()
    token = _pinned.set({} if held is None else held)
    try:
        yield
    except FSDPToolsError as error:
        if (text := told(str(error))) == str(error):
            raise
        raise type(error)(text) from None
    finally:
        _pinned.reset(token)


def told(text: str) -> str:
    """A text with URLs in place of their stubs, as it may leave the program."""
    for url, (_, stub) in _stubs.items():
        text = text.replace(str(stub), url)
    return printable(text)


def stub_of(url: str) -> Path:
    """The local stub of what lies at a URL now: made once per process, and again where that has changed.

    No rank communicates. Small files and headers are read, weights are not. Old stubs are removed in time.
    """
    held = _pinned.get()
    if held is not None and url in held:
        return held[url]
    for _ in range(3):
        files = files_at(url, below=STATE_FOLDER_PREFIXES)
        known = _stubs.get(url)
        if known is not None and _same(known[0], files):
            break
        if not files:
            raise CheckpointError(f"No checkpoint at {url!r}: there are no files of that name. {_CURE}")
        try:
            with store_errors("open", url):
                made = _make_stub(url, files)
        except CheckpointError:
            if _same(files, files_at(url, below=STATE_FOLDER_PREFIXES)):
                raise
            continue
        if _same(files, files_at(url, below=STATE_FOLDER_PREFIXES)):  # otherwise a save has replaced it meanwhile
            if former := _replaced.pop(url, None):
                _remove(former)
            if known is not None:  # which a load that began before it was replaced may still read
                _replaced[url] = known[1]
            known = _stubs[url] = (files, made)
            break
    else:
        raise CheckpointError(f"{url}: changes while it is opened. Open it again when the save there is over.")
    if held is not None:
        held[url] = known[1]
    return known[1]


def _remove(stub: Path) -> None:
    """Remove a stub of what is no longer there; who still holds it is answered that its files are gone."""
    folder = _root() / stub.relative_to(_root()).parts[0]
    for file in [file for file in [*_objects] if file.is_relative_to(folder)]:
        del _objects[file]
    shutil.rmtree(folder, ignore_errors=True)


def stored_object(file: Path) -> StoredObject | None:
    """The file in a store for which a local file stands; None for a file of its own."""
    return _objects.get(file) if _objects else None


def name_of(file: Path) -> str:
    """The name of a file for messages: the URL of that for which it stands."""
    there = stored_object(file)
    return str(file) if there is None else there.url


def open_file(file: Path) -> BinaryIO:
    """Open a file, or that for which it stands, to read some of its bytes."""
    if (there := stored_object(file)) is None:
        return file.open("rb", buffering=0)
    raw = _Ranges(there)
    return cast(BinaryIO, raw if there._held else io.BufferedReader(raw, 2**16))


def fetch_whole(files: Iterable[Path]) -> None:
    """Bring the content of files into their stubs, which are then files as others are; side by side."""
    wanted = {file: there for file in files if (there := stored_object(file)) is not None}
    contents = _ranges([(there, 0, there.size) for there in wanted.values()])
    for file, content in zip(wanted, contents, strict=True):
        file.write_bytes(content)
        del _objects[file]


@contextmanager
def at_hand(ranges: Iterable[tuple[Path, int, int]]) -> Iterator[None]:
    """Fetch ranges of files in few requests, side by side, and hold them for a block; those of local files are not."""
    joined: list[tuple[StoredObject, int, int]] = []
    for file, start, stop in sorted(ranges):
        if (there := stored_object(file)) is None:
            continue
        if joined and joined[-1][0] is there and start <= joined[-1][2] + _GAP_BYTES:
            joined[-1] = (there, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((there, start, stop))
    try:
        for (there, start, _), content in zip(joined, _ranges(joined), strict=True):
            there._held.append((start, content))
        yield
    finally:
        for there, _, _ in joined:
            there._held.clear()


class _Ranges(io.RawIOBase):
    """A file in a store, each read of which is one of a range."""

    def __init__(self, there: StoredObject) -> None:
        self._there, self._position = there, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._there.size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = max(self._position, min(self._there.size, self._position + len(buffer)))
        content = self._there.read(self._position, stop)
        buffer[: len(content)], self._position = content, stop
        return len(content)


def _same(one: Mapping[str, StoredObject], other: Mapping[str, StoredObject]) -> bool:
    return {name: file.version for name, file in one.items()} == {name: file.version for name, file in other.items()}


def _make_stub(url: str, files: Mapping[str, StoredObject]) -> Path:
    base = Path(tempfile.mkdtemp(dir=_root())) / "above" / "near"  # both belong to it: a config may lie there
    folder = base / (url.rpartition("/")[2] or "root")
    if len(files) == 1 and next(iter(files.values())).url == url:
        folder = base
    folder.mkdir(parents=True)
    if "config.json" not in files and folder != base:
        _fetch_above(url, folder)
    whole, weights = {}, {}
    for name, file in files.items():
        last, is_of_adapter = name.rpartition("/")[2], name.startswith("adapter_model.")
        if (last.endswith(_WHOLE) or is_of_adapter) and file.size <= _MOST_WHOLE_BYTES:
            whole[name] = file
        elif last.endswith(_WEIGHTS):
            weights[name] = file
    headers = _headers([file for name, file in weights.items() if name.endswith(".safetensors")])
    for name, content in zip(whole, _ranges([(file, 0, file.size) for file in whole.values()]), strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name, file in weights.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as stream:
            stream.write(headers.get(file.url, b""))
            stream.truncate(file.size)
        _objects[folder / name] = file
    return folder / next(iter(files)) if folder == base else folder


def _fetch_above(url: str, folder: Path) -> None:
    """Fetch the configs of a training state from the two folders above it, where there are any."""
    for above in list(folder.parents)[:2]:
        url = url.rpartition("/")[0]
        if url.endswith("/"):  # there is nothing above a bucket
            return
        fs, path = open_store(url)
        for name in _PARENT_CONFIGS:
            with store_errors("read", f"{url}/{name}"), suppress(FileNotFoundError):
                (above / name).write_bytes(fs.cat_file(f"{path.rstrip('/')}/{name}"))


def _headers(files: Sequence[StoredObject]) -> dict[str, bytes]:
    """What stands before the data of each file of safetensors, by URL: two requests for each, side by side."""
    lengths = _ranges([(file, 0, min(8, file.size)) for file in files])
    stops = [min(file.size, 8 + int.from_bytes(length, "little")) for file, length in zip(files, lengths, strict=True)]
    stops = [stop if stop <= _MOST_HEADER_BYTES else 8 for stop in stops]
    texts = _ranges([(file, min(8, stop), stop) for file, stop in zip(files, stops, strict=True)])
    return {file.url: a + b for file, a, b in zip(files, lengths, texts, strict=True)}


def _ranges(wanted: Sequence[tuple[StoredObject, int, int]]) -> list[bytes]:
    """Ranges of several files of one file system, side by side."""
    contents = [b""] * len(wanted)
    if some := [i for i, (_, start, stop) in enumerate(wanted) if stop > start]:
        first = wanted[some[0]][0]
        with store_errors("read", first.url):
            paths, starts, stops = zip(*((wanted[i][0].path, *wanted[i][1:]) for i in some), strict=True)
            found = first.fs.cat_ranges(list(paths), list(starts), list(stops), on_error="return")
            for i, content in zip(some, found, strict=True):
                file, start, stop = wanted[i]
                if isinstance(content, Exception):
                    raise content
                if len(content) != stop - start:
                    raise CheckpointError(f"{file.url}: has changed while it was opened. Open it again.")
                contents[i] = content
    return contents
