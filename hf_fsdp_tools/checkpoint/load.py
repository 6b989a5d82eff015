"""Checkpoint files straight into the shards of a meta model: each rank reads its own bytes and nothing travels between
ranks, unless storage is slow and reading together pays.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.mesh import rank_on_node
from hf_fsdp_tools.meta import allocate, initialize_missing
from hf_fsdp_tools.quantization import packed_linears
from hf_fsdp_tools.release import parameter_groups

from .agreement import agreed, all_ranks, rank_and_size
from .checks import refuse_not_finite, refuse_quantized
from .conversion import ConversionGroup, LoadMap, convert_group, map_loading, persistent_tensors, set_conversions
from .exchange import Together, read_together
from .fit import Fit, check_ties, fit_checkpoint, transfers_of
from .index import CheckpointIndex
from .packed import part_packed, share_of_packed
from .pieces import PieceTensor
from .probe import measure
from .progress import loading_bar
from .quantize import quantize_weights
from .read_mode import ReadChoice, ReadMode, choose_read_mode, refuse_read_mode
from .reader import TransferStats, read_transfers
from .report import LoadReport, MemoryWatch, log_keys
from .rollback import aftermath, rolled_back
from .scales import forget_scales
from .shares import is_sharded, local_boxes_of, local_tensor, memory_view
from .stall import READ_TIMEOUT_S, patience, patiently
from .transfer import Transfer
from .vocabulary import AddedTokens, fill_added

__all__ = ["load_weights"]


def load_weights(
    model: nn.Module,
    path_or_repo: str | PathLike[str] | CheckpointIndex,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignore_mismatched_sizes: bool = False,
    strict: bool = False,
    added_tokens: AddedTokens | None = None,
    check_finite: bool = False,
    seed: int = 0,
    staging_bytes: int = 64 * 2**20,
    read_mode: ReadMode = "auto",
    read_timeout_s: float = READ_TIMEOUT_S,
    progress: bool | None = None,
    **hub_kwargs: Any,
) -> LoadReport:
    """Fill a sharded (or plain) meta model from a Hugging Face checkpoint, in place; each rank reads only its own
    share.

    The result equals ``from_pretrained`` bit for bit: transformers' own conversions, ties and initialisation of what
    is in no file. Conversions that only move data are composed with the shard, so that just the needed ranges are
    read; any other is run on whole tensors, one conversion at a time, and counted in the report.

    Tied weights are read once, from whichever name the file has. Where a config ties two names and the file holds
    different values for them, transformers leaves them untied; a sharded model cannot be untied any more, so that is
    an error here.

    Args:
        model: Parameters on meta get storage first; those that have some are overwritten. Ties must be in place.
        path_or_repo: Folder, weight file or hub name, or an index that is open already; see ``CheckpointIndex.open`` for
            the formats. Of a DCP folder the model's part is read, wherever it is in what was saved.
        dtype: What floating-point parameters become (float32 for master weights). None keeps the model's own dtypes.
        device: Where storage goes. None: the mesh's device, the CPU for a CPU-offloaded or plain model.
        ignore_mismatched_sizes: Initialise tensors of other shape than the checkpoint's instead of refusing them.
        strict: Refuse missing and unexpected keys instead of reporting them.
        added_tokens: Where the model's vocabulary was resized (``num_tokens`` of ``from_pretrained``, or on meta, before it is
            sharded, ``model.resize_token_embeddings(…, mean_resizing=False)``): old rows are read from the files slice by
            slice, and new ones are the mean of the old ("mean") or drawn by the model's own initialisation ("random"); the
            same values for any number of ranks. None refuses a checkpoint of another vocabulary.
        check_finite: Refuse NaN and infinity in what was read; each rank looks at its own shards.
        seed: Of what the model initialises itself; the values do not depend on the number of ranks.
        staging_bytes: Bound of host memory above the shards; at least 1 MiB.
        read_mode: "rank": each rank reads its own byte ranges. "node": the ranks of a node each read distinct contiguous
            parts of what any of them wants, once, and pass them on over gloo; in HSDP whose replicas are on different
            nodes, all ranks of the job do. "auto" times five requests for 4 KiB and one for 1 MiB. Where a request takes 2 ms or
            more, or a stream brings less than 0.5 GB/s, it also times a 128th of what is wanted, on all ranks at once, expects
            from that how long either way takes, and picks the shorter: "node" where many ranks want the same bytes of
            storage that gives all of them little, or where each would make many small requests. Otherwise "rank". Where
            requests take 2 ms, more of them are in flight in either mode, and in "rank" neighbouring ranges are read as one.
            The report says what was picked and why. Conversions that compute read their whole tensors on every rank in
            either mode.
        read_timeout_s: When a rank has waited so long for its storage, without any read completed, all ranks stop with
            an error. From 30 s on it warns, with file and position. Stay below the timeout of the process group (10 minutes
            with NCCL), after which the ranks that wait are aborted without a word about the file.
        progress: A bar with bytes and speed on rank 0, over that rank's own bytes. None: where standard error is a terminal
            and transformers' and the hub's bars are on.
        hub_kwargs: ``allow_pickle`` (for legacy ``.bin`` files), ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``, ``subfolder``, as for ``CheckpointIndex.open``.

    Every rank of the default process group must call; without a group, one process loads all. The ranks exchange only
    errors, what they measured and the figures of the report, and weights where they read together.

    A load that fails leaves no half of a model: what was on meta is on meta again and its memory is free, so that it can
    be tried again; floating-point tensors that had storage before become NaN if reading had begun.

    Raises:
        CheckpointError: The checkpoint is absent or damaged, or does not fit; the same on every rank, and before
            anything is changed unless reading itself fails.
        ConfigError: ``staging_bytes`` is too small, ``read_mode`` cannot be had, or ``dtype`` is not what parameters that
            have storage already have.
    """
    if staging_bytes < 2**20:
        raise ConfigError(f"staging_bytes is {staging_bytes}; it must be at least {2**20} (1 MiB).")
    refuse_read_mode(read_mode)
    _refuse_other_dtype(model, dtype)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone, the root's parameters are still gathered copies
    rank, world_size = rank_and_size()
    seconds: dict[str, float] = {}
    watch = MemoryWatch()
    with _timed(seconds, "plan"), agreed("opening the checkpoint"), patience(read_timeout_s):
        index = (
            path_or_repo
            if isinstance(path_or_repo, CheckpointIndex)
            else CheckpointIndex.open(path_or_repo, **hub_kwargs)
        )
        index = index.of_model(persistent_tensors(model))
        load_map = map_loading(model, index.tensors, layout=index.layout)
        load_map, to_pack = part_packed(model, load_map, index)
        refuse_quantized(model, load_map, index)
        fit = fit_checkpoint(
            model,
            load_map,
            index,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            strict=strict,
            resize_vocabulary=added_tokens is not None,
            packed=to_pack,
        )
        check_ties(fit, index, staging_bytes)
    after = aftermath(model)
    with rolled_back(model), patience(read_timeout_s):
        with _timed(seconds, "read"):
            with agreed(f"reading the checkpoint ({after})"):
                forget_scales(model)
                allocate(model, device=device or _device_of(model), dtype=dtype)
                share = _share_of(model, load_map, fit, index)
                packed = share_of_packed(model, to_pack, load_map, index)
                probed = patiently(measure, share.transfers)
            how = choose_read_mode(share.transfers, files=share.files, speed=probed, mode=read_mode)
            to_read = share.transfer_bytes + packed.read_bytes
            with loading_bar(to_read, rank=rank, world_size=world_size, progress=progress) as on_bytes:
                together = _read_together(share, how, staging_bytes, on_bytes)
                with agreed(f"reading the checkpoint ({after})"):
                    stats = together.result() if together else _read_alone(share, how, staging_bytes, on_bytes)
                    whole = _convert_whole(model, share, fit, index, staging_bytes, on_bytes)
                stats += quantize_weights(
                    packed,
                    index,
                    doing=f"reading the checkpoint ({after})",
                    staging_bytes=staging_bytes,
                    pace=how.speed.pace(),
                    on_bytes=on_bytes,
                )
        if check_finite:
            with _timed(seconds, "check"), agreed(f"checking the values ({after})"):
                refuse_not_finite(model, {*fit.loaded, *to_pack})
        with _timed(seconds, "initialize"), agreed(f"initialising what is in no file ({after})"):
            initialize_missing(model, missing_keys=fit.to_initialize, seed=seed)
            set_conversions(model, load_map)
        if added_tokens is not None:
            fill_added(model, fit.added, added_tokens, seed)
    report = LoadReport(
        checkpoint=index.name,
        rank=rank,
        dtypes=_dtypes(model),
        missing_keys=tuple(sorted(fit.missing_keys)),
        unexpected_keys=tuple(sorted(fit.unexpected_keys)),
        mismatched_keys=fit.mismatched,
        resized_keys=fit.resized,
        initialized_keys=tuple(sorted(fit.to_initialize)),
        bytes_read=stats.num_bytes + whole.num_bytes,
        share_bytes=share.num_bytes + packed.num_bytes,
        replicated_bytes=share.replicated_bytes + packed.replicated_bytes,
        converted_bytes=whole.num_bytes,
        header_bytes=index.header_bytes,
        read_calls=stats.calls + whole.calls,
        read_mode=how.mode,
        read_mode_why=how.why,
        request_s=how.speed.request_s,
        stream_bytes_s=how.speed.stream_bytes_s,
        probe_bytes=how.probe_bytes,
        staging_bytes=max(stats.staging_bytes, whole.staging_bytes),
        peak_host_bytes=watch.above(share.host_bytes + packed.host_bytes),
        seconds=seconds,
    )
    log_keys(model, report)
    return report.with_ranks(all_ranks(report.figures()))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note the wall time of a block."""
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 4)


