"""Join tensors of which several safetensors files hold a part each: what torch's `HuggingFaceStorageWriter` writes.

With `save_distributed=True` each rank writes its chunks into files of its own (`shard-00001-model-00001-of-00002`),
whose headers say where in the whole tensor a chunk begins. torchtitan, OpenRLHF and others save so.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.dcp import check_cover
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, StoredTensor, TensorChunk
from hf_fsdp_tools.text import dtype_name, listed

_PARTS_FOLDER = "sharded"
"""Where the writer puts its parts if it joins them too (`enable_consolidation=True`); source: torch 2.9 to 2.14,
`SHARDED_DIR_NAME`."""


def join_parts(key: str, parts: Sequence[StoredTensor]) -> StoredTensor | ChunkedTensor:
    """One tensor from all that files hold under its name.

    The files do not say how large the whole is, so it ends where the last of its parts ends.
    """
    first = parts[0]
    if len(parts) == 1 and not any(first.start or ()):
        return first
    if (unplaced := next((part for part in parts if part.start is None), None)) is not None:
        other = next(part for part in parts if part is not unplaced)
        one, two = sorted((unplaced.file, other.file))
        raise CheckpointError(f"{two}: holds {key!r}, which {one.name} holds too; keep one of them.")
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        found = listed(f"{dtype_name(part.dtype)} {list(part.shape)} in {part.file.name}" for part in parts)
        raise CheckpointError(
            f"{first.file.parent}: the parts of {key!r} do not belong together: {found}. They come from several saves; "
            "save it again into an empty folder."
        )
    boxes = [Box(start=part.start or (), length=part.shape) for part in parts]
    shape = tuple(max(box.start[dim] + box.length[dim] for box in boxes) for dim in range(len(first.shape)))
    held = [(part, box) for part, box in zip(parts, boxes, strict=True) if box.numel]
    check_cover(first.file.parent, key, shape, [box for _, box in held])
    chunks = tuple(
        TensorChunk(
            name=f"{key}{list(box.start)} in {part.file.name}",
            box=box,
            file=part.file,
            offset=part.offset,
            length=part.num_bytes,
            is_archive=False,
        )
        for part, box in held
    )
    return ChunkedTensor(key=key, file=first.file, dtype=first.dtype, shape=shape, chunks=chunks)


def find_parts(folder: Path) -> Path:
    """Where the weight files of a folder are: in the folder, or its parts in the one inside that was never joined."""
    inside = folder / _PARTS_FOLDER
    return inside if not any(folder.glob("*.safetensors*")) and any(inside.glob("shard-*.safetensors")) else folder
