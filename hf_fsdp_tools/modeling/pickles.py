"""Read what `torch.save` wrote, of any origin: no code runs, the time is bounded, and nothing is inflated.

Weights, chunks of DCP, training states and adapters are read by `load_pickled` alone. The metadata of DCP is a pickle
without an archive; `refuse_endless` holds for it too.
"""

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.modeling.untrusted import MAX_PARSED_BYTES, refuse_pointer
from hf_fsdp_tools.text import cut, first_line, listed, quoted

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip record: lengths of its name and extra field, after which the data begins."""

_MOST_OPERATIONS = 5_000_000
"""Of a pickle in an archive, some 50 a tensor: 100,000 tensors, and 15 s of a CPU. (measured)"""

_MOST_HASHED = 1_000
"""Values in one tuple, with those of tuples in it: Python's random state has 629. Each hash visits all of them."""

_MOST_HELD = 10_000_000
"""Values in one container, with those of containers in it, however often one is held; or 8 a byte of the pickle."""

_MOST_NESTED = 100
"""Containers in containers: states of optimizers have five. (assumed)"""

_MOST_KEYS = 10_000
"""Keys that are neither texts nor integers of 32 bits, and so can be chosen to have equal hashes."""

_LATIN = ("latin1", "latin-1")
"""How a pickle of protocol 2 holds bytes. Other codecs make texts longer, and so of few bytes any number of them."""


class Pickled(NamedTuple):
    """What an archive of `torch.save` holds."""

    content: Any
    """The saved object."""

    records: dict[int, int]
    """Bytes of data by the place in the archive where they begin."""

    num_bytes: int
    """Bytes that were read."""


def load_pickled(
    file: Path, start: int = 0, length: int | None = None, *, device: str = "meta", safe: Sequence[Any] = ()
) -> Pickled:
    """Read an archive of `torch.save`; no code of it is run.

    torch's restricted unpickler builds tensors and plain values only, after the pickle was followed without building
    anything (see `refuse_endless`).

    No rank communicates.
    """
    try:
        with watched(file):
            size = file.stat().st_size
        with _Window(file, start, size if length is None else length) as window:
            records = _records(file, window)
            window.seek(0)
            allowed = torch.serialization.get_safe_globals()  # stays as it is; the block takes its own away again
            with torch.serialization.safe_globals([each for each in safe if each not in allowed]):
                content = _unpickle(file, window, device)
            return Pickled(content, records, window.bytes_read)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}. Check the path and its permissions.") from None


class _Window(io.RawIOBase):
    """A part of a file as a file of its own; counts the bytes read."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        with watched(file, start):
            self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for ever
        self._file = file
        self._start, self._length, self._position = start, length, 0
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        position = self._start + self._position
        with watched(self._file, position):
            done = os.preadv(self._descriptor, [view[:count]], position) if count else 0
        self._position += done
        self.bytes_read += done
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _unpickle(file: Path, window: _Window, device: str) -> Any:
    """The saved object, by torch's restricted unpickler."""
    try:
        return torch.load(window, map_location=device, weights_only=True)  # type: ignore[arg-type]  # a binary file
    except pickle.UnpicklingError as error:
        named = (s for s in str(error).splitlines() if any(w in s for w in ("WeightsUnpickler", "GLOBAL", "upported")))
        line = next(named, first_line(error))
        raise CheckpointError(
            f"{file}: holds more than tensors, and unpickling it could run code, so it was not opened "
            f"({cut(line.strip(), 200)}). Where you trust its source, allow its classes: "
            "torch.serialization.add_safe_globals([…]). Convert weights to safetensors."
        ) from error
    except (OSError, MemoryError):
        raise
    except NotImplementedError as error:  # torch 2.15 reads the indices of sparse tensors, which meta has not
        raise damaged(file, "holds a tensor that is no plain dense tensor") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise damaged(file, f"cannot be opened by torch.load: {first_line(error)}") from error


