"""This rank's share of a model: what in the checkpoint it is made of, and filling it, alone or together with other ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_fsdp_tools.checkpoint.conversion import (
    ConversionGroup,
    LoadMap,
    convert_group,
    persistent_tensors,
)
from hf_fsdp_tools.checkpoint.index import CheckpointIndex
from hf_fsdp_tools.checkpoint.io.exchange import Together, read_together
from hf_fsdp_tools.checkpoint.io.probe import measure
from hf_fsdp_tools.checkpoint.io.read_mode import ReadChoice, ReadMode, choose_read_mode
from hf_fsdp_tools.checkpoint.io.reader import TransferStats, read_transfers
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.io.watch import patiently
from hf_fsdp_tools.checkpoint.match import Fit, transfers_of
from hf_fsdp_tools.checkpoint.quantized.pack import quantize_weights
from hf_fsdp_tools.checkpoint.quantized.share import PackedShare, share_of_packed
from hf_fsdp_tools.checkpoint.report import loading_bar
from hf_fsdp_tools.checkpoint.shards import (
    is_sharded,
    local_boxes_of,
    local_tensor,
    memory_view,
)
from hf_fsdp_tools.checkpoint.symbolic import PieceTensor
from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node

__all__ = ["Filled", "Matched", "Share", "fill_shards"]


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A model and a checkpoint that go together."""

    index: CheckpointIndex
    """The checkpoint."""

    load_map: LoadMap
    """transformers' conversions; without weights that are packed while they are read."""

    to_pack: Mapping[str, PieceTensor]
    """Those, by key."""

    fit: Fit
    """What is loaded, what is missing and what is left over."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of the model, and how to fill it."""

    transfers: tuple[Transfer, ...]
    """What can be read directly."""

    files: tuple[Path, ...]
    """All files that hold something of the model; as many and in the same order on every rank."""

    opaque: tuple[ConversionGroup, ...]
    """Conversions that compute, and so take whole tensors."""

    transfer_bytes: int
    """Bytes to read for both, gaps left out."""

    num_bytes: int
    """Bytes of the whole share in stored dtypes."""

    replicated_bytes: int
    """Of these, what every rank holds."""

    host_bytes: int
    """Memory of the share on the host."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What filling the share took."""

    share: Share
    """What was read as it is, or converted."""

    packed: PackedShare
    """What was packed while it was read."""

    how: ReadChoice
    """Which rank read what."""

    stats: TransferStats
    """What was read of the two, but for `whole`."""

    whole: TransferStats
    """Stored tensors that were read whole, to be converted."""


def fill_shards(
    model: nn.Module,
    matched: Matched,
    *,
    doing: str,
    staging_bytes: int,
    read_mode: ReadMode,
    progress: bool | None,
) -> Filled:
    """Fill the memory of an allocated model, as `load_weights` says. Every rank must call.

    Raises:
        CheckpointError: Reading fails on some rank; the same on every rank.
    """
    fit, index = matched.fit, matched.index
    rank, world_size = rank_and_size()
    with agreed(doing):
        share = _share_of(model, matched.load_map, fit, index)
        packed = share_of_packed(model, matched.to_pack, matched.load_map, index)
        probed = patiently(measure, share.transfers)
    how = choose_read_mode(share.transfers, files=share.files, speed=probed, mode=read_mode)
    to_read = share.transfer_bytes + packed.read_bytes
    with loading_bar(to_read, rank=rank, world_size=world_size, progress=progress) as on_bytes:
        together = _read_together(share, how, staging_bytes, on_bytes)
        with agreed(doing):
            stats = together.result() if together else _read_alone(share, how, staging_bytes, on_bytes)
            whole = _convert_whole(model, share, fit, index, staging_bytes, on_bytes)
        stats += quantize_weights(
            packed, index, doing=doing, staging_bytes=staging_bytes, pace=how.speed.pace(), on_bytes=on_bytes
        )
    return Filled(share=share, packed=packed, how=how, stats=stats, whole=whole)


