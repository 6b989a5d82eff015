"""Merge the adapters of a PEFT model into a second model, to be saved; the PEFT model stays as it is."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import cut, gather_on_device
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.clone import copy_tree
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.peft_view import bare_model, base_of, is_wrapper
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units

__all__ = ["merged_model"]


def merged_model(model: nn.Module) -> nn.Module:
    """The base of a PEFT model with the active adapters merged into it, sharded like the base.

    Equals PEFT's `merge_and_unload` bit for bit: each rank gathers one adapted module at a time, lets PEFT merge it
    whole, and keeps its shard. Merged weights are new tensors, as large as this rank's shards of the adapted modules;
    all other tensors are the model's own. The result is for saving: it has no FSDP2 hooks to run with.

    Every rank must call; the adapted modules are gathered one after another, and the ranks exchange errors.

    Raises:
        ConfigError: the adapter cannot be merged (prompt methods, 4-bit bases), or an adapter is merged already; the
            same on every rank.
    """
    base = base_of(model)
    if packed_linears(base):
        raise ConfigError(
            "Adapters merged into 4-bit weights would be rounded to 4 bits. Save the adapter, load the base again "
            "without quantization_config, load_adapter(model, folder), and save that with merge_adapters=True."
        )
    reshard_units(base)
    wrappers = list(_outermost(base))
    if not wrappers:
        kind = type(model).__name__
        raise ConfigError(f"{kind} has no adapter in its modules that could be merged. Save it without merge_adapters.")
    check = getattr(getattr(model, "base_model", None), "_check_merge_allowed", None)
    try:
        if check is not None:
            check()
        with torch.no_grad():
            merged = {old: new for wrapper in wrappers for old, new in _merged_parameters(wrapper)}
    except ValueError as error:
        raise ConfigError(f"PEFT cannot merge these adapters: {error}") from error
    result = bare_model(base, merged=merged, trained=True).model
    _declare_untied(result)
    return result


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_wrapper(child):
            yield child
        else:
            yield from _outermost(child)


def _merged_parameters(wrapper: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each parameter of the module inside a wrapper, with its merged shard."""
    if "modules_to_save" in wrapper._modules:
        return  # trained whole: nothing to compute
    twin = _whole_copy(wrapper)
    with agreed("merging the adapters"):
        inside = _merged_by_peft(twin)
    before = bare_model(wrapper).model
    for (name, old), (other, whole) in zip(before.named_parameters(), inside.named_parameters(), strict=True):
        assert name == other, f"PEFT renamed {name} to {other}"
        yield old, nn.Parameter(_shard_like(whole.detach(), old), requires_grad=False)


def _merged_by_peft(twin: Any) -> nn.Module:
    """The module inside a whole wrapper, with the adapter merged into it.

    Raises:
        CheckpointError: PEFT cannot merge it.
    """
    try:
        if hasattr(twin, "unload_and_optionally_merge_module"):
            inside: nn.Module = twin.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        else:
            twin.merge(safe_merge=False, adapter_names=None)
            inside = twin.get_base_layer()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return inside


def _shard_like(whole: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    """This rank's shard of a whole tensor, sharded like a parameter."""
    if not isinstance(like.data, DTensor):
        return whole
    return cut(whole, like.data)


def _whole_copy(wrapper: nn.Module) -> Any:
    """A copy of a wrapper and all modules below it, with whole parameters of its own; PEFT can merge it in place."""
    wholes: dict[nn.Parameter, nn.Parameter] = {}

    def whole(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is not None and parameter not in wholes:
            wholes[parameter] = nn.Parameter(gather_on_device(parameter).clone(), requires_grad=False)
        return None if parameter is None else wholes[parameter]

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: whole(parameter) for key, parameter in module._parameters.items()}

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
