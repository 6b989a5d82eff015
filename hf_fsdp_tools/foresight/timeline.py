"""One rank over the course of a predicted or measured training step: its memory, computation and communication."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Literal, Self

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Alloc, Event, Free, Work

Origin = Literal["predicted", "measured"]

MOST_POINTS = 1000  # About as many as a picture has columns of pixels


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory of one rank over one training step: bytes by kind at each of its points. All fields have one length."""

    origin: Origin
    axis: Literal["events", "seconds"]  # What `positions` count
    positions: tuple[float, ...]  # Where each point lies: never decreasing
    phases: tuple[str, ...]
    units: tuple[str, ...]  # Unit that computes at each point: fqn of its first module, "" for the root
    kinds: Mapping[str, tuple[int, ...]]
    """Allocated bytes by kind. A real step has one kind, "allocated": an allocator does not know more."""
    reserved: tuple[int, ...] = ()
    """Bytes that the caching allocator holds; () where there is none, or none was modelled."""

    @property
    def allocated(self) -> tuple[int, ...]:
        """Bytes of all kinds together at each point."""
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))

    @property
    def peak(self) -> int:
        """Index of the point with the most allocated memory, the first of several."""
        allocated = self.allocated
        return allocated.index(max(allocated))

    @property
    def peak_bytes(self) -> int:
        return max(self.allocated)

    @property
    def peak_phase(self) -> str:
        return self.phases[self.peak]

    @property
    def peak_unit(self) -> str:
        return self.units[self.peak]

    def in_seconds(self, events: Sequence[Event], spans: Sequence[tuple[float, float]]) -> Self:
        """The same memory with its points in time: each where the computation issued before its event ends."""
        times, now, seconds = iter(spans), 0.0, []
        for event in events:
            if isinstance(event, Work):
                end = next(times)[1]
                now = max(now, end) if event.stream == "compute" else now
            seconds.append(now)
        return replace(self, axis="seconds", positions=tuple(seconds[int(i)] for i in self.positions))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def memory_timeline(
    events: Sequence[Event], resident: Sequence[Alloc], *, reserved: Sequence[int] = (), most_points: int = MOST_POINTS
) -> Timeline:
    """The memory of a predicted step by the numbers of its events; of many, those of highest and lowest memory among
    their neighbours."""
    allocated = [sum(now.values()) for _, now, _ in states(events, resident, range(len(events)))]
    phases = _phases(events)
    kept = extremes(allocated, phases, most_points)
    if reserved:
        kept = sorted({*kept, max(range(len(reserved)), key=reserved.__getitem__)})
    kinds: dict[str, list[int]] = {event.kind: [] for event in (*resident, *events) if isinstance(event, Alloc)}
    units: list[str] = []
    for unit, now, _ in states(events, resident, kept):
        units.append(unit)
        for kind, values in kinds.items():
            values.append(now.get(kind, 0))
    return Timeline(
        origin="predicted",
        axis="events",
        positions=tuple(map(float, kept)),
        phases=tuple(phases[i] for i in kept),
        units=tuple(units),
        kinds={kind: tuple(values) for kind, values in kinds.items()},
        reserved=tuple(reserved[i] for i in kept) if reserved else (),
    )


def _phases(events: Sequence[Event]) -> list[str]:
    """The phase of each event: of memory that is taken, that of the work which comes next."""
    works = [event.phase for event in events if isinstance(event, Work)] or ["forward"]
    done, now, result = 0, works[0], []
    for event in events:
        if isinstance(event, (Work, Alloc)):
            now = works[min(done, len(works) - 1)]
        done += isinstance(event, Work)
        result.append(str(now))
    return result


