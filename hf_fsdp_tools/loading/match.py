"""A checkpoint matched with a model: which key fills which tensor, and what is left over."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap, adjust_keys
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.sources import Sources, sources_of
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.vocabulary import added_part, token_dims
from hf_fsdp_tools.text import grouped, listed_lines

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, shape in the checkpoint, shape in the model."""


@dataclass(frozen=True, kw_only=True)
class Match(Sources):
    """Which tensors of a checkpoint fill which tensors of a model."""

    loaded: Mapping[str, PieceTensor]
    """Every other tensor that the checkpoint fills: key to stored elements; tied tensors under one key."""
    tied_pairs: tuple[tuple[str, str], ...]
    """Pairs of tied keys where the checkpoint holds both keys; the first key of each pair is in `loaded`."""
    to_initialize: frozenset[str]
    """Keys of tensors that the model must initialise; tied tensors under one key."""
    missing_keys: frozenset[str]
    """Keys of the model that the checkpoint lacks, as they are reported."""
    unexpected_keys: frozenset[str]
    """Keys of the checkpoint that the model has no place for, as they are reported."""
    heads: CheckpointIndex | None
    """The part of the checkpoint that is heads which the class says not to report; None without any."""
    stored_heads: CheckpointIndex
    """The same as it is stored: values and scales apart, with all that lies next to them."""
    mismatched: tuple[Mismatch, ...]
    """Tensors of another shape in the checkpoint, which the model initialises anew."""
    resized: tuple[Mismatch, ...]
    """Tensors that are loaded token by token, because the model has another vocabulary."""
    added: Mapping[str, Box]
    """The part of each loaded tensor that is of tokens which the checkpoint lacks, by key."""


def match_checkpoint(
    model: nn.Module,
    index: CheckpointIndex,
    *,
    ignore_mismatched_sizes: bool = False,
    strict: bool = False,
    resize_vocabulary: bool = False,
) -> Match:
    """Sort every key of the model into loaded, missing and mismatched. Nothing is read or communicated."""
    sources = sources_of(model, index)
    index, state, load_map = sources.index, sources.state, sources.load_map
    stored, added = _resized(model, state, load_map) if resize_vocabulary else (load_map.tensors, {})
    mismatched = _other_shapes(stored, state)
    if mismatched and not ignore_mismatched_sizes:
        _refuse_mismatched(mismatched, index, resize_vocabulary)
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    wanted = {key: tensor for key, tensor in state.items() if key not in sources.computed.filled}
    loaded, tied_pairs, absent = _first_names(wanted, {key: stored[key] for key in stored.keys() - wrong})
    missing = {key for tied in absent for key in tied} - wrong
    missing_keys, unexpected_keys = adjust_keys(model, missing, set(load_map.unexpected_keys))
    heads = _heads(model, load_map, unexpected_keys)
    modules = {key.rpartition(".")[0] for key in heads}
    if strict:
        _refuse_other_keys(index, missing_keys, unexpected_keys)
    return Match(
        **vars(sources),
        loaded=loaded,
        tied_pairs=tuple(tied_pairs),
        to_initialize=frozenset(tied[0] for tied in absent),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        heads=part_of(index, heads.__contains__) if heads or sources.beside else None,
        stored_heads=part_of(sources.as_stored, lambda key: key.rpartition(".")[0] in modules or key in sources.beside),
        mismatched=mismatched,
        resized=_other_shapes(load_map.tensors, stored),
        added={key: rows for key, rows in added.items() if key in loaded},
    )


def _first_names(
    wanted: Mapping[str, torch.Tensor], stored: Mapping[str, PieceTensor]
) -> tuple[dict[str, PieceTensor], list[tuple[str, str]], list[list[str]]]:
    """Each tensor's stored values under the first of its tied names that has some, with pairs of it and of the other
    names that have some; and the names of each tensor that has none."""
    loaded: dict[str, PieceTensor] = {}
    pairs: list[tuple[str, str]] = []
    absent: list[list[str]] = []
    for tied in grouped((id(tensor), key) for key, tensor in wanted.items()).values():
        there = [key for key in tied if key in stored]
        if there:
            loaded[there[0]] = stored[there[0]]
            pairs += [(there[0], other) for other in there[1:]]
        else:
            absent.append(list(tied))
    return loaded, pairs, absent


