"""A checkpoint matched with a model: which key fills which tensor, and what is left over on either side."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap, adjust_keys, map_loading, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.recognize import Dequantized, method_of, scaled_as_converted, with_floats
from hf_fsdp_tools.loading.quantized.refuse import refuse_quantized
from hf_fsdp_tools.loading.quantized.weights_4bit import Weights4Bit, part_packed
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.vocabulary import added_part, token_dims
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.quantization import stored_quantization
from hf_fsdp_tools.text import listed_lines

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, shape in the checkpoint, shape in the model."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which tensors of a checkpoint fill which tensors of a model."""

    index: CheckpointIndex
    """The checkpoint, with quantised weights as plain ones; of a training state, the model's part."""
    dequantized: Dequantized | None
    """What is dequantised while it is read; None of a plain checkpoint."""
    state: Mapping[str, torch.Tensor]
    """The model's persistent tensors by key, before they have storage."""
    load_map: LoadMap
    """Where each tensor of the model comes from, by transformers' conversions; without the weights that are packed."""
    weights_4bit: Weights4Bit | None
    """The 4-bit weights, which are not in `load_map` where they are packed while loading; None without any."""
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
    state = persistent_tensors(model)
    quantization = stored_quantization(model)
    index, dequantized = with_floats(index.of_model(state), quantization, state)
    load_map = map_loading(model, state, index.tensors, is_model_state=index.is_model_state)
    index = scaled_as_converted(index, load_map)
    layers = packed_linears(model) if getattr(model, "hf_quantizer", None) is not None else {}
    load_map, weights_4bit = part_packed(layers, state, load_map, index) if layers else (load_map, None)
    refuse_quantized(state, layers, load_map, index, method_of(quantization), is_known=dequantized is not None)
    stored, added = _resized(model, state, load_map) if resize_vocabulary else (load_map.tensors, {})
    mismatched = _other_shapes(stored, state)
    if mismatched and not ignore_mismatched_sizes:
        _refuse_mismatched(mismatched, index, resize_vocabulary)
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    packed = weights_4bit.plain if weights_4bit else {}
    names: dict[int, list[str]] = {}
    for key, tensor in state.items():
        if key not in packed:
            names.setdefault(id(tensor), []).append(key)
    loaded: dict[str, PieceTensor] = {}
    tied_pairs: list[tuple[str, str]] = []
    to_initialize: set[str] = set()
    missing: set[str] = set()
    for tied in names.values():
        there = [key for key in tied if key in stored and key not in wrong]
        if there:
            loaded[there[0]] = stored[there[0]]
            tied_pairs += [(there[0], other) for other in there[1:]]
        else:
            to_initialize.add(tied[0])
            missing.update(key for key in tied if key not in wrong)
    missing_keys, unexpected_keys = adjust_keys(model, missing, set(load_map.unexpected_keys))
    if strict and (missing_keys or unexpected_keys):
        raise CheckpointError(
            f"{index.name!r} does not hold exactly what the model needs. Missing: "
            f"{', '.join(sorted(missing_keys)) or 'none'}. Unexpected: {', '.join(sorted(unexpected_keys)) or 'none'}. "
            "Use the matching auto class, or strict=False."
        )
    return Match(
        index=index,
        dequantized=dequantized,
        state=state,
        load_map=load_map,
        weights_4bit=weights_4bit,
        loaded=loaded,
        tied_pairs=tuple(tied_pairs),
        to_initialize=frozenset(to_initialize),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        mismatched=mismatched,
        resized=_other_shapes(load_map.tensors, stored),
        added={key: rows for key, rows in added.items() if key in loaded},
    )


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
