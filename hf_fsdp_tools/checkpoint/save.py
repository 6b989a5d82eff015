"""A sharded model back into an ordinary Hugging Face checkpoint: every rank writes its own bytes to the same files."""

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hf_fsdp_tools.checkpoint.conversion import persistent_tensors, revert_group, saved_tensors
from hf_fsdp_tools.checkpoint.gather import gather_to_first
from hf_fsdp_tools.checkpoint.index import WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.checkpoint.io.files import TransferStats, write_transfers
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.layout import Layout, Place, plan_layout
from hf_fsdp_tools.checkpoint.merge_adapter import merged_model
from hf_fsdp_tools.checkpoint.regions import row_major_strides, slice_view
from hf_fsdp_tools.checkpoint.report import SaveReport
from hf_fsdp_tools.checkpoint.save_adapter import save_adapter
from hf_fsdp_tools.checkpoint.shards import is_first_replica, local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.modeling.peft_view import is_adapted, is_wrapper
from hf_fsdp_tools.sharding.hf_interface import with_cache_as_found
from hf_fsdp_tools.text import dtype_name

__all__ = ["save_pretrained"]

_MIN_RUN_BYTES = 2048
"""Mean bytes of a run in the file below which a tensor is gathered instead: one system call per run costs more than
sending the tensor to rank 0. (assumed)"""

_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = 64 * 2**20,
    merge_adapters: bool = False,
) -> SaveReport:
    """Write a model, sharded or not, as the checkpoint that plain `save_pretrained` would write.

    Keys, dtypes and shapes are the hub's (experts one by one, tied weights once), by transformers' own reverse
    conversions. Of a PEFT model, the adapter alone is written, as PEFT writes it; or, with `merge_adapters`, a
    checkpoint that needs no PEFT.

    No rank gathers the model. All ranks compute the same layout, rank 0 makes the files at full length, every rank
    writes its own ranges, and rank 0 gives the files their names once all are complete; the index comes last. Gathered
    one at a time, and counted, are tensors whose reverse conversion does more than move data, and tensors that would be
    written in runs of a few bytes.

    Args:
        model: its config, and generation config if it generates, are written too; `config.dtype` and
            `config.architectures` are set as transformers does.
        folder: made if it is not there; must be on a file system that all ranks see. Weight files of an earlier save
            are removed.
        tokenizer: saved beside the model.
        dtype: of floating-point tensors in the files; None keeps the model's. 4-bit weights are saved as bitsandbytes
            does, with their scales, and cannot be cast.
        max_shard_size: largest weight file, in bytes or as "5GB".
        staging_bytes: bound of host memory used for casting and scattering.
        merge_adapters: write the base of a PEFT model with the active adapters merged into it, equal to PEFT's
            `merge_and_unload` bit for bit; the model stays as it is. Adapted modules are gathered one at a time, and
            this rank holds their merged shards until they are written.

    Every rank of the default process group must call. The ranks exchange errors, and send gathered tensors to rank 0.

    Raises:
        ConfigError: adapters that cannot be merged, or have no `PeftModel` around them.
        CheckpointError: the model is on meta; the folder is a file, cannot be written or is not seen by all ranks; the
            disk is full. The same on every rank. Files of an earlier save are then still there, unless renaming itself
            fails.
    """
    start = time.perf_counter()
    rank, _ = rank_and_size()
    folder = Path(folder)
    if merge_adapters:
        model = merged_model(model)
    elif is_adapted(model):
        return save_adapter(model, folder, tokenizer=tokenizer, dtype=dtype)
    elif any(is_wrapper(module) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has adapters without a PeftModel around it (model.add_adapter). Make it with "
            "get_peft_model(model, config) to save the adapter, or save it with merge_adapters=True."
        )
    mark = all_ranks(secrets.token_hex(4))[0]
    with agreed("planning the checkpoint"):
        _refuse_meta(model)
        _refuse_cast(model, dtype)
        layout = plan_layout(model, dtype, max_shard_size, folder, mark)
        transfers = _plan_transfers(model, layout)
        scattered = {key for key, parts in transfers.items() if _is_scattered(parts)}
    # A tensor is gathered by all ranks or by none, so they must agree on which.
    to_gather = sorted({key for key in layout.places if key not in transfers}.union(*all_ranks(scattered)))
    try:
        with agreed("preparing the save", folder):
            if rank == 0:
                _create_files(layout)
        with agreed("opening the folder", folder):
            _check_visible(layout)
        with agreed("writing the checkpoint", folder):
            in_place = (t for key, parts in transfers.items() if key not in to_gather for t in parts)
            stats = write_transfers(in_place, staging_bytes=staging_bytes)
        for key in to_gather:
            stats += _write_gathered(model, key, layout, staging_bytes)
        written = sum(all_ranks(stats.num_bytes))
        assert written == layout.num_bytes, f"wrote {written} of {layout.num_bytes} bytes"
        with agreed("finishing the save", folder):
            if rank == 0:
                _publish(model, layout)
                _save_configs(model, folder, dtype, tokenizer)
    finally:
        if rank == 0:
            _discard(layout)
    return SaveReport(
        folder=str(folder),
        files=tuple(layout.files),
        total_bytes=layout.num_bytes,
        bytes_written=stats.num_bytes,
        gathered_bytes=sum(layout.places[key].num_bytes for key in to_gather),
        write_calls=stats.calls,
        seconds=round(time.perf_counter() - start, 4),
    )


