"""Checkpoint files straight into the shards of a meta model: each rank reads its own bytes and nothing travels between
ranks.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.meta import allocate, initialize_missing

from .agreement import agreed, all_ranks, rank_and_size
from .conversion import LoadMap, adjust_keys, convert_group, map_loading, persistent_tensors, set_conversions
from .index import CheckpointIndex
from .pieces import PieceTensor
from .reader import TransferStats, read_transfers
from .report import LoadReport, MemoryWatch
from .shares import is_sharded, local_boxes_of, local_tensor, memory_view
from .slices import Box, View, row_major_strides, slice_piece
from .transfer import Transfer

__all__ = ["load_weights"]


def load_weights(
    model: nn.Module,
    path_or_repo: str | PathLike[str] | CheckpointIndex,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignore_mismatched_sizes: bool = False,
    strict: bool = False,
    seed: int = 0,
    staging_bytes: int = 64 * 2**20,
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
        path_or_repo: Folder, safetensors file or hub name, or an index that is open already.
        dtype: What floating-point parameters become (float32 for master weights). None keeps the model's own dtypes.
        device: Where storage goes. None: the mesh's device, the CPU for a CPU-offloaded or plain model.
        ignore_mismatched_sizes: Initialise tensors of other shape than the checkpoint's instead of refusing them.
        strict: Refuse missing and unexpected keys instead of reporting them.
        seed: Of what the model initialises itself; the values do not depend on the number of ranks.
        staging_bytes: Bound of host memory above the shards; at least 1 MiB.
        hub_kwargs: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``subfolder``, as for
            ``CheckpointIndex.open``.

    Every rank of the default process group must call; without a group, one process loads all. The ranks exchange only
    errors and the figures of the report.

    Raises:
        CheckpointError: The checkpoint is absent or damaged, or does not fit; the same on every rank, and before
            anything is changed unless reading itself fails.
        ConfigError: ``staging_bytes`` is too small.
    """
    if staging_bytes < 2**20:
        raise ConfigError(f"staging_bytes is {staging_bytes}; it must be at least {2**20} (1 MiB).")
    seconds: dict[str, float] = {}
    watch = MemoryWatch()
    with _timed(seconds, "plan"), agreed("opening the checkpoint"):
        _refuse_quantized(model)
        index = (
            path_or_repo
            if isinstance(path_or_repo, CheckpointIndex)
            else CheckpointIndex.open(path_or_repo, **hub_kwargs)
        )
        load_map = map_loading(model, index.tensors)
        fit = _fit(model, load_map, index, ignore_mismatched_sizes=ignore_mismatched_sizes, strict=strict)
        _check_ties(fit, index, staging_bytes)
    with _timed(seconds, "read"), agreed("reading the checkpoint (the model is left half filled)"):
        allocate(model, device=device or _device_of(model), dtype=dtype)
        share = _share_of(model, fit, index)
        stats = read_transfers(share.transfers, staging_bytes=staging_bytes)
        whole = _convert_whole(model, load_map, fit, index, staging_bytes)
    with _timed(seconds, "initialize"), agreed("initialising what is in no file"):
        initialize_missing(model, missing_keys=fit.to_initialize, seed=seed)
        set_conversions(model, load_map)
    return LoadReport(
        checkpoint=index.name,
        rank=rank_and_size()[0],
        dtypes=_dtypes(model),
        missing_keys=tuple(sorted(fit.missing_keys)),
        unexpected_keys=tuple(sorted(fit.unexpected_keys)),
        mismatched_keys=fit.mismatched,
        initialized_keys=tuple(sorted(fit.to_initialize)),
        bytes_read=stats.num_bytes + whole.num_bytes,
        share_bytes=share.num_bytes,
        replicated_bytes=share.replicated_bytes,
        converted_bytes=whole.num_bytes,
        header_bytes=index.header_bytes,
        read_calls=stats.calls + whole.calls,
        staging_bytes=max(stats.staging_bytes, whole.staging_bytes),
        peak_host_bytes=watch.above(share.host_bytes),
        seconds=seconds,
        bytes_read_per_rank=tuple(all_ranks(stats.num_bytes + whole.num_bytes)),
    )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note the wall time of a block."""
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 4)


def _refuse_quantized(model: nn.Module) -> None:
    """A quantised checkpoint holds packed values and scales; no shard of a parameter can be cut from those."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        raise CheckpointError(
            f"The checkpoint is quantised ({method}); only floating-point checkpoints can be read into shards. "
            "Dequantise it "
            "once: load it with from_pretrained, call model.dequantize(), save it, and remove quantization_config."
        )


