"""Checkpoint files straight into the shards of a meta model: each rank reads its own slices."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import (
    agreed,
    agreed_steps,
    compare_at_end,
    opened,
    own_seed,
    rank_and_size,
    same_on_all_ranks,
)
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.conversion import set_conversions
from hf_fsdp_tools.loading.fill import Filled, check_values, fill_shards
from hf_fsdp_tools.loading.heads import WithHeads, remember_heads
from hf_fsdp_tools.loading.index import CheckpointIndex, refuse_other_contents
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT, STAGING_BYTES, STAGING_BYTES_PINNED
from hf_fsdp_tools.loading.match import Match, match_checkpoint
from hf_fsdp_tools.loading.report import LoadReport, MemoryWatch, log_dequantized, log_keys
from hf_fsdp_tools.loading.vocabulary import AddedTokens, fill_added
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.module_tree import slots
from hf_fsdp_tools.modeling.packed import floats_held, forget_quantization, refuse_cast
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.fsdp2_internals import is_offloaded, reshard_units
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import did_you_mean, dtype_name


def load_weights(
    model: nn.Module,
    path_or_repo: str | PathLike[str] | CheckpointIndex,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignore_mismatched_sizes: bool = False,
    strict: bool = False,
    added_tokens: AddedTokens | None = None,
    carry_heads: bool = True,
    seed: int | None = None,
    staging_bytes: int | None = None,
    requests_in_flight: int = REQUESTS_IN_FLIGHT,
    progress: bool | None = None,
    **hub_kwargs: Any,
) -> LoadReport:
    """Fill a sharded (or plain) meta model from a Hugging Face checkpoint, in place; each rank reads its own shards.

    The result equals `from_pretrained` bit for bit: transformers' own conversions and ties are used, and its own
    initialisation for tensors that are in no file. Where a conversion only moves data, a rank reads the byte ranges
    of its shard; where these are short (`fill.Band`), up to eight ranks read together and exchange them. Any other
    conversion runs on whole tensors, one at a time, and is counted in the report. Under HSDP the first replica reads,
    and each shard is broadcast to the others.

    Weights in a quantised format (docs/checkpoints.md lists them) are dequantised while they are read, as by
    transformers' `dequantize=True`, a bounded number at a time; one line on rank 0 says so. The model is a plain one
    afterwards. What has no rule per block (AQLM, HQQ, …) is refused.

    Tied weights are read once, from whichever name the file has. Where a config ties two names and the file holds
    different values for them, transformers leaves them untied. A sharded model cannot be untied, so this is an error.

    Args:
        model: tied, on any device. Parameters on meta get storage first; parameters with storage are overwritten.
        path_or_repo: folder, weight file or hub name, or an index that is open already; see `CheckpointIndex.open` for
            the formats. From a DCP folder the model's part is read, wherever it lies in the state.
        dtype: of floating-point parameters (float32 for master weights). None keeps the model's own dtypes.
        device: where storage goes. None: the mesh's device, or the CPU for a CPU-offloaded or plain model.
        ignore_mismatched_sizes: initialise tensors of other shape than the checkpoint's instead of refusing them.
        strict: refuse missing and unexpected keys instead of reporting them.
        added_tokens: where the model's vocabulary was resized (`num_tokens` of `from_pretrained`, or on meta, before it
            is sharded, `model.resize_token_embeddings(…, mean_resizing=False)`): new rows are the mean of the old ones
            ("mean") or drawn by the model's own initialisation ("random"); the same values for any number of ranks.
            None refuses a checkpoint of another vocabulary.
        carry_heads: remember heads for multi-token prediction that the checkpoint holds and the class ignores (of
            DeepSeek-V3, GLM-4 MoE, Qwen3-Next, …), which every save then copies from its files. They stay open.
        seed: of the model's own initialisation; the values do not depend on the number of ranks. None: it follows from
            rank 0's generator, that is from `torch.manual_seed` or `set_seed`.
        staging_bytes: bound of host memory above the shards; at least 1 MiB. None: 64 MiB, or 320 MiB of pinned memory
            for shards on an accelerator.
        requests_in_flight: reads of this rank at a time. More may help where one request takes very long, fewer where a
            file server throttles.
        progress: a bar with bytes and speed on rank 0, over that rank's own bytes. None: where standard error is a
            terminal and transformers' and the hub's bars are on.
        hub_kwargs: `allow_pickle` (for legacy `.bin` files), `revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`, as for `CheckpointIndex.open`.

    Every rank of the default process group must call, with equal arguments but for `path_or_repo`,
    `requests_in_flight`, `progress` and how to fetch; without a group, one process loads all. The ranks exchange
    errors, digests of the arguments and of the checkpoint, and the seed; thin shards and those of HSDP too. Where
    storage does not answer, a warning names file and position after 30 s.

    A load that fails can be tried again. Tensors that were on meta are on meta again and their memory is free;
    floating-point tensors that had storage before become NaN if reading had begun.

    Raises:
        CheckpointError: the checkpoint is absent or damaged, or does not fit; the same on every rank, and before
            anything is changed unless reading itself fails.
        ConfigError: `staging_bytes` or `requests_in_flight` is too small, `dtype` differs from that of parameters with
            storage, or arguments differ between ranks; the same on every rank.
        RanksError: a rank is lost, or makes no progress for ten minutes.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> shard_model(model, make_wrap_plan(model))
        LlamaForCausalLM(...
        >>> load_weights(model, "checkpoint", progress=False).missing_keys
        ()
    """
    seconds: dict[str, float] = {}
    watch, seeds = MemoryWatch(), list[int]()
    matching: dict[str, Any] = {"ignore_mismatched_sizes": ignore_mismatched_sizes, "strict": strict}
    with agreed_steps("loading weights"), _timed(seconds, "plan"):
        with agreed("checking the arguments of load_weights"):
            dtype, device = as_dtype(dtype), device or _device_of(model)
            if staging_bytes is None:
                staging_bytes = STAGING_BYTES if device.type == "cpu" else STAGING_BYTES_PINNED
            _refuse_arguments(isinstance(path_or_repo, CheckpointIndex), staging_bytes, requests_in_flight, hub_kwargs)
        filling: dict[str, Any] = {"device": device, "dtype": dtype, "staging_bytes": staging_bytes}
        others: dict[str, Any] = {"added_tokens": added_tokens, "carry_heads": carry_heads, "seed": seed}
        others["allow_pickle"] = hub_kwargs.get("allow_pickle", False)
        if isinstance(path_or_repo, CheckpointIndex):
            others["checkpoint"] = path_or_repo.contents
        same_on_all_ranks("loading weights", **matching, **filling, **others)
        index = _open(path_or_repo, hub_kwargs)
        with agreed("matching the checkpoint with the model"):
            reshard_units(model)
            match = match_checkpoint(model, index, resize_vocabulary=added_tokens is not None, **matching)
            _refuse_other_dtype(model, dtype)
            checked = check_values(match, staging_bytes=staging_bytes)
        compare_at_end(own_seed(seed), seeds.extend)
    with rolled_back(model) as after:
        filling |= {"doing": f"reading the checkpoint ({after})", "in_flight": requests_in_flight, "progress": progress}
        with _timed(seconds, "read"):
            filled = fill_shards(model, match.index, match.loaded, match, **filling)
        with _timed(seconds, "initialize"):
            with agreed_steps(f"initialising what is in no file ({after})"):
                with agreed(filling["doing"]):
                    remember_heads(model, match, carry=carry_heads)
                    index.refuse_changed()
                initialize_missing(model, missing_keys=match.to_initialize, seed=seeds[0])
                set_conversions(model, match.load_map)
                forget_quantization(model)
            if added_tokens is not None:
                fill_added(model, match.added, added_tokens, seeds[0])
    report = _report(model, match, replace(filled, stats=filled.stats + checked), watch, seconds)
    log_keys(model, report)
    log_dequantized(report, match.dequantized.other_blocks if match.dequantized else ())
    return report


def _open(path_or_repo: str | PathLike[str] | CheckpointIndex, hub_kwargs: dict[str, Any]) -> CheckpointIndex:
    """The index of a checkpoint, whose contents all ranks see alike. Every rank must call."""
    if isinstance(path_or_repo, CheckpointIndex):  # an argument, and compared as such
        return path_or_repo
    wait_for_saves()  # perhaps of this checkpoint
    open_it = partial(CheckpointIndex.open, path_or_repo)
    index = opened("opening the checkpoint", path_or_repo, lambda hub: open_it(**hub), hub_kwargs)
    refuse_other_contents(index)
    return index


def _refuse_arguments(is_open: bool, staging_bytes: int, requests_in_flight: int, hub_kwargs: dict[str, Any]) -> None:
    if staging_bytes < 2**20:
        raise ConfigError(f"staging_bytes is {staging_bytes}; it must be at least {2**20} (1 MiB).")
    if requests_in_flight < 1:
        raise ConfigError(f"requests_in_flight is {requests_in_flight}; it must be 1 or more.")
    of_files = () if is_open else signature(CheckpointIndex.open).parameters.keys()
    if unknown := sorted(hub_kwargs.keys() - of_files):
        end = did_you_mean(unknown[0], signature(load_weights).parameters.keys() | of_files)
        of = " for a checkpoint that is open" if is_open else ""
        raise ConfigError(f"load_weights has no argument {', '.join(unknown)}{of}{end}")


def _report(
    model: nn.Module, match: Match, filled: Filled, watch: MemoryWatch, seconds: dict[str, float]
) -> LoadReport:
    """This rank's report."""
    count = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            count[parameter.dtype] += parameter.numel()
    dtypes = [dtype for dtype, _ in count.most_common()]
    dequantized, heads = match.dequantized, WithHeads.of(model).heads
    return LoadReport(
        checkpoint=match.index.name,
        rank=rank_and_size()[0],
        dtypes=tuple(map(dtype_name, dtypes)),
        missing_keys=tuple(sorted(match.missing_keys)),
        unexpected_keys=tuple(sorted(match.unexpected_keys)),
        mismatched_keys=match.mismatched,
        resized_keys=match.resized,
        initialized_keys=tuple(sorted(match.to_initialize)),
        carried_keys=tuple(heads.index.tensors) if heads else (),
        carried_bytes=heads.index.num_bytes if heads else 0,
        dequantized_from=dequantized.method if dequantized else None,
        quantized_bytes=dequantized.stored_bytes if dequantized else 0,
        dequantized_bytes=dequantized.num_values * dtypes[0].itemsize if dequantized else 0,
        bytes_read=filled.stats.num_bytes + filled.converted.num_bytes,
        share_bytes=filled.share_bytes,
        converted_bytes=filled.converted.num_bytes,
        read_calls=filled.stats.calls + filled.converted.calls,
        staging_bytes=max(filled.stats.staging_bytes, filled.converted.staging_bytes),
        peak_host_bytes=watch.above(filled.host_bytes),
        seconds=seconds,
    )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note the wall time of a block."""
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 4)


def _refuse_other_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse a dtype for quantised weights, and for parameters that have storage already."""
    refuse_cast(model, dtype)
    for name, parameter in model.named_parameters():
        if dtype and parameter.is_floating_point() and not parameter.is_meta and parameter.dtype != dtype:
            raise ConfigError(
                f"dtype={dtype} cannot be honoured: {name!r} has storage in {parameter.dtype} already. Build the "
                "model on meta (build_meta_model), or leave dtype out."
            )


def _device_of(model: nn.Module) -> torch.device:
    """Where weights belong: the mesh's device, or the CPU if FSDP2 offloads parameters or nothing is sharded."""
    if (sharding := sharding_of(model)) is not None:
        return sharding.device
    if is_offloaded(model):
        return torch.device("cpu")
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return torch.device(mesh.device_type if mesh is not None else "cpu")


@contextmanager
def rolled_back(model: nn.Module) -> Iterator[str]:
    """Undo a block that fails: put tensors that were on meta back on meta, and free their storage.

    Floating-point tensors that had storage before become NaN rather than a mixture of two models. Yields in which state
    the model then is, for messages. No rank communicates; a failure that `agreed` shares undoes the block on all ranks.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        after = "the model is on meta again, as it was"
    else:
        after = "weights that had storage are partly overwritten, so they were filled with NaN"
    before, held = list(slots(model)), floats_held(model)
    try:
        yield after
    except BaseException:
        for store, name, tensor in before:
            if tensor.is_meta:
                _free(store[name])
                store[name] = tensor
            elif tensor.is_floating_point() or tensor in held:
                nan = float("nan") if tensor.is_floating_point() else 255  # the bits of a NaN, of scales of any format
                for _, memory in Held.of(tensor).parts():
                    memory.fill_(nan)
        renew(model)
        raise


def _free(tensor: torch.Tensor | None) -> None:
    """Free a tensor's memory now: FSDP2 keeps a reference to each shard until it gets the next one."""
    if tensor is not None and not tensor.is_meta:
        storage = Held.of(tensor).memory.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
