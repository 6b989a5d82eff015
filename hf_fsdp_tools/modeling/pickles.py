"""Read pickles, JSON and YAML of any origin: no code runs, the time is bounded, nothing is inflated, one error each.

Weights, chunks of DCP, training states and adapters are read by `load_pickled` alone. The metadata of DCP is a pickle
without an archive; `refuse_endless` holds for it too.
"""

import io
import json
import os
import pickle
import re
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
"""Values in one container, with those of containers in it, however often one is in it; or 8 a byte of the pickle."""

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
#
# DCP's metadata has 70 operations for each chunk, so the loop below keeps of a value only what it must know: a text is
# its bytes, a class its module and name, a number _ATOM, or _LARGE where its hash can be chosen; a tuple of these is
# 256 * the values in it + its depth. All else, and what may yet be filled, is a list of:
_VALUES, _DEPTH, _IS_INSIDE, _NUM_ODD, _IS_ODD, _LAST = range(6)
# the values in it, however deep and often; its depth; whether another holds it already; how many values with hashes of
# the file's choice it gives to a call, which may make keys of them; whether it is such a value; a tuple's last value.

_ATOM, _LARGE = 256, 512

_NUMBERS = dict(zip(b"KMJGN\x88\x89)", (1, 2, 4, 8, 0, 0, 0, 0), strict=True))
"""Operations for numbers and their like, with the bytes of each."""

_TEXTS = dict(zip(b"\x8cX\x8dUCB", (1, 4, 8, 1, 1, 4), strict=True))
"""Operations for texts, with the bytes of their lengths."""

_GET, _PUT, _NUMBER = ord("h"), ord("q"), struct.Struct("<I").unpack_from
_GETS, _PUTS = {_GET: 1, ord("j"): 4}, {_PUT: 1, ord("r"): 4}
"""Operations for what is remembered, with the bytes of its number."""

_SKIPPED = {0x80: 1, 0x95: 8, ord("Q"): 0}
"""PROTO and FRAME, with the bytes of their arguments; a storage (BINPERSID), for which its name may stand."""

_TUPLES = {ord("t"): 0, 0x85: 1, 0x86: 2, 0x87: 3}
_FILLS = dict(zip(b"baseu\x90", (1, 1, 2, 0, 0, 0), strict=True))
"""Operations that make tuples, and that put values into the one below, with their number; 0: all after a mark."""

_ADD_KEYS, _ADD_VALUES, _EMPTY, _CALLS, _REDUCE = b"su\x90", b"ae", b"]}\x8f", b"R\x81", ord("R")
_MEMOIZE, _MARK, _ADDITEMS, _GLOBAL, _STACK_GLOBAL, _LONG1, _STOP = b"\x94(\x90c\x93\x8a."

_LONGEST_NAME = 300
"""Bytes of a module's or a class's name of which more are not looked at."""

_RECORD = b")\x81\x94}\x94("
"""What follows a class where a record of DCP begins: NEWOBJ, and the dict of its fields."""

_SIZES = re.compile(
    rb"(?:N\x85|NN\x86|NNN\x87|\(N*t)\x94\x85\x94R\x94".replace(b"N", rb"(?:K.|M..|J.{4}|\x8a\x05.{5})"), re.DOTALL
)
"""What follows `torch.Size`: the tuple of numbers, the tuple of arguments, and the call."""


