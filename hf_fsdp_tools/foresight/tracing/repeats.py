"""Which blocks of a model repeat, and the model and the plan with few of them.

Blocks repeat, alone or in periods (five local layers and a global one). The short model has the first blocks that
differ, a few periods, and what is left over.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.tree_copy import copy_tree
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.stacks import find_blocks

_POSITION = re.compile(r"layer_?(idx|id|index|num|number)$|(^|_)idx$")
"""Attributes that tell a block where it is, and nothing else (`layer_idx`)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of blocks, of which a few stand for all."""

    container: str  # Fqn of the `ModuleList`
    size: int  # Number of its blocks
    first: int  # Blocks before the first period
    length: int  # Blocks of a period
    periods: int
    kept: int  # Periods that are run

    @property
    def left_out(self) -> int:
        """Number of blocks that are not run."""
        return (self.periods - self.kept) * self.length

    @property
    def indices(self) -> list[int]:
        """The blocks that are run."""
        rest = self.first + self.periods * self.length
        return [*range(self.first + self.kept * self.length), *range(rest, self.size)]

    def period_of(self, index: int) -> int | None:
        """The period of the block at an index of the shortened list; None for a block of no period."""
        period = (index - self.first) // self.length
        return period if 0 <= period < self.kept else None


def repeating_stacks(model: nn.Module, kept: int) -> list[Stack]:
    """The lists of blocks in which more than `kept` periods of alike blocks follow each other."""
    if any(hasattr(config, "deepstack_visual_indexes") for config in configs_of(model)):
        return []  # text layers of such models differ by their position alone
    tree = ModuleTree(model)
    stacks = []
    for blocks in find_blocks(tree):
        for container in dict.fromkeys(block.parent for block in blocks):
            if container is None or not isinstance(modules := container.module, nn.ModuleList):
                continue
            if any(len(weight.owners) > 1 for block in container.children for b in block.walk() for weight in b.own):
                continue
            config = getattr(container.parent.module if container.parent else model, "config", None)
            signs = [_signature(block, config, index, len(modules)) for index, block in enumerate(modules)]
            if (stack := _best(container.fqn, signs, kept)) is not None:
                stacks.append(stack)
    return stacks


def _best(container: str, signs: Sequence[object], kept: int) -> Stack | None:
    """The way to see a list as periods with the fewest blocks to run."""
    size = len(signs)
    best: Stack | None = None
    for length in range(1, size // (kept + 1) + 1):
        for first in range(size - (kept + 1) * length + 1):
            end = first + length
            while end < size and signs[end] == signs[end - length]:
                end += 1
            periods = (end - first) // length
            if periods > kept:
                stack = Stack(container=container, size=size, first=first, length=length, periods=periods, kept=kept)
                if best is None or len(stack.indices) < len(best.indices):
                    best = stack
    return best


def _signature(block: nn.Module, config: Any, index: int, size: int) -> list[object]:
    """What decides about the events of a block, apart from its place: numbers and words in its attributes (of a rate,
    whether it is 0), its tensors, entries of the configuration's lists, and membership in its lists of places."""
    signs: list[object] = []
    for name, module in block.named_modules():
        signs.append((name, type(module)))
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and not _POSITION.search(key):
                signs.append((key, value != 0 if isinstance(value, float) else value))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            signs.append((key, None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)))
    for key, value in sorted(vars(config).items()) if config is not None else ():
        if isinstance(value, list | tuple) and all(isinstance(each, int | float | str) for each in value):
            if len(value) == size:
                signs.append((key, value[index]))
            elif "layer" in key or "ind" in key:
                signs.append((key, index in value))
    return signs


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations in a model, those within others among them."""
    configs = {id(c): c for module in model.modules() if (c := module.__dict__.get("config")) is not None}
    nested = [vars(config).get(key) for config in configs.values() for key in getattr(config, "sub_configs", ())]
    return [*configs.values(), *(config for config in nested if config is not None)]


def short_copy(model: nn.Module, stacks: Sequence[Stack]) -> nn.Module:
    """A copy of a model, and of its configurations, with those blocks of the stacks that are run."""
    containers = {stack: model.get_submodule(stack.container) for stack in stacks}
    whole = {stack: container._modules for stack, container in containers.items()}
    try:
        for stack, container in containers.items():
            blocks = list(whole[stack].values())
            container._modules = {str(new): blocks[old] for new, old in enumerate(stack.indices)}
        twin = copy_tree(model, hooks=False).model
    finally:
        for stack, container in containers.items():
            container._modules = whole[stack]
    _copy_configs(twin, stacks)
    return twin


def _copy_configs(model: nn.Module, stacks: Sequence[Stack]) -> None:
    """Give a copy of a model configurations of its own, whose lists with an entry for each block are cut."""
    configs = {id(config): config for config in configs_of(model)}
    copies = {key: copy.copy(config) for key, config in configs.items()}  # some models write into theirs
    for stack in stacks:
        owner = model.get_submodule(stack.container.rpartition(".")[0])
        config = owner.__dict__.get("config")
        for key, value in vars(config).items() if config is not None else ():
            if isinstance(value, list | tuple) and len(value) == stack.size:
                copies[id(config)].__dict__[key] = type(value)(value[index] for index in stack.indices)
    for config in copies.values():
        for key in getattr(config, "sub_configs", ()):
            if id(part := config.__dict__.get(key)) in copies:
                config.__dict__[key] = copies[id(part)]
    for module in model.modules():
        if (config := module.__dict__.get("config")) is not None:
            module.__dict__["config"] = copies[id(config)]


def cut_plan(plan: WrapPlan, stacks: Sequence[Stack]) -> WrapPlan:
    """The plan of the short model."""

    def name(old: str) -> str | None:
        for stack in stacks:
            if (place := block_and_rest(old, stack)) is not None:
                index, rest = place
                if index not in stack.indices:
                    return None
                old = f"{stack.container}.{stack.indices.index(index)}{rest}"
        return old

    units = []
    for unit in plan.units:
        modules = tuple(new for old in unit.modules if (new := name(old)) is not None)
        if modules:
            units.append(replace(unit, modules=modules))
    replicated = tuple(new for old in plan.replicated if (new := name(old)) is not None)
    return replace(plan, units=tuple(units), replicated=replicated)


def block_and_rest(name: str, stack: Stack) -> tuple[int, str] | None:
    """The index of the block of a stack in an fqn, and what follows ("" or ".…"); None if it is of no block."""
    if not name.startswith(f"{stack.container}."):
        return None
    index, dot, rest = name[len(stack.container) + 1 :].partition(".")
    return int(index), dot + rest
