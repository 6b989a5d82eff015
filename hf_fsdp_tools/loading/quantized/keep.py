"""Quantised weights that stay as they are stored: which parameters can, and the stored bytes that fill them.

A conversion that only moves data (stacking experts, joining gate and up) moves the bytes of values as it moves the
values, and those of scales as it moves blocks. So transformers' own conversion is run once more for each: on tensors
whose elements are bytes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import ConversionGroup, LoadMap, convert_group, map_loading, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.recognize import scaled_as_converted, with_floats
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.modeling.packed import (
    check_experts,
    exchanged,
    is_packable,
    pack,
    packed_parameters,
    plain_parameters,
    stored_quantization,
)
from hf_fsdp_tools.modeling.packed_weight import PackedForm, part_name
from hf_fsdp_tools.text import listed


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A parameter that stays packed, and the bytes that fill it."""

    form: PackedForm
    bytes_of: Mapping[str, PieceTensor]
    """By the fqns of its parts; their sources are stored tensors seen as bytes."""
    members: tuple[QuantizedTensor, ...]
    """The stored tensors that it is made of."""


def keep_stored(model: nn.Module, index: CheckpointIndex) -> None:
    """Let the quantised weights of a checkpoint stay as they are stored in a model on meta, in place, and freeze all.

    No rank communicates.

    Raises:
        ConfigError: nothing is quantised, or something quantised has no such form in the model: tables, tied weights,
            what a conversion computes, blocks that conversions cut through.
    """
    state = persistent_tensors(model)
    quantization = stored_quantization(model)
    floats, dequantized = with_floats(index.of_model(state), quantization, state)
    load_map = map_loading(model, state, floats.tensors, is_model_state=floats.is_model_state)
    floats = scaled_as_converted(floats, load_map)
    names = Counter(map(id, state.values()))  # tied tensors have several, and stay plain
    owners = {key: model.get_submodule(key.rpartition(".")[0]) for key in state}
    plain = {
        key: tensor
        for key, tensor in state.items()
        if isinstance(tensor, nn.Parameter) and names[id(tensor)] == 1 and is_packable(owners[key], tensor)
    }
    if dequantized is None:
        raise ConfigError(f"dequantize=False: {index.name!r} holds no quantised weights. Leave dequantize out.")
    kept = kept_parameters(model, floats, load_map, plain)
    quantized = {key for key, stored in floats.tensors.items() if isinstance(stored, QuantizedTensor)}
    floating = [key for key, tensor in load_map.tensors.items() if key not in kept and tensor.sources & quantized]
    if floating:  # saves would hold floats for which the config promises something else
        raise ConfigError(
            f"dequantize=False: {listed(floating)} of {type(model).__name__} cannot be kept as stored "
            f"({dequantized.method}): they are tied, tables, or joined by a conversion that cuts blocks. Leave "
            "dequantize out."
        )
    pack(model, {key: each.form for key, each in kept.items()})
    check_experts(model)
    model.requires_grad_(False)


def kept_parameters(
    model: nn.Module, index: CheckpointIndex, load_map: LoadMap, plain: Mapping[str, torch.Tensor]
) -> dict[str, Kept]:
    """The parameters among `plain` (by fqn, with the plain shape and dtype) that can stay packed."""
    found: dict[str, Kept] = {}
    traced: dict[str, Mapping[str, Mapping[str, PieceTensor]]] = {}
    for key, tensor in plain.items():
        members = _members(index, load_map, key)
        forms = [replace(each.form, shape=tuple(tensor.shape), dtype=tensor.dtype) for each in members]
        if not members or any(form != forms[0] for form in forms):
            continue
        group, form = load_map.groups[key], forms[0]
        if group.target not in traced:
            with original_classes(model):
                traced[group.target] = {name: _traced(model, group, members, name) for name in members[0].stored}
        bytes_of = {part_name(key, name): parts[key] for name, parts in traced[group.target].items() if key in parts}
        if bytes_of.keys() == form.parts(key).keys() and _fits(form, list(bytes_of.values()), members):
            found[key] = Kept(form=form, bytes_of=bytes_of, members=tuple(members))
    return found


