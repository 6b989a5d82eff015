"""Which blocks of a model repeat, the model and the plan with few of them, and its events at full depth.

Blocks repeat, alone or in periods (five local layers and a global one). The short model has the first blocks that
differ, a few periods, and what is left over. The events of one period stand for those that were left out, where two
neighbouring periods have equal events, down to each byte and to the order in which memory is given back.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Gradient, Mark, Work
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

    def place_of(self, fqn: str) -> tuple[int, str] | None:
        """The index of the block that an fqn is in, and what follows ("" or ".…"); None if it is in no block."""
        if not fqn.startswith(f"{self.container}."):
            return None
        index, dot, rest = fqn[len(self.container) + 1 :].partition(".")
        return int(index), dot + rest


def repeating_stacks(model: nn.Module, kept: int, every: int = 1, without: nn.Module | None = None) -> list[Stack]:
    """The lists of blocks outside of a module in which more than `kept` periods of alike blocks follow each other; of
    every so many blocks the first is another than those behind it (`every_n_layers` of activation checkpointing)."""
    if any(hasattr(config, "deepstack_visual_indexes") for config in configs_of(model)):
        return []  # text layers of such models differ by their position alone
    outside = set() if without is None else set(without.modules())
    stacks = []
    for container in dict.fromkeys(block.parent for blocks in find_blocks(ModuleTree(model)) for block in blocks):
        if container is None or not isinstance(modules := container.module, nn.ModuleList) or modules in outside:
            continue
        if any(len(weight.owners) > 1 for block in container.children for b in block.walk() for weight in b.own):
            continue
        config = getattr(container.parent.module if container.parent else model, "config", None)
        signs = [
            (index % every == 0, _signature(block, config, index, len(modules))) for index, block in enumerate(modules)
        ]
        if (stack := _best(container.fqn, signs, kept)) is not None:
            stacks.append(stack)
    return stacks


def _best(container: str, signs: Sequence[object], kept: int) -> Stack | None:
    """The way to see a list as periods with the fewest blocks to run."""
    size, found = len(signs), list[Stack]()
    for length in range(1, size // (kept + 1) + 1):
        for first in range(size - (kept + 1) * length + 1):
            end = first + length
            while end < size and signs[end] == signs[end - length]:
                end += 1
            if (periods := (end - first) // length) > kept:
                found.append(
                    Stack(container=container, size=size, first=first, length=length, periods=periods, kept=kept)
                )
    return min(found, key=lambda stack: len(stack.indices), default=None)


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
    """A copy of a model with those blocks of the stacks that are run, and with configurations of its own, cut alike."""
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
    copies: dict[int, Any] = {}
    for module in twin.modules():  # some models write into theirs
        if (config := module.__dict__.get("config")) is not None:
            module.__dict__["config"] = copy.deepcopy(config, copies)
    for stack in stacks:
        config = twin.get_submodule(stack.container.rpartition(".")[0]).__dict__.get("config")
        for key, value in vars(config).items() if config is not None else ():
            if isinstance(value, list | tuple) and len(value) == stack.size:
                config.__dict__[key] = type(value)(value[index] for index in stack.indices)
    return twin


def cut_plan(plan: WrapPlan, stacks: Sequence[Stack]) -> WrapPlan:
    """The plan of the short model."""

    def renamed(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            found = next(((stack, *place) for stack in stacks if (place := stack.place_of(name)) is not None), None)
            if found is None:
                yield name
            elif found[1] in found[0].indices:
                yield f"{found[0].container}.{found[0].indices.index(found[1])}{found[2]}"

    units = (replace(unit, modules=tuple(renamed(unit.modules))) for unit in plan.units)
    return replace(
        plan, units=tuple(unit for unit in units if unit.modules), replicated=tuple(renamed(plan.replicated))
    )


_Segment = tuple[str, Literal["forward", "backward"], int]  # Stack, pass, period


class _NotAlikeError(Exception):
    """Periods differ, or are entangled with events of others."""


def expand(events: Sequence[Event], stacks: Sequence[Stack]) -> list[Event] | None:
    """The events of the full depth, of those of the short model; None where neighbouring periods differ."""
    with suppress(_NotAlikeError):
        return _Expansion(events, stacks).run()
    return None


class _Expansion:
    def __init__(self, events: Sequence[Event], stacks: Sequence[Stack]) -> None:
        self._events = events
        self._marks: dict[tuple[str, str], list[int]] = {}  # Places of the marks of a module's passes
        for at, event in enumerate(events):
            if isinstance(event, Mark) and not event.again:
                self._marks.setdefault((event.where, event.module), []).append(at)
        self._stacks = {s.container: s for s in stacks if ("before_forward", f"{s.container}.0") in self._marks}
        self._spans: dict[_Segment, tuple[int, int]] = {}
        for stack in self._stacks.values():
            self._find_spans(stack)
        bare = sorted(self._spans.values())
        if any(end <= start for start, end in bare) or any(a[1] > b[0] for a, b in pairwise(bare)):
            raise _NotAlikeError
        self._home: dict[int, tuple[_Segment, int]] = {}
        """The segment of memory that a period takes, and its place from the end: the first block begins otherwise."""
        for key, (start, end) in self._spans.items():
            taken = [event.block for event in events[start:end] if isinstance(event, Alloc)]
            self._home.update({block: (key, place - len(taken)) for place, block in enumerate(taken)})
        self._numbers: dict[object, int] = {}
        self._names: dict[tuple[str, _Segment | None, int], str] = {}

    def _find_spans(self, stack: Stack) -> None:
        """Where a period's passes begin, and end where the next one's do."""
        begins = [stack.first + period * stack.length for period in range(stack.kept)]
        firsts, lasts = ([f"{stack.container}.{at + by}" for at in begins] for by in (0, stack.length - 1))
        needed = [("before_forward", each) for each in firsts] + [("before_backward", each) for each in lasts]
        is_there = {("after_forward", lasts[-1]), *needed} <= self._marks.keys()
        if not is_there or any(len(self._marks[each]) != 1 for each in needed[: stack.kept]):
            raise _NotAlikeError
        end = self._marks["after_forward", lasts[-1]][0] + 1
        while isinstance(event := self._events[end], Free) or getattr(event, "where", "") == "after_forward":
            end += 1  # what it was called with is given back
        starts = [self._marks[each][0] for each in needed]
        ended = self._marks.get(("after_backward", firsts[0]), [len(self._events) - 1])[-1] + 1
        for period, span in enumerate(pairwise([*starts[: stack.kept], end])):
            self._spans[stack.container, "forward", period] = span
        for period, (end, start) in enumerate(pairwise([ended, *starts[stack.kept :]])):
            self._spans[stack.container, "backward", period] = start, end

    def run(self) -> list[Event]:
        for (container, direction, period), (start, end) in self._spans.items():
            if period == 1:  # it is repeated; neither it nor the next is at an end
                key: _Segment = (container, direction, 2)
                first = [self._moved(event, (container, direction, 1), -1) for event in self._events[start:end]]
                if first != [self._moved(event, key, -2) for event in self._events[slice(*self._spans[key])]]:
                    raise _NotAlikeError
        segment_at = {start: key for key, (start, _) in self._spans.items()}
        made: list[Event] = []
        place = 0
        while place < len(self._events):
            key_at = segment_at.get(place)
            end = place + 1 if key_at is None else self._spans[key_at][1]
            for shift in (0,) if key_at is None else self._shifts(key_at):
                made += [self._moved(event, key_at, shift) for event in self._events[place:end]]
            place = end
        return made

    def _shifts(self, key: _Segment) -> Sequence[int]:
        """By how many periods the events of a segment are moved, once for each time that they occur."""
        container, direction, period = key
        more = self._stacks[container].periods - self._stacks[container].kept
        if period == 1:
            return range(more + 1) if direction == "forward" else range(more, -1, -1)
        return (more if period else 0,)

    def _moved(self, event: Any, key: _Segment | None, shift: int) -> Event:
        """An event with the number of its memory and its name replaced."""
        kind, changes = type(event), dict[str, Any]()
        if kind is not Work and kind is not Mark:
            final: object = event.block
            if (home := self._home.get(event.block)) is not None:
                (container, direction, period), place = home
                final = container, direction, self._final(container, period, key, shift), place
            changes["block"] = self._numbers.setdefault(final, len(self._numbers) + 1)
        if (field := _NAMES.get(kind)) is not None:
            named = (fqn := getattr(event, field), key, shift)
            if named not in self._names:
                self._names[named] = self._name(*named)
            changes |= {field: self._names[named]} if self._names[named] != fqn else {}
        moved: Event = replace(event, **changes) if changes else event
        return moved

    def _final(self, container: str, period: int, key: _Segment | None, shift: int) -> int:
        """The period of the full model that an event speaks of."""
        stack = self._stacks[container]
        is_inside = key is not None and key[0] == container
        if (abs(period - key[2]) > 1) if key and is_inside else period not in (0, stack.kept - 1):
            raise _NotAlikeError
        return period + (shift if is_inside else (stack.periods - stack.kept) * (period > 0))

    def _name(self, fqn: str, key: _Segment | None, shift: int) -> str:
        for container, stack in self._stacks.items():
            if (place := stack.place_of(fqn)) is not None:
                index, rest = place
                period = (index - stack.first) // stack.length
                if 0 <= period < stack.kept:
                    index += (self._final(container, period, key, shift) - period) * stack.length
                elif index >= stack.first:
                    index += stack.left_out
                return f"{container}.{index}{rest}"
        return fqn


_NAMES = {Alloc: "unit", Work: "unit", Mark: "module", Gradient: "parameter"}
"""The field of each event that names a module or a parameter."""
