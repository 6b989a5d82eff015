"""Read pickles, JSON and YAML of any origin: no code runs, the time is bounded, nothing is inflated, one error each.

Weights, chunks of DCP, training states and adapters are read by `load_pickled` alone. The metadata of DCP is a pickle
without an archive; `refuse_endless` holds for it too.
"""

import io
import json
import os
import pickle
import pickletools
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
from hf_fsdp_tools.text import first_line, listed, quoted

MAX_PARSED_BYTES = 100_000_000
"""Bytes of the largest file that is parsed: the largest header of a safetensors file."""

_MOST_NESTED_YAML, _MOST_YAML_BYTES = 50, 10**6
"""Levels and bytes of YAML; a launch file has 2 levels, and a second is needed for a megabyte. (assumed)"""


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
    """The content of a YAML file without aliases: these, one in the other, make any amount of a few lines."""
    text, depth = read_small(file, _MOST_YAML_BYTES).decode(), 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line} has the alias *{event.anchor}; write it out")
        if depth > _MOST_NESTED_YAML:
            raise yaml.YAMLError(f"line {line} is nested more than {_MOST_NESTED_YAML} deep")
    return yaml.safe_load(text)


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


_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip record: lengths of its name and extra field, after which the data begins."""

_MOST_HELD = 10_000_000
"""Values in one container, with those of containers in it, however often one is held; or 8 a byte of the pickle."""

_MOST_NESTED = 100
"""Containers in containers: states of optimizers have five. (assumed)"""

_MOST_KEYS = 10_000
"""Keys that are neither texts nor integers of 32 bits, and so can be chosen to have equal hashes."""


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
    """Read an archive of `torch.save`, or one inside a file; no code of it is run.

    torch's restricted unpickler builds tensors and plain values only, after the pickle was followed without building
    anything (see `refuse_endless`).
    """
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
    a file from elsewhere cannot make a tensor of other bytes. Records of which a few bytes become many are refused:
    compressed ones, several in one place, a pickle too long.
    """
    with library_errors(f"{file}: is no archive as torch.save writes it since torch 1.6", _SAVE_AGAIN):
        archive = zipfile.ZipFile(window)
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise damaged(file, f"{quoted(entry.filename)} is compressed, expected an uncompressed record")
        if sum(entry.file_size for entry in entries) > window.length:
            raise damaged(file, f"its records hold more than the {window.length:,} bytes of the whole")
        orders = {archive.read(e) for e in entries if e.filename.endswith("byteorder") and e.file_size < 16}
        if orders - {b"little"}:  # torch would swap the bytes of a meta tensor, which has none, and crash (2.13)
            raise damaged(file, f"has byte order {listed(map(quoted, orders))}, expected little")
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if (num_bytes := sum(entry.file_size for entry in pickles)) > MAX_PARSED_BYTES:
            raise damaged(file, f"its pickle has {num_bytes:,} bytes, expected at most {MAX_PARSED_BYTES:,}")
        for entry in pickles:
            refuse_endless(archive.read(entry))
    records = {}
    for entry in entries:
        window.seek(entry.header_offset)
        head = window.read(30)
        if len(head) == 30:
            records[entry.header_offset + 30 + sum(_LOCAL_HEADER.unpack(head))] = entry.file_size
    return records


_SAVE_AGAIN = (
    "The file is damaged or no checkpoint; download it again. Where you trust its source, save it again: "
    "torch.save(torch.load(file, weights_only=True), file)."
)


def damaged(file: Path, fact: str) -> CheckpointError:
    """The error about a file that `torch.save` did not write so."""
    return CheckpointError(f"{file}: {fact}. {_SAVE_AGAIN}")


# ---- the size of what a pickle builds ----


