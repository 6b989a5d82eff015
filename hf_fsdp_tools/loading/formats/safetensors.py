"""Parse the header of a safetensors file, and join tensors of which several files hold a part each.

torch's `HuggingFaceStorageWriter(save_distributed=True)` writes parts (torchtitan, OpenRLHF and others save so).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors, storage_errors
from hf_fsdp_tools.hub import OF_GGUF
from hf_fsdp_tools.loading.formats.dcp import SavedPath
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, StoredTensor, check_cover
from hf_fsdp_tools.modeling.pickles import parse_json_object, refuse_pointer, refuse_special
from hf_fsdp_tools.text import dtype_name, listed, quoted

DTYPES: Mapping[str, torch.dtype] = {
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
"""Dtypes by their names in safetensors (https://github.com/huggingface/safetensors#format). Dtypes below one byte are
left out: torch cannot slice them."""

_DCP_INFO = "DCP_SHARDING_INFO"
"""Entry of a header's metadata with each tensor's place in a larger one (torch 2.9 to 2.14: `_hf_utils.py` of DCP)."""

_DAMAGED = "The file is damaged or not safetensors; download or save it again."


def parse_header(file: Path) -> tuple[list[tuple[SavedPath, StoredTensor]], int]:
    """The tensors of one safetensors file, in file order, with their paths; and the number of bytes read.

    safetensors itself checks lengths, shapes and byte ranges, which must cover the data without holes or overlaps.
    """
    refuse_special(file)
    with watched(file), storage_errors("read", file), open(file, "rb") as stream:
        prefix = stream.read(8)
        refuse_pointer(file, prefix)
        if prefix.startswith(b"GGUF"):
            raise CheckpointError(f"{file}: is a file of GGUF, not safetensors. {OF_GGUF}")
        try:
            with library_errors(f"{file}: cannot be read as safetensors", _DAMAGED), safe_open(file, framework="np"):
                text = stream.read(int.from_bytes(prefix, "little"))
        except MemoryError as error:  # of the address space, into which safetensors maps the file
            raise CheckpointError(f"{file}: cannot be mapped into memory: {error}. {_DAMAGED}") from None
    entries = parse_json_object(file, text)  # safetensors takes the last of equal keys, this none
    places = parse_json_object(file, entries.pop("__metadata__", {}).get(_DCP_INFO, "{}").encode())
    data_start = 8 + len(text)
    tensors = []
    for key, entry in entries.items():
        if len(key) > 1000:  # names are compared part by part
            raise CheckpointError(f"{file}: names a tensor by {len(key):,} characters. {_DAMAGED}")
        begin, end = entry["data_offsets"]
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise CheckpointError(
                f"{file}: {quoted(key)}: dtype {entry['dtype']} is not supported; supported: {', '.join(DTYPES)}. "
                "Save it in one of these."
            )
        tensor = StoredTensor(
            key=key,
            file=file,
            dtype=dtype,
            shape=tuple(entry["shape"]),
            offset=data_start + begin,
            num_bytes=end - begin,
            start=_start(file, key, entry["shape"], places[key]) if key in places else None,
        )
        tensors.append(tensor)
    return [((t.key,), t) for t in sorted(tensors, key=lambda t: (t.offset, t.num_bytes))], data_start


def _start(file: Path, key: str, shape: list[int], info: Any) -> tuple[int, ...]:
    start = info.get("saved_offsets") if isinstance(info, dict) else None
    is_start = isinstance(start, list) and len(start) == len(shape) and all(type(n) is int and n >= 0 for n in start)
    if start is None or not is_start:
        raise CheckpointError(
            f"{file}: {quoted(key)}: {_DCP_INFO} is {quoted(info)}, expected saved_offsets for {shape}. {_DAMAGED}"
        )
    return tuple(start)


def join_parts(key: str, parts: Sequence[StoredTensor]) -> StoredTensor | ChunkedTensor:
    """One tensor from all that files hold under its name; it ends where the last of its parts ends."""
    first = parts[0]
    if len(parts) == 1 and not any(first.start or ()):
        return first if first.start is None else replace(first, start=None)
    if (unplaced := next((part for part in parts if part.start is None), None)) is not None:
        other = next(part for part in parts if part is not unplaced)
        one, two = sorted((unplaced.file, other.file))
        raise CheckpointError(f"{two}: holds {key!r}, which {one.name} holds too; keep one of them.")
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        kinds = listed(f"{dtype_name(part.dtype)} {list(part.shape)} in {part.file.name}" for part in parts)
        raise CheckpointError(
            f"{first.file.parent}: the parts of {key!r} do not belong together: {kinds}. They come from several saves; "
            "save it again into an empty folder."
        )
    boxes = [part.box for part in parts]
    shape = tuple(max(box.start[dim] + box.length[dim] for box in boxes) for dim in range(len(first.shape)))
    named = (replace(part, key=f"{key}{list(part.box.start)} in {part.file.name}") for part in parts if part.box.numel)
    check_cover(first.file.parent, key, shape, [box for box in boxes if box.numel])
    return ChunkedTensor(key=key, file=first.file, dtype=first.dtype, shape=shape, parts=tuple(named))
