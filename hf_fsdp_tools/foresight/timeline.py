"""The memory of one rank over the course of a training step, as a value; `plots` draws it.

That of a predicted step is made of its events, that of a real one of a profile (`measured`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Literal, Self

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Work

Origin = Literal["predicted", "measured"]
"""Of a dry run, or of a real step."""

MOST_POINTS = 1000
"""About as many as a picture has columns of pixels."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory of one rank over one training step: bytes by kind at each of its points. All fields have one length."""

    origin: Origin
    """Where it is from."""
    axis: Literal["events", "seconds"]
    """What `positions` count."""
    positions: tuple[float, ...]
    """Where each point lies: never decreasing."""
    phases: tuple[str, ...]
    """Part of the step at each point: forward, loss, backward, clip, optimizer."""
    units: tuple[str, ...]
    """Unit that computes at each point: fqn of its first module, "" for the root."""
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
        """The most allocated memory."""
        return max(self.allocated)

    @property
    def peak_phase(self) -> str:
        """Part of the step that holds the peak."""
        return self.phases[self.peak]

    @property
    def peak_unit(self) -> str:
        """Unit that computes at the peak."""
        return self.units[self.peak]

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak; kinds that take nothing are left out."""
        peak = self.peak
        return {kind: values[peak] for kind, values in self.kinds.items() if values[peak]}

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
        """This value as JSON text."""
        return json.dumps(asdict(self))


def memory_timeline(
    events: Sequence[Event],
    resident: Sequence[Alloc],
    *,
    reserved: Sequence[int] | None = None,
    most_points: int = MOST_POINTS,
) -> Timeline:
    """The memory of a predicted step over its course, by the numbers of its events; `in_seconds` places it in time.

    Of many events, those are kept in which the memory is highest and lowest among their neighbours; the peak is.
    """
    allocated = [sum(now.values()) for _, now in states(events, resident, range(len(events)))]
    phases = _phases(events)
    kept = extremes(allocated, phases, most_points)
    if reserved is not None:
        kept = sorted({*kept, max(range(len(reserved)), key=reserved.__getitem__)})
    taken = (event for event in (*resident, *events) if isinstance(event, Alloc))
    kinds: dict[str, list[int]] = {event.kind: [] for event in taken}
    units: list[str] = []
    for unit, now in states(events, resident, kept):
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
        reserved=() if reserved is None else tuple(reserved[i] for i in kept),
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


def held(events: Sequence[Event], resident: Iterable[Alloc], at: int) -> list[Alloc]:
    """The memory that is in use after an event."""
    blocks = {alloc.block: alloc for alloc in resident}
    for event in events[: at + 1]:
        if isinstance(event, Alloc):
            blocks[event.block] = event
        elif isinstance(event, Free):
            blocks.pop(event.block, None)
    return list(blocks.values())


def states(
    events: Sequence[Event], resident: Iterable[Alloc], kept: Iterable[int]
) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield, after each event in `kept`, the unit that computes and the bytes by kind (changed in place later)."""
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
            yield unit, now
