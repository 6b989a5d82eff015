"""Locate the tensors of a `torch.save` file without reading their data: `pytorch_model.bin`, and chunks of DCP.

torch's restricted unpickler (`weights_only=True`) puts them on meta, and notes where each storage lies in the zip file.
"""

from pathlib import Path
from typing import Any

import torch

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.dcp import SavedPath
from hf_fsdp_tools.loading.formats.stored import StoredTensor
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.modeling.pickles import damaged, load_pickled
from hf_fsdp_tools.text import listed, quoted


def parse_pickled(file: Path) -> tuple[list[tuple[SavedPath, StoredTensor]], int]:
    """The tensors of a state dict saved by `torch.save`, in its order, with their paths; and the number of bytes read.

    Lightning and Fabric save a dict in which the state dict of the model is one value of several.
    """
    content, records, num_bytes = load_pickled(file)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise damaged(file, f"holds a {type(content).__name__}, expected a dict from names to tensors")
    no_tensors = [
        f"{quoted(key)} ({type(value).__name__})" for key, value in content.items() if not torch.is_tensor(value)
    ]
    parts = {(key,): value for key, value in content.items() if _is_state(value)} if no_tensors else {(): content}
    if not parts:
        raise damaged(
            file, f"holds values that are no tensors: {listed(no_tensors)}; expected the state dict of a model alone"
        )
    named = [((*part, name), tensor) for part, state in parts.items() for name, tensor in state.items()]
    return [(path, _locate_tensor(file, ".".join(path), tensor, records, 0)) for path, tensor in named], num_bytes


def _is_state(value: Any) -> bool:
    named = value.items() if isinstance(value, dict) else ()
    return bool(named) and all(isinstance(name, str) and torch.is_tensor(tensor) for name, tensor in named)


def locate_chunk(archive: StoredTensor) -> StoredTensor:
    """Where the data of one chunk lies, from the head and tail of its own `torch.save` archive; no data is read."""
    file, key = archive.file, archive.key
    try:
        tensor, records, _ = load_pickled(file, archive.offset, archive.num_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {key!r} at byte {archive.offset}: {error}") from None
    kind = (tensor.dtype, tuple(tensor.shape)) if torch.is_tensor(tensor) else type(tensor).__name__
    if kind != (archive.dtype, archive.shape):
        raise damaged(file, f"{key!r}: expected {archive.dtype} {list(archive.shape)}, found {kind}")
    stored = _locate_tensor(file, key, tensor, records, archive.offset)
    if stored.strides is not None:
        raise damaged(
            file, f"{key!r} was saved transposed (strides {list(stored.strides)}), expected a row-major chunk"
        )
    return stored


def _locate_tensor(file: Path, key: str, tensor: torch.Tensor, records: dict[int, int], start: int) -> StoredTensor:
    """The place of a meta tensor's elements in its file, checked against the archive's records."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise damaged(file, f"{key!r} is no plain dense tensor ({tensor.layout}, {tensor.dtype})")
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    size = tensor.dtype.itemsize
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (offset not in records or (last + 1) * size > records[offset]):
        raise damaged(
            file, f"{key!r}: its {tensor.numel() * size} bytes are not in an uncompressed record of the archive"
        )
    shape = tuple(tensor.shape)
    # The stride of a dimension of length one does not matter, and torch lets it be anything.
    plain = row_major_strides(shape)
    strides = tuple(p if n == 1 else s for n, s, p in zip(shape, tensor.stride(), plain, strict=True))
    if 0 in strides and tensor.numel():
        raise damaged(file, f"{key!r} is an expanded tensor (strides {list(strides)}): save a contiguous copy")
    return StoredTensor(
        key=key,
        file=file,
        dtype=tensor.dtype,
        shape=shape,
        offset=start + (offset or 0) + int(tensor.storage_offset()) * size,
        num_bytes=tensor.numel() * size,
        strides=None if strides == plain or not tensor.numel() else strides,
    )
