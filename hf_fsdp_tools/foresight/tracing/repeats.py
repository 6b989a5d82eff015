"""Which blocks of a model repeat, the model and the plan with few of them, and its events at full depth.

Blocks repeat, alone or in periods (five local layers and a global one). The short model has the first blocks that
differ, a few periods, and what is left over. The events of one period stand for those of the periods that were left
out, where two neighbouring periods have equal events, of forward and of backward pass, down to each byte and to the
order in which memory is given back.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Gradient, Mark, Work
from hf_fsdp_tools.foresight.tracing.recorder import Recorder
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


def repeating_stacks(model: nn.Module, kept: int, every: int = 1) -> list[Stack]:
    """The lists of blocks in which more than `kept` periods of alike blocks follow each other; of every so many blocks
    the first is another than those behind it (`every_n_layers` of activation checkpointing)."""
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
            signs: list[object] = [
                (index % every == 0, _signature(block, config, index, len(modules)))
                for index, block in enumerate(modules)
            ]
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


# ---- events of the full depth ----


class Bounds:
    """The places in a list of events at which the passes of blocks end."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], recorder: Recorder) -> None:
        self._stacks, self._recorder = stacks, recorder
        self.forward: dict[tuple[str, int], list[int]] = {}
        """By stack and period: where its forward pass begins and ends."""
        self.backward: dict[tuple[str, int], list[int]] = {}
        """By stack and period: where the gradient of its output is there, and where that of its input is."""
        for stack in stacks:
            blocks = list(model.get_submodule(stack.container).children())
            for period in range(stack.kept):
                start = stack.first + period * stack.length
                self._watch(blocks[start], blocks[start + stack.length - 1], (stack.container, period))

    def _watch(self, first: nn.Module, last: nn.Module, key: tuple[str, int]) -> None:
        events = self._recorder.events

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recorder.phase == "backward":
                return  # a block that is computed again
            self.forward.setdefault(key, []).append(len(events))
            if (hidden := _hidden(*args, *kwargs.values())) is not None:
                hidden.register_hook(lambda _: note_input())

        def end(_: nn.Module, args: object, output: Any) -> None:
            if self._recorder.phase == "backward":
                return
            self.forward.setdefault(key, []).append(len(events))
            if (hidden := _hidden(*(output if isinstance(output, tuple | list) else (output,)))) is not None:
                hidden.register_hook(lambda _: self.backward.setdefault(key, []).append(len(events)))

        def note_input() -> None:
            place = len(events)
            while isinstance(mark := events[place - 1], Mark) and mark.where == "before_backward":
                place -= 1  # of what ran before, whose output this is
            self.backward.setdefault(key, []).append(place)

        first.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        last.register_forward_hook(end, prepend=True)

    def expand(self) -> list[Event] | None:
        """The events of the full depth; None where neighbouring periods differ."""
        try:
            return _Expansion(self._recorder.events, self._stacks, self).run()
        except _NotAlikeError:
            return None


def _hidden(*values: Any) -> Any:
    """The first tensor that needs a gradient: hidden states."""
    return next((value for value in values if getattr(value, "requires_grad", False)), None)


_Segment = tuple[str, str, int]  # Stack, pass ("forward" or "backward"), period


class _NotAlikeError(Exception):
    """Periods differ, or are entangled with events of others."""


