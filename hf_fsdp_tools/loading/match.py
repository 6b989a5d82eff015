"""A checkpoint matched with a model: which key fills which tensor, and what is left over on either side."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.shards import local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap, adjust_keys, map_loading, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import Reader
from hf_fsdp_tools.loading.quantized.dequantize import read_into
from hf_fsdp_tools.loading.quantized.recognize import Dequantized, method_of, scaled_as_converted, with_floats
from hf_fsdp_tools.loading.quantized.refuse import refuse_quantized
from hf_fsdp_tools.loading.quantized.share import part_packed
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.vocabulary import AddedRows, vocabulary_dims
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.quantization import stored_quantization
from hf_fsdp_tools.text import listed_lines

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, shape in the checkpoint, shape in the model."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which tensors of a checkpoint fill which tensors of a model."""

    index: CheckpointIndex
    """The checkpoint, with quantised weights as plain ones; of a DCP folder, the part that is the model's."""

    dequantized: Dequantized | None
    """What is dequantised while it is read; None of a plain checkpoint."""

    state: Mapping[str, torch.Tensor]
    """The model's persistent tensors by key, before they have storage."""

    load_map: LoadMap
    """Where each tensor of the model comes from, by transformers' conversions; without the weights in `to_pack`."""

    to_pack: Mapping[str, PieceTensor]
    """4-bit weights to pack while loading: key to the plain weight that the checkpoint holds."""

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

    added: Mapping[str, AddedRows]
    """Loaded tensors with rows for tokens that the checkpoint lacks, by key."""


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
    load_map = map_loading(model, index.tensors, is_model_state=index.is_model_state)
    index = scaled_as_converted(index, load_map)
    load_map, to_pack = part_packed(model, load_map, index)
    refuse_quantized(model, load_map, index, method_of(quantization), is_known=dequantized is not None)
    found, added = _resized(model, state, load_map) if resize_vocabulary else (load_map.tensors, {})
    mismatched = _other_shapes(found, state)
    if mismatched and not ignore_mismatched_sizes:
        _refuse_mismatched(mismatched, index, resize_vocabulary)
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    loaded: dict[str, PieceTensor] = {}
    tied_pairs: list[tuple[str, str]] = []
    to_initialize: set[str] = set()
    missing: set[str] = set()
    for tied in _tied_names({key: tensor for key, tensor in state.items() if key not in to_pack}):
        there = [key for key in tied if key in found and key not in wrong]
        if there:
            loaded[there[0]] = found[there[0]]
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
        to_pack=to_pack,
        loaded=loaded,
        tied_pairs=tuple(tied_pairs),
        to_initialize=frozenset(to_initialize),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        mismatched=mismatched,
        resized=_other_shapes(load_map.tensors, found),
        added={key: rows for key, rows in added.items() if key in loaded},
    )


