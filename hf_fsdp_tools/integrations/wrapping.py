"""Translate the wrap policies of Accelerate, torch and PEFT into a `HybridPolicy`."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.settings import warn_on_node
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.policy import HybridPolicy, UnitPredicate, matching_nodes, nearest_names


def policy_from_wrap(wrap: Any, *, class_names: Iterable[str], min_num_params: int, reshard: bool) -> HybridPolicy:
    """The `HybridPolicy` for an `auto_wrap_policy` of Accelerate or torch, of any kind.

    | `wrap` | becomes |
    |---|---|
    | None | the detected blocks |
    | `transformer_auto_wrap_policy`, `ModuleWrapPolicy` | `block_types` |
    | `size_based_auto_wrap_policy` | `min_unit_params` |
    | `CustomPolicy`, `lambda_auto_wrap_policy` | a predicate in `units` |
    | a function of (module), (name, module), or torch's (module, recurse, nonwrapped_numel) | a predicate in `units` |
    | `_or_policy` (PEFT's) | all of its parts together |
    """
    settings = _settings(wrap, tuple(name.strip() for name in class_names if name.strip()), min_num_params)
    if not reshard:
        settings["reshard_after_forward"] = {"*": False}
    return HybridPolicy(**settings)


def _settings(wrap: Any, class_names: tuple[str, ...], min_num_params: int) -> dict[str, Any]:
    function, keywords = (wrap.func, wrap.keywords) if isinstance(wrap, functools.partial) else (wrap, {})
    if wrap is None:
        return {}
    if isinstance(wrap, ModuleWrapPolicy):
        return _block_types(wrap._module_classes)
    if isinstance(wrap, CustomPolicy):
        return {"units": (_of_module(wrap._lambda_fn),)}
    if function is transformer_auto_wrap_policy:
        return _block_types(keywords.get("transformer_layer_cls") or class_names)
    if function is size_based_auto_wrap_policy:
        size = keywords.get("min_num_params") or min_num_params
        return {"min_unit_params": size} if size else {}
    if function is lambda_auto_wrap_policy:
        return {"units": (_of_module(keywords["lambda_fn"]),)}
    if function is _or_policy:
        return _together([_settings(part, class_names, min_num_params) for part in keywords["policies"]])
    if not callable(wrap):
        raise ConfigError(
            f"auto_wrap_policy is {wrap!r}; expected TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, one of torch's "
            "policies or a function of a module. Or give a HybridPolicy as `policy`."
        )
    return {"units": (_predicate(wrap),)}


def _block_types(classes: Iterable[Any]) -> dict[str, Any]:
    """The classes as `block_types`; a set, as torch keeps them, is sorted, so that all ranks make the same plan."""
    if isinstance(classes, set | frozenset):
        classes = sorted(classes, key=lambda item: item if isinstance(item, str) else item.__qualname__)
    return {"block_types": types} if (types := tuple(classes)) else {}


def _together(settings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for name, value in (item for each in settings for item in each.items()):
        if name in together:
            value = min(together[name], value) if name == "min_unit_params" else together[name] + value
        together[name] = value
    return together


def _predicate(function: Callable[..., Any]) -> UnitPredicate:
    """A callable by its arguments: (module), (name, module), or torch's (module, recurse, nonwrapped_numel)."""
    wanted = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if len(wanted) <= 1:
        return _of_module(function)
    if len(wanted) == 2:
        return function

    def ask(fqn: str, module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(fqn and function(module=module, recurse=False, nonwrapped_numel=size))

    return ask


def _of_module(function: Callable[[nn.Module], Any]) -> UnitPredicate:
    return lambda fqn, module: bool(fqn and function(module))


def narrowed(policy: HybridPolicy, model: nn.Module) -> HybridPolicy:
    """`policy` without the block types that `model` lacks; a warning names them and what is used instead.

    Accelerate has one list of class names for all models of a process, and a reference or reward model of another
    architecture has none of these classes.
    """
    if policy.block_types is None:
        return policy
    tree = ModuleTree(model)
    problems: list[str] = []
    present = tuple(each for each in policy.block_types if matching_nodes(tree, each, problems=problems))
    if not problems:
        return policy
    warn_on_node(
        f"Layer classes to wrap, in {type(model).__name__}: "
        f"{' '.join(problems)} "
        f"{'The others are used' if present else 'The blocks that its structure shows are used'}.",
        stacklevel=2,
    )
    return replace(policy, block_types=present or None)


def without_modules(policy: HybridPolicy, ignored: Iterable[nn.Module] | str | None, model: nn.Module) -> HybridPolicy:
    """`policy` extended so that Accelerate's `ignored_modules` of `model` stay whole on every rank."""
    if ignored is None:
        return policy
    modules = {name: module for name, module in model.named_modules() if name}
    if isinstance(ignored, str):
        names = tuple(name for name in modules if re.fullmatch(ignored, name))
    else:
        meant = {id(module) for module in ignored}
        names = tuple(name for name, module in modules.items() if id(module) in meant)
    if not names:
        alien = ": they belong to another model."
        hint = nearest_names(ModuleTree(model), ignored) if isinstance(ignored, str) else alien
        raise ConfigError(f"ignored_modules {ignored!r} matches no module of {type(model).__name__}{hint}")
    with_parameters = tuple(name for name in names if any(True for _ in modules[name].parameters()))
    return replace(policy, replicate=(*policy.replicate, *with_parameters))
