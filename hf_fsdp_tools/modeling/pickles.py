"""Read pickles, JSON and YAML of any origin: no code of theirs runs, and what is wrong is one error.

Weights, chunks of DCP, training states and adapters are read by `load_pickled` alone.
"""

import io
import json
import os
import pickle
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import GenerationConfig

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors, storage_errors
from hf_fsdp_tools.stores import open_file
from hf_fsdp_tools.text import first_line, quoted

MAX_PARSED_BYTES = 100_000_000
"""Bytes of the largest file that is parsed: the largest header of a safetensors file."""

_MOST_YAML_BYTES = 10**6
"""Bytes of YAML: a second is needed for a megabyte. (assumed)"""

_LONGEST_PLAIN = 1000
"""Characters of a value without quotes in YAML. (assumed)"""


def read_small(file: Path, most: int = MAX_PARSED_BYTES) -> bytes:
    """The bytes of a file that is parsed as a whole."""
    if (size := refuse_special(file)) > most:
        raise CheckpointError(f"{file}: is {size:,} bytes long, expected at most {most:,}. Save it again.")
    with watched(file), storage_errors("read", file):
        content = file.read_bytes()
    refuse_pointer(file, content)
    return content


def refuse_special(file: Path) -> int:
    """Refuse a file that is none on a disk: a pipe would wait for ever; return the size of others."""
    with watched(file), storage_errors("read", file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: is no regular file. Copy or save it again.")
    return status.st_size


def read_json_object(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file that must hold an object with unique keys."""
    return parse_json_object(file, read_small(file))


def parse_json_object(file: Path, text: bytes) -> dict[str, Any]:
    """A JSON object of a file, with unique keys."""
    with library_errors(f"{file}: is not valid JSON", "The file is damaged; download or save it again."):
        content = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {quoted(content)}. Download or save it again.")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {quoted(twice)} occurs twice")
    return entries


def load_yaml(file: Path) -> Any:
    """The content of a YAML file, in which every value is written out; whatever is wrong with it is a `YAMLError`."""
    content = read_small(file, _MOST_YAML_BYTES)
    try:
        return yaml.load(content, Loader=_WrittenOut)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of PyYAML, over dates, numbers and depths that it does not expect
        raise yaml.YAMLError(f"{type(error).__name__}: {first_line(error)}") from None


class _WrittenOut(yaml.SafeLoader):
    """Refuses what a short file can be endless with: values that are meant again, and numbers in base 60."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        is_long = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > _LONGEST_PLAIN
        if isinstance(event, yaml.AliasEvent) or is_long:
            said = f"the alias *{event.anchor}" if not is_long else f"a value of {len(event.value):,} characters"
            cure = "write the value out, in quotes where it is a long text"
            raise yaml.composer.ComposerError(None, None, f"{said} is not read here: {cure}", event.start_mark)
        return super().compose_node(parent, index)


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation settings of a folder, which older ones have in `config.json`; None where it has neither."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    with watched(folder):
        file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    options = {} if file == files[0] else {"config_file_name": file.name, "_from_model_config": True}
    read_json_object(file)
    with library_errors(f"{file}: cannot be used", "Save it again, or remove it."):
        return GenerationConfig.from_pretrained(folder, local_files_only=True, **options)


def refuse_pointer(file: Path, beginning: bytes) -> None:
    """Refuse the pointer that a clone without git-lfs leaves in place of a file."""
    if len(beginning) > 1 and b"version https://git-lfs".startswith(beginning[:20]):
        raise CheckpointError(
            f"{file}: is a pointer of git-lfs, expected the file itself. "
            "Run `git lfs pull` in its folder, or download it."
        )


# ---- what a pickle asks for, before it is read ----

_DEEPEST, _MOST_REPEATED, _MOST_DIMENSIONS = 100, 10**6, 64
"""What a pickle may have: tuples in each other, items that it means again, sizes of a tensor. (assumed)"""

_PLAIN = {
    "value": {b"N\x88\x89]}\x8f": 0, b"G": 8},
    "number": {b"K": 1, b"M": 2},
    "signed": {b"J": 4, b"\x8a": -1, b"\x8b": -4},
    "text": {b"U\x8cC": -1, b"TXB": -4, b"\x8d\x8e": -8},
    "put": {b"q": 1, b"r": 4, b"\x94": 0},
    "get": {b"h": 1, b"j": 4},
    "none": {b"\x80": 1, b"\x95": 8},
    "name": {b"c": 0},
    "mark": {b"(": 0},
    "end": {b".": 0},
}
_TAKING = {
    "tuple": {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3, b"t\x91": -1},
    "call": {b"R\x81": 2, b"\x92": 3},
    "into": {b"ab": 2, b"s": 3, b"eu\x90": -2},
    "value of": {b"Q": 1, b"\x93": 2},
}
_OPERATIONS = {code: (kind, size, 0) for kind, each in _PLAIN.items() for codes, size in each.items() for code in codes}
_OPERATIONS |= {code: (kind, 0, n) for kind, each in _TAKING.items() for codes, n in each.items() for code in codes}
"""The operations that writers of pickles use: kind, bytes of the argument (below 0: of the length before it), and
how many values it takes from the stack (below 0: those behind the mark, and all but one in front of it)."""


def refuse_endless(data: bytes) -> None:
    """Refuse a pickle that asks for more time or memory than its size shows; nothing of it is run.

    A hash walks through all tuples of a key. So of each tuple its depth and its items are known, those in it with them.
    """
    stack: list[
        Any
    ] = []  # a tuple or object: (depth, items, its own items); a number: 0 or -1; a text, name: its bytes
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = repeated = 0
    while True:
        if (code := data[at]) not in _OPERATIONS:
            raise ValueError(f"operation {code:#x} is none that torch or DCP writes")
        kind, size, taken = _OPERATIONS[code]
        begin, at = at + 1, at + 1 + size
        if size < 0:
            begin, at = begin - size, begin - size + int.from_bytes(data[begin : begin - size], "little")
        if kind == "put":
            number = int.from_bytes(data[begin:at], "little") if size else len(memo)
            if number > at:
                raise ValueError(f"place {number:,} of its memo is beyond its end")
            memo[number] = stack[-1]
        elif kind == "get":
            stack.append(value := memo[int.from_bytes(data[begin:at], "little")])
            if type(value) is tuple and (repeated := repeated + value[1]) > _MOST_REPEATED + at:
                raise ValueError(f"tuples are repeated until they hold more than {repeated:,} items")
        elif kind == "number":
            stack.append(0)
        elif kind == "value":
            stack.append(None)
        elif kind == "text":
            stack.append(data[begin:at])
        elif kind == "signed":
            stack.append(-1 if at > begin and data[at - 1] > 127 else 0)
        elif kind == "mark":
            marks.append(len(stack))
        elif kind == "name":
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            stack.append(data[begin : at - 1].rpartition(b"\n")[2])
        elif kind in _TAKING:
            start = marks.pop() + taken + 1 if taken < 0 else len(stack) - taken
            if start < (marks[-1] if marks else 0):
                raise ValueError("it takes values from where there are none")
            items = stack[start:]
            if kind == "call":
                _refuse_call(*items[:2])
            depth, count = 1, len(items)
            for item in items if kind in ("tuple", "call") else ():
                if type(item) is tuple:
                    depth, count = max(depth, item[0] + 1), count + item[1]
            if depth > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} tuples are in each other")
            if kind == "tuple":
                items = [(depth, count, items)]
            elif kind == "call":
                items = [(depth, count, ())]
            stack[start:] = items[:1] if kind != "value of" else items[1:] or [None]
        elif kind == "end":
            return


def _refuse_call(function: Any, arguments: Any) -> None:
    """Refuse a call whose numbers or codec take time and memory that nothing in the pickle shows."""
    values = arguments[2] if type(arguments) is tuple else [0]
    is_of_bytes = 0 not in values and (len(values) < 2 or values[1] in (b"latin1", b"latin-1"))
    if function in (b"bytearray", b"encode") and not is_of_bytes:
        raise ValueError(f"{function.decode()} is called otherwise than for bytes")
    if type(function) is bytes and function.startswith(b"_rebuild"):  # on meta, torch looks at no sign
        sizes = [value[2] for value in values if type(value) is tuple]
        if any(len(each) > _MOST_DIMENSIONS or -1 in each for each in sizes):
            raise ValueError(f"a tensor has a size or stride below 0, or more than {_MOST_DIMENSIONS} dimensions")


_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip record: lengths of its name and extra field, after which the data begins."""


class Pickled(NamedTuple):
    """The content of an archive of `torch.save`."""

    content: Any
    """The saved object."""

    records: dict[int, int]
    """Bytes of data by the place in the archive where they begin."""

    num_bytes: int
    """Bytes that were read."""


def load_pickled(
    file: Path, start: int = 0, length: int | None = None, *, device: str = "meta", safe: Sequence[Any] = ()
) -> Pickled:
    """Read an archive of `torch.save`, or one inside a file, by torch's restricted unpickler, which runs no code."""
    size = refuse_special(file)
    with storage_errors("read", file), open_file(file) as opened:
        window = _Window(file, opened, start, size if length is None else length)
        refuse_pointer(file, window.read(20))
        records = _records(file, window)
        window.seek(0)
        allowed = torch.serialization.get_safe_globals()  # stays as it is; the block takes its own away again
        with torch.serialization.safe_globals([each for each in safe if each not in allowed]):
            return Pickled(_unpickle(file, window, device), records, window.bytes_read)


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own; counts the bytes read."""

    def __init__(self, file: Path, opened: Any, start: int, length: int) -> None:
        self._file, self._opened, self._start, self.length = file, opened, start, length
        self._position = self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self.length)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self._position))
        with watched(self._file, self._start + self._position):
            self._opened.seek(self._start + self._position)
            done = self._opened.readinto(memoryview(buffer)[:count]) or 0
        self._position += done
        self.bytes_read += done
        return done


def _unpickle(file: Path, window: _Window, device: str) -> Any:
    """The saved object, by torch's restricted unpickler."""
    with library_errors(f"{file}: cannot be opened by torch.load", "The file is damaged; download or save it again."):
        try:
            return torch.load(window, map_location=device, weights_only=True)  # type: ignore[arg-type]  # a binary file
        except pickle.UnpicklingError as error:  # its context has the reason, before torch's own advice
            raise CheckpointError(
                f"{file}: holds more than tensors, and unpickling it could run code, so it was not opened "
                f"({first_line(error.__context__ or error)}). Where you trust its source, allow its classes: "
                "torch.serialization.add_safe_globals([…]). Convert weights to safetensors."
            ) from error


def _records(file: Path, window: _Window) -> dict[int, int]:
    """Position and length of the data of every record, by the archive's own directory.

    torch computes the position of a storage from how its own writer lays files out. The directory is the check, so that
    a file from elsewhere cannot make a tensor of other bytes. Compressed records are refused: they have other bytes.
    """
    with library_errors(f"{file}: is no archive as torch.save writes it since torch 1.6", _SAVE_AGAIN):
        archive = zipfile.ZipFile(window)
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise damaged(file, f"{quoted(entry.filename)} is compressed, expected an uncompressed record")
        if all(entry.header_offset for entry in entries):
            raise damaged(file, "has bytes in front of its archive")  # where Python and torch read other records
    records = {}
    for entry in entries:
        window.seek(entry.header_offset)
        head = window.read(30)
        if len(head) == 30:
            begin = entry.header_offset + 30 + sum(_LOCAL_HEADER.unpack(head))
            records[begin] = entry.file_size
            name = entry.orig_filename.lower()  # as torch looks for them
            if "/data/" in name:
                continue
            if entry.file_size > MAX_PARSED_BYTES:  # torch reads it whole
                raise damaged(file, f"{quoted(entry.filename)} has {entry.file_size:,} bytes, and is no tensor")
            window.seek(begin)
            if name.endswith("data.pkl"):
                with library_errors(f"{file}: cannot be opened", _SAVE_AGAIN):
                    refuse_endless(window.read(entry.file_size))
            elif name.endswith("byteorder") and (order := window.read(entry.file_size)) != b"little":
                # torch would swap the bytes of a meta tensor, which has none, and crash (2.13)
                raise damaged(file, f"has byte order {quoted(order)}, expected little")
    return records


_SAVE_AGAIN = (
    "The file is damaged or no checkpoint; download it again. Where you trust its source, save it again: "
    "torch.save(torch.load(file, weights_only=True), file)."
)


def damaged(file: Path, fact: str) -> CheckpointError:
    """The error about a file that `torch.save` did not write so."""
    return CheckpointError(f"{file}: {fact}. {_SAVE_AGAIN}")
