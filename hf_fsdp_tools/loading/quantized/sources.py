"""Where the tensors of a model come from in a checkpoint, quantised or not; what no rule makes floats of is refused."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap, map_loading, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.four_bits import Weights4Bit, match_4bit
from hf_fsdp_tools.loading.quantized.keep import with_bytes
from hf_fsdp_tools.loading.quantized.recognize import Dequantized, method_of, scaled_as_converted, with_floats
from hf_fsdp_tools.modeling.packed import packed_parts, plain_parameters, stored_quantization
from hf_fsdp_tools.text import dtype_name, listed_lines, quoted

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


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where each tensor of a model comes from."""

    as_stored: CheckpointIndex
    """The checkpoint as its files have it, or the model's part of a training state."""
    index: CheckpointIndex
    """The same with quantised weights as plain ones."""
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


def sources_of(model: nn.Module, index: CheckpointIndex) -> Sources:
    """Where a model's tensors come from in a checkpoint. Nothing is read or communicated."""
    state, quantization = persistent_tensors(model), stored_quantization(model)
    as_stored = index.of_model(state)
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
    sources = Sources(
        as_stored=as_stored,
        index=index,
        dequantized=dequantized,
        state=state,
        load_map=load_map,
        computed=computed,
        beside=_beside(as_stored, index) if is_packed else frozenset(),
    )
    _refuse(sources, method_of(quantization), is_known=is_known or bool(computed.forms))
    return sources


def _refuse(sources: Sources, method: str | None, *, is_known: bool) -> None:
    """Refuse quantised values that cannot be read into shards, and a config that does not fit the files.

    The files decide: a stored tensor is packed if it fills a floating-point parameter with integers, or if the model
    does not know it and it belongs to the module of a parameter that is missing or one byte wide.
    """
    packed, index = _packed_tensors(sources), sources.index
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


def _packed_tensors(sources: Sources) -> list[tuple[Stored, str]]:
    """Every stored tensor that holds packed values, with the key of the floating-point parameter it stands for."""
    state, load_map, stored = sources.state, sources.load_map, sources.index.tensors
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


def _beside(as_stored: CheckpointIndex, index: CheckpointIndex) -> frozenset[str]:
    """Stored keys of what no parameter takes: scales of activations, shapes of packed weights, GPTQ's groups."""
    quantized = [tensor for tensor in index.tensors.values() if isinstance(tensor, QuantizedTensor)]
    known = {part.key for tensor in quantized for part in tensor.parts} | index.tensors.keys()
    return frozenset(as_stored.tensors.keys() - known) | {t.groups.key for t in quantized if t.groups is not None}
