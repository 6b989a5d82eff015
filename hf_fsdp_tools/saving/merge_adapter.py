"""Merge the adapters of a PEFT model into a second model, to be saved; the PEFT model stays as it is."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import cut, gather_on_device
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.tree_copy import bare_model, base_of, copy_tree, is_wrapper
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units


def merged_model(model: nn.Module) -> nn.Module:
    """The base of a PEFT model with the active adapters merged into it, sharded like the base.

    Equals PEFT's `merge_and_unload` bit for bit: each rank gathers one adapted module at a time (those with a common
    weight together, as a tied embedding and head), lets PEFT merge it whole, and keeps its shard. Merged weights are
    new tensors, as large as this rank's shards of the adapted modules; all other tensors are the model's own. The
    result is for saving: it has no FSDP2 hooks to run with.

    Every rank must call; the adapted modules are gathered one after another, and the ranks exchange errors.
    """
    base = base_of(model)
    wrappers = mergeable(model)
    reshard_units(base)
    merged: dict[nn.Parameter, nn.Parameter] = {}
    for together in _sharing(wrappers):
        copies: dict[nn.Parameter, nn.Parameter] = {}  # shared: what two adapters change, both change in one place
        twins = [whole_copy(wrapper, lambda p: gather_on_device(p).clone(), copies) for wrapper in together]
        with agreed("merging the adapters"):
            wholes = dict(pair for both in zip(together, twins, strict=True) for pair in merged_tensors(*both))
        merged |= {old: nn.Parameter(_shard_like(whole, old), requires_grad=False) for old, whole in wholes.items()}
    return with_merged(base, merged)


def _sharing(wrappers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """The wrappers in their order, those with a common parameter to merge into together."""
    groups: list[tuple[set[nn.Parameter], list[nn.Module]]] = []
    for wrapper in wrappers:
        own = {parameter for _, parameter in adapted_parameters(wrapper)}
        meeting = [group for group in groups if group[0] & own]
        joined = (own.union(*(held for held, _ in meeting)), [w for _, ws in meeting for w in ws] + [wrapper])
        groups = [group for group in groups if group not in meeting] + [joined]
    return [together for _, together in groups]


def mergeable(model: nn.Module) -> list[nn.Module]:
    """The outermost wrappers of a PEFT model whose adapters can be merged, without modules that are trained whole."""
    base = base_of(model)
    if packed_linears(base):
        raise ConfigError(
            "Adapters merged into 4-bit weights would be rounded to 4 bits. Save the adapter, load the base again "
            "without quantization_config, load_adapter(model, folder), and save that with merge_adapters=True."
        )
    wrappers = list(_outermost(base))
    if not wrappers:
        kind = type(model).__name__
        raise ConfigError(
            f"{kind} has no adapter in its modules that could be merged: it works beside the base, as prompts do. Save "
            "it as an adapter, without merge_adapters, and load it with PEFT."
        )
    check = getattr(getattr(model, "base_model", None), "_check_merge_allowed", None)
    try:
        if check is not None:
            check()
    except ValueError as error:
        raise ConfigError(f"PEFT cannot merge these adapters: {error}") from None
    return [wrapper for wrapper in wrappers if "modules_to_save" not in wrapper._modules]


def with_merged(base: nn.Module, merged: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A second tree over the parameters of an adapted base, without adapters and with merged parameters in their place.

    Its config no longer ties embeddings that differ, as PEFT does.
    """
    result = bare_model(base, merged=merged, trained=True).model
    _declare_untied(result)
    return result


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_wrapper(child):
            yield child
        else:
            yield from _outermost(child)


def adapted_parameters(wrapper: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module inside a wrapper, which merging changes, by their names in that module."""
    return list(bare_model(wrapper).model.named_parameters())


def merged_tensors(wrapper: nn.Module, twin: Any) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter of the module inside a wrapper, with its merged whole value; `twin` is changed."""
    with torch.no_grad():
        inside = _merged_by_peft(twin)
    pairs = []
    for (name, old), (other, whole) in zip(adapted_parameters(wrapper), inside.named_parameters(), strict=True):
        assert name == other, f"PEFT renamed {name} to {other}"
        pairs.append((old, whole.detach()))
    return pairs


def _merged_by_peft(twin: Any) -> nn.Module:
    """The module inside a whole wrapper, with the adapter merged into it."""
    try:
        if hasattr(twin, "unload_and_optionally_merge_module"):
            inside: nn.Module = twin.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        else:
            twin.merge(safe_merge=False, adapter_names=None)
            inside = twin.get_base_layer()
    except ValueError as error:
        raise ConfigError(f"PEFT cannot merge these adapters: {error}") from None
    return inside


def _shard_like(whole: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    """This rank's shard of a whole tensor, sharded like a parameter."""
    if not isinstance(like.data, DTensor):
        return whole
    return cut(whole, like.data)


def whole_copy(
    wrapper: nn.Module,
    whole: Callable[[nn.Parameter], torch.Tensor],
    wholes: dict[nn.Parameter, nn.Parameter] | None = None,
) -> Any:
    """A copy of a wrapper and all modules below it, with whole parameters of its own; PEFT can merge it in place."""
    made: dict[nn.Parameter, nn.Parameter] = {} if wholes is None else wholes

    def own(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is not None and parameter not in made:
            made[parameter] = nn.Parameter(whole(parameter), requires_grad=False)
        return None if parameter is None else made[parameter]

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: own(parameter) for key, parameter in module._parameters.items()}

    return copy_tree(wrapper, parameters=parameters, hooks=False).model


def _declare_untied(model: Any) -> None:
    """Let the config no longer tie embeddings that differ after merging, as PEFT does."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is not None and first.weight is not last.weight:
        model.config = copy.deepcopy(config)
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
