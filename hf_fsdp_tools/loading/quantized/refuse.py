"""Refuse quantised weights for which no rule per block is known, and configs that contradict the files."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.formats.stored import Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.text import dtype_name, listed_lines, quoted

_REASONS = {
    "aqlm": "it stores codes of codebooks",
    "auto-round": "it packs values with zero points per group, and may reorder columns",
    "awq": "it packs values in an order of its own, with zero points per group",
    "bitnet": "its layers compute with ternary weights",
    "bitsandbytes": "8-bit layers keep a second reference to the whole weight, which FSDP2 neither shards nor frees",
    "compressed-tensors": "of its formats, 8-bit values, packed integers of 4 or 8 bits and NVFP4 are dequantised",
    "fp_quant": "it rotates weights before it packs them",
    "gptq": "it packs values with zero points per group, and may reorder columns",
    "higgs": "it stores codes of a grid, of rotated weights",
    "hqq": "it packs values with zero points, in layouts of its own",
    "quip": "it stores codes of codebooks",
    "spqr": "it keeps outliers apart from packed values",
    "vptq": "it stores codes of codebooks",
}
"""Why there is no rule that makes floats of some blocks by themselves, by the method that a config names."""

_OF_8_BITS = (torch.int8, torch.uint8)
"""Dtypes that values of a quantised weight have under the weight's own name; packed ones have names of their own."""

_PLAIN = (
    "Make a plain checkpoint of it once, with the library of its method: python recipes/dequantize.py CHECKPOINT OUT."
)


def refuse_quantized(
    state: Mapping[str, torch.Tensor],
    layers: Collection[str],
    load_map: LoadMap,
    index: CheckpointIndex,
    method: str | None,
    *,
    is_known: bool,
) -> None:
    """Refuse quantised values that cannot be read into shards, and a config that does not fit the files.

    The files decide, whatever the method is called. A stored tensor is packed if it fills a floating-point parameter
    with integers, or if the model does not know it and it belongs to the module of a parameter that is missing or one
    byte wide (`qweight`, `weight_packed`, the scales of an 8-bit `weight`). The 4-bit weights of `layers`, at which
    `part_packed` has looked, do not count.
    """
    packed = _packed_tensors(state, load_map, index.tensors, layers)
    if not packed and (method is None or layers or is_known):
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
        f"The checkpoint {index.name!r} is {says}; it cannot be dequantised shard by shard: {reason}.\n{rows}\n{_PLAIN}"
    )


def _packed_tensors(
    state: Mapping[str, torch.Tensor], load_map: LoadMap, stored: Mapping[str, Stored], layers: Collection[str]
) -> list[tuple[Stored, str]]:
    """Every stored tensor that holds packed values, with the key of the floating-point parameter it stands for."""
    parameters = ((key, t) for key, t in state.items() if isinstance(t, nn.Parameter) and key not in layers)
    floats = sorted(key for key, parameter in parameters if parameter.is_floating_point())
    of_source = {source: tensor for tensor in stored.values() for source in tensor.sources}
    packed = []
    modules: dict[str, str] = {}  # module of a parameter that is missing, or 8 bits wide -> its key
    for key in floats:
        sources = sorted(load_map.tensors[key].sources) if key in load_map.tensors else []
        made_of = [of_source[source] for source in sources]
        packed += [(t, key) for t in made_of if not t.dtype.is_floating_point]
        if all(t.dtype.itemsize == 1 for t in made_of):
            modules[key.rpartition(".")[0]] = key
    by_suffix = {suffix: key for name, key in reversed(modules.items()) for suffix in _suffixes(name)}
    used = {source for tensor in load_map.tensors.values() for source in tensor.sources}
    for t in (t for t in stored.values() if used.isdisjoint(t.sources) and t.shape):
        # The same module, or one whose name differs in the prefix of a base model only.
        module = t.key.rpartition(".")[0]
        same = (by_suffix.get(module), *(modules.get(name) for name in _suffixes(module)))
        target = next(filter(None, same), None) if module else None
        is_packed = target in load_map.tensors or t.dtype.itemsize == 1 or not t.dtype.is_floating_point
        if target is not None and is_packed:
            packed.append((t, target))
    return packed


def _suffixes(name: str) -> list[str]:
    """A dotted name, and what is left of it without its first part, its first two parts, …"""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