# ---- files ----


def _refuse_meta(model: nn.Module) -> None:
    """Refuse a model with tensors on meta: it was never loaded, or its loading failed."""
    empty = [key for key, tensor in persistent_tensors(model).items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors are on meta and have no values, {empty[0]!r} first. Load the model with "
            "load_weights or from_pretrained before it is saved; after a failed load, load it again."
        )


def _refuse_cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse a cast of 4-bit weights: they are bytes, also where their storage has a floating-point dtype."""
    if dtype is not None and (packed := packed_linears(model)):
        raise CheckpointError(
            f"dtype={dtype} cannot be honoured: {min(packed)!r} holds 4-bit values, which a cast destroys. "
            "Leave dtype out."
        )


def _create_files(layout: Layout) -> None:
    """Make the folder, and every file under its temporary name with its header and its full length."""
    try:
        if layout.folder.exists() and not layout.folder.is_dir():
            raise CheckpointError(f"{str(layout.folder)!r} is a file; give the name of a folder to save to.")
        layout.folder.mkdir(parents=True, exist_ok=True)
        for file, size in layout.files.items():
            with open(layout.temporary(file), "wb") as stream:
                stream.write(layout.headers[file])
                stream.flush()
                _reserve(stream.fileno(), size)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save to {str(layout.folder)!r}: {error}. {layout.num_bytes} bytes are to be written there; check "
            "space and permissions, or give another folder."
        ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its length; where the file system can, also its blocks, so that a full disk shows before any work."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(descriptor, size)


def _check_visible(layout: Layout) -> None:
    """Refuse a folder in which this rank does not see the files that rank 0 made."""
    for file, size in layout.files.items():
        path = layout.temporary(file)
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise CheckpointError(
                f"{str(layout.folder)!r} is not the same folder on this rank as on rank 0: {path.name} is "
                f"{'absent' if found is None else f'{found} bytes long'}, expected {size} bytes. Save to a file system "
                "that all ranks share."
            )


def _publish(model: nn.Module, layout: Layout) -> None:
    """Give complete files their names, write the index, and remove weight files that only an earlier save had."""
    kept = set(layout.files)
    try:
        for file in layout.files:
            os.replace(layout.temporary(file), layout.folder / file)
        if len(layout.files) > 1:
            index = {
                "metadata": {"total_parameters": _num_parameters(model), "total_size": layout.num_bytes},
                "weight_map": {key: place.file for key, place in layout.places.items()},
            }
            temporary = layout.temporary(WEIGHTS_INDEX)
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(temporary, layout.folder / WEIGHTS_INDEX)
            kept.add(WEIGHTS_INDEX)
        for path in layout.folder.iterdir():
            # model.safetensors and the index too: one that stays would be opened instead of the new files.
            weights = path.name in (WEIGHTS, WEIGHTS_INDEX) or _SHARD_NAME.fullmatch(path.name)
            if weights and path.name not in kept:
                path.unlink()
    except OSError as error:
        raise CheckpointError(f"Cannot finish {str(layout.folder)!r}: {error}. Check space and permissions.") from error


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _discard(layout: Layout) -> None:
    """Remove files that still have temporary names; there are none after a complete save."""
    for file in (*layout.files, WEIGHTS_INDEX):
        with suppress(OSError):  # the error that led here is the one to show
            layout.temporary(file).unlink(missing_ok=True)


def _save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None, tokenizer: Any) -> None:
    """Write everything beside the weights as transformers does: config, generation config, model code, tokenizer."""
    try:
        if isinstance(model, PreTrainedModel):
            model.config.dtype = dtype_name(dtype or model.dtype)
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            with original_classes(model):  # transformers copies the file of the class, which is torch's under FSDP2
                if model.is_remote_code():
                    custom_object_save(model, folder, config=model.config)
            with with_cache_as_found(model):
                model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The weights are in {str(folder)!r}, but config or tokenizer cannot be saved beside them: {error}."
        ) from error


# ---- bytes ----


def _plan_transfers(model: nn.Module, layout: Layout) -> dict[str, list[Transfer]]:
    """This rank's transfers by hub key; without the keys whose reverse conversion does more than move data."""
    state = saved_tensors(model)
    return {
        key: list(_transfers(key, place, state, layout))
        for key, place in layout.places.items()
        if place.tensor.pieces is not None
    }