def with_bytes(model: nn.Module, index: CheckpointIndex, load_map: LoadMap) -> tuple[CheckpointIndex, LoadMap]:
    """Index and load map (of plain parameters) in which a model's packed parameters are filled with stored bytes."""
    forms = {key: form for key, form in packed_parameters(model).items() if not form.flat_block}
    plain = {key: tensor for key, tensor in plain_parameters(model).items() if key in forms}
    kept = kept_parameters(model, index, load_map, plain)
    wrong = [key for key, form in forms.items() if key not in kept or kept[key].form != form]
    if wrong:
        raise CheckpointError(
            f"{index.name!r} does not hold {listed(wrong)} in the quantised form in which this model has "
            f"{'them' if len(wrong) > 1 else 'it'}. Load the checkpoint that the model was built for."
        )
    tensors: dict[str, Stored] = dict(index.tensors)
    pieces = {key: tensor for key, tensor in load_map.tensors.items() if key not in forms}
    for each in kept.values():
        pieces |= each.bytes_of
        for member in each.members:
            tensors |= {(stored := _as_bytes(member, name)).key: stored for name in member.stored}
    index = replace(index, tensors=MappingProxyType(tensors))
    return index, replace(load_map, tensors=pieces)


def _members(index: CheckpointIndex, load_map: LoadMap, key: str) -> list[QuantizedTensor]:
    """The stored tensors that make a parameter, if all of them are quantised."""
    if (group := load_map.groups.get(key)) is None:
        return []
    names = [name for name, _ in group.members[: None if group.transform is not None else 1]]
    found = [stored for name in names if isinstance(stored := index.tensors[name], QuantizedTensor)]
    return found if len(found) == len(names) else []


def _traced(
    model: nn.Module, group: ConversionGroup, members: Sequence[QuantizedTensor], name: str
) -> Mapping[str, PieceTensor]:
    """What a group's conversion makes of the bytes of values or of scales, by model key; nothing if it fails.

    It sees the dimensions in the order of the plain tensors.
    """
    is_transposed = members[0].form.is_transposed
    symbols = {each.key: PieceTensor.stored(_as_bytes(each, name), torch.uint8) for each in members}
    try:
        found = convert_group(model, group, {key: exchanged(each, is_transposed) for key, each in symbols.items()})
        return {key: exchanged(each, is_transposed) for key, each in found.items()}  # type: ignore[misc]  # symbols
    except Exception:  # a conversion may do anything; what it does to floats need not fit bytes, and then none is kept
        return {}


def _as_bytes(tensor: QuantizedTensor, name: str) -> StoredTensor:
    """Values ("packed") or scales of a quantised tensor as bytes, (…, rows, bytes)."""
    stored, outer = tensor.stored[name], tensor.shape[:-2]
    width = tensor.elements(name) * stored.dtype.itemsize
    rows = stored.num_bytes // max(1, width * math.prod(outer))
    return replace(stored, dtype=torch.uint8, shape=(*outer, rows, width))


def _fits(form: PackedForm, parts: Sequence[PieceTensor], members: Sequence[QuantizedTensor]) -> bool:
    """Whether the bytes have the form's shapes, and no conversion has cut through a block."""
    rows, columns = form.matrix()
    for high, wide in (part.block for part in form.scales.values()):
        for own_rows, across in (each.form.matrix() for each in members):
            if (own_rows % high and own_rows != rows) or (across % wide and across != columns):
                return False
    if any(part.pieces is None or part.shape != own for part, own in zip(parts, form.shapes("").values(), strict=True)):
        return False
    blocks_of = {part.block for part in form.scales.values()}
    down = form.values.block[0]
    return all(_moves_blocks(parts[0], -(-high // down), wide, members) for high, wide in blocks_of)


def _moves_blocks(values: PieceTensor, high: int, wide: int, members: Sequence[QuantizedTensor]) -> bool:
    """Whether a conversion has left the values of each block of a stored tensor together, in their order.

    Rows, and the height of blocks, are those of the stored matrix, of GPTQ the words that pack values down.
    """
    for piece in values.pieces or ():
        each = next(each for each in members if each.values.key == piece.source)
        *_, rows, width = _as_bytes(each, "packed").shape
        across = max(1, wide * width // each.form.columns)
        row, column = divmod(piece.offset % (rows * width), width)
        places, (count, _) = (row, piece.box.start[-2]), piece.box.length[-2:]
        is_whole = high >= rows or high == 1
        if not is_whole and (
            piece.strides[-2] != width or any(p % high for p in places) or (count % high and row + count != rows)
        ):
            return False
        if across < width and (piece.strides[-1] != 1 or column % across or piece.box.start[-1] % across):
            return False
    return True
