"""Read the units and parameters of a live model, sharded by FSDP2 or not at all.

Names are those of the model without the wrappers around its modules (checkpoint wrappers, `torch.compile`, FSDP), as
in a plan that was made before the modules were wrapped. Nothing is changed and nothing is communicated.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, Weight, class_name, way_inside
from hf_fsdp_tools.modeling.tree_copy import copy_tree
from hf_fsdp_tools.sharding.fsdp2_internals import parameters_of_unit, unit_modules
from hf_fsdp_tools.text import grouped, listed, merge_names, show_bytes, show_count


@dataclass(eq=False, slots=True, kw_only=True)
class LiveUnit:
    """Modules whose parameters FSDP2 gathers together now."""

    nodes: list[ModuleNode] = field(default_factory=list)
    """Its modules in the tree; more than one for `fully_shard([a, b])`."""
    weights: list[Weight] = field(default_factory=list)
    """The weights that it gathers, tied weights once."""
    parent: "LiveUnit | None" = None
    """The unit around it; None for a root."""

    @property
    def name(self) -> str:
        """Fqns of its modules, for messages."""
        return " + ".join(node.fqn or "(root)" for node in self.nodes)

    @property
    def num_params(self) -> int:
        """Number of parameters that it gathers."""
        return sum(weight.numel for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters in the dtype in which they are kept."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass(eq=False, slots=True, kw_only=True)
class LiveParameter:
    """A parameter under one of its names; tied names have the same `tensor`."""

    tensor: torch.Tensor
    """A tensor of the global shape: a DTensor, or a plain parameter."""
    unit: LiveUnit | None
    """The unit that gathers it under this name; None where no unit does."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A live model as a tree, its units, and the unit that gathers each parameter."""

    tree: ModuleTree
    """The modules without wrappers, every parameter at its global shape."""
    units: tuple[LiveUnit, ...]
    """Units in tree order, parents first; empty for a model that is not sharded."""
    parameters: dict[str, LiveParameter]
    """Every parameter of the tree, by name."""


def read_live_model(model: nn.Module) -> LiveModel:
    """Read which units `model` has now and which parameters each unit gathers; shapes only, no data."""
    units = _Units()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"{type(model).__name__} is wrapped by FSDP1, of which nothing is read here. Shard it with FSDP2 "
                "(shard_model), or give the plain model."
            )
        if isinstance(module, FSDPModule):
            units.read_unit(module)
    copy = copy_tree(model, parameters=units.parameters, way_inside=way_inside)
    tree = ModuleTree(copy.model)
    parameters = {
        f"{node.fqn}.{name}" if node.fqn else name: units.parameter(copy.originals[node.module], name, tensor)
        for node in tree
        for name, tensor in node.module._parameters.items()
        if tensor is not None
    }
    return LiveModel(tree=tree, units=_placed(tree, units, copy.originals, parameters), parameters=parameters)


@dataclass(frozen=True, kw_only=True)
class UnitGroup:
    """Units side by side that differ in the numbers of their names only, and the units inside them."""

    modules: str
    """Fqns of their modules, in one text for all: `model.layers.{0..31}`."""
    classes: tuple[str, ...]
    """Classes of the first modules of a unit."""
    count: int
    """How many units these are."""
    num_params: int
    """Parameters that one of them gathers."""
    num_bytes: int
    """Bytes of these, in the dtype in which they are kept."""
    inside: tuple["UnitGroup", ...]
    """Units inside them."""


@dataclass(frozen=True, kw_only=True)
class UnitTree:
    """The units of a live model, those that are alike grouped; printed, a tree with sizes."""

    model_class: str
    """Class of the model."""
    num_params: int
    """Parameters of the model, tied ones once."""
    num_units: int
    """How many units there are; 0 for a model that is not sharded, and for one that one rank has whole."""
    is_whole: bool
    """Whether `shard_model` left the model whole, on one rank."""
    groups: tuple[UnitGroup, ...]
    """The outermost units."""
    outside: tuple[int, int, int]
    """Tensors, parameters and bytes that lie in no unit of a sharded model."""

    def __str__(self) -> str:
        head = f"{self.model_class}: {show_count(self.num_params)} parameters"
        if not self.num_units:
            return f"{head}, {'whole on one rank' if self.is_whole else 'not sharded'}"
        lines = [f"{head} in {self.num_units} units (FSDP2)", *_branches(self.groups, "")]
        count, num_params, num_bytes = self.outside
        if count:
            lines.append(f"in no unit: {count} tensors, {show_count(num_params)} parameters, {show_bytes(num_bytes)}")
        return "\n".join(lines)


