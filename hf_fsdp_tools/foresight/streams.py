"""When one rank computes and when it communicates over the course of a training step, as a value; `plots` draws it.

That of a predicted step is made of its events and of the times that the simulation gives them, that of a real one of a
profile (`measured`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from operator import attrgetter
from typing import Literal

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Alloc, Event, Free, Work
from hf_fsdp_tools.foresight.timeline import Origin

_UNSEEN = 1 / 2000
"""Part of a step below which a pause in the computation is not drawn as one: less than a pixel of most pictures."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in which one stream works for one unit; a free of gathered parameters has no length."""

    track: Literal["communication", "compute", "host"]
    """Where it is drawn: collectives, computation, copies to and from the host."""
    operation: str
    """`compute`, one of `COLLECTIVES`, `free`, or the direction of a copy."""
    unit: str
    phase: str
    start_s: float
    """Since the step began, as the next."""
    end_s: float
    again: bool = False
    """Whether activation checkpointing computes here for the second time."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When one rank computes and when it communicates in one training step."""

    origin: Origin
    bars: tuple[Bar, ...]
    """In the order of their starts."""
    exposed: tuple[tuple[float, float], ...]
    """Start and end of each stretch of time in which a collective runs and nothing is computed."""

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last bar."""
        return max((bar.end_s for bar in self.bars), default=0.0)

    @property
    def exposed_seconds(self) -> float:
        """Time in which a collective runs and nothing is computed."""
        return sum(end - start for start, end in self.exposed)

    @property
    def communication_seconds(self) -> float:
        """Time in which a collective runs."""
        return sum(end - start for start, end in _union(_spans(self.bars, "communication")))

    def to_json(self) -> str:
        """This value as JSON text."""
        return json.dumps(asdict(self))


def step_schedule(events: Sequence[Event], spans: Sequence[tuple[float, float]]) -> Schedule:
    """The streams of a predicted step over its course."""
    bars, gathered = [], {}
    times = iter(spans)
    computed = 0.0  # until when the work that was issued so far keeps the compute stream busy
    for event in events:
        if isinstance(event, Work):
            start, end = next(times)
            bars.append(_bar(event, start, end))
            computed = max(computed, end) if event.stream == "compute" else computed
        elif isinstance(event, Alloc) and event.kind == "gathered parameters":
            gathered[event.block] = event.unit
        elif isinstance(event, Free) and event.block in gathered:
            phase = bars[-1].phase if bars else "forward"
            bars.append(Bar("compute", "free", gathered.pop(event.block), phase, computed, computed))
    return make_schedule("predicted", bars)


def _bar(work: Work, start: float, end: float) -> Bar:
    if work.operation in COLLECTIVES:
        return Bar("communication", work.operation, work.unit, work.phase, start, end)
    if work.operation in COPIES:
        return Bar("host", work.operation, work.unit, work.phase, start, end)
    return Bar("compute", "compute", work.unit, work.phase, start, end, work.again)


def make_schedule(origin: Origin, bars: Iterable[Bar]) -> Schedule:
    """A schedule of single kernels and collectives: computation of one unit that follows on itself becomes one bar."""
    every = sorted(bars, key=lambda bar: (bar.start_s, bar.end_s))
    busy = _union(_spans(every, "compute"))
    exposed = _without(_union(_spans(every, "communication")), busy)
    unseen = _UNSEEN * max((bar.end_s for bar in every), default=0.0)
    merged: list[Bar] = []
    last: dict[str, int] = {}  # the latest bar of each track, and the latest free
    for bar in every:
        row = "free" if bar.operation == "free" else bar.track
        before = merged[last[row]] if row in last else None
        is_alike = before is not None and _look(bar) == _look(before) and bar.operation in ("compute", "free")
        if before and is_alike and bar.start_s - before.end_s <= unseen:
            merged[last[row]] = replace(before, end_s=max(before.end_s, bar.end_s)) if row != "free" else before
        else:
            last[row] = len(merged)
            merged.append(bar)
    return Schedule(origin=origin, bars=tuple(merged), exposed=tuple(exposed))


_look = attrgetter("operation", "unit", "phase", "again")


def _spans(bars: Iterable[Bar], track: str) -> list[tuple[float, float]]:
    return [(bar.start_s, bar.end_s) for bar in bars if bar.track == track and bar.end_s > bar.start_s]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time that any of the spans covers, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def _without(spans: Iterable[tuple[float, float]], busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What of the spans no busy stretch covers; both are unions."""
    result, i = [], 0
    for start, end in spans:
        while i < len(busy) and busy[i][1] <= start:
            i += 1
        for begin, until in takewhile(lambda one, end=end: one[0] < end, islice(busy, i, None)):  # type: ignore[misc]
            if begin > start:
                result.append((start, begin))
            start = max(start, until)
        if start < end:
            result.append((start, end))
    return result
