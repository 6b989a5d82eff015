"""Events of the full depth of a model from a run with few of its blocks.

The events of one period of blocks stand for those of the periods that were left out, where two neighbouring periods
have equal events, of forward and of backward pass, down to each byte and to the order in which memory is given back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Gradient, Mark, Work
from hf_fsdp_tools.foresight.tracing.recorder import Recorder
from hf_fsdp_tools.foresight.tracing.repeats import Stack, block_and_rest


class Bounds:
    """The places in a list of events at which the passes of blocks end."""

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


def _hidden(*values: Any) -> Any:
    """The first tensor that needs a gradient: hidden states."""
    return next((value for value in values if getattr(value, "requires_grad", False)), None)


_Segment = tuple[str, str, int]  # Stack, pass ("forward" or "backward"), period


def expand(events: Sequence[Event], stacks: Sequence[Stack], bounds: Bounds) -> list[Event] | None:
    """The events of the full depth; None where neighbouring periods differ."""
    try:
        return _Expansion(events, stacks, bounds).run()
    except _NotAlikeError:
        return None


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
                if self._canonical((container, direction, 1)) != self._canonical((container, direction, 2)):
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
            place = block_and_rest(fqn, stack)
            return fqn if place is None else (place[0] - period * stack.length, place[1])

        return [_changed(event, number, name) for event in self._events[start:end]]

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