def _share_of(model: nn.Module, load_map: LoadMap, fit: Fit, index: CheckpointIndex) -> Share:
    """Every loaded tensor's local boxes as transfers into its memory."""
    state = persistent_tensors(model)  # allocation made new tensors
    transfers: list[Transfer] = []
    num_bytes = replicated_bytes = 0
    for key, tensor in fit.loaded.items():
        local = local_tensor(state[key])
        stored_size = index.source_dtype(min(tensor.sources)).itemsize if tensor.sources else 0
        for box, local_start in local_boxes_of(state[key]):
            num_bytes += box.numel * stored_size
            replicated_bytes += 0 if is_sharded(state[key]) else box.numel * stored_size
            if tensor.pieces is not None:
                transfers += transfers_of(tensor, box, local, local_start, index)
    opaque = {g.target: g for key, t in fit.loaded.items() if t.pieces is None for g in (load_map.groups[key],)}
    opaque_bytes = sum(index.tensors[key].num_bytes for group in opaque.values() for key, _ in group.members)
    distinct = {id(t): local_tensor(t) for t in state.values()}.values()
    return Share(
        transfers=tuple(transfers),
        files=tuple(sorted({index.source_file(key) for tensor in fit.loaded.values() for key in tensor.sources})),
        opaque=tuple(opaque.values()),
        transfer_bytes=sum(t.memory.numel() * t.dtype.itemsize for t in transfers) + opaque_bytes,
        num_bytes=num_bytes,
        replicated_bytes=replicated_bytes,
        host_bytes=sum(t.numel() * t.element_size() for t in distinct if t.device.type == "cpu"),
    )


def _read_together(
    share: Share, how: ReadChoice, staging_bytes: int, on_bytes: Callable[[int], object]
) -> Together | None:
    """Read with other ranks, if that was chosen."""
    if how.mode == "rank":
        return None
    return read_together(
        share.transfers, files=share.files, staging_bytes=staging_bytes, pace=how.speed.pace(), on_bytes=on_bytes
    )


def _read_alone(share: Share, how: ReadChoice, staging_bytes: int, on_bytes: Callable[[int], object]) -> TransferStats:
    """Read this rank's own share."""
    # Where all ranks share this machine, what one does not want another does.
    is_shared = rank_on_node()[1] == rank_and_size()[1]
    return read_transfers(
        share.transfers,
        staging_bytes=staging_bytes,
        pace=how.speed.pace(),
        read_ahead=is_shared,
        on_bytes=on_bytes,
    )


def _convert_whole(
    model: nn.Module,
    share: Share,
    fit: Fit,
    index: CheckpointIndex,
    staging_bytes: int,
    on_bytes: Callable[[int], object],
) -> TransferStats:
    """Conversions that compute: one group at a time, its stored tensors read whole, converted, and this rank's part
    kept.
    """
    state = persistent_tensors(model)
    stats = TransferStats()
    for group in share.opaque:
        # transformers casts what it reads to the dtype of the model before it converts
        dtype = state[group.target].dtype
        whole = {key: torch.empty(index.tensors[key].shape, dtype=dtype) for key, _ in group.members}
        transfers = [
            transfer
            for key, memory in whole.items()
            for box, start in local_boxes_of(memory)
            for transfer in transfers_of(PieceTensor.stored(index.tensors[key], dtype), box, memory, start, index)
        ]
        stats += read_transfers(transfers, staging_bytes=staging_bytes, on_bytes=on_bytes)
        for key, result in convert_group(model, group, whole).items():
            if key not in fit.loaded or fit.loaded[key].pieces is not None:
                continue
            local = local_tensor(state[key])
            for box, local_start in local_boxes_of(state[key]):
                part = result[tuple(slice(s, s + n) for s, n in zip(box.start, box.length, strict=True))]
                memory_view(local, local_start, box.length).copy_(part)
    return stats
