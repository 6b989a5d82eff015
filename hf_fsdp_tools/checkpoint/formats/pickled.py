"""Locate the tensors of a `torch.save` file without reading their data: `pytorch_model.bin`, and chunks of DCP.

The file is a zip archive: one pickle, which describes tensors, and one uncompressed record of bytes per storage.
torch's restricted unpickler (`weights_only=True`) reads the description onto the meta device and notes where each
storage lies (torch 2.7 and newer). So the data can be read like that of other checkpoints: only the bytes of a shard.
"""

import io
import os
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from hf_fsdp_tools.checkpoint.formats.safetensors import refuse_pointer
from hf_fsdp_tools.checkpoint.formats.stored import MAX_KEY_LENGTH, StoredTensor, TensorChunk
from hf_fsdp_tools.checkpoint.formats.tuples import refuse_endless_tuples
from hf_fsdp_tools.checkpoint.regions import row_major_strides
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.modeling.untrusted import refuse_compressed
from hf_fsdp_tools.text import cut, first_line, listed, quoted

__all__ = ["check_value", "locate_chunk", "parse_pickled"]

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip record: lengths of its name and extra field, after which the data begins."""


def parse_pickled(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a state dict saved by `torch.save`, in its order; and the number of bytes read to locate them.

    No code of the file is run: torch's restricted unpickler builds tensors and plain containers only. Tied tensors
    share their bytes; transposed tensors keep their strides.

    Raises:
        CheckpointError: the file is damaged, holds anything but a dict of tensors, would run code, or has the format
            from before torch 1.6, whose data has no fixed place.
    """
    try:
        with watched(file):
            size = file.stat().st_size
        with _Window(file, 0, size) as window:
            records = _records(file, window)
            content = _unpickle(file, window)
            num_bytes = window.bytes_read
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}. Check the path and its permissions.") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _damaged(file, f"holds a {type(content).__name__}, expected a dict from names to tensors")
    others = [f"{quoted(key)} ({type(value).__name__})" for key, value in content.items() if not torch.is_tensor(value)]
    if others:
        raise _damaged(
            file, f"holds values that are no tensors: {listed(others)}; expected the state dict of a model alone"
        )
    if long := next((key for key in content if len(key) > MAX_KEY_LENGTH), None):
        raise _damaged(file, f"{quoted(long)} has {len(long):,} characters; a name has at most {MAX_KEY_LENGTH:,}")
    return [_locate_tensor(file, key, tensor, records, 0) for key, tensor in content.items()], num_bytes


def locate_chunk(chunk: TensorChunk, dtype: torch.dtype) -> StoredTensor:
    """Where the data of one chunk lies, from the head and tail of its own `torch.save` archive; no data is read.

    Raises:
        CheckpointError: the chunk is no such archive, or holds another tensor than the folder's metadata says.
    """
    try:
        with _Window(chunk.file, chunk.offset, chunk.length) as window:
            if window.read(2) != b"PK":
                raise _damaged(chunk.file, f"{chunk.name!r}: no archive of torch.save begins at byte {chunk.offset}")
            records = _records(chunk.file, window)
            tensor = _unpickle(chunk.file, window)
    except OSError as error:
        raise CheckpointError(f"{chunk.file}: cannot be read: {error}. Check the path and its permissions.") from None
    if not torch.is_tensor(tensor) or tuple(tensor.shape) != chunk.box.length or tensor.dtype != dtype:
        found = f"{tensor.dtype} {list(tensor.shape)}" if torch.is_tensor(tensor) else type(tensor).__name__
        raise _damaged(chunk.file, f"{chunk.name!r}: expected {dtype} {list(chunk.box.length)}, found {found}")
    stored = _locate_tensor(chunk.file, chunk.name, tensor, records, chunk.offset)
    if stored.strides is not None:
        raise CheckpointError(
            f"{chunk.file}: {chunk.name!r} was saved transposed (strides {list(stored.strides)}); only row-major "
            "chunks can be read. Make the parameter contiguous and save again."
        )
    return stored


