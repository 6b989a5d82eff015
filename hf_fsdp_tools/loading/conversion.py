"""Stored layout to model layout and back, by transformers' own conversions run on `PieceTensor`s.

This is the only file that touches transformers' conversion interface (checked with 5.17 and 5.23).
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.stored import Stored
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.four_bits import beside_4bit
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.modeling.packed import revert
from hf_fsdp_tools.text import listed


@dataclass(frozen=True, kw_only=True)
class ConversionGroup:
    """The stored tensors that one conversion takes together, and the conversion."""

    target: str
    """The model key that transformers files the group under."""
    members: tuple[tuple[str, str], ...]
    """(stored key, pattern it matched), in the order in which the conversion takes them."""
    transform: Any
    """transformers' transform; None where the tensor is only renamed."""


@dataclass(frozen=True, kw_only=True)
class LoadMap:
    """Where each tensor of the model comes from."""

    tensors: Mapping[str, PieceTensor]
    """Model key to the stored elements that the tensor is made of; inputs are named by stored key."""
    groups: Mapping[str, ConversionGroup]
    """Model key to the group that makes the tensor, to convert real values where a `PieceTensor` is opaque."""
    unexpected_keys: Mapping[str, Sequence[str]]
    """Keys of the checkpoint, after renaming, that the model has no place for; each with the stored keys behind it."""
    used_conversions: tuple[Any, ...] | None
    """transformers' transforms that matched a key; saving reverts them. None for a checkpoint in the model's layout."""


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by state-dict key; tied ones appear under each name as the same object."""
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors to save, by key: persistent ones, and what bitsandbytes stores next to 4-bit weights."""
    return persistent_tensors(model) | beside_4bit(model)


def map_loading(
    model: nn.Module, state: Mapping[str, torch.Tensor], stored: Mapping[str, Stored], *, is_model_state: bool = False
) -> LoadMap:
    """Trace every stored tensor through transformers' renamings and conversions to the keys of the model's `state`."""
    with original_classes(model):
        convert = not is_model_state and isinstance(model, PreTrainedModel)
        transforms = get_model_conversion_mapping(model) if convert else []
        groups, unexpected = _group(model, stored, state, transforms)
        tensors: dict[str, PieceTensor] = {}
        makers: dict[str, ConversionGroup] = {}
        for group in groups:
            for key, tensor in _trace(model, group, stored, state[group.target].dtype).items():
                if key in state:
                    tensors[key], makers[key] = tensor, group
                else:
                    unexpected.setdefault(key, [])
    return LoadMap(
        tensors=tensors,
        groups=makers,
        unexpected_keys=unexpected,
        used_conversions=tuple(t for t in transforms if t.was_used()) if not is_model_state else None,
    )


def _group(
    model: nn.Module, stored: Collection[str], state: Mapping[str, torch.Tensor], transforms: Sequence[Any]
) -> tuple[list[ConversionGroup], dict[str, list[str]]]:
    """Collect stored keys by the conversion they go into, as `convert_and_load_state_dict_in_model` does."""
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    members: dict[str, list[tuple[str, str]]] = {}
    transform_of: dict[str, Any] = {}
    unexpected: dict[str, list[str]] = {}
    for key in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if renamed not in state and key in state:  # a renaming that this model does not need; the prefix may still be
            renamed, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if renamed in state:
            transform_of.setdefault(renamed, None if pattern is None else converter_of[pattern])
            members.setdefault(renamed, []).append((key, pattern or key))
        elif pattern is not None:
            targets = converter_of[pattern].target_patterns
            for target in targets:
                unexpected.setdefault(renamed.replace(targets[0], target), []).append(key)
        else:
            unexpected.setdefault(renamed, []).append(key)
    groups = [ConversionGroup(target=key, members=tuple(m), transform=transform_of[key]) for key, m in members.items()]
    return groups, unexpected