def extremes(values: Sequence[int], phases: Sequence[str], most: int = MOST_POINTS) -> list[int]:
    """Indices of the points to draw: first and last of each phase, highest and lowest of each stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    length, kept = -(-2 * len(values) // most), set()
    for _, run in groupby(range(len(values)), key=phases.__getitem__):
        inside = list(run)
        kept |= {inside[0], inside[-1]}
        for start in range(0, len(inside), length):
            stretch = inside[start : start + length]
            kept |= {max(stretch, key=values.__getitem__), min(stretch, key=values.__getitem__)}
    return sorted(kept)


def states(
    events: Sequence[Event], resident: Iterable[Alloc], kept: Iterable[int]
) -> Iterator[tuple[str, Mapping[str, int], Mapping[int, Alloc]]]:
    """Yield, after each event in `kept`, the unit that computes, the bytes by kind and the memory in use by its number
    (changed in place later)."""
    chosen, unit = set(kept), ""
    blocks = {alloc.block: alloc for alloc in resident}
    now: dict[str, int] = {}
    for alloc in blocks.values():
        now[alloc.kind] = now.get(alloc.kind, 0) + alloc.num_bytes
    for i, event in enumerate(events):
        if isinstance(event, Alloc):
            blocks[event.block] = event
            now[event.kind] = now.get(event.kind, 0) + event.num_bytes
        elif isinstance(event, Free) and event.block in blocks:
            block = blocks.pop(event.block)
            now[block.kind] -= block.num_bytes
        elif isinstance(event, Work) and event.stream == "compute":
            unit = event.unit
        if i in chosen:
            yield unit, now, blocks


_UNSEEN = 1 / 2000  # Part of a step below which a pause in the computation is not drawn: less than a pixel


Track = Literal["communication", "compute", "host"]


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in which one stream works for one unit."""

    track: Track  # Where it is drawn: collectives, computation, copies to and from the host
    operation: str  # `compute`, one of `COLLECTIVES`, or the direction of a copy
    unit: str
    phase: str
    start_s: float  # Since the step began, as `end_s`
    end_s: float
    again: bool = False  # Whether activation checkpointing computes here for the second time


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When one rank computes and when it communicates in one training step."""

    origin: Origin
    bars: tuple[Bar, ...]  # In the order of their starts
    exposed: tuple[tuple[float, float], ...]
    """Start and end of each stretch of time in which a collective runs and nothing is computed."""

    @property
    def seconds(self) -> float:
        return max((bar.end_s for bar in self.bars), default=0.0)

    @property
    def exposed_seconds(self) -> float:
        return sum(end - start for start, end in self.exposed)

    @property
    def communication_seconds(self) -> float:
        """Time in which a collective runs."""
        return sum(end - start for start, end, communicates, _ in _stretches(self.bars) if communicates)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def step_schedule(events: Sequence[Event], spans: Sequence[tuple[float, float]]) -> Schedule:
    """The streams of a predicted step over its course."""
    works = (event for event in events if isinstance(event, Work))
    bars = []
    for work, (start, end) in zip(works, spans, strict=True):
        is_copy, is_collective = work.operation in COPIES, work.operation in COLLECTIVES
        track: Track = "host" if is_copy else "communication" if is_collective else "compute"
        operation = "compute" if track == "compute" else work.operation
        bars.append(Bar(track, operation, work.unit, work.phase, start, end, work.again))
    return make_schedule("predicted", bars)


def make_schedule(origin: Origin, bars: Iterable[Bar]) -> Schedule:
    """A schedule of single kernels and collectives: computation of one unit that follows on itself becomes one bar."""
    every = sorted(bars, key=lambda bar: (bar.start_s, bar.end_s))
    exposed: list[tuple[float, float]] = []
    for start, end, communicates, computes in _stretches(every):
        if communicates and not computes:
            is_longer = exposed and exposed[-1][1] == start
            exposed.append((exposed.pop()[0] if is_longer else start, end))
    unseen = _UNSEEN * max((bar.end_s for bar in every), default=0.0)
    merged: list[Bar] = []
    computed = -1  # the latest bar of computation
    for bar in every:
        before = merged[computed] if computed >= 0 and bar.track == "compute" else None
        if before and _look(bar) == _look(before) and bar.start_s - before.end_s <= unseen:
            merged[computed] = replace(before, end_s=max(before.end_s, bar.end_s))
        else:
            computed = len(merged) if bar.track == "compute" else computed
            merged.append(bar)
    return Schedule(origin=origin, bars=tuple(merged), exposed=tuple(exposed))


_look = attrgetter("unit", "phase", "again")


def _stretches(bars: Iterable[Bar]) -> Iterator[tuple[float, float, bool, bool]]:
    """Yield start and end of each stretch of time, whether a collective runs in it, and whether anything computes."""
    lasting = [bar for bar in bars if bar.end_s > bar.start_s]
    changes = sorted((time, bar.track, by) for bar in lasting for time, by in ((bar.start_s, 1), (bar.end_s, -1)))
    running: Counter[str] = Counter()
    for (start, track, by), (end, _, _) in pairwise(changes):
        running[track] += by
        if end > start:
            yield start, end, running["communication"] > 0, running["compute"] > 0