def _device_of(model: nn.Module) -> torch.device:
    """Where shards belong: the mesh's device, or the CPU if FSDP2 offloads parameters or nothing is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # 2.13 has several
            if any(group is not None and isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
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


# ---- what fits where ----


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The model and the checkpoint held against each other."""

    state: Mapping[str, torch.Tensor]
    """The model's persistent tensors by key, before storage."""

    loaded: Mapping[str, PieceTensor]
    """One key per distinct tensor of the model that the checkpoint fills."""

    doubles: tuple[tuple[PieceTensor, PieceTensor, str, str], ...]
    """Tied keys that the checkpoint holds both, with their keys."""

    to_initialize: frozenset[str]
    """Keys that nothing fills; one per distinct tensor."""

    missing_keys: frozenset[str]
    """As reported."""

    unexpected_keys: frozenset[str]
    """As reported."""

    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(key, checkpoint shape, model shape)."""


def _fit(
    model: nn.Module, load_map: LoadMap, index: CheckpointIndex, *, ignore_mismatched_sizes: bool, strict: bool
) -> _Fit:
    """Sort every key of the model into loaded, missing and mismatched; raise for what must not be."""
    state = persistent_tensors(model)
    found = load_map.tensors
    mismatched = tuple(
        (k, tuple(t.shape), tuple(state[k].shape)) for k, t in found.items() if t.shape != state[k].shape
    )
    if mismatched and not ignore_mismatched_sizes:
        rows = "\n".join(f"- {k}: {list(a)} in the checkpoint, {list(b)} in the model" for k, a, b in mismatched[:20])
        more = f"\n… and {len(mismatched) - 20} more" if len(mismatched) > 20 else ""
        raise CheckpointError(
            f"{len(mismatched)} tensors of {index.name!r} have another shape than the model's:\n{rows}{more}\nUse "
            "the config that "
            "belongs to the checkpoint, or pass ignore_mismatched_sizes=True to initialise these anew."
        )
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    names: dict[int, list[str]] = {}
    for key, tensor in state.items():
        names.setdefault(id(tensor), []).append(key)
    loaded: dict[str, PieceTensor] = {}
    doubles: list[tuple[PieceTensor, PieceTensor, str, str]] = []
    to_initialize: set[str] = set()
    missing: set[str] = set()
    for tied in names.values():
        there = [key for key in tied if key in found and key not in wrong]
        if there:
            loaded[there[0]] = found[there[0]]
            doubles += [(found[there[0]], found[other], there[0], other) for other in there[1:]]
        else:
            to_initialize.add(tied[0])
            missing.update(key for key in tied if key not in wrong)
    missing_keys, unexpected_keys = adjust_keys(model, missing, set(load_map.unexpected_keys))
    if strict and (missing_keys or unexpected_keys):
        raise CheckpointError(
            f"{index.name!r} does not hold exactly what the model needs. Missing: "
            f"{', '.join(sorted(missing_keys)) or 'none'}. "
            f"Unexpected: {', '.join(sorted(unexpected_keys)) or 'none'}. Use the matching auto class, or strict=False."
        )
    return _Fit(
        state=state,
        loaded=loaded,
        doubles=tuple(doubles),
        to_initialize=frozenset(to_initialize),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        mismatched=mismatched,
    )


def _refuse_untied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Names that the config ties must be one parameter by now: a shard cannot be tied afterwards."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    apart = [f"{a} = {b}" for a, b in ties.items() if a in state and b in state and state[a] is not state[b]]
    if apart:
        raise CheckpointError(
            f"The config ties weights that are separate parameters in this model: {', '.join(apart)}. Call "
            "model.tie_weights() "
            "before sharding, or set tie_word_embeddings=False in the config."
        )


def _check_ties(fit: _Fit, index: CheckpointIndex, staging_bytes: int) -> None:
    """A tied weight that the checkpoint holds under two names must be equal in both; each rank compares its share."""
    for first, second, name, other in fit.doubles:
        for box, _ in local_boxes_of(fit.state[name]):
            for slab in _slabs(box, first.dtype, staging_bytes // 4):
                values = [torch.empty(slab.length, dtype=first.dtype) for _ in range(2)]
                for tensor, value in zip((first, second), values, strict=True):
                    transfers = _transfers(tensor, slab, value, (0,) * len(slab.start), index)
                    read_transfers(transfers, staging_bytes=staging_bytes // 2)
                if not torch.equal(values[0], values[1]):
                    raise CheckpointError(
                        f"{index.name!r}: the config ties {name!r} and {other!r}, but the checkpoint holds "
                        "different values for "
                        "them. Set tie_word_embeddings=False in the config to keep both."
                    )


def _slabs(box: Box, dtype: torch.dtype, num_bytes: int) -> Iterator[Box]:
    """The box in parts along dimension 0 of at most ``num_bytes``, or single rows."""
    rows = box.length[0] if box.length else 1
    step = max(1, num_bytes * rows // max(1, box.numel * dtype.itemsize))
    for i in range(0, rows, step):
        count = min(step, rows - i)
        yield Box(start=(box.start[0] + i, *box.start[1:]), length=(count, *box.length[1:])) if box.length else box


# ---- what is read ----


@dataclass(frozen=True, kw_only=True)
class _Share:
    """This rank's part of the model, and how to fill it."""

    transfers: tuple[Transfer, ...]
    """What can be read directly."""

    num_bytes: int
    """Bytes of the whole share in stored dtypes."""

    replicated_bytes: int
    """Of these, what every rank holds."""

    host_bytes: int
    """Memory of the share on the host."""