def _trace(
    model: nn.Module, group: ConversionGroup, stored: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, PieceTensor]:
    """The group's conversion on tensors without data; results that cannot be followed are opaque."""
    inputs = {key: PieceTensor.stored(stored[key], dtype) for key, _ in group.members}
    try:
        return convert_group(model, group, inputs)
    except Exception as symbolic:  # a conversion may do anything to a tensor that has no values
        try:
            zeros = {key: torch.zeros(stored[key].shape, dtype=dtype) for key, _ in group.members}
            results = convert_group(model, group, zeros)
        except Exception:
            raise CheckpointError(
                f"The conversion to {group.target!r} ({group.transform}) fails on what the checkpoint holds, "
                + listed(f"{k!r} {list(stored[k].shape)}" for k, _ in group.members)
                + f": {symbolic}. The checkpoint does not fit this model or this version of transformers."
            ) from symbolic
        sources = frozenset[str]().union(*(stored[key].sources for key in inputs))
        return {k: PieceTensor(t.shape, t.dtype, None, sources) for k, t in results.items()}


def convert_group(model: nn.Module, group: ConversionGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The results of a group's transform by model key, of whole tensors by stored key; within `original_classes`."""
    if group.transform is None:  # of several tensors that are renamed to one key the first wins, as in transformers
        return {group.target: tensors[group.members[0][0]]}
    transform = deepcopy(group.transform)
    for key, pattern in group.members:
        transform.add_tensor(group.target, key, pattern, tensors[key])
    with torch.no_grad():
        results = transform.convert(group.target, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in results.items()}


def adjust_keys(model: nn.Module, missing: set[str], unexpected: set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """(missing, unexpected) without the keys that the model's class says not to report."""
    if not isinstance(model, PreTrainedModel):
        return frozenset(missing), frozenset(unexpected)
    info: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    return frozenset(info.missing_keys), frozenset(info.unexpected_keys)


def set_conversions(model: nn.Module, load_map: LoadMap) -> None:
    """Note on the model which conversions loading used, as `from_pretrained` does: saving reverts them."""
    if isinstance(model, PreTrainedModel) and load_map.used_conversions is not None:
        model._weight_conversions = list(load_map.used_conversions)


def assume_conversions(model: nn.Module) -> None:
    """Let saving a model that was not loaded write the files that one which `from_pretrained` made would write."""
    if isinstance(model, PreTrainedModel) and "_weight_conversions" not in vars(model):
        known = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [transform for transform in known if not isinstance(transform, PrefixChange)]


def map_parts(model: nn.Module) -> dict[str, PieceTensor]:
    """`map_saving` by all conversions that transformers knows for the class, whatever loading used of them: what a
    tensor of the model is put together from does not depend on where its values come from."""
    if not isinstance(model, PreTrainedModel):
        return map_saving(model)
    kept = vars(model).pop("_weight_conversions", None)
    try:
        assume_conversions(model)
        return map_saving(model)
    finally:
        vars(model).pop("_weight_conversions", None)
        if kept is not None:
            model._weight_conversions = kept


def copy_conversions(source: nn.Module, target: nn.Module) -> None:
    """Let saving `target` revert what loading `source`, a view of the same parameters, converted."""
    if "_weight_conversions" in vars(source):
        target._weight_conversions = source._weight_conversions


def map_saving(model: nn.Module) -> dict[str, PieceTensor]:
    """Hub key to the model elements that are saved under the key; inputs are named by the model's own keys.

    As in transformers, keys that the class does not save are left out, and tied tensors are saved under one name.
    """
    state = persistent_tensors(model)
    for key in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(key, None)
    if isinstance(model, PreTrainedModel):
        bare = {k: torch.empty(t.shape, dtype=t.dtype, device="meta") for k, t in state.items()}
        state = {k: state[k] for k in remove_tied_weights_from_state_dict(bare, model)}
    state |= beside_4bit(model)
    return revert_whole(model, {k: PieceTensor.named(k, t.shape, t.dtype) for k, t in state.items()})


def revert_whole(model: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors, or symbols of them, in the hub's layout; parts of packed parameters as bytes."""
    return revert(model, whole, partial(revert_group, model))


def revert_group(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """`state` in the hub's layout, by transformers' own reverse conversions; of one conversion, or symbolic."""
    if not isinstance(model, PreTrainedModel):
        return dict(state)
    with original_classes(model), torch.no_grad():
        reverted: dict[str, Any] = revert_weight_conversion(model, dict(state))
    return reverted