def _records(file: Path, window: _Window) -> dict[int, int]:
    """Position and length of the data of every uncompressed record, by the archive's own directory.

    torch computes the position of a storage from how its own writer lays files out. The directory is the check, so that
    a file from elsewhere cannot make a tensor of other bytes.
    """
    if not (head := window.read(2)):
        raise damaged(file, "is empty, expected a zip archive")
    refuse_pointer(file, head)
    if head != b"PK":
        raise damaged(
            file,
            "is no zip archive, which torch.save writes since torch 1.6. If it is older, convert it once: "
            "torch.save(torch.load(file, weights_only=True), file)",
        )
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            _refuse_inflating(file, entries, window)
            orders = {archive.read(e) for e in entries if e.filename.endswith("byteorder") and e.file_size < 16}
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    refuse_endless(archive.read(entry), most=_MOST_OPERATIONS)
    except (OSError, MemoryError, CheckpointError):
        raise
    except Exception as error:  # of damaged archives, unknown compressions, encrypted entries; a pickle fails anyhow
        what = "is no complete zip archive" if isinstance(error, zipfile.BadZipFile) else "cannot be unpickled"
        raise damaged(file, f"{what}: {first_line(error)}") from error
    if orders - {b"little"}:  # torch would swap the bytes of a meta tensor, which has none, and crash (2.13)
        raise CheckpointError(
            f"{file}: has byte order {listed(map(quoted, orders))}, expected little. "
            "Save it on a little-endian machine."
        )
    found = {}
    for entry in entries:
        window.seek(entry.header_offset)
        head = window.read(30) or b""
        if len(head) == 30:
            found[entry.header_offset + 30 + sum(_LOCAL_HEADER.unpack(head))] = entry.file_size
    return found


def _refuse_inflating(file: Path, entries: Sequence[zipfile.ZipInfo], window: _Window) -> None:
    """Refuse records of which a few bytes become many: compressed ones, several in one place, a pickle too long."""
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(
                f"{file}: {quoted(entry.filename)} is compressed ({entry.file_size:,} bytes in "
                f"{entry.compress_size:,}), expected an uncompressed record of the archive, as torch.save writes it. "
                "Where you trust its source, save it again: torch.save(torch.load(file, weights_only=True), file)."
            )
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PARSED_BYTES:
            raise damaged(
                file, f"describes its content in {entry.file_size:,} bytes, expected at most {MAX_PARSED_BYTES:,}"
            )
    held, size = sum(entry.file_size for entry in entries), window.seek(0, os.SEEK_END)
    if held > size:
        raise damaged(file, f"its records hold {held:,} bytes, and the whole has {size:,}")


def damaged(file: Path, fact: str) -> CheckpointError:
    """The error about a file that `torch.save` did not write so."""
    return CheckpointError(f"{file}: {fact}. The file is damaged or no checkpoint; download or save it again.")


# ---- what a pickle would build ----


class _Value:
    """What is known of a value that a pickle builds."""

    __slots__ = ("chosen", "depth", "hashed", "held", "inside", "listed", "text")

    def __init__(self, argument: Any = None) -> None:
        is_text = isinstance(argument, (str, bytes))
        self.text: Any = argument if is_text else ""
        """A text, or the module and name of a class; of a tuple, that of its last value."""
        self.chosen = not (is_text or isinstance(argument, float))
        """Whether the file chooses its hash; Python itself chooses those of texts, with a seed."""
        if isinstance(argument, int) and argument.bit_length() <= 32:
            self.chosen = False
        self.listed = 0
        """How many such values it gives to a call, which may make keys of them."""
        self.held = self.hashed = 1
        """Values in it, however deep and however often; and those that its hash visits."""
        self.depth = 0
        self.inside = False
        """Whether something holds it already."""

    def hold(self, values: "Sequence[_Value]") -> "_Value":
        """Put values into this one."""
        if self.inside or any(value is self for value in values):
            raise pickle.UnpicklingError("a container is filled after it was put into another")
        for value in values:
            value.inside = True
            self.held += value.held
            self.depth = max(self.depth, 1 + value.depth)
        return self