class _Value:
    """A value that a pickle would build."""

    __slots__ = ("depth", "inside", "is_global", "is_odd", "num_odd", "num_values", "text")

    def __init__(self, argument: Any = None) -> None:
        self.text: Any = argument if isinstance(argument, (str, bytes)) else ""
        """A text, or the module and name of a class; of a tuple, that of its last value."""
        self.is_global = False
        self.is_odd = not isinstance(argument, (str, bytes, float, int)) or (
            isinstance(argument, int) and argument.bit_length() > 32
        )
        """Whether the file could choose its hash."""
        self.num_odd = 0
        """How many odd values it gives to a call, which may make keys of them."""
        self.num_values = 1
        """Values in it, however deep and however often."""
        self.depth = 0
        self.inside = False
        """Whether another value holds it already."""

    def hold(self, values: "Sequence[_Value]") -> None:
        """Put values into this one."""
        if values and (self.inside or any(value is self for value in values)):
            raise pickle.UnpicklingError("a container is filled after it was put into another")
        for value in values:
            value.inside = True
            self.num_values += value.num_values
            self.depth = max(self.depth, 1 + value.depth)


_INTO_TARGET = ("SETITEMS", "APPENDS", "ADDITEMS", "SETITEM", "APPEND", "BUILD")
"""Operations of a pickle that put values into the one below them."""


def refuse_endless(text: bytes) -> None:
    """Refuse a pickle that takes endless time or memory to load, although nothing in it runs.

    A dict hashes its keys, and a tuple's hash visits its values each time: tuples that hold the same tuples twice, and
    these others twice, end at no time with 40 such levels. So do lists for whoever follows them, integers of equal
    hashes, and texts that are encoded again and again. Nothing ends these from outside, so all values are counted
    first. A pickle may set attributes on a class, too; that is refused.
    """
    mark, stack = _Value(), list[_Value]()
    memo: dict[int, _Value] = {}
    num_keys, most_values = 0, max(_MOST_HELD, 8 * len(text))
    for operation, argument, _ in pickletools.genops(text):
        name = operation.name
        if num_keys > _MOST_KEYS:
            raise pickle.UnpicklingError(f"more than {_MOST_KEYS:,} keys are neither texts nor small integers")
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(mark)
        elif len(operation.stack_after) == 1:
            values = _taken(stack, operation.stack_before, mark)
            made = values.pop(0) if name in _INTO_TARGET else _Value(argument)
            if name == "BUILD" and made.is_global:
                raise pickle.UnpicklingError(f"it sets attributes of {quoted(made.text)}")
            if name == "REDUCE":
                _refuse_inflating(*values)
                num_keys += values[1].num_odd
            elif name.startswith(("SETITEM", "ADDITEM")):
                num_keys += sum(value.is_odd for value in (values[::2] if name.startswith("SETITEM") else values))
            elif name.startswith("APPEND"):
                made.num_odd += sum(value.is_odd for value in values)
            elif name.startswith("TUPLE") and values:
                made.text, made.num_odd = values[-1].text, sum(value.num_odd for value in values)
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                made.is_global = True
                made.text = made.text or " ".join(str(value.text) for value in values)
            elif name == "NEWOBJ":
                made.is_odd = False  # records of DCP's metadata
            made.hold(values)
            if made.num_values > most_values or made.depth > _MOST_NESTED:
                raise pickle.UnpicklingError(
                    f"containers hold {made.num_values:,} values in {made.depth} levels, expected at most "
                    f"{most_values:,} in {_MOST_NESTED}"
                )
            stack.append(made)
        else:
            raise pickle.UnpicklingError(f"operation {name} is none that torch writes")


def _taken(stack: list[_Value], before: Sequence[Any], mark: _Value) -> list[_Value]:
    """Take the values of an operation from the stack."""
    start = len(stack) - len(before)
    if pickletools.markobject in before:
        start = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is mark)
        start -= before.index(pickletools.markobject)
    values = [value for value in stack[start:] if value is not mark]
    del stack[start:]
    return values


def _refuse_inflating(function: _Value, arguments: _Value) -> None:
    """Refuse calls that make much of little; torch encodes bytes as latin1."""
    if function.text == "_codecs encode" and arguments.text not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it encodes as {quoted(arguments.text)}, expected latin1")
    if str(function.text).endswith(" bytearray"):
        raise pickle.UnpicklingError("it makes a bytearray, of any length")