def _refuse_other_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """A dtype can be chosen only for parameters that get their storage now, and not for packed ones."""
    if dtype and (packed := packed_linears(model)):
        raise ConfigError(
            f"dtype={dtype} cannot be honoured: {min(packed)!r} holds 4-bit values, which have the dtype of their storage. Give "
            "dtype to build_meta_model or from_pretrained, or leave it out."
        )
    for name, parameter in model.named_parameters():
        if dtype and parameter.is_floating_point() and not parameter.is_meta and parameter.dtype != dtype:
            raise ConfigError(
                f"dtype={dtype} cannot be honoured: {name!r} has storage in {parameter.dtype} already. Build the model on meta "
                "(build_meta_model), or leave dtype out."
            )


def _device_of(model: nn.Module) -> torch.device:
    """Where shards belong: the mesh's device, or the CPU if FSDP2 offloads parameters or nothing is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = parameter_groups(module._get_fsdp_state())
            if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
                return torch.device("cpu")
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return torch.device(mesh.device_type if mesh is not None else "cpu")


def _dtypes(model: nn.Module) -> tuple[str, ...]:
    """Dtypes of floating-point parameters, most elements first."""
    count = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            count[parameter.dtype] += parameter.numel()
    return tuple(str(dtype).removeprefix("torch.") for dtype, _ in count.most_common())


@dataclass(frozen=True, kw_only=True)
class _Share:
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


def _share_of(model: nn.Module, load_map: LoadMap, fit: Fit, index: CheckpointIndex) -> _Share:
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
    return _Share(
        transfers=tuple(transfers),
        files=tuple(sorted({index.source(key).file for tensor in fit.loaded.values() for key in tensor.sources})),
        opaque=tuple(opaque.values()),
        transfer_bytes=sum(t.memory.numel() * t.dtype.itemsize for t in transfers) + opaque_bytes,
        num_bytes=num_bytes,
        replicated_bytes=replicated_bytes,
        host_bytes=sum(t.numel() * t.element_size() for t in distinct if t.device.type == "cpu"),
    )


def _read_together(
    share: _Share, how: ReadChoice, staging_bytes: int, on_bytes: Callable[[int], object]
) -> Together | None:
    """Read with other ranks, if that was chosen."""
    if how.mode == "rank":
        return None
    return read_together(
        share.transfers, files=share.files, staging_bytes=staging_bytes, pace=how.speed.pace(), on_bytes=on_bytes
    )


def _read_alone(share: _Share, how: ReadChoice, staging_bytes: int, on_bytes: Callable[[int], object]) -> TransferStats:
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
    share: _Share,
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
