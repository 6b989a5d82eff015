"""A sharded model back into an ordinary Hugging Face checkpoint: every rank writes its own bytes to the same files."""

import ctypes
import errno
import os
import secrets
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hf_fsdp_tools.checkpoint.conversion import persistent_tensors, revert_group, saved_tensors
from hf_fsdp_tools.checkpoint.draft import Draft
from hf_fsdp_tools.checkpoint.durable import library_errors, storage_errors, sync
from hf_fsdp_tools.checkpoint.gather import gather_to_first
from hf_fsdp_tools.checkpoint.index import WEIGHTS_INDEX
from hf_fsdp_tools.checkpoint.io.files import TransferStats, write_transfers
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.layout import Layout, Place, plan_layout
from hf_fsdp_tools.checkpoint.merge_adapter import merged_model
from hf_fsdp_tools.checkpoint.publish import publish_weights
from hf_fsdp_tools.checkpoint.push import hub_target, push_saved
from hf_fsdp_tools.checkpoint.regions import row_major_strides, slice_view
from hf_fsdp_tools.checkpoint.report import SaveReport
from hf_fsdp_tools.checkpoint.save_adapter import save_adapter
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.shards import local_boxes_of, local_tensor, memory_view, replica_of
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

_MIN_PART_BYTES = 2**20
"""Bytes that each replica of a shard must get to write for the replicas to share the shard; less is written by one of
them. (assumed)"""


def save_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = 64 * 2**20,
    merge_adapters: bool = False,
    push_to_hub: bool = False,
    **hub_arguments: Any,
) -> SaveReport:
    """Write a model, sharded or not, as the checkpoint that plain `save_pretrained` would write.

    Keys, dtypes and shapes are the hub's (experts one by one, tied weights once), by transformers' own reverse
    conversions. Of a PEFT model, the adapter alone is written, as PEFT writes it; or, with `merge_adapters`, a
    checkpoint that needs no PEFT.

    No rank gathers the model. All ranks compute the same layout, rank 0 makes the files at full length in a hidden
    folder, every rank writes and syncs its own ranges (under HSDP the replicas of a shard share its bytes), and rank 0
    gives all files their names once they are complete. Until one last rename, whoever opens the folder gets the
    checkpoint that was there, and then the new one. Gathered one at a time, and counted, are tensors whose reverse
    conversion does more than move data, and tensors that would be written in runs of a few bytes.

    Args:
        model: its config, and generation config if it generates, are written too; `config.dtype` and
            `config.architectures` are set as transformers does.
        folder: made if it is not there; must be on a file system that all ranks see. Weight files of an earlier save
            are removed; where there are any, the names of new shards have the save's mark in them
            (`model.1b0f5e9a-00001-of-00006.safetensors`). Files of another kind of model that would be opened with the
            new ones are renamed to `*.former`, with a warning: those of an adapter, or `config.json` of full weights
            that are not the base of the adapter.
        tokenizer: saved beside the model.
        dtype: of floating-point tensors in the files; None keeps the model's. 4-bit weights are saved as bitsandbytes
            does, with their scales, and cannot be cast.
        max_shard_size: largest weight file, in bytes or as "5GB".
        staging_bytes: bound of host memory used for casting and scattering.
        merge_adapters: write the base of a PEFT model with the active adapters merged into it, equal to PEFT's
            `merge_and_unload` bit for bit; the model stays as it is. Adapted modules are gathered one at a time, and
            this rank holds their merged shards until they are written.
        push_to_hub: upload the files of this save, once they are complete, as one commit that also deletes weights of
            earlier saves from the repository. Rank 0 uploads, the others wait. A `README.md` in the folder is uploaded
            too; where neither the folder nor the repository have one, it is huggingface_hub's template.
        hub_arguments: with `push_to_hub`, as transformers has them: `repo_id` (None: the name of the folder),
            `private`, `token`, `commit_message`, `commit_description`, `revision`, `create_pr`.

    Every rank of the default process group must call. The ranks exchange errors, and send gathered tensors to rank 0.

    Raises:
        ConfigError: adapters that cannot be merged, or have no `PeftModel` around them; arguments that differ between
            ranks, or are unknown.
        CheckpointError: the model is on meta; a tensor has a dtype that safetensors has no name for; the folder is a
            file, cannot be written or is not seen by all ranks; the disk is full; another job is saving there; config
            or tokenizer cannot be saved. The same on every rank; what was saved there before is unchanged. Or the hub
            refuses or cannot be reached, when the folder holds the new checkpoint.
    """
    start = time.perf_counter()
    rank, _ = rank_and_size()
    folder = Path(folder)
    same_on_all_ranks(
        "saving the model",
        dtype=dtype,
        max_shard_size=max_shard_size,
        staging_bytes=staging_bytes,
        merge_adapters=merge_adapters,
        push_to_hub=push_to_hub,
        hub_arguments={**hub_arguments, "token": None},
    )
    target = hub_target(folder, push_to_hub, hub_arguments)
    if merge_adapters:
        model = merged_model(model)
    elif is_adapted(model):
        return push_saved(model, save_adapter(model, folder, tokenizer=tokenizer, dtype=dtype), target)
    elif any(is_wrapper(module) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has adapters without a PeftModel around it (model.add_adapter). Make it with "
            "get_peft_model(model, config) to save the adapter, or save it with merge_adapters=True."
        )
    draft = Draft(folder, all_ranks(secrets.token_hex(4), "beginning the save")[0])
    with agreed("planning the checkpoint"):
        _refuse_meta(model)
        _refuse_cast(model, dtype)
        layout = plan_layout(model, dtype, max_shard_size, draft.path)
        transfers = _plan_transfers(model, layout)
        scattered = {key for key, parts in transfers.items() if _is_scattered([transfer for transfer, _ in parts])}
    # A tensor is gathered by all ranks or by none, so they must agree on which.
    to_gather = sorted(
        {key for key in layout.places if key not in transfers}.union(*all_ranks(scattered, "planning the checkpoint"))
    )
    try:
        with agreed("preparing the save", folder):
            if rank == 0:
                draft.begin()
                _stage_configs(model, draft, dtype, tokenizer)
                _create_files(layout, folder)
        with agreed("opening the folder", folder):
            _check_visible(layout, folder)
        stats = _write_all(model, layout, transfers, to_gather, folder, staging_bytes)
        written = sum(all_ranks(stats.num_bytes, "adding up what was written"))
        assert written == layout.num_bytes, f"wrote {written} of {layout.num_bytes} bytes"
        names: tuple[tuple[str, ...], ...] = ()
        with agreed("finishing the save", folder):
            if rank == 0:
                others = (*draft.names_beside(), *([WEIGHTS_INDEX] if len(layout.files) > 1 else []))
                weight_map = {key: place.file for key, place in layout.places.items()}
                sizes = {"total_parameters": _num_parameters(model), "total_size": layout.num_bytes}
                names = publish_weights(draft, layout.files, weight_map, sizes), others
                draft.end()  # before any rank goes on
        files, others = all_ranks(names, "finishing the save")[0]
    finally:
        if rank == 0:
            draft.end()
    report = SaveReport(
        folder=str(folder),
        files=files,
        total_bytes=layout.num_bytes,
        bytes_written=stats.num_bytes,
        gathered_bytes=sum(layout.places[key].num_bytes for key in to_gather),
        write_calls=stats.calls,
        seconds=round(time.perf_counter() - start, 4),
        others=others,
    )
    return push_saved(model, report, target)


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


