"""A checkpoint matched with a model: which key fills which tensor, quantised or not, and what is left over."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap, adjust_keys, map_loading, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, QuantizedTensor, Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.four_bits import Weights4Bit, match_4bit
from hf_fsdp_tools.loading.quantized.keep import with_bytes
from hf_fsdp_tools.loading.quantized.recognize import Dequantized, method_of, scaled_as_converted, with_floats
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.loading.vocabulary import added_part, token_dims
from hf_fsdp_tools.modeling.packed import packed_parts, plain_parameters, stored_quantization
from hf_fsdp_tools.text import dtype_name, grouped, listed_lines, quoted

_REASONS = {
    "aqlm": "it stores codes of codebooks",
    "auto-round": "it packs values with zero points per group, and may reorder columns",
    "awq": "of its formats, 4-bit integers as gemm packs them are dequantised",
    "bitnet": "its layers compute with ternary weights",
    "bitsandbytes": "8-bit layers keep a second reference to the whole weight, which FSDP2 neither shards nor frees",
    "compressed-tensors": "of its formats, those that docs/checkpoints.md lists are dequantised",
    "fp_quant": "it rotates weights before it packs them",
    "gptq": "of its formats, gptq and gptq_v2 of 4 or 8 bits are dequantised",
    "higgs": "it stores codes of a grid, of rotated weights",
    "hqq": "it packs values with zero points, in layouts of its own",
    "quip": "it stores codes of codebooks",
    "spqr": "it keeps outliers apart from packed values",
    "vptq": "it stores codes of codebooks",
}
"""Why there is no rule that makes floats of some blocks by themselves, by the method that a config names."""

_OF_8_BITS = (torch.int8, torch.uint8)
"""Dtypes that values of a quantised weight have under the weight's own name; packed ones have names of their own."""

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, shape in the checkpoint, shape in the model."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which tensors of a checkpoint fill which tensors of a model."""

    index: CheckpointIndex
    """The checkpoint, or the model's part of a training state, with quantised weights as plain ones."""
    dequantized: Dequantized | None
    """What is dequantised while it is read; None of a plain checkpoint."""
    state: Mapping[str, torch.Tensor]
    """The model's persistent tensors by key, before they have storage."""
    load_map: LoadMap
    """What each of them is made of, by transformers' conversions."""
    computed: Weights4Bit
    """What fills those whose bytes no file holds as they are."""
    beside: frozenset[str]
    """Stored keys of what lies next to weights quantised as stored, and only servers read: saves copy it as heads."""
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
    state = persistent_tensors(model)
    as_stored = index.of_model(state)
    index, load_map, dequantized, computed, beside = _sources(model, state, as_stored)
    stored, added = _resized(model, state, load_map) if resize_vocabulary else (load_map.tensors, {})
    mismatched = _other_shapes(stored, state)
    if mismatched and not ignore_mismatched_sizes:
        _refuse_mismatched(mismatched, index, resize_vocabulary)
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    wanted = {key: tensor for key, tensor in state.items() if key not in computed.filled}
    loaded, tied_pairs, absent = _first_names(wanted, {key: stored[key] for key in stored.keys() - wrong})
    missing = {key for tied in absent for key in tied} - wrong
    missing_keys, unexpected_keys = adjust_keys(model, missing, set(load_map.unexpected_keys))
    heads = _heads(model, load_map, unexpected_keys)
    modules = {key.rpartition(".")[0] for key in heads}
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
        computed=computed,
        beside=beside,
        loaded=loaded,
        tied_pairs=tuple(tied_pairs),
        to_initialize=frozenset(tied[0] for tied in absent),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        heads=part_of(index, heads.__contains__) if heads or beside else None,
        stored_heads=part_of(as_stored, lambda key: key.rpartition(".")[0] in modules or key in beside),
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


# ---- where tensors come from ----


