"""Events of the full depth of a model from a run of few of its blocks.

Blocks repeat, alone or in periods (five local layers and a global one). A model is run with its first blocks that
differ, a few periods, and what is left over; the events of one period then stand for those that were left out. Whether
they may is checked: two neighbouring periods must have equal events, of forward and of backward pass, down to each byte
and to the order in which memory is given back. Where they do not, the caller runs the full depth.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from torch import nn

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Gradient, Mark, Work
from hf_fsdp_tools.foresight.recorder import Recorder
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.stacks import find_blocks

__all__ = ["Bounds", "Stack", "cut_model", "cut_plan", "expand", "repeating_stacks"]

_POSITION = re.compile(r"layer_?(idx|id|index|num|number)$|(^|_)idx$")
"""Attributes that tell a block where it is, and nothing else (`layer_idx`)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of blocks, of which a few stand for all."""

    container: str
    """Fqn of the `ModuleList`."""
    size: int
    """Number of its blocks."""
    first: int
    """Blocks before the first period."""
    length: int
    """Blocks of a period."""
    periods: int
    """Number of periods."""
    kept: int
    """Periods that are run."""

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
        period, _ = divmod(index - self.first, self.length)
        return period if 0 <= period < self.kept else None


# ---- what repeats ----


def repeating_stacks(model: nn.Module, kept: int) -> list[Stack]:
    """The lists of blocks in which more than `kept` periods of alike blocks follow each other."""
    if any(hasattr(config, "deepstack_visual_indexes") for config in _configs(model)):
        return []  # text layers of such models differ by their position alone
    tree = ModuleTree(model)
    found = []
    for blocks in find_blocks(tree):
        for container in dict.fromkeys(block.parent for block in blocks):
            if container is None or not isinstance(container.module, nn.ModuleList):
                continue
            if any(len(weight.owners) > 1 for block in container.children for b in block.walk() for weight in b.own):
                continue
            signs = _signatures(container.module, container.parent.module if container.parent else model)
            stack = _best(container.fqn, signs, kept)
            if stack is not None:
                found.append(stack)
    return found


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
                stack = Stack(
                    container=container, size=size, first=first, length=length, periods=periods, kept=kept
                )
                if best is None or len(stack.indices) < len(best.indices):
                    best = stack
    return best


def _signatures(blocks: nn.ModuleList, owner: nn.Module) -> list[object]:
    """What decides about the events of each block, apart from its place."""
    config = getattr(owner, "config", None)
    return [(_signature(block), _said_of(config, index, len(blocks))) for index, block in enumerate(blocks)]


def _signature(block: nn.Module) -> object:
    return tuple(
        (name, type(module), _scalars(module), _shapes(module._parameters), _shapes(module._buffers))
        for name, module in block.named_modules()
    )


def _scalars(module: nn.Module) -> object:
    """Attributes that are numbers or words; of a rate, whether it is 0."""
    return tuple(
        (key, value != 0 if isinstance(value, float) else value)
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and isinstance(value, bool | int | float | str) and not _POSITION.search(key)
    )


def _shapes(tensors: dict[str, Any]) -> object:
    return tuple(
        (key, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
        for key, value in tensors.items()
    )


def _said_of(config: Any, index: int, size: int) -> object:
    """What a configuration says of one block: entries of lists with one for each, and membership in lists of indices."""
    said = []
    for key, value in sorted(vars(config).items()) if config is not None else ():
        if isinstance(value, list | tuple) and value and all(isinstance(each, bool | int | float | str) for each in value):
            if len(value) == size:
                said.append((key, value[index]))
            elif all(isinstance(each, int) for each in value) and ("layer" in key or "ind" in key):
                said.append((key, index in value))
    return tuple(said)


def _configs(model: nn.Module) -> list[Any]:
    found = {id(c): c for module in model.modules() if (c := module.__dict__.get("config")) is not None}
    nested = [vars(config).get(key) for config in found.values() for key in getattr(config, "sub_configs", ())]
    return [*found.values(), *(config for config in nested if config is not None)]


# ---- the short model ----


def cut_model(model: nn.Module, stacks: Sequence[Stack]) -> None:
    """Leave the blocks of the stacks that are run in a copy of a model, and cut the configuration's lists."""
    copies: dict[int, Any] = {}
    for stack in stacks:
        container = model.get_submodule(stack.container)
        blocks = list(container._modules.values())
        container._modules = {str(new): blocks[old] for new, old in enumerate(stack.indices)}
        owner = model.get_submodule(stack.container.rpartition(".")[0])
        config = owner.__dict__.get("config")
        if config is None:
            continue
        short = copies.setdefault(id(config), copy.copy(config))
        short.__dict__ = dict(short.__dict__)
        for key, value in vars(config).items():
            if isinstance(value, list | tuple) and len(value) == stack.size:
                short.__dict__[key] = type(value)(value[index] for index in stack.indices)
    for module in model.modules():
        if (config := module.__dict__.get("config")) is not None and id(config) in copies:
            module.__dict__["config"] = copies[id(config)]


