"""Merge the adapters of a PEFT model into a second model, to be saved; the PEFT model stays as it is."""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.packed import require_floats
from hf_fsdp_tools.modeling.tree_copy import bare_model, base_of, copy_tree, is_wrapper
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units

T = TypeVar("T", bound=Hashable)


def merged_model(model: nn.Module) -> nn.Module:
    """The base of a PEFT model with the active adapters merged into it, sharded like the base.

    Equals PEFT's `merge_and_unload` bit for bit (`Merging`). Merged weights are new tensors, as large as this rank's
    shards of the adapted modules; all other tensors are the model's own. The result is for saving: it has no FSDP2
    hooks to run with.

    Every rank must call; the adapted modules are gathered one after another, and the ranks exchange errors.
    """
    merging = Merging(model)
    reshard_units(merging.base)
    merged: dict[nn.Parameter, nn.Parameter] = {}
    failure: Exception | None = None
    for group in merging.groups:
        try:
            merged |= merging.merge(group)
        except Exception as error:  # the other ranks go on gathering
            failure = failure or error
    with agreed("merging the adapters"):
        if failure is not None:
            raise failure
    return with_merged(merging.base, merged)


class Merging:
    """The adapters of a PEFT model, to be merged into the shards of its base a few modules at a time."""

    def __init__(self, model: nn.Module) -> None:
        """No rank communicates. A `ConfigError` refuses what cannot be merged."""
        self.base = base_of(model)
        self._adapted = mergeable(model)
        joined = connected([wrapper, *parameters.values()] for wrapper, parameters in self._adapted.items())
        unique = {id(group): group for group in joined.values()}.values()
        self.groups = [[wrapper for wrapper in self._adapted if wrapper in group] for group in unique]
        """Adapted modules that are merged together: one, or those with a common weight, as a tied embedding and head.
        In the same order on every rank."""

    def olds(self, group: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
        """The parameters that merging a group changes."""
        return (old for wrapper in group for old in self._adapted[wrapper].values())

    def merge(self, group: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """This rank's shard of each merged parameter of a group, by the parameter of the base.

        Every rank must call: the group's modules are gathered whole, one copy on each rank, and PEFT merges them.
        """
        twins = whole_copies(group, lambda p: Held.of(p).gather().clone())
        merged = merge(twins, self._adapted).items()
        return {old: nn.Parameter(Held.of(old).cut(whole), requires_grad=False) for old, whole in merged}


def connected(groups: Iterable[Iterable[T]]) -> dict[T, set[T]]:
    """The members of groups, each with all members of the groups that have a member in common, directly or not."""
    joined: dict[T, set[T]] = {}
    for group in groups:
        members = list(group)
        together = set(members).union(*(joined.get(member, ()) for member in members))
        joined |= dict.fromkeys(together, together)
    return joined


Adapted = dict[nn.Module, dict[str, nn.Parameter]]
"""Outermost wrappers of a PEFT model, each with the parameters of the module inside, which merging changes, by their
names in that module."""


def mergeable(model: nn.Module) -> Adapted:
    """The adapters of a model that can be merged; modules that are trained whole are none of them."""
    base = base_of(model)
    require_floats(
        base,
        "Adapters are merged into floats, and this base is quantised as stored. Save the adapter, then merge it: "
        "hf-fsdp export BASE OUT --adapter ADAPTER (export_checkpoint); FP8 stays FP8 with --keep-stored-format.",
    )
    wrappers = list(_outermost(base))
    if not wrappers:
        raise ConfigError(
            f"{type(model).__name__} has no adapter in its modules that could be merged: it works next to the base, as "
            "prompts do. Save it as an adapter, without merge_adapters, and load it with PEFT."
        )
    check = getattr(getattr(model, "base_model", None), "_check_merge_allowed", None)
    try:
        if check is not None:
            check()
    except ValueError as error:
        raise ConfigError(f"PEFT cannot merge these adapters: {error}") from None
    wrappers = [wrapper for wrapper in wrappers if "modules_to_save" not in wrapper._modules]
    return {wrapper: dict(bare_model(wrapper).model.named_parameters()) for wrapper in wrappers}


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_wrapper(child):
            yield child
        else:
            yield from _outermost(child)


def whole_copies(wrappers: Iterable[nn.Module], whole: Callable[[nn.Parameter], torch.Tensor]) -> dict[nn.Module, Any]:
    """A copy of each wrapper and all modules below it, with whole parameters of its own; PEFT can merge it in place.

    What is one parameter of several wrappers is one in their copies: what an adapter changes, the next changes further.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        for p in module._parameters.values():
            if p is not None and p not in copies:
                copies[p] = nn.Parameter(whole(p), requires_grad=False)
        return {key: None if p is None else copies[p] for key, p in module._parameters.items()}

    return {wrapper: copy_tree(wrapper, parameters=parameters, hooks=False).model for wrapper in wrappers}


def merge(twins: Mapping[nn.Module, Any], adapted: Adapted) -> dict[nn.Parameter, torch.Tensor]:
    """The merged whole value of each parameter inside wrappers; `twins`, their whole copies, are changed."""
    merged: dict[nn.Parameter, torch.Tensor] = {}
    for wrapper, twin in twins.items():
        try:
            with torch.no_grad():
                if hasattr(twin, "unload_and_optionally_merge_module"):
                    result = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
                else:
                    twin.merge(safe_merge=False, adapter_names=None)
                    result = twin.get_base_layer()
        except ValueError as error:
            raise ConfigError(f"PEFT cannot merge these adapters: {error}") from None
        wholes = dict(result.named_parameters())
        merged |= {old: wholes[name].detach() for name, old in adapted[wrapper].items()}
    return merged


def with_merged(base: nn.Module, merged: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A second tree over the parameters of an adapted base, without adapters and with merged parameters in their place.

    Its config no longer ties embeddings that differ, as PEFT does.
    """
    model: Any = bare_model(base, merged=merged, trained=True).model
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings"):
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
        if last is not None and first.weight is not last.weight:
            model.config = copy.deepcopy(config)
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys = {}
    result: nn.Module = model
    return result