class _Expansion:
    def __init__(self, events: Sequence[Event], stacks: Sequence[Stack], bounds: Bounds) -> None:
        self._events = events
        run = {container for container, _ in bounds.forward}
        self._stacks = {stack.container: stack for stack in stacks if stack.container in run}
        self._spans: dict[_Segment, tuple[int, int]] = {}
        for stack in self._stacks.values():
            self._find_spans(stack, bounds)
        bare = sorted(self._spans.values())
        if any(end <= start for start, end in bare) or any(a[1] > b[0] for a, b in pairwise(bare)):
            raise _NotAlikeError
        self._segment_at = {start: key for key, (start, _) in self._spans.items()}
        self._home: dict[int, tuple[_Segment, int]] = {}
        """The segment of memory that a period takes, and its place counted from the end, since the first block may
        begin otherwise (hidden states in fp32 are cast by the others)."""
        for key, (start, end) in self._spans.items():
            taken = [event.block for event in events[start:end] if isinstance(event, Alloc)]
            self._home.update({block: (key, place - len(taken)) for place, block in enumerate(taken)})
        self._numbers: dict[object, int] = {}

    def _find_spans(self, stack: Stack, bounds: Bounds) -> None:
        keys = [(stack.container, period) for period in range(stack.kept)]
        for key in keys:
            if len(bounds.forward.get(key, ())) != 2 or len(bounds.backward.get(key, ())) not in (1, 2):
                raise _NotAlikeError
        starts = [bounds.forward[key][0] for key in keys]
        ends = [*starts[1:], self._returned(bounds.forward[keys[-1]][1])]
        for (name, period), start, end in zip(keys, starts, ends, strict=True):
            self._spans[name, "forward", period] = start, end
        starts = [bounds.backward[key][0] for key in keys]
        ends = [len(self._events) if len(b := bounds.backward[keys[0]]) == 1 else b[1], *starts]
        for (name, period), start, end in zip(keys, starts, ends, strict=False):
            self._spans[name, "backward", period] = start, end

    def _returned(self, place: int) -> int:
        """Where a block has returned, and what it was called with is given back."""
        while isinstance(event := self._events[place], Free | Mark):
            if isinstance(event, Mark) and event.where != "after_forward":
                break
            place += 1
        return place

    def run(self) -> list[Event]:
        for container in self._stacks:
            for direction in ("forward", "backward"):  # the period that is repeated, and the next: neither is at an end
                first, second = (
                    [self._moved(event, key, -period) for event in self._events[slice(*self._spans[key])]]
                    for period in (1, 2)
                    for key in [(container, direction, period)]
                )
                if first != second:
                    raise _NotAlikeError
        made: list[Event] = []
        place = 0
        while place < len(self._events):
            key = self._segment_at.get(place)
            if key is None:
                made.append(self._moved(self._events[place], None, 0))
                place += 1
                continue
            start, end = self._spans[key]
            for shift in self._shifts(key):
                made += [self._moved(event, key, shift) for event in self._events[start:end]]
            place = end
        return made

    def _shifts(self, key: _Segment) -> Sequence[int]:
        """By how many periods the events of a segment are moved, once for each time that they occur."""
        container, direction, period = key
        more = self._stacks[container].periods - self._stacks[container].kept
        if period == 1:
            return range(more + 1) if direction == "forward" else range(more, -1, -1)
        return (0,) if period == 0 else (more,)

    def _moved(self, event: Event, key: _Segment | None, shift: int) -> Event:
        number, name = (partial(change, key=key, shift=shift) for change in (self._number, self._name))
        moved: Event = _changed(event, number, name)
        return moved

    def _number(self, block: int, key: _Segment | None, shift: int) -> int:
        home = self._home.get(block)
        if home is None:
            final: object = block
        else:
            (container, direction, period), place = home
            final = container, direction, self._final(container, period, key, shift), place
        return self._numbers.setdefault(final, len(self._numbers) + 1)

    def _final(self, container: str, period: int, key: _Segment | None, shift: int) -> int:
        """The period of the full model that an event speaks of."""
        stack = self._stacks[container]
        if key is not None and key[0] == container:
            if abs(period - key[2]) > 1:
                raise _NotAlikeError
            return period + shift
        if period not in (0, stack.kept - 1):
            raise _NotAlikeError
        return period if period == 0 else stack.periods - 1

    def _name(self, fqn: str, key: _Segment | None, shift: int) -> str:
        for container, stack in self._stacks.items():
            place = block_and_rest(fqn, stack)
            if place is None:
                continue
            index, rest = place
            period = stack.period_of(index)
            if period is not None:
                index += (self._final(container, period, key, shift) - period) * stack.length
            elif index >= stack.first:
                index += stack.left_out
            return f"{container}.{index}{rest}"
        return fqn


_NAMES = {Alloc: "unit", Work: "unit", Mark: "module", Gradient: "parameter"}
"""The field of each event that names a module or a parameter."""


def _changed(event: Any, number: Callable[[int], Any], name: Callable[[str], Any]) -> Any:
    """An event with the number of its memory and its name replaced."""
    changes = {"block": number(event.block)} if isinstance(event, Alloc | Free | Gradient) else {}
    if (field := _NAMES.get(type(event))) is not None:
        changes[field] = name(getattr(event, field))
    is_same = all(getattr(event, field) == value for field, value in changes.items())
    return event if is_same else replace(event, **changes)