def _transfers(key: str, place: Place, state: Mapping[str, torch.Tensor], layout: Layout) -> Iterator[Transfer]:
    """Yield what this rank writes of one saved tensor: its boxes of each model tensor that the saved one is made of."""
    strides = row_major_strides(place.tensor.shape)
    for piece in place.tensor.pieces or ():
        source = state[piece.source]
        if not is_first_replica(source):
            continue
        local = local_tensor(source)
        for box, local_start in local_boxes_of(source):
            held = memory_view(local, local_start, box.length)
            for part, view in slice_view(piece.view, source.shape, box):
                start = [a + b for a, b in zip(piece.box.start, part.start, strict=True)]
                first = sum(i * s for i, s in zip(start, strides, strict=True))
                held = held.contiguous()  # a copy only where a rank holds several ranges of one dimension
                yield Transfer(
                    file=layout.temporary(place.file),
                    start=place.offset + first * place.dtype.itemsize,
                    dtype=place.dtype,
                    strides=strides,
                    memory=held.as_strided(view.length, view.strides, held.storage_offset() + view.offset),
                )


def _is_scattered(transfers: list[Transfer]) -> bool:
    """Whether writing a tensor in place takes one system call for every few bytes; up to 64 calls do not matter."""
    num_bytes = sum(t.memory.numel() for t in transfers) * transfers[0].dtype.itemsize if transfers else 0
    runs = 0
    for t in transfers:
        run = 1
        for n, stride in sorted(zip(t.memory.shape, t.strides, strict=True), key=lambda d: d[1]):
            if stride == run:
                run *= n
        runs += t.memory.numel() // run
    return runs > 64 and num_bytes < runs * _MIN_RUN_BYTES


def _write_gathered(model: nn.Module, key: str, layout: Layout, staging_bytes: int) -> TransferStats:
    """Gather the model tensors of one saved tensor on rank 0, which reverts their conversion and writes the result."""
    place = layout.places[key]
    state = saved_tensors(model)
    whole = {n: gather_to_first(state[n], staging_bytes=staging_bytes) for n in sorted(place.tensor.sources)}
    stats = TransferStats()
    with agreed(f"writing {key!r}"):
        if rank_and_size()[0] == 0:
            result = revert_group(model, {name: t for name, t in whole.items() if t is not None})[key]
            transfer = Transfer(
                file=layout.temporary(place.file),
                start=place.offset,
                dtype=place.dtype,
                strides=row_major_strides(result.shape),
                memory=result,
            )
            stats = write_transfers([transfer], staging_bytes=staging_bytes)
    return stats