def cut_plan(plan: WrapPlan, stacks: Sequence[Stack]) -> WrapPlan:
    """The plan of the short model."""

    def name(old: str) -> str | None:
        for stack in stacks:
            if (found := _split(old, stack)) is not None:
                index, rest = found
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


def _split(name: str, stack: Stack) -> tuple[int, str] | None:
    """The index of the block of a stack in an fqn, and what follows; None if it is of no block."""
    if not name.startswith(f"{stack.container}."):
        return None
    index, dot, rest = name[len(stack.container) + 1 :].partition(".")
    return int(index), dot + rest


# ---- where passes begin and end ----


class Bounds:
    """The places in a list of events at which the passes of blocks end.

    Args:
        model: the short model.
        stacks: cut out of it.
        recorder: of the model's events.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], recorder: Recorder) -> None:
        self._recorder = recorder
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
        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recorder.phase == "backward":
                return  # a block that is computed again
            self.forward.setdefault(key, []).append(len(self._recorder.events))
            for tensor in _hidden(*args, *kwargs.values()):
                tensor.register_hook(lambda _: self._note_input(key))

        def end(_: nn.Module, args: object, output: Any) -> None:
            if self._recorder.phase == "backward":
                return
            self.forward.setdefault(key, []).append(len(self._recorder.events))
            for tensor in _hidden(*(output if isinstance(output, tuple | list) else (output,))):
                tensor.register_hook(lambda _: self.backward.setdefault(key, []).append(len(self._recorder.events)))

        first.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        last.register_forward_hook(end, prepend=True)

    def _note_input(self, key: tuple[str, int]) -> None:
        events = self._recorder.events
        place = len(events)
        while isinstance(mark := events[place - 1], Mark) and mark.where == "before_backward":
            place -= 1  # of what ran before, whose output this is
        self.backward.setdefault(key, []).append(place)


def _hidden(*values: Any) -> Iterator[Any]:
    """The first tensor that needs a gradient: hidden states."""
    for value in values:
        if getattr(value, "requires_grad", False):
            yield value
            return


# ---- the full list ----

_Segment = tuple[str, str, int]
"""Stack, pass ("forward" or "backward"), period."""


def expand(events: Sequence[Event], stacks: Sequence[Stack], bounds: Bounds) -> list[Event] | None:
    """The events of the full depth; None where neighbouring periods differ.

    Args:
        events: of the short model.
        stacks: that were cut.
        bounds: of their periods.
    """
    try:
        return _Expansion(events, stacks, bounds).run()
    except _NotAlikeError:
        return None


class _NotAlikeError(Exception):
    """Periods differ, or are entangled with events of others."""


class _Expansion:
    def __init__(self, events: Sequence[Event], stacks: Sequence[Stack], bounds: Bounds) -> None:
        self._events = events
        self._stacks = {stack.container: stack for stack in stacks}
        self._spans: dict[_Segment, tuple[int, int]] = {}
        for stack in stacks:
            self._find_spans(stack, bounds)
        bare = sorted(self._spans.values())
        if any(end <= start for start, end in bare) or any(a[1] > b[0] for a, b in pairwise(bare)):
            raise _NotAlikeError
        self._segment_at = {start: key for key, (start, _) in self._spans.items()}
        self._home: dict[int, tuple[_Segment, int]] = {}
        """Of memory that a period takes: the segment, and how many it took before."""
        for key, (start, end) in self._spans.items():
            taken = [event.block for event in events[start:end] if isinstance(event, Alloc)]
            self._home.update({block: (key, place) for place, block in enumerate(taken)})
        self._numbers: dict[object, int] = {}

    def _find_spans(self, stack: Stack, bounds: Bounds) -> None:
        keys = [(stack.container, period) for period in range(stack.kept)]
        for key in keys:
            if len(bounds.forward.get(key, ())) != 2 or len(bounds.backward.get(key, ())) not in (1, 2):
                raise _NotAlikeError
        ends = [bounds.forward[key][1] for key in keys]
        starts = [bounds.forward[keys[0]][0], *ends]
        for (name, period), start, end in zip(keys, starts, ends, strict=False):
            self._spans[name, "forward", period] = start, end
        starts = [bounds.backward[key][0] for key in keys]
        ends = [len(self._events) if len(b := bounds.backward[keys[0]]) == 1 else b[1], *starts]
        for (name, period), start, end in zip(keys, starts, ends, strict=False):
            self._spans[name, "backward", period] = start, end

    def run(self) -> list[Event]:
        for stack in self._stacks.values():
            self._check(stack)
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
        stack = self._stacks[container]
        more = stack.periods - stack.kept
        if period == 1:
            return range(more + 1) if direction == "forward" else range(more, -1, -1)
        return (0,) if period == 0 else (more,)

    # ---- whether periods are alike ----

    def _check(self, stack: Stack) -> None:
        """Compare the period that is repeated with a neighbour that has neighbours of its own on the same side."""
        after = 2
        before = 0 if stack.kept == 3 else 2
        for direction, other in (("forward", after), ("backward", before)):
            ours = self._canonical((stack.container, direction, 1))
            if ours != self._canonical((stack.container, direction, other)):
                raise _NotAlikeError

    def _canonical(self, key: _Segment) -> list[object]:
        """Events of a segment, with names and memory told from the segment's own place."""
        start, end = self._spans[key]
        container, _, period = key

        def number(block: int) -> object:
            home = self._home.get(block)
            if home is None or home[0][0] != container:
                return block
            (_, direction, where), place = home
            return direction, where - period, place

        def name(fqn: str) -> object:
            stack = self._stacks[container]
            found = _split(fqn, stack)
            if found is None:
                return fqn
            return found[0] - period * stack.length, found[1]

        return [_with(event, number, name, _told) for event in self._events[start:end]]

    # ---- moving ----

    def _moved(self, event: Event, key: _Segment | None, shift: int) -> Event:
        return _with(
            event,
            lambda block: self._number(block, key, shift),
            lambda fqn: self._name(fqn, key, shift),
            _rebuilt,
        )

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
            found = _split(fqn, stack)
            if found is None:
                continue
            index, rest = found
            period = stack.period_of(index)
            if period is not None:
                index += (self._final(container, period, key, shift) - period) * stack.length
            elif index >= stack.first:
                index += stack.left_out
            return f"{container}.{index}{rest}"
        return fqn