def refuse_endless(text: bytes) -> None:
    """Refuse a pickle that takes endless time or memory to load, although nothing in it runs.

    A dict hashes its keys, and a tuple's hash visits its values each time: tuples that hold the same tuples twice, and
    these others twice, end at no time with 40 such levels. So do lists for whoever follows them, integers of equal
    hashes, and texts that are encoded again and again. Nothing ends these from outside, so all values are counted
    first. A pickle may set attributes on a class, too; that is refused.
    """
    stack, marks, memo = list[Any](), list[int](), list[Any]()
    i, num_keys, most_values = 0, 0, max(_MOST_HELD, 8 * len(text))
    while (code := text[i]) != _STOP:
        i += 1
        if code in _GETS:
            value = memo[text[i] if code == _GET else _NUMBER(text, i)[0]]
            i += _GETS[code]
            stack.append(value)
            if type(value) is str and text.startswith(_RECORD, i):
                stack[-1:] = held = [3, 1, False, 0, False, None], [1, 0, False, 0, True, None]
                memo += held
                marks.append(len(stack))
                i += len(_RECORD)
            elif value == "torch Size" and (call := _SIZES.match(text, i)):
                most = 256 * (call.end() - i)  # of bytes, and so of values
                memo += most + 1, most + 2, most + 3
                stack[-1] = most + 3
                i = call.end()
        elif code in _FILLS:
            start = len(stack) - _FILLS[code] if _FILLS[code] else marks.pop()
            values = stack[start:]
            del stack[start:]
            if type(made := stack[-1]) is not list:
                raise pickle.UnpicklingError(f"it sets attributes of {quoted(made)}")
            _hold(made, values, most_values)
            if code in _ADD_KEYS:
                num_keys += _num_odd(values if code == _ADDITEMS else values[::2])
            elif code in _ADD_VALUES:
                made[_NUM_ODD] += _num_odd(values)
        elif code == _MEMOIZE:
            memo.append(stack[-1])
        elif code in _NUMBERS:
            stack.append(_ATOM)
            i += _NUMBERS[code]
        elif code == _MARK:
            marks.append(len(stack))
        elif code in _TEXTS:
            start = i + _TEXTS[code]
            i = start + int.from_bytes(text[i:start], "little")
            stack.append(text[start:i])
        elif code in _TUPLES:
            start = len(stack) - _TUPLES[code] if _TUPLES[code] else marks.pop()
            values = stack[start:]
            del stack[start:]
            made = [1, 0, False, 0, True, values[-1] if values else None]
            made[_NUM_ODD] = _hold(made, values, most_values)
            is_short = not made[_NUM_ODD] and type(made[_LAST]) is not bytes
            stack.append(256 * made[_VALUES] + made[_DEPTH] if is_short else made)
        elif code in _CALLS:
            function, arguments = values = stack[-2:]
            del stack[-2:]
            made = [1, 0, False, 0, code == _REDUCE, None]  # NEWOBJ makes records of DCP's metadata
            num_odd = _hold(made, values, most_values)
            if code == _REDUCE:
                _refuse_inflating(function, arguments)
                num_keys += num_odd
            stack.append(made)
        elif code in _EMPTY:
            stack.append([1, 0, False, 0, True, None])
        elif code in _PUTS:
            place = text[i] if code == _PUT else _NUMBER(text, i)[0]
            if place > len(memo):
                raise pickle.UnpicklingError("what it remembers is not numbered as torch does")
            memo[place : place + 1] = stack[-1:]
            i += _PUTS[code]
        elif code == _STACK_GLOBAL:
            stack[-2:] = [b" ".join(name[:_LONGEST_NAME] for name in stack[-2:]).decode()]
        elif code == _GLOBAL:
            start, i = i, text.index(b"\n", text.index(b"\n", i) + 1) + 1
            stack.append(text[start : i - 1].decode().replace("\n", " "))
        elif code == _LONG1:
            stack.append(_ATOM if text[i] < 5 else _LARGE)
            i += 1 + text[i]
        elif code in _SKIPPED:
            i += _SKIPPED[code]
        else:
            raise pickle.UnpicklingError(f"operation {bytes([code])!r} is none that torch writes")
    if num_keys > _MOST_KEYS:
        raise pickle.UnpicklingError(f"more than {_MOST_KEYS:,} keys are neither texts nor small integers")


def _hold(made: list[Any], values: Sequence[Any], most_values: int) -> int:
    """Put values into another; return how many odd ones they give to a call."""
    num_values, depth, num_odd = made[_VALUES], made[_DEPTH] or len(values[:1]), 0
    for value in values:
        if type(value) is int:
            num_values += value >> 8
            if value & 255 >= depth:
                depth = 1 + (value & 255)
        elif type(value) is list:
            value[_IS_INSIDE] = True
            num_values += value[_VALUES]
            num_odd += value[_NUM_ODD]
            if value[_DEPTH] >= depth:
                depth = 1 + value[_DEPTH]
        else:
            num_values += 1
    if made[_IS_INSIDE] and values:  # it may be one of the values
        raise pickle.UnpicklingError("a container is filled after it was put into another")
    if num_values > most_values or depth > _MOST_NESTED:
        raise pickle.UnpicklingError(
            f"containers hold {num_values:,} values in {depth} levels, expected at most {most_values:,} in "
            f"{_MOST_NESTED}"
        )
    made[_VALUES], made[_DEPTH] = num_values, depth
    return num_odd


def _num_odd(values: Sequence[Any]) -> int:
    """How many values there are whose hashes the file could choose."""
    count = 0
    for value in values:
        if type(value) is int:
            count += value != _ATOM
        elif type(value) is list:
            count += value[_IS_ODD]
    return count


def _refuse_inflating(function: Any, arguments: Any) -> None:
    """Refuse calls that make much of little; torch encodes bytes as latin1."""
    last = arguments[_LAST] if type(arguments) is list else None
    if function == "_codecs encode" and last not in (b"latin1", b"latin-1"):
        raise pickle.UnpicklingError(
            f"it encodes as {quoted(last.decode() if isinstance(last, bytes) else last)}, expected latin1"
        )
    if str(function).endswith(" bytearray"):
        raise pickle.UnpicklingError("it makes a bytearray, of any length")
