"""Read the `.metadata` of a `torch.distributed.checkpoint` (DCP) folder: its tensors and chunks; nothing is trusted.

Each rank of the saving job wrote its part of every tensor as one `torch.save` archive inside a `.distcp` file. With the
place of each chunk known, any number of ranks reads from them what its own shards need.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.dcp_pickle import load_metadata
from hf_fsdp_tools.loading.formats.pickled import check_value
from hf_fsdp_tools.loading.formats.saved_names import SavedPath
from hf_fsdp_tools.loading.formats.stored import MAX_KEY_LENGTH, ChunkedTensor, TensorChunk, leaves_folder
from hf_fsdp_tools.text import first_line, listed, listed_lines, quoted

METADATA = ".metadata"
"""Name of DCP's metadata file."""

MODEL_FOLDERS = "pytorch_model_fsdp_*"
"""DCP folders of models inside a folder that Accelerate's `save_state` or the Trainer wrote."""


def find_dcp_folder(folder: Path) -> Path | None:
    """The DCP folder of a model: `folder`, or the one inside it that Accelerate or the Trainer wrote; None without
    one.
    """
    if (folder / METADATA).is_file():
        return folder
    below = sorted(path.parent for path in folder.glob(f"{MODEL_FOLDERS}/{METADATA}"))
    if len(below) > 1:
        names = ", ".join(path.name for path in below)
        raise CheckpointError(f"{str(folder)!r} holds several models: {names}. Give the path of one of these folders.")
    return below[0] if below else None


def parse_dcp(folder: Path) -> tuple[list[tuple[SavedPath, ChunkedTensor]], int]:
    """The tensors of a DCP folder, each with its path in the saved state dict; and the bytes of the metadata.

    The metadata is a pickle, of which only DCP's own plain records are built. Values other than tensors (step counts,
    random states) are left out.
    """
    file = folder / METADATA
    with watched(file):
        text = file.read_bytes()
    metadata = _unpickle(file, text)
    storage = _storage(file, metadata)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    problems: list[str] = []
    sizes: dict[str, int] = {}
    tensors = []
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            continue
        try:
            _check_entry(file, key, entry)
            path = _path(file, key, paths.get(key, (key,)))
            chunks = [
                _parse_chunk(folder, key, chunk, storage, sizes) for chunk in entry.chunks if math.prod(chunk.sizes)
            ]
            check_cover(file, key, tuple(entry.size), [chunk.box for chunk in chunks])
        except CheckpointError as error:
            problems.append(str(error))
            continue
        tensor = ChunkedTensor(
            key=key, file=file, dtype=entry.properties.dtype, shape=tuple(entry.size), chunks=tuple(chunks)
        )
        tensors.append((path, tensor))
    if problems:
        raise CheckpointError(listed_lines(problems, 3, head=""))  # a file that is gone is a problem of each tensor
    return tensors, len(text)


def check_dcp(folder: Path) -> list[str]:
    """Refuse a DCP folder that would run code when torch reads it; return its keys, of tensors and of other values.

    torch unpickles the metadata, and every value that is no tensor, without restriction (2.13:
    `FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`). Call it before torch does; all values are read.
    """
    file = folder / METADATA
    metadata = _unpickle(file, file.read_bytes())
    storage = _storage(file, metadata)
    if outside := [place.relative_path for place in storage.values() if leaves_folder(place.relative_path)]:
        raise CheckpointError(f"{file}: names files outside the folder: {listed(map(quoted, outside))}. Save it again.")
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            place = storage.get(dcp.MetadataIndex(key))
            if place is None:
                raise CheckpointError(f"{file}: {quoted(key)} lies nowhere. Save it again.")
            check_value(folder / place.relative_path, key, place.offset, place.length)
    return list(metadata.state_dict_metadata)


# ---- the metadata file ----


def _unpickle(file: Path, text: bytes) -> dcp.Metadata:
    try:
        metadata = load_metadata(text)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(
            f"{file}: cannot be read as the metadata of torch.distributed.checkpoint: {first_line(error)}. Save it "
            "again, or give the folder of a Hugging Face checkpoint."
        ) from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise CheckpointError(f"{file}: holds a {type(metadata).__name__}, expected DCP metadata. Save it again.")
    if wrong := [key for key in metadata.state_dict_metadata if not _is_key(key)]:
        raise CheckpointError(
            f"{file}: {quoted(wrong[0])} is no name of a tensor, which is a text of at most {MAX_KEY_LENGTH:,} "
            "characters. Save it again."
        )
    return metadata


def _is_key(key: Any) -> bool:
    return type(key) is str and len(key) <= MAX_KEY_LENGTH