def _create_files(layout: Layout, folder: Path) -> None:
    """Make every file with its header and its full length."""
    try:
        for file, size in layout.files.items():
            with open(layout.path(file), "wb") as stream:
                stream.write(layout.headers[file])
                stream.flush()
                _reserve(stream.fileno(), size)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save to {str(folder)!r}: {error}. {layout.num_bytes} bytes are to be written there; check "
            "space and permissions, or give another folder."
        ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its length; where the file system can, also its blocks, so that a full disk shows before any work."""
    os.ftruncate(descriptor, size)
    code = _fallocate(descriptor, size)
    if code not in (0, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, size: int) -> int:
    """Reserve the blocks of a file by the system call `fallocate`; the number of its error, 0 without one.

    `os.posix_fallocate` is not that call alone: on file systems without it (FUSE, NFS before 4.2, mounts of object
    stores) the C library writes a byte into every block instead, 34 million writes for 140 GB.
    """
    if sys.platform != "linux" or not size:
        return 0
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    while fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


def _check_visible(layout: Layout, folder: Path) -> None:
    """Refuse a folder in which this rank does not see the files that rank 0 made."""
    for file, size in layout.files.items():
        path = layout.path(file)
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise CheckpointError(
                f"{str(folder)!r} is not the same folder on this rank as on rank 0: {path.relative_to(folder)} is "
                f"{'absent' if found is None else f'{found} bytes long'}, expected {size} bytes. Save to a file system "
                "that all ranks share."
            )


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _stage_configs(model: nn.Module, draft: Draft, dtype: torch.dtype | None, tokenizer: Any) -> None:
    """Write everything beside the weights as transformers does: config, generation config, model code, tokenizer."""
    with library_errors("save config and tokenizer to", draft.folder):
        if isinstance(model, PreTrainedModel):
            model.config.dtype = dtype_name(dtype or model.dtype)
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            with original_classes(model):  # transformers copies the file of the class, which is torch's under FSDP2
                if model.is_remote_code():
                    custom_object_save(model, draft.beside, config=model.config)
            with with_cache_as_found(model):
                model.config.save_pretrained(draft.beside)
            if model.can_generate():
                model.generation_config.save_pretrained(draft.beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft.beside)


# ---- bytes ----


def _plan_transfers(model: nn.Module, layout: Layout) -> dict[str, list[tuple[Transfer, tuple[int, int]]]]:
    """This rank's transfers by hub key, each with (index, number) of the replica that this rank holds.

    Keys whose reverse conversion does more than move data are left out.
    """
    state = saved_tensors(model)
    return {
        key: list(_transfers(key, place, state, layout))
        for key, place in layout.places.items()
        if place.tensor.pieces is not None
    }


def _transfers(
    key: str, place: Place, state: Mapping[str, torch.Tensor], layout: Layout
) -> Iterator[tuple[Transfer, tuple[int, int]]]:
    """Yield what this rank holds of one saved tensor: its boxes of each model tensor that the saved one is made of."""
    strides = row_major_strides(place.tensor.shape)
    for piece in place.tensor.pieces or ():
        source = state[piece.source]
        replica = replica_of(source)
        if replica is None:
            continue
        local = local_tensor(source)
        for box, local_start in local_boxes_of(source):
            held = memory_view(local, local_start, box.length)
            for part, view in slice_view(piece.view, source.shape, box):
                start = [a + b for a, b in zip(piece.box.start, part.start, strict=True)]
                first = sum(i * s for i, s in zip(start, strides, strict=True))
                held = held.contiguous()  # a copy only where a rank holds several ranges of one dimension
                transfer = Transfer(
                    file=layout.path(place.file),
                    start=place.offset + first * place.dtype.itemsize,
                    dtype=place.dtype,
                    strides=strides,
                    memory=held.as_strided(view.length, view.strides, held.storage_offset() + view.offset),
                )
                yield transfer, replica


def _part_of_replica(key: str, transfer: Transfer, replica: tuple[int, int]) -> Iterator[Transfer]:
    """Yield the part of a transfer that this rank writes, if any; its replicas, which hold the same, write the rest.

    A large transfer is cut along the dimension with the longest steps in the file, so that each replica writes about
    one run of it. Small ones are dealt out by the tensor's name.
    """
    index, number = replica
    longest = sorted(zip(transfer.strides, range(len(transfer.strides)), strict=True), reverse=True)
    dim = next((d for _, d in longest if transfer.memory.shape[d] >= number), None)
    if number == 1:
        yield transfer
    elif dim is None or transfer.num_bytes < number * _MIN_PART_BYTES:
        if zlib.crc32(key.encode()) % number == index:
            yield transfer
    else:
        size = transfer.memory.shape[dim]
        first, stop = size * index // number, size * (index + 1) // number
        yield replace(
            transfer,
            start=transfer.start + first * transfer.strides[dim] * transfer.dtype.itemsize,
            memory=transfer.memory.narrow(dim, first, stop - first),
        )


def _write_all(
    model: nn.Module,
    layout: Layout,
    transfers: Mapping[str, list[tuple[Transfer, tuple[int, int]]]],
    to_gather: list[str],
    folder: Path,
    staging_bytes: int,
) -> TransferStats:
    """Write and sync this rank's bytes: in place first, then, on rank 0, what is gathered. Every rank must call."""
    in_place = [
        own
        for key, held in transfers.items()
        if key not in to_gather
        for transfer, replica in held
        for own in _part_of_replica(key, transfer, replica)
    ]
    with agreed("writing the checkpoint", folder):
        stats = write_transfers(in_place, staging_bytes=staging_bytes)
    for key in to_gather:
        stats += _write_gathered(model, key, layout, staging_bytes)
    with agreed("syncing the checkpoint", folder), storage_errors("save to", folder):
        # Rank 0 has written to every file: headers, and what was gathered.
        is_first = rank_and_size()[0] == 0
        for file in map(layout.path, layout.files) if is_first else dict.fromkeys(t.file for t in in_place):
            sync(file)
    return stats


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
                file=layout.path(place.file),
                start=place.offset,
                dtype=place.dtype,
                strides=row_major_strides(result.shape),
                memory=result,
            )
            stats = write_transfers([transfer], staging_bytes=staging_bytes)
    return stats
