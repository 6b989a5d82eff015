"""Copy a module tree without its tensors: new modules around the same or other parameters."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from hf_fsdp_tools.modeling.module_tree import own_class


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
