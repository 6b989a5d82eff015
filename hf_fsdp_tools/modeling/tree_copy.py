"""Copies of module trees without their tensors; of the base inside a PEFT model without its adapters.

PEFT puts a wrapper where a module was and keeps the module inside it (`module_tree.ADAPTED`). A bare model is a second
tree over the same parameters without the wrappers. PEFT itself is not imported.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ADAPTED, own_class


@dataclass(frozen=True, kw_only=True)
class TreeCopy:
    """A copy of a module tree, and the place of each of its modules in the original tree."""

    model: nn.Module
    """Copies of the modules (not of their tensors) under their own classes, without the wrappers between them."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Name in the copy to name in the original tree: of the outermost wrapper, or of a module without one."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the copy to name in the original tree: of the module inside its wrappers."""
    originals: Mapping[nn.Module, nn.Module] = field(default_factory=dict)
    """Module of the copy to module of the original tree."""


def copy_tree(
    model: nn.Module,
    *,
    parameters: Callable[[nn.Module], Mapping[str, nn.Parameter | None]] = lambda module: module._parameters,
    way_inside: Callable[[nn.Module], str] = lambda module: "",
    hooks: bool = True,
) -> TreeCopy:
    """Copy each module of a tree once, and none of its tensors; the tree itself stays as it is.

    A copied module has the class that the original had before FSDP2, and dictionaries of its own for parameters,
    buffers and children. It shares everything else with the original. FSDP does not manage it.

    No rank communicates.
    """
    places: dict[str, str] = {}
    names: dict[str, str] = {}
    copies: dict[nn.Module, nn.Module] = {}
    fresh = {key: value for key, value in nn.Module().__dict__.items() if key not in ("_buffers", "training")}

    def copied(outer: nn.Module, name: str, place: str) -> nn.Module:
        way = way_inside(outer)
        module = outer.get_submodule(way)
        inner = _joined(place, way)
        places.setdefault(name, place)
        names.setdefault(name, inner)
        if module in copies:
            return copies[module]
        twin: nn.Module = object.__new__(own_class(module))
        copies[module] = twin
        if hooks:
            twin.__dict__.update(module.__dict__)
        else:
            twin.__dict__.update({key: _own_container(value) for key, value in module.__dict__.items()})
            twin.__dict__.update({key: _own_container(value) for key, value in fresh.items()})
        bound = {k: v for k, v in module.__dict__.items() if isinstance(v, MethodType) and v.__self__ is module}
        twin.__dict__.update({key: MethodType(method.__func__, twin) for key, method in bound.items()})
        own = dict(parameters(module))
        for key in ("__deepcopy__", *own):  # set on units, and views in the place of flattened parameters
            twin.__dict__.pop(key, None)
        twin.__dict__["_parameters"] = own
        twin.__dict__["_buffers"] = dict(module._buffers)
        twin.__dict__["_modules"] = {
            key: None if child is None else copied(child, _joined(name, key), _joined(inner, key))
            for key, child in module._modules.items()
        }
        return twin

    twin = copied(model, "", "")
    originals = {twin: module for module, twin in copies.items()}
    return TreeCopy(model=twin, places=places, names=names, originals=originals)


def _own_container(value: object) -> object:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """The base of a `PeftModel`, with the adapters in it; any other model unchanged."""
    base: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]  # PEFT's own
    return base


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around another module."""
    return hasattr(type(module), "adapter_layer_names") and any(
        module._modules.get(part) is not None for part in ADAPTED
    )


def bare_model(
    base: nn.Module, *, merged: Mapping[nn.Parameter, nn.Parameter] | None = None, trained: bool = False
) -> TreeCopy:
    """A base model without its adapters, as a second tree; nothing is changed or communicated."""
    shown = merged or {}

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: None if p is None else shown.get(p, p) for key, p in module._parameters.items()}

    return copy_tree(base, parameters=parameters, way_inside=partial(_way_inside, trained=trained))


def _way_inside(module: nn.Module, *, trained: bool) -> str:
    """The name of the module inside PEFT's wrappers, relative to the outermost; "" for a module that is no wrapper."""
    parts: list[str] = []
    while is_wrapper(module):
        copies = module._modules.get("modules_to_save")
        active = getattr(module, "active_adapters", None)
        if trained and isinstance(copies, nn.ModuleDict) and active and active[0] in copies:
            parts += ["modules_to_save", active[0]]
            module = copies[active[0]]
            continue
        part, module = next((part, child) for part in ADAPTED if (child := module._modules.get(part)) is not None)
        parts.append(part)
    return ".".join(parts)