def check_value(file: Path, key: str, offset: int, num_bytes: int) -> None:
    """Refuse a value saved by `torch.save` at a place of a file that holds more than tensors and plain containers.

    Raises:
        CheckpointError: the file is too short, the value is damaged, or unpickling it could run code.
    """
    try:
        with _Window(file, offset, num_bytes) as window:
            _records(file, window)
            _unpickle(file, window)
    except OSError as error:
        raise CheckpointError(f"{file}: {quoted(key)} cannot be read: {error}. Save it again.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{quoted(key)}: {error}") from None


class _Window(io.RawIOBase):
    """A part of a file as a file of its own; counts the bytes read."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        with watched(file, start):
            self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
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


def _unpickle(file: Path, window: _Window) -> Any:
    """The saved object, every tensor on meta."""
    window.seek(0)
    try:
        return torch.load(window, map_location="meta", weights_only=True)  # type: ignore[arg-type]  # a binary file
    except UnpicklingError as error:
        named = (s for s in str(error).splitlines() if any(w in s for w in ("WeightsUnpickler", "GLOBAL", "upported")))
        line = next(named, first_line(error))
        raise CheckpointError(
            f"{file}: holds more than tensors, and unpickling it could run code, so it was not opened "
            f"({cut(line.strip(), 200)}). Convert it to safetensors where you trust its source."
        ) from error
    except (OSError, MemoryError):
        raise
    except NotImplementedError as error:  # torch 2.15 reads the indices of sparse tensors, which meta has not
        raise _damaged(file, "holds a tensor that is no plain dense tensor") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damaged(file, f"cannot be opened by torch.load: {first_line(error)}") from error


def _records(file: Path, window: _Window) -> dict[int, int]:
    """Position and length of the data of every uncompressed record, by the archive's own directory.

    torch computes the position of a storage from how its own writer lays files out. The directory is the check, so that
    a file from elsewhere cannot make a tensor of other bytes.
    """
    window.seek(0)
    if not (head := window.read(2)):
        raise _damaged(file, "is empty, expected a zip archive")
    refuse_pointer(file, head)
    if head != b"PK":
        raise _damaged(
            file,
            "is no zip archive, which torch.save writes since torch 1.6. If it is older, convert it once: "
            "torch.save(torch.load(file, weights_only=True), file)",
        )
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            orders = {archive.open(e).read(16) for e in entries if e.filename.endswith("byteorder")}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        # what zipfile raises for damaged archives, unknown compressions and encrypted entries
        raise _damaged(file, f"is no complete zip archive: {first_line(error)}") from error
    refuse_compressed(file, entries)
    try:
        with zipfile.ZipFile(window) as archive:
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    refuse_endless_tuples(archive.read(entry))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damaged(file, f"cannot be unpickled: {first_line(error)}") from error
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


def _locate_tensor(file: Path, key: str, tensor: torch.Tensor, records: dict[int, int], start: int) -> StoredTensor:
    """The place of a meta tensor's elements in its file, checked against the archive's records."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise _damaged(file, f"{key!r} is no plain dense tensor ({tensor.layout}, {tensor.dtype})")
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    size = tensor.dtype.itemsize
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (offset not in records or (last + 1) * size > records[offset]):
        raise _damaged(
            file,
            f"{key!r}: its {tensor.numel() * size} bytes are not in an uncompressed record of the archive",
        )
    shape = tuple(tensor.shape)
    # The stride of a dimension of length one does not matter, and torch lets it be anything.
    plain = row_major_strides(shape)
    strides = tuple(p if n == 1 else s for n, s, p in zip(shape, tensor.stride(), plain, strict=True))
    if 0 in strides and tensor.numel():
        raise _damaged(file, f"{key!r} is an expanded tensor (strides {list(strides)}): save a contiguous copy")
    return StoredTensor(
        key=key,
        file=file,
        dtype=tensor.dtype,
        shape=shape,
        offset=start + (offset or 0) + int(tensor.storage_offset()) * size,
        num_bytes=tensor.numel() * size,
        strides=None if strides == plain or not tensor.numel() else strides,
    )


def _damaged(file: Path, fact: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {fact}. The file is damaged or no checkpoint of a model; download or save it again."
    )