def _sources(
    model: nn.Module, state: Mapping[str, torch.Tensor], as_stored: CheckpointIndex
) -> tuple[CheckpointIndex, LoadMap, Dequantized | None, Weights4Bit, frozenset[str]]:
    """Where a model's tensors come from in a checkpoint, as `Match` has it. Nothing is read or communicated."""
    quantization, beside = stored_quantization(model), frozenset[str]()
    index, dequantized = with_floats(as_stored, quantization, state)
    is_known, parts, wanted, computed = dequantized is not None, packed_parts(model), dict(state), Weights4Bit()
    is_packed = bool(parts) and parts.isdisjoint(index.tensors)  # a training state has the parts under their own names
    if is_packed:
        wanted = {key: tensor for key, tensor in state.items() if key not in parts} | plain_parameters(model)
    load_map = map_loading(model, wanted, index.tensors, is_model_state=index.is_model_state)
    index = scaled_as_converted(index, load_map)
    if is_packed:
        index, load_map = with_bytes(model, index, load_map)
        used = {source for tensor in load_map.tensors.values() for source in tensor.sources}
        dequantized = dequantized.of([index.tensors[source] for source in used]) if dequantized else None
        index, load_map, computed = match_4bit(model, state, load_map, index)
        # what no parameter takes: scales of activations, shapes of packed weights, GPTQ's groups
        quantized = [tensor for tensor in index.tensors.values() if isinstance(tensor, QuantizedTensor)]
        known = {part.key for tensor in quantized for part in tensor.parts} | index.tensors.keys()
        beside = frozenset(as_stored.tensors.keys() - known) | {t.groups.key for t in quantized if t.groups is not None}
    _refuse(index, state, load_map, method_of(quantization), is_known=is_known or bool(computed.forms))
    return index, load_map, dequantized, computed, beside


def _refuse(
    index: CheckpointIndex, state: Mapping[str, torch.Tensor], load_map: LoadMap, method: str | None, *, is_known: bool
) -> None:
    """Refuse quantised values that cannot be read into shards, and a config that does not fit the files.

    The files decide: a stored tensor is packed if it fills a floating-point parameter with integers, or if the model
    does not know it and it belongs to the module of a parameter that is missing or one byte wide.
    """
    packed = _packed_tensors(index.tensors, state, load_map)
    if not packed and (method is None or is_known):
        return
    if not packed:
        dtypes = ", ".join(sorted({dtype_name(t.dtype) for t in index.tensors.values()}))
        raise CheckpointError(
            f"{index.name!r}: the config says that it is quantised ({quoted(method)[1:-1]}), but its files hold plain "
            f"values ({dtypes}). Remove quantization_config from the config to load these."
        )
    rows = listed_lines(
        f"{t.file}: {t.key!r} holds {dtype_name(t.dtype)}, expected floating-point values for {target!r}"
        for t, target in packed
    )
    if method is None and all(t.key == target and t.dtype not in _OF_8_BITS for t, target in packed):
        raise CheckpointError(
            f"The checkpoint {index.name!r} holds other values than floating-point numbers where the model has these.\n"
            f"{rows}\nUse the checkpoint that belongs to the model, or convert these tensors once and save it again."
        )
    says = f"quantised ({method})" if method else "quantised, although its config has no quantization_config"
    reason = _REASONS.get(method or "", "no rule is known that makes floats of some of its blocks by themselves")
    raise CheckpointError(
        f"The checkpoint {index.name!r} is {says}; it cannot be dequantised shard by shard: {reason}.\n{rows}\n"
        "Make a plain checkpoint of it once by the library of its method: load it with transformers' from_pretrained, "
        "then call model.dequantize() and model.save_pretrained(OUT)."
    )


def _packed_tensors(
    stored: Mapping[str, Stored], state: Mapping[str, torch.Tensor], load_map: LoadMap
) -> list[tuple[Stored, str]]:
    """Every stored tensor that holds packed values, with the key of the floating-point parameter it stands for."""
    of_source = {source: tensor for tensor in stored.values() for source in tensor.sources}
    packed = []
    modules: dict[str, str] = {}  # module of a parameter that is missing, or 8 bits wide -> its key
    for key in sorted(key for key, t in state.items() if isinstance(t, nn.Parameter) and t.is_floating_point()):
        made_of = [of_source[each] for each in sorted(load_map.tensors[key].sources)] if key in load_map.tensors else []
        packed += [(t, key) for t in made_of if not t.dtype.is_floating_point]
        if all(t.dtype.itemsize == 1 for t in made_of):
            modules[key.rpartition(".")[0]] = key
    for key, names in load_map.unexpected_keys.items():
        target = modules.get(key.rpartition(".")[0])
        for t in (stored[name] for name in names if target is not None and stored[name].shape):
            if target in load_map.tensors or t.dtype.itemsize == 1 or not t.dtype.is_floating_point:
                packed.append((t, str(target)))
    return packed