def _storage(file: Path, metadata: dcp.Metadata) -> dict[dcp.MetadataIndex, Any]:
    """DCP's records of where things lie, with the types that they must have.

    The keys are of DCP's own class, since sealed ones are equal to no other.
    """
    places = metadata.storage_data or {}
    if not isinstance(places, dict):
        raise CheckpointError(f"{file}: storage_data is a {type(places).__name__}, expected a dict. Save it again.")
    storage = {}
    for key, place in places.items():
        is_key = isinstance(key, dcp.MetadataIndex) and type(getattr(key, "fqn", None)) is str
        name = quoted(key.fqn) if is_key else f"a {type(key).__name__}"
        _expect(file, name, is_key and _is_sizes(key.offset or ()), "key of storage_data", key)
        is_place = isinstance(place, _StorageInfo) and type(getattr(place, "relative_path", None)) is str
        _expect(file, name, is_place, "place", place)
        place_range = (getattr(place, "offset", None), getattr(place, "length", None))
        _expect(file, name, _is_sizes(place_range), "byte range", place_range)
        storage[dcp.MetadataIndex(key.fqn, key.offset)] = place
    return storage


def _check_entry(file: Path, key: str, entry: Any) -> None:
    """Refuse a record of a tensor whose parts are not of the types that DCP gives them."""
    properties, chunks = getattr(entry, "properties", None), getattr(entry, "chunks", None)
    size: Any = getattr(entry, "size", None)
    _expect(file, quoted(key), isinstance(getattr(properties, "dtype", None), torch.dtype), "dtype", properties)
    _expect(file, quoted(key), _is_sizes(size), "size", size)
    _expect(file, quoted(key), isinstance(chunks, (list, tuple)), "list of chunks", chunks)
    for chunk in chunks or ():
        parts = (getattr(chunk, "offsets", None), getattr(chunk, "sizes", None))
        is_chunk = all(_is_sizes(part) and len(part or ()) == len(size) for part in parts)
        _expect(file, quoted(key), is_chunk, "chunk", parts)


def _is_sizes(value: Any) -> bool:
    """Whether a value is a tuple of at most 64 integers from 0 to 2**63 - 1."""
    return isinstance(value, tuple) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _path(file: Path, key: str, path: Any) -> SavedPath:
    """The path of a tensor in the saved state dict, as text; lists in it are no names, and may be nested endlessly."""
    is_path = isinstance(path, (list, tuple)) and all(type(part) in (str, int) for part in path)
    _expect(file, quoted(key), is_path and bool(path), "path", path)
    return tuple(str(part) for part in path)


def _expect(file: Path, name: str, is_so: bool, what: str, found: Any) -> None:
    """Refuse metadata in which `is_so` does not hold of a part."""
    if not is_so:
        raise CheckpointError(
            f"{file}: {name}: expected a {what} as DCP writes it, found {quoted(found)}. Save it again."
        )


def _parse_chunk(folder: Path, key: str, saved: Any, storage: Mapping[Any, Any], sizes: dict[str, int]) -> TensorChunk:
    """The place of one chunk of a tensor, checked against the sizes of the folder's files."""
    start, length = tuple(saved.offsets), tuple(saved.sizes)
    place = storage.get(dcp.MetadataIndex(key, saved.offsets))
    name = f"{key}[{', '.join(f'{s}:{s + n}' for s, n in zip(start, length, strict=True))}]" if start else key
    if place is None or leaves_folder(place.relative_path):
        found = "nowhere" if place is None else f"in {quoted(place.relative_path)}"
        raise CheckpointError(
            f"{folder / METADATA}: {name!r} lies {found}, expected a file of the folder. Save it again."
        )
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder / METADATA}: {name!r} is stored through {quoted(place.transform_descriptors)}; parts of it "
            "cannot be read. Save it without stream transforms."
        )
    file = folder / place.relative_path
    if place.relative_path not in sizes:
        with watched(file):
            sizes[place.relative_path] = file.stat().st_size if file.is_file() else -1
    size = sizes[place.relative_path]
    if not 0 <= place.offset <= place.offset + place.length <= size:
        found = "is not there" if size < 0 else f"is {size} bytes long"
        raise CheckpointError(
            f"{file}: {found}, but {name!r} is at bytes {place.offset} to {place.offset + place.length}. The "
            "checkpoint is not complete: copy or save it again."
        )
    box = Box(start=start, length=length)
    return TensorChunk(name=name, box=box, file=file, offset=place.offset, length=place.length)


def check_cover(file: Path, key: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse chunks that do not form a grid over the tensor: their ranges must follow each other in each dimension."""
    if not math.prod(shape):
        return
    cells = 1
    for dim, size in enumerate(shape):
        position = 0
        for start, length in (ranges := sorted({(box.start[dim], box.length[dim]) for box in boxes})):
            if start != position:
                break
            position += length
        cells *= len(ranges)
        if position != size:
            cells = -1
            break
    if cells != len(boxes) or len(set(boxes)) != len(boxes):
        raise CheckpointError(
            f"{file}: the chunks of {key!r} {list(shape)} leave something out or overlap: "
            f"{listed((box.start, box.length) for box in boxes)}. Some rank did not finish; save it again."
        )