def unit_tree(live: LiveModel, *, is_whole: bool) -> UnitTree:
    """The units of a model as a tree; siblings whose names differ in numbers only are one."""
    below = grouped((id(unit.parent), unit) for unit in live.units)
    outside = [w for w in live.tree.weights if live.units and live.parameters[w.names[0]].unit is None]
    return UnitTree(
        model_class=class_name(live.tree.root.module),
        num_params=live.tree.num_params,
        num_units=len(live.units),
        is_whole=is_whole,
        groups=_groups(below.get(id(None), []), below),
        outside=(len(outside), sum(weight.numel for weight in outside), sum(weight.nbytes for weight in outside)),
    )


def _groups(units: list[LiveUnit], below: dict[int, list[LiveUnit]]) -> tuple[UnitGroup, ...]:
    alike = grouped((_shape(unit, below), unit) for unit in units)
    return tuple(_group(units, below) for units in alike.values())


def _group(units: list[LiveUnit], below: dict[int, list[LiveUnit]]) -> UnitGroup:
    one = units[0]
    columns = zip(*([node.fqn for node in unit.nodes] for unit in units), strict=True)
    return UnitGroup(
        modules=listed([merge_names(column) for column in columns], 3, separator=" + "),
        classes=tuple(dict.fromkeys(class_name(node.module) for node in one.nodes[:3])),
        count=len(units),
        num_params=one.num_params,
        num_bytes=one.num_bytes,
        inside=_groups([child for unit in units for child in below.get(id(unit), ())], below),
    )


def _branches(groups: tuple[UnitGroup, ...], margin: str) -> Iterator[str]:
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        times = f"{group.count} × " if group.count > 1 else ""
        size = f"{times}{show_count(group.num_params)} parameters, {show_bytes(group.num_bytes)}"
        yield f"{margin}{'└─' if is_last else '├─'} {group.modules}  {'/'.join(group.classes)}  {size}"
        yield from _branches(group.inside, margin + ("   " if is_last else "│  "))


def _shape(unit: LiveUnit, below: dict[int, list[LiveUnit]]) -> object:
    """A key that is equal for units whose names, and those of the units inside them, differ in numbers only."""
    names = tuple((re.sub(r"\d+", "#", node.fqn), class_name(node.module)) for node in unit.nodes)
    inner = tuple(_shape(child, below) for child in below.get(id(unit), ()))
    return names, unit.num_params, unit.num_bytes, inner


class _Units:
    """The units found so far, and the unit of each registered parameter."""

    def __init__(self) -> None:
        self.units: dict[object, LiveUnit] = {}
        self.unit_of_module: dict[nn.Module, LiveUnit] = {}
        self.managed: dict[tuple[nn.Module, str], LiveParameter] = {}

    def read_unit(self, module: Any) -> None:
        members = unit_modules(module)
        is_new = members not in self.units
        unit = self.units.setdefault(members, LiveUnit())
        self.unit_of_module[module.get_submodule(way_inside(module))] = unit
        for shard, places in parameters_of_unit(module) if is_new else ():
            self.managed.update(dict.fromkeys(places, LiveParameter(tensor=shard, unit=unit)))

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        """The parameters of a module as the tree shows them."""
        own: dict[str, Any] = module._parameters
        return own | {name: self.managed[module, name].tensor for name in own if (module, name) in self.managed}

    def parameter(self, module: nn.Module, name: str, tensor: nn.Parameter) -> LiveParameter:
        return self.managed.get((module, name), LiveParameter(tensor=tensor, unit=None))


def _placed(
    tree: ModuleTree, units: _Units, originals: Mapping[nn.Module, nn.Module], parameters: dict[str, LiveParameter]
) -> tuple[LiveUnit, ...]:
    """The units in tree order, each with its nodes, its weights and the unit around it."""
    seen: set[int] = set()
    nearest: dict[int, LiveUnit | None] = {}
    ordered: dict[int, LiveUnit] = {}
    for node in tree:
        above = nearest[id(node.parent)] if node.parent else None
        unit = units.unit_of_module.get(originals[node.module])
        nearest[id(node)] = unit or above
        if unit is not None and id(node.module) not in seen:  # a module registered twice counts once
            seen.add(id(node.module))
            if not unit.nodes:
                unit.parent = above
            unit.nodes.append(node)
            ordered[id(unit)] = unit
    for weight in tree.weights:
        for unit in {id(unit): unit for name in weight.names if (unit := parameters[name].unit)}.values():
            unit.weights.append(weight)
    return tuple(ordered.values())
