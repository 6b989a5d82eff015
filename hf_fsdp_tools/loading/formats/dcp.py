"""Read the `.metadata` of a `torch.distributed.checkpoint` (DCP) folder: its tensors and chunks; nothing is trusted.

Each rank of the saving job wrote its part of every tensor as one `torch.save` archive inside a `.distcp` file. With the
place of each chunk known, any number of ranks reads from them what its own shards need.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors
from hf_fsdp_tools.loading.formats.saved_names import SavedPath
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, StoredTensor, TensorChunk, check_cover, leaves_folder
from hf_fsdp_tools.modeling.pickles import load_pickled, refuse_endless
from hf_fsdp_tools.text import listed_lines, quoted

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

    Values other than tensors (step counts, random states) are left out.
    """
    file = folder / METADATA
    metadata, num_bytes = _read_metadata(file)
    problems: list[str] = []
    file_sizes: dict[Path, int] = {}
    with library_errors(f"{file}: is not as DCP writes it", "Save it again."):
        tensors = list(_tensors(file, metadata))
    for _, tensor in tensors:
        try:
            for chunk in tensor.chunks:
                _check_range(chunk.stored, file_sizes)
            check_cover(file, tensor.key, tensor.shape, [chunk.box for chunk in tensor.chunks])
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(listed_lines(problems, 3, head=""))  # a file that is gone is a problem of each tensor
    return tensors, num_bytes


def check_dcp(folder: Path) -> list[str]:
    """Refuse a DCP folder that would run code when torch reads it; return its keys, of tensors and of other values.

    torch unpickles the metadata, and every value that is no tensor, without restriction (2.13:
    `FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`). Call it before torch does; all values are read.
    """
    file = folder / METADATA
    metadata, _ = _read_metadata(file)
    with library_errors(f"{file}: is not as DCP writes it", "Save it again."):
        for index in metadata.storage_data:
            _place(file, metadata, index)
        values = [key for key, kind in metadata.state_dict_metadata.items() if type(kind) is dcp.BytesStorageMetadata]
        places = {key: _place(file, metadata, dcp.MetadataIndex(key)) for key in values}
    for key, (name, offset, length) in places.items():
        try:
            load_pickled(folder / name, offset, length)
        except CheckpointError as error:
            raise CheckpointError(f"{quoted(key)}: {error}") from None
    return list(metadata.state_dict_metadata)


# ---- the metadata file ----


_RECORDS = {
    **{(dcp.__name__, name): kind for name in dcp.__all__ if isinstance(kind := getattr(dcp, name), type)},
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
}
"""The records of DCP's metadata, by module and name."""


class _Unpickler(pickle.Unpickler):
    """Builds the records that DCP writes, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few classes of DCP's metadata; any other name would run code that the file chooses."""
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that DCP writes")


def _read_metadata(file: Path) -> tuple[dcp.Metadata, int]:
    """The metadata, of whose parts any may have another type than DCP gives them; and its bytes."""
    with watched(file):
        text = file.read_bytes()
    cure = "Save it again, or give the folder of a Hugging Face checkpoint."
    with library_errors(f"{file}: cannot be read as the metadata of torch.distributed.checkpoint", cure):
        refuse_endless(text)
        metadata = _Unpickler(io.BytesIO(text)).load()
        if not isinstance(metadata, dcp.Metadata) or not all(type(key) is str for key in metadata.state_dict_metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}, expected metadata of named tensors")
    return metadata, len(text)


def _tensors(file: Path, metadata: dcp.Metadata) -> Iterator[tuple[SavedPath, ChunkedTensor]]:
    """Yield each tensor with its path in the saved state dict; fails where a part is not as DCP writes it."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            continue
        path, dtype, shape = paths.get(key, (key,)), entry.properties.dtype, _sizes(entry.size)
        if not isinstance(path, (list, tuple)) or not all(type(part) in (str, int) for part in path):
            raise TypeError(f"the path of {quoted(key)} is {quoted(path)}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of {key!r} is {quoted(dtype)}")
        chunks = []
        for saved in entry.chunks:
            box = Box(start=_sizes(saved.offsets, len(shape)), length=_sizes(saved.sizes, len(shape)))
            if not box.numel:
                continue
            place, offset, length = _place(file, metadata, dcp.MetadataIndex(key, saved.offsets))
            ranges = ", ".join(f"{s}:{s + n}" for s, n in zip(box.start, box.length, strict=True))
            name = f"{key}[{ranges}]" if shape else key
            stored = StoredTensor(
                key=name, file=file.parent / place, dtype=dtype, shape=box.length, offset=offset, num_bytes=length
            )
            chunks.append(TensorChunk(box=box, stored=stored, is_archive=True))
        tensor = ChunkedTensor(key=key, file=file, dtype=dtype, shape=shape, chunks=tuple(chunks))
        yield tuple(str(part) for part in path), tensor


def _place(file: Path, metadata: dcp.Metadata, index: dcp.MetadataIndex) -> tuple[str, int, int]:
    """File name, position and length of a value or a chunk."""
    place = metadata.storage_data.get(index)
    if place is None:
        raise ValueError(f"{index.fqn!r} lies nowhere")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{index.fqn!r} is stored through a stream transform, through which no part can be read")
    name, (offset, length) = place.relative_path, _sizes((place.offset, place.length))
    if type(name) is not str:
        raise TypeError(f"the file of {index.fqn!r} is {quoted(name)}")
    if leaves_folder(name):
        raise CheckpointError(f"{file}: names {quoted(name)}, expected a file of the folder. Save it again.")
    return name, offset, length


def _sizes(sizes: Any, count: int | None = None) -> tuple[int, ...]:
    """A tuple of sizes, refused if it holds anything else than integers from 0 on, or not so many."""
    if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{quoted(sizes)} are no sizes")
    if count not in (None, len(sizes)):
        raise ValueError(f"{quoted(sizes)} are not {count} sizes")
    return tuple(sizes)


def _check_range(chunk: StoredTensor, file_sizes: dict[Path, int]) -> None:
    """Refuse a chunk that is not inside its file; sizes of files are looked up once."""
    if chunk.file not in file_sizes:
        with watched(chunk.file):
            file_sizes[chunk.file] = chunk.file.stat().st_size if chunk.file.is_file() else -1
    size = file_sizes[chunk.file]
    if chunk.offset + chunk.num_bytes > size:
        fact = "is not there" if size < 0 else f"is {size} bytes long"
        raise CheckpointError(
            f"{chunk.file}: {fact}, but {chunk.key!r} is at bytes {chunk.offset} to {chunk.offset + chunk.num_bytes}. "
            "The checkpoint is not complete: copy or save it again."
        )