def _share_of(model: nn.Module, fit: _Fit, index: CheckpointIndex) -> _Share:
    """Every loaded tensor's local boxes as transfers into its memory."""
    state = persistent_tensors(model)  # allocation made new tensors
    transfers: list[Transfer] = []
    num_bytes = replicated_bytes = 0
    for key, tensor in fit.loaded.items():
        local = local_tensor(state[key])
        stored_size = index.tensors[min(tensor.sources)].dtype.itemsize
        for box, local_start in local_boxes_of(state[key]):
            num_bytes += box.numel * stored_size
            replicated_bytes += 0 if is_sharded(state[key]) else box.numel * stored_size
            if tensor.pieces is not None:
                transfers += _transfers(tensor, box, local, local_start, index)
    distinct = {id(t): local_tensor(t) for t in state.values()}.values()
    host_bytes = sum(t.numel() * t.element_size() for t in distinct if t.device.type == "cpu")
    return _Share(
        transfers=tuple(transfers), num_bytes=num_bytes, replicated_bytes=replicated_bytes, host_bytes=host_bytes
    )


def _transfers(
    tensor: PieceTensor, box: Box, local: torch.Tensor, local_start: tuple[int, ...], index: CheckpointIndex
) -> Iterator[Transfer]:
    """What to read for one box of a tensor that lies at ``local_start`` of ``local``."""
    for piece in tensor.pieces or ():
        part = slice_piece(piece, box)
        if part is None:
            continue
        stored = index.tensors[part.source]
        start = [p - b + at for p, b, at in zip(part.box.start, box.start, local_start, strict=True)]
        yield Transfer(
            key=part.source,
            file=stored.file,
            offset=stored.offset,
            dtype=stored.dtype,
            stored=part.view,
            memory=memory_view(local, start, part.box.length),
        )


def _convert_whole(
    model: nn.Module, load_map: LoadMap, fit: _Fit, index: CheckpointIndex, staging_bytes: int
) -> TransferStats:
    """Conversions that compute: one group at a time, its stored tensors read whole, converted, and this rank's part
    kept.
    """
    state = persistent_tensors(model)
    opaque = [key for key, tensor in fit.loaded.items() if tensor.pieces is None]
    stats = TransferStats()
    for group in {load_map.groups[key].target: load_map.groups[key] for key in opaque}.values():
        # transformers casts what it reads to the dtype of the model before it converts
        dtype = state[group.target].dtype
        whole = {key: torch.empty(index.tensors[key].shape, dtype=dtype) for key, _ in group.members}
        transfers = [
            Transfer(
                key=t.key,
                file=t.file,
                offset=t.offset,
                dtype=t.dtype,
                stored=View(offset=0, length=t.shape, strides=row_major_strides(t.shape)),
                memory=whole[t.key],
            )
            for t in (index.tensors[key] for key in whole)
        ]
        stats += read_transfers(transfers, staging_bytes=staging_bytes)
        for key, result in convert_group(model, group, whole).items():
            if key not in opaque:
                continue
            local = local_tensor(state[key])
            for box, local_start in local_boxes_of(state[key]):
                part = result[tuple(slice(s, s + n) for s, n in zip(box.start, box.length, strict=True))]
                memory_view(local, local_start, box.length).copy_(part)
    return stats