_INTO_TARGET = ("SETITEMS", "APPENDS", "ADDITEMS", "SETITEM", "APPEND", "BUILD")
"""Operations of a pickle that put values into what lies below them."""

_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2, "APPEND": 1, "BUILD": 1}
"""How many values operations take; the other ones take all down to a mark."""

_CALLS = {"BINPERSID": 1, "REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2}
"""How many values calls take, whose result is put in their place."""


def refuse_endless(text: bytes, *, most: int | None = None) -> None:
    """Refuse a pickle that takes endless time or memory to load, although nothing in it runs.

    A dict hashes its keys, and a tuple's hash visits its values each time: tuples that hold the same tuples twice, and
    these others twice, end at no time with 40 such levels. So do lists for whoever follows them, keys of equal hashes,
    and texts that are encoded again and again. Nothing ends these from outside, so all values are counted first.
    """
    mark = _Value()
    stack: list[_Value] = []
    memo: dict[int, _Value] = {}
    keys, most_held = 0, max(_MOST_HELD, 8 * len(text))
    for count, (operation, argument, _) in enumerate(pickletools.genops(text)):
        name = operation.name
        if count == most:
            raise pickle.UnpicklingError(f"it has more than {most:,} operations")
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(mark)
        elif name in _CALLS:
            taken = stack[-_CALLS[name] :]
            del stack[-_CALLS[name] :]
            keys += _called(name, taken)
            made = _Value().hold(taken)
            made.chosen = name != "NEWOBJ"  # the records of DCP's metadata, whose own hash is guarded
            made.text = f"{taken[0].text} {taken[1].text}" if name == "STACK_GLOBAL" else ""
            stack.append(made)
        elif name in _TAKEN or name in _INTO_TARGET or name == "TUPLE":
            start = len(stack) - _TAKEN[name] if name in _TAKEN else _mark(stack, mark)
            values = [value for value in stack[start:] if value is not mark]
            del stack[start:]
            if name.startswith("TUPLE"):
                stack.append(_tuple(values))
            else:
                stack[-1].hold(values)
            if name.startswith(("SETITEM", "ADDITEM")):
                keys += sum(value.chosen for value in (values[::2] if name.startswith("SETITEM") else values))
            elif name.startswith("APPEND"):
                stack[-1].listed += sum(value.chosen for value in values)
        elif len(operation.stack_after) == 1 and not operation.stack_before:
            stack.append(_Value(argument))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise pickle.UnpicklingError(f"operation {name} is none that torch writes")
        if stack and stack[-1].held > most_held:
            raise pickle.UnpicklingError(f"containers in containers hold more than {most_held:,} values")
        if stack and stack[-1].depth > _MOST_NESTED:
            raise pickle.UnpicklingError(f"containers are nested more than {_MOST_NESTED} deep")
        if keys > _MOST_KEYS:
            raise pickle.UnpicklingError(f"more than {_MOST_KEYS:,} keys are neither texts nor small integers")


def _mark(stack: list[_Value], mark: _Value) -> int:
    """Where the last mark lies."""
    return next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is mark)


def _called(name: str, taken: list[_Value]) -> int:
    """Refuse calls that make much of little; how many keys the arguments may become."""
    if name == "REDUCE":
        function, arguments = taken
        if function.text == "_codecs encode" and arguments.text not in _LATIN:
            raise pickle.UnpicklingError(f"it encodes as {quoted(arguments.text)}, expected latin1")
        if function.text.endswith(" bytearray"):
            raise pickle.UnpicklingError("it makes a bytearray, of any length")
        return arguments.listed
    return 0


def _tuple(values: list[_Value]) -> _Value:
    """A tuple of values."""
    made = _Value().hold(values)
    made.text = values[-1].text if values else ""
    made.listed = sum(value.listed for value in values)
    made.hashed += sum(value.hashed for value in values)
    if made.hashed > _MOST_HASHED:
        raise pickle.UnpicklingError(f"tuples in tuples hold more than {_MOST_HASHED:,} values")
    return made
