"""Parse the header of a safetensors file; nothing in the file is trusted."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType
from typing import Any

import torch

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.stored import MAX_KEY_LENGTH, StoredTensor
from hf_fsdp_tools.modeling.untrusted import refuse_pointer
from hf_fsdp_tools.text import quoted

MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes that the safetensors format allows."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""Dtypes by their names in safetensors (https://github.com/huggingface/safetensors#format). Dtypes below one byte are
left out: torch cannot slice them."""

_DCP_INFO = "DCP_SHARDING_INFO"
"""Entry of a header's metadata in which torch's `HuggingFaceStorageWriter` says which part of a tensor a file holds."""

_PARTS = frozenset(["dtype", "shape", "data_offsets"])


def parse_header(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of one safetensors file, in file order; and the number of bytes read to locate them.

    Nothing in the file is trusted: length, encoding, JSON, dtypes, shapes and byte ranges are checked, and ranges must
    cover the data without holes or overlaps, as the format demands.
    """
    try:
        with watched(file):
            status = file.stat()
            if not S_ISREG(status.st_mode):  # opening a named pipe waits for a writer for ever
                raise OSError("it is not a regular file")
            size = status.st_size
            with open(file, "rb") as stream:
                prefix = stream.read(8)
                length = int.from_bytes(prefix, "little")
                sane = len(prefix) == 8 and 8 + length <= size and length <= MAX_HEADER_BYTES
                text = stream.read(length) if sane else b""
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}. Check the path and its permissions.") from None
    refuse_pointer(file, prefix)
    if len(prefix) < 8:
        raise _damaged(file, f"is {size} bytes long; a safetensors file has at least 8")
    if length > MAX_HEADER_BYTES:
        raise _damaged(file, f"header length is {length} bytes; the format allows {MAX_HEADER_BYTES}")
    if len(text) < length:
        raise _damaged(file, f"header length is {length} bytes, but the file has {size - 8} bytes after the length")
    entries = parse_json(file, text, _entry)
    starts = _starts(file, entries.pop("__metadata__", None))
    tensors = [_parse_entry(file, key, value, 8 + length, starts) for key, value in entries.items()]
    tensors.sort(key=lambda t: (t.offset, t.num_bytes))
    _check_layout(file, tensors, 8 + length, size)
    return tensors, 8 + length


def parse_json(
    file: Path, text: bytes, made_of: Callable[[dict[str, Any]], Any] = lambda value: value
) -> dict[str, Any]:
    """A JSON object, the header of a safetensors file or an index file, as a dict with unique keys."""
    what = "it" if file.suffix == ".json" else "header"

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise json.JSONDecodeError(f"key {quoted(twice)} occurs twice", "", 0)
        return made_of(found)

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise _damaged(file, f"{what} is not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise _damaged(file, f"{what} is not valid JSON: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; thousands of brackets
        raise _damaged(file, f"{what} is not valid JSON: a number is too long, or it is nested too deeply") from None
    if not isinstance(entries, dict):
        raise _damaged(file, f"{what} is a JSON {type(entries).__name__}, expected an object")
    return entries


def _entry(value: dict[str, Any]) -> Any:
    """Of an object that describes a tensor, its parts as tuples: a third of the memory and time of dicts and lists."""
    if not value.keys() >= _PARTS:
        return value
    shape, offsets = value["shape"], value["data_offsets"]
    sizes = (tuple(part) if type(part) is list else part for part in (shape, offsets))
    return (value["dtype"], *sizes)


def _starts(file: Path, metadata: Any) -> Mapping[str, Any]:
    """What torch's `HuggingFaceStorageWriter` says in a header of each tensor's place in a larger one; empty without.

    torch 2.9 to 2.14: torch/distributed/checkpoint/_hf_utils.py.
    """
    said = metadata.get(_DCP_INFO) if isinstance(metadata, dict) else None
    if said is None:
        return {}
    if not isinstance(said, str):
        raise _damaged(file, f"{_DCP_INFO} is {quoted(said)}, expected a text")
    try:
        return parse_json(file, said.encode())
    except CheckpointError as error:
        raise CheckpointError(f"{_DCP_INFO} of {error}") from None


def _start(file: Path, key: str, shape: tuple[int, ...], info: Any) -> tuple[int, ...]:
    found = info.get("saved_offsets") if isinstance(info, dict) else None
    start = tuple(found) if isinstance(found, list) else ()
    if not isinstance(found, list) or not _are_sizes(start) or len(start) != len(shape):
        raise _damaged(file, f"{quoted(key)}: {_DCP_INFO} is {quoted(info)}, expected saved_offsets for {list(shape)}")
    return start


def _parse_entry(file: Path, key: str, value: Any, data_start: int, starts: Mapping[str, Any]) -> StoredTensor:
    """One entry of the header, checked by itself."""
    if type(value) is not tuple:
        raise _damaged(file, f"{quoted(key)}: expected dtype, shape and data_offsets, found {quoted(value)}")
    name, shape, offsets = value
    if len(key) > MAX_KEY_LENGTH:
        raise _damaged(file, f"{quoted(key)} has {len(key):,} characters; a name has at most {MAX_KEY_LENGTH:,}")
    if not isinstance(name, str) or name not in DTYPES:
        raise _damaged(file, f"{quoted(key)}: dtype {quoted(name)} is not supported; supported: {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise _damaged(file, f"{quoted(key)}: shape {quoted(shape)} is not a list of non-negative integers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"{quoted(key)}: data_offsets {quoted(offsets)} is not [begin, end]")
    begin, end = offsets
    dtype = DTYPES[name]
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise _damaged(file, f"{key!r}: {name} {list(shape)} needs {num_bytes} bytes, data_offsets give {end - begin}")
    start = _start(file, key, shape, starts[key]) if key in starts else None
    return StoredTensor(
        key=key, file=file, dtype=dtype, shape=shape, offset=data_start + begin, num_bytes=num_bytes, start=start
    )


def _check_layout(file: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    """Refuse tensors, sorted by offset, that leave holes, overlap, or do not fill the file to its end."""
    position, previous = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != position:
            beyond = next((t for t in tensors if t.offset + t.num_bytes > size), None)
            if beyond is not None:
                place = f"bytes {beyond.offset} to {beyond.offset + beyond.num_bytes}"
                raise _damaged(file, f"{beyond.key!r} is said to lie at {place}, but the file has {size} bytes")
            what = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise _damaged(
                file, f"{tensor.key!r} begins at byte {tensor.offset}, {what} {previous}, which ends at {position}"
            )
        position, previous = tensor.offset + tensor.num_bytes, repr(tensor.key)
    if size != position:
        what = "is truncated" if size < position else "has bytes that belong to no tensor"
        raise _damaged(file, f"{what}: it is {size} bytes long, its header describes {position}")


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of at most 64 integers from 0 to 2**63 - 1: what a shape or a byte range can be."""
    return type(value) is tuple and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _damaged(file: Path, fact: str) -> CheckpointError:
    kind = "no index of a checkpoint" if file.suffix == ".json" else "not safetensors"
    return CheckpointError(f"{file}: {fact}. The file is damaged or {kind}; download or save it again.")