def _refuse_other_keys(index: CheckpointIndex, missing: Collection[str], unexpected: Collection[str]) -> None:
    if missing or unexpected:
        raise CheckpointError(
            f"{index.name!r} does not hold exactly what the model needs. Missing: "
            f"{', '.join(sorted(missing)) or 'none'}. Unexpected: {', '.join(sorted(unexpected)) or 'none'}. "
            "Use the matching auto class, or strict=False."
        )


def part_of(index: CheckpointIndex, holds: Callable[[str], bool]) -> CheckpointIndex:
    """A checkpoint with some of its tensors alone."""
    return replace(index, tensors={key: index.tensors[key] for key in sorted(index.tensors) if holds(key)})


def _heads(model: nn.Module, load_map: LoadMap, reported: Collection[str]) -> set[str]:
    """Stored keys that only a head for multi-token prediction can have, which servers look for.

    What else a class says not to report is of no use to it: buffers of older versions, or towers and decoders of a
    larger model, which the config that it saves does not have either.
    """
    ignored = ((key, stored) for key, stored in load_map.unexpected_keys.items() if key not in reported)
    return {each for key, stored in ignored if _is_of_head(model, key) for each in stored}


def _is_of_head(model: nn.Module, key: str) -> bool:
    """Whether a key has a part `mtp…`, or is of one more layer than a list of the model has."""
    if any(part.startswith("mtp") for part in key.split(".")):
        return True
    module: nn.Module | None = model
    prefix = getattr(model, "base_model_prefix", "")
    for part in key.removeprefix("" if hasattr(model, prefix) else f"{prefix}.").split("."):
        if module is None or part not in module._modules:
            return isinstance(module, nn.ModuleList) and part.isdigit()
        module = module._modules[part]
    return False


def _other_shapes(stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[Mismatch, ...]:
    """The keys of `stored` that have another shape in `wanted`."""
    return tuple(
        (key, tuple(tensor.shape), tuple(wanted[key].shape))
        for key, tensor in stored.items()
        if tensor.shape != wanted[key].shape
    )


def _resized(
    model: nn.Module, state: Mapping[str, torch.Tensor], load_map: LoadMap
) -> tuple[dict[str, PieceTensor], dict[str, Box]]:
    """The stored tensors by model key, cut or extended to the model's vocabulary; and where rows were added."""
    stored, added = dict(load_map.tensors), {}
    for key, dim in token_dims(model).items():
        tensor, wanted = stored.get(key), state[key].shape
        if tensor is None or tensor.pieces is None or tensor.shape == wanted or tensor.dim() != len(wanted):
            continue
        extended = tensor.extended(dim, wanted[dim])
        if extended.shape == wanted:
            stored[key] = extended
            if (new := added_part(tensor.shape, wanted)).numel:
                added[key] = new
    return stored, added


def _refuse_mismatched(mismatched: Collection[Mismatch], index: CheckpointIndex, resize_vocabulary: bool) -> None:
    rows = listed_lines(f"{key}: {list(a)} in the checkpoint, {list(b)} in the model" for key, a, b in mismatched)
    hint = "" if resize_vocabulary else " (or added_tokens, where the vocabulary alone was resized)"
    if any(isinstance(tensor, ChunkedTensor) for tensor in index.tensors.values()):
        hint += ". Parts in files of their own (shard-*.safetensors) must all be there"
    raise CheckpointError(
        f"{len(mismatched)} tensors of {index.name!r} have another shape than the model's:\n{rows}\nUse the config "
        f"that belongs to the checkpoint, or pass ignore_mismatched_sizes=True to initialise these anew{hint}."
    )


def _refuse_untied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose tied names are still separate parameters: shards cannot be tied afterwards."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    apart = [f"{a} = {b}" for a, b in ties.items() if a in state and b in state and state[a] is not state[b]]
    if apart:
        raise CheckpointError(
            f"The config ties weights that are separate parameters in this model: {', '.join(apart)}. Call "
            "model.tie_weights() before sharding, or set tie_word_embeddings=False in the config."
        )
