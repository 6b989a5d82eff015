"""What FSDP manages in a live model, whoever sharded it: FSDP2, FSDP1, or nobody.

Names are those of the model without the wrappers around its modules (checkpoint wrappers, `torch.compile`, FSDP1), as in a
plan that was made before it was wrapped. Private attributes of torch's FSDP are read here (and, to take FSDP2 off again, in
`release`): torch has no public way to ask which unit gathers a parameter. Nothing is changed and nothing is communicated.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.modeling.module_tree import (
    WRAPPED_ATTRIBUTES,
    ModuleNode,
    ModuleTree,
    Weight,
    class_name,
)
from hf_fsdp_tools.sharding.fsdp2_internals import parameter_groups
from hf_fsdp_tools.text import listed, merge_names, show_bytes, show_count

__all__ = ["LiveModel", "LiveParameter", "LiveUnit", "describe_units", "local_part", "plain_name", "read_live_model"]

_FLAT_PARAMETER = "_flat_param"  # where FSDP1 registers what it flattened


@dataclass(eq=False, slots=True, kw_only=True)
class LiveUnit:
    """Modules whose parameters FSDP gathers together now."""

    version: Literal[1, 2]
    """Of FSDP."""
    original_parameters: bool
    """False for FSDP1 without `use_orig_params`: one flat parameter takes the place of the unit's own."""
    nodes: list[ModuleNode] = field(default_factory=list)
    """Its modules in the tree; more than one for `fully_shard([a, b])`."""
    weights: list[Weight] = field(default_factory=list)
    """What it gathers, tied weights once."""
    parent: "LiveUnit | None" = None
    """The unit around it; None for a root."""

    @property
    def name(self) -> str:
        """Fqns of its modules, for messages."""
        return " + ".join(node.fqn or "(root)" for node in self.nodes)

    @property
    def num_params(self) -> int:
        """Parameters gathered together."""
        return sum(weight.numel for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        """Their bytes at the dtype they are kept in."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass(eq=False, slots=True, kw_only=True)
class LiveParameter:
    """One name of a parameter. Tied names share `tensor`."""

    tensor: torch.Tensor
    """Has the global shape: a DTensor, a plain parameter, or, under FSDP1, a stand-in on meta."""
    unit: LiveUnit | None
    """The unit that gathers it under this name; None where no unit does."""
    local_numel: int
    """Elements on this rank."""
    is_meta: bool
    """Whether it has no storage."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A live model as a tree, its units, and which unit gathers what."""

    tree: ModuleTree
    """The modules without wrappers, every parameter at its global shape."""
    units: tuple[LiveUnit, ...]
    """Units in tree order, parents first; empty for a model that is not sharded."""
    parameters: dict[str, LiveParameter]
    """Every parameter name of the tree."""


def read_live_model(model: nn.Module) -> LiveModel:
    """Read which units `model` has now and what each gathers; shapes and registrations only, no data.

    Args:
        model: sharded or not, on any device, also between a forward and its backward pass.

    Raises:
        BlockDetectionError: the model has no parameters.
    """
    found = _Found()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            found.read_fsdp1(module)
        elif isinstance(module, FSDPModule):
            found.read_fsdp2(module)
    copies: dict[int, nn.Module] = {}
    tree = ModuleTree(_without_wrappers(model, found, copies))
    original = {id(copy): key for key, copy in copies.items()}
    parameters = {
        f"{node.fqn}.{name}" if node.fqn else name: found.parameter(original[id(node.module)], name, tensor)
        for node in tree
        for name, tensor in node.module._parameters.items()
        if tensor is not None
    }
    return LiveModel(tree=tree, units=_placed(tree, found, original, parameters), parameters=parameters)


def describe_units(live: LiveModel) -> str:
    """The units as a tree with the sizes that are gathered; siblings that differ in numbers only are one line."""
    head = f"{class_name(live.tree.root.module)}: {show_count(live.tree.num_params)} parameters"
    if not live.units:
        return f"{head}, not sharded"
    below: dict[int, list[LiveUnit]] = {}
    for unit in live.units:
        below.setdefault(id(unit.parent), []).append(unit)
    lines = [f"{head} in {len(live.units)} units (FSDP{live.units[0].version})"]
    lines += _branches(below[id(None)], below, "")
    outside = [weight for weight in live.tree.weights if live.parameters[weight.names[0]].unit is None]
    if outside:
        count, size = sum(weight.numel for weight in outside), sum(weight.nbytes for weight in outside)
        lines.append(f"in no unit: {len(outside)} tensors, {show_count(count)} parameters, {show_bytes(size)}")
    return "\n".join(lines)


def _branches(units: list[LiveUnit], below: dict[int, list[LiveUnit]], margin: str) -> Iterator[str]:
    groups: dict[object, list[LiveUnit]] = {}
    for unit in units:
        groups.setdefault(_shape(unit, below), []).append(unit)
    for index, group in enumerate(groups.values()):
        is_last = index == len(groups) - 1
        one = group[0]
        columns = zip(*([node.fqn for node in unit.nodes] for unit in group), strict=True)
        names = [merge_names(column) for column in columns]
        name = listed(names, 3, separator=" + ")
        classes = "/".join(dict.fromkeys(class_name(node.module) for node in one.nodes[:3]))
        times = f"{len(group)} × " if len(group) > 1 else ""
        size = f"{times}{show_count(one.num_params)} parameters, {show_bytes(one.num_bytes)}"
        yield f"{margin}{'└─' if is_last else '├─'} {name}  {classes}  {size}"
        inner = [child for unit in group for child in below.get(id(unit), ())]
        yield from _branches(inner, below, margin + ("   " if is_last else "│  "))


def _shape(unit: LiveUnit, below: dict[int, list[LiveUnit]]) -> object:
    """Equal for units that differ in the numbers of their names only, down to the units inside them."""
    names = tuple((re.sub(r"\d+", "#", node.fqn), class_name(node.module)) for node in unit.nodes)
    inner = tuple(_shape(child, below) for child in below.get(id(unit), ()))
    return names, unit.num_params, unit.num_bytes, inner


def plain_name(fqn: str) -> str:
    """A name without the parts that wrappers insert."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPED_ATTRIBUTES)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _core(module: nn.Module) -> nn.Module:
    """The module inside its wrappers."""
    for attribute in WRAPPED_ATTRIBUTES:
        wrapped = module._modules.get(attribute)
        if wrapped is not None:
            return _core(wrapped)
    return module


class _Found:
    """Units by their FSDP state, and for each registered parameter the unit and the tensor that stands for it."""

    def __init__(self) -> None:
        self.units: dict[int, LiveUnit] = {}
        self.unit_of_module: dict[int, LiveUnit] = {}
        self.managed: dict[tuple[int, str], LiveParameter] = {}
        self.stand_ins: dict[int, LiveParameter] = {}
        self.flattened: dict[int, list[str]] = {}

    def read_fsdp2(self, module: Any) -> None:
        state = module._get_fsdp_state()
        is_new = id(state) not in self.units
        unit = self.units.setdefault(id(state), LiveUnit(version=2, original_parameters=True))
        self.unit_of_module[id(_core(module))] = unit
        for group in parameter_groups(state) if is_new else ():
            for managed in group.fsdp_params:
                info = managed._module_info
                current = info.module._parameters.get(info.param_name)
                # While gathered, the module holds the whole tensor; its shard is what the optimizer knows.
                tensor = current if isinstance(current, DTensor) else managed.sharded_param
                local = local_part(tensor)
                here = LiveParameter(tensor=tensor, unit=unit, local_numel=local.numel(), is_meta=local.is_meta)
                self.managed[id(info.module), info.param_name] = here
                for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    self.managed[id(owner), name] = here

    def read_fsdp1(self, module: Any) -> None:
        handle = module._handle
        unit = LiveUnit(version=1, original_parameters=handle is None or handle._use_orig_params)
        self.units[id(module)] = self.unit_of_module[id(_core(module))] = unit
        if handle is None:
            return
        flat = handle.flat_param
        for index, info in enumerate(flat._param_infos):
            own = flat._params[index] if flat._params is not None else flat
            stand_in = nn.Parameter(
                torch.empty(flat._shapes[index], dtype=flat.dtype, device="meta"), requires_grad=own.requires_grad
            )
            numel = flat._shard_param_infos[index].numel_in_shard or 0
            here = LiveParameter(tensor=stand_in, unit=unit, local_numel=numel, is_meta=flat.is_meta)
            if own is not flat:
                self.stand_ins[id(own)] = here
            self._flatten(info.module, info.param_name, here)
        for shared in flat._shared_param_infos:
            here = self.managed[id(shared.prim_module), shared.prim_param_name]
            self._flatten(shared.module, shared.param_name, here)

    def _flatten(self, module: nn.Module, name: str, here: LiveParameter) -> None:
        self.managed[id(module), name] = here
        self.flattened.setdefault(id(module), []).append(name)

    def tensor(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """What stands for a registered parameter in the tree."""
        if here := self.managed.get((id(module), name)):
            return here.tensor
        registered = module._parameters[name]
        elsewhere = self.stand_ins.get(id(registered))
        return elsewhere.tensor if elsewhere else registered

    def parameter(self, module_id: int, name: str, tensor: nn.Parameter) -> LiveParameter:
        if here := self.managed.get((module_id, name)):
            return here
        local = local_part(tensor)
        return LiveParameter(tensor=tensor, unit=None, local_numel=local.numel(), is_meta=local.is_meta)


def _without_wrappers(module: nn.Module, found: _Found, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of the module tree (not of its tensors) with wrappers left out; `copies` maps ids of modules to copies."""
    core = _core(module)
    if id(core) in copies:
        return copies[id(core)]
    copy: nn.Module = object.__new__(type(core))
    copies[id(core)] = copy
    copy.__dict__.update(core.__dict__)
    names = dict.fromkeys(
        [*core._parameters, *found.flattened.get(id(core), ())]
    )  # FSDP1 may unregister what it flattens
    copy.__dict__["_parameters"] = {name: found.tensor(core, name) for name in names if name != _FLAT_PARAMETER}
    copy.__dict__["_modules"] = {
        name: None if child is None else _without_wrappers(child, found, copies)  # empty lists are false
        for name, child in core._modules.items()
    }
    return copy


def _placed(
    tree: ModuleTree, found: _Found, original: dict[int, int], parameters: dict[str, LiveParameter]
) -> tuple[LiveUnit, ...]:
    """The units in tree order, each with its nodes, its weights and the unit around it."""
    seen: set[int] = set()
    nearest: dict[int, LiveUnit | None] = {}
    ordered: dict[int, LiveUnit] = {}
    for node in tree:
        above = nearest[id(node.parent)] if node.parent else None
        unit = found.unit_of_module.get(original[id(node.module)])
        nearest[id(node)] = unit or above
        if unit is not None and id(node.module) not in seen:  # a module registered twice is one module of its unit
            seen.add(id(node.module))
            if not unit.nodes:
                unit.parent = above
            unit.nodes.append(node)
            ordered[id(unit)] = unit
    for weight in tree.weights:
        units = {id(unit): unit for name in weight.names if (unit := parameters[name].unit)}
        for unit in units.values():
            unit.weights.append(weight)
    return tuple(ordered.values())