def _with(event: Event, number: Callable[[int], Any], name: Callable[[str], Any], build: Callable[..., Any]) -> Any:
    """`build(event, …)` with the numbers and names of an event replaced."""
    if isinstance(event, Alloc):
        return build(event, number(event.block), name(event.unit))
    if isinstance(event, Free):
        return build(event, number(event.block))
    if isinstance(event, Work):
        return build(event, name(event.unit))
    if isinstance(event, Mark):
        return build(event, name(event.module))
    assert isinstance(event, Gradient)
    return build(event, name(event.parameter), number(event.block))


def _told(event: Event, *rest: object) -> object:
    """What an event says beside names and numbers, and these."""
    given = {field.name: getattr(event, field.name) for field in fields(event)}
    own = {key: value for key, value in given.items() if key not in ("block", "unit", "module", "parameter")}
    return type(event), tuple(own.items()), rest


def _rebuilt(event: Event, *rest: Any) -> Event:
    """The event with other names and numbers."""
    if isinstance(event, Alloc):
        return Alloc(rest[0], event.num_bytes, event.kind, rest[1], event.stream)
    if isinstance(event, Free):
        return Free(rest[0])
    if isinstance(event, Work):
        return event if event.unit == rest[0] else replace(event, unit=rest[0])
    if isinstance(event, Mark):
        return Mark(event.where, rest[0], event.again)
    return Gradient(*rest)