def _other_shapes(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[Mismatch, ...]:
    """The keys of `found` that have another shape in `wanted`."""
    return tuple(
        (key, tuple(tensor.shape), tuple(wanted[key].shape))
        for key, tensor in found.items()
        if tensor.shape != wanted[key].shape
    )


def _tied_names(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The keys of each distinct tensor."""
    names: dict[int, list[str]] = {}
    for key, tensor in state.items():
        names.setdefault(id(tensor), []).append(key)
    return list(names.values())


def _resized(
    model: nn.Module, state: Mapping[str, torch.Tensor], load_map: LoadMap
) -> tuple[dict[str, PieceTensor], dict[str, AddedRows]]:
    """The stored tensors by model key, cut or extended to the model's vocabulary; and where rows were added."""
    found, added = dict(load_map.tensors), {}
    dims = vocabulary_dims(model)
    for key, tensor in load_map.tensors.items():
        dim = dims.get(key)
        if dim is None or tensor.pieces is None or tensor.dim() != state[key].dim():
            continue
        old, new = tensor.shape[dim], state[key].shape[dim]
        extended = tensor.extended(dim, new)
        if old != new and extended.shape == state[key].shape:
            found[key] = extended
            if new > old:
                added[key] = AddedRows(dim=dim, start=old)
    return found, added


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


# ---- values ----


def check_ties(match: Match, *, staging_bytes: int) -> None:
    """Compare the two stored values of each tied pair; each rank compares its own shards."""
    index = match.index
    if not match.tied_pairs:
        return
    with Reader(staging_bytes=staging_bytes // 2, side=None) as reader:
        for name, other in match.tied_pairs:
            first, second = match.loaded[name], match.load_map.tensors[other]
            if first.pieces is None or second.pieces is None or _are_same_bytes(first, second, index):
                continue  # what a conversion computes has no bytes in the file to compare
            for box, _ in local_boxes_of(match.state[name]):
                for slab in box.slabs(staging_bytes // 4, first.dtype.itemsize):
                    values = torch.zeros(2, *slab.length, dtype=first.dtype)  # rows of added tokens stay 0
                    places = [(value, tensor, slab) for tensor, value in zip((first, second), values, strict=True)]
                    read_into(places, index, reader, staging_bytes=staging_bytes // 2)
                    if not torch.equal(values[0], values[1]):
                        raise CheckpointError(
                            f"{index.name!r}: the config ties {name!r} and {other!r}, but the checkpoint holds "
                            "different values for them. Set tie_word_embeddings=False in the config to keep both."
                        )


def _are_same_bytes(first: PieceTensor, second: PieceTensor, index: CheckpointIndex) -> bool:
    """Whether two keys name the same bytes: pickled files list a tied tensor under both names and store it once."""
    places = []
    for tensor in (first, second):
        stored = [(index.source(piece.source), piece) for piece in tensor.pieces or ()]
        places.append({(s.file, s.offset, s.dtype, piece.box, piece.view) for s, piece in stored})
    return places[0] == places[1]


_SLAB_ELEMENTS = 2**22
"""Values that are checked at a time, which bounds the check's memory to a few MiB. (assumed)"""


def refuse_not_finite(model: nn.Module, keys: Iterable[str]) -> None:
    """Refuse NaN and infinity in this rank's shards of the loaded tensors; of 4-bit weights, in their scales."""
    state = persistent_tensors(model)
    layers = packed_linears(model)
    counts = {
        key: _num_bad_scales(layers[key]) if key in layers else _num_not_finite(state[key]) for key in sorted(keys)
    }
    found = [(key, count) for key, count in counts.items() if count]
    if found:
        rows = listed_lines(f"{key}: {count} of its values here" for key, count in found)
        raise CheckpointError(
            f"{len(found)} tensors hold values that are not finite:\n{rows}\nThe training that wrote the checkpoint "
            "diverged, or the values do not fit the dtype they are loaded in. Use another checkpoint or dtype, or "
            "check_finite=False to load it as it is."
        )


def _num_not_finite(tensor: torch.Tensor) -> int:
    """How many values of this rank's shard are NaN or infinite."""
    if not tensor.is_floating_point():
        return 0
    local = local_tensor(tensor)
    parts = (memory_view(local, start, box.length) for box, start in local_boxes_of(tensor))
    return sum(slab.numel() - int(torch.isfinite(slab).sum()) for part in parts for slab in _bounded_parts(part))


def _num_bad_scales(layer: Any) -> int:
    """How many scales of a 4-bit weight are not finite; where these are quantised, how many of their own scales."""
    state = layer.quant_state
    scales = [state.absmax] if state.state2 is None else [state.offset, state.state2.absmax]
    return sum(tensor.numel() - int(torch.isfinite(tensor).sum()) for tensor in scales)


def _bounded_parts(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in parts of bounded size: runs of memory where it is contiguous, rows otherwise."""
    if part.is_contiguous():
        yield from torch.split(part.view(-1), _SLAB_ELEMENTS)
    else:
        yield from torch.split(part, max(1, _SLAB_ELEMENTS * part.shape[0] // max(1, part.numel())))
