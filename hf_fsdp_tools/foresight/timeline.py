"""One rank over the course of a training step: its memory, computation and communication, predicted, or read from what
torch's profiler exports with `profile_memory=True`."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, Self

from hf_fsdp_tools.errors import ConfigError
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


# ---- a recorded step, whose trace names what is needed ----

# [memory]                      each allocation and free, with the totals of the allocator
# FSDP::pre_forward (fqn), …    FSDP2's own labels: which unit the host is at
# Optimizer.step#…              torch's label of a step of an optimizer
# kernel, gpu_memcpy            what a GPU ran; its `correlation` is that of the call that launched it
# gloo:…                        a collective of gloo, on a thread of its own, launched by a c10d:: operation

_LABEL = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[.*)?$")  # names all modules of a unit, by ", "

_Record = Mapping[str, Any]


class _Host:
    """Where the host is in the step at a time: the phase and the unit."""

    def __init__(self, records: Sequence[_Record]) -> None:
        changes: list[tuple[float, str, str]] = []
        self._collectives: list[tuple[float, float, str]] = []  # FSDP2's labels around them: start, end, unit
        for record in records:
            start, end = record["ts"], record["ts"] + record.get("dur", 0.0)
            match = _LABEL.match(record["name"])
            label, unit = (match[1], (match[2] or "").split(", ")[0]) if match else ("", "")
            if label in ("all_gather", "post_backward_reduce"):
                self._collectives.append((start, end, unit))
            elif label in ("pre_forward", "pre_backward"):
                changes.append((start, label.removeprefix("pre_"), unit))
            elif label == "post_forward":
                changes.append((end, "after a unit" if unit else "loss", ""))
            elif label == "root_post_backward_callback":
                changes.append((end, "clip", ""))
            elif record["name"].startswith("Optimizer.step#"):
                changes.append((start, "optimizer", ""))
        if not any(phase == "backward" for _, phase, _ in changes):  # a model without FSDP
            times = [r["ts"] for r in records if r["name"].startswith("autograd::engine::evaluate_function")]
            changes += [(min(times), "backward", ""), (max(times), "clip", "")] if times else []
        changes.sort(key=lambda change: change[0])
        for at, (time, phase, _) in enumerate(changes):
            if phase == "after a unit":  # after the last one comes the loss, which transformers' models compute
                is_last = at + 1 < len(changes) and changes[at + 1][1] in ("loss", "backward")
                changes[at] = (time, "loss" if is_last else "forward", "")
        self._changes = changes
        self._times = [time for time, _, _ in changes]

    def at(self, time: float) -> tuple[str, str]:
        i = bisect_right(self._times, time) - 1
        return self._changes[i][1:] if i >= 0 else ("forward", "")

    def collective_at(self, time: float) -> tuple[str, str]:
        """The phase, and the unit for which a collective is launched: the computing one where FSDP2 does not."""
        phase, unit = self.at(time)
        return phase, next((own for start, end, own in reversed(self._collectives) if start <= time <= end), unit)


def _records(trace: _Record) -> list[_Record]:
    """The records of a trace that have a time, in the order in which they begin, labels of GPU streams left out."""
    events = trace.get("traceEvents", ())
    kept = [r for r in events if r.get("ph") in ("X", "i") and "ts" in r and r.get("cat") != "gpu_user_annotation"]
    if not kept:
        raise ConfigError("The profile of the step is empty. Run one whole training step while it is recorded.")
    return sorted(kept, key=lambda record: record["ts"])


def read_memory(trace: _Record, *, resident_bytes: int = 0) -> Timeline:
    """The memory of the recorded step: of the accelerator's caching allocator, or of PyTorch's allocator on a CPU."""
    records = _records(trace)
    memory = [record for record in records if record["name"] == "[memory]"]
    if not memory:
        raise ConfigError("No memory was allocated while the step was recorded. Run one whole training step.")
    devices = Counter((r["args"]["Device Type"], r["args"]["Device Id"]) for r in memory)
    device = max(devices, key=lambda key: (key[0] != 0, devices[key]))
    memory = [r for r in memory if (r["args"]["Device Type"], r["args"]["Device Id"]) == device]
    allocated = [int(r["args"]["Total Allocated"]) for r in memory]
    allocated = [allocated[0] - int(memory[0]["args"]["Bytes"]), *allocated]  # and before the first of them
    if device[0] == 0:  # a CPU's total begins with the first trace of the process
        allocated = [total - allocated[0] + resident_bytes for total in allocated]
    host, began = _Host(records), records[0]["ts"]
    times = [began, *(record["ts"] for record in memory)]
    states = [host.at(time) for time in times]
    reserved = [int(record["args"]["Total Reserved"]) for record in (memory[0], *memory)]
    kept = extremes(allocated, [phase for phase, _ in states])
    return Timeline(
        origin="measured",
        axis="seconds",
        positions=tuple((times[i] - began) / 1e6 for i in kept),
        phases=tuple(states[i][0] for i in kept),
        units=tuple(states[i][1] for i in kept),
        kinds={"allocated": tuple(allocated[i] for i in kept)},
        reserved=() if device[0] == 0 else tuple(reserved[i] for i in kept),
    )


def read_schedule(trace: _Record) -> Schedule:
    """When the recorded step computed and communicated: streams of a GPU, or the host and gloo's threads."""
    records = _records(trace)
    host, began = _Host(records), records[0]["ts"]
    read = _gpu_bars if any(record.get("cat") == "kernel" for record in records) else _cpu_bars
    return make_schedule(
        "measured",
        (
            replace(bar, start_s=(bar.start_s - began) / 1e6, end_s=(bar.end_s - began) / 1e6)
            for bar in read(records, host)
        ),
    )


def _gpu_bars(records: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield the kernels and copies of a GPU, times in microseconds; each belongs where the host launched it."""
    launched: Mapping[Any, float] = {
        r["args"]["correlation"]: r["ts"]
        for r in records
        if r.get("cat") in ("cuda_runtime", "cuda_driver", "xpu_runtime") and "correlation" in r.get("args", {})
    }
    for record in records:
        if record.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, end, name = record["ts"], record["ts"] + record["dur"], record["name"]
        at = launched.get(record.get("args", {}).get("correlation", ""), start)
        operation = _collective(name) if "nccl" in name.lower() else ""
        phase, unit = host.collective_at(at) if operation else host.at(at)
        if operation:
            yield Bar("communication", operation, unit, phase, start, end)
        elif "HtoD" in name or "DtoH" in name:
            yield Bar("host", "host_to_device" if "HtoD" in name else "device_to_host", unit, phase, start, end)
        else:
            yield Bar("compute", "compute", unit, phase, start, end)


def _cpu_bars(records: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield the operations that call no other one and the collectives of gloo, times in microseconds."""
    launches = [r for r in records if r["name"].startswith("c10d::")]
    collectives = [r for r in records if r["name"].startswith("gloo:")]
    threads = {r["tid"] for r in collectives}
    for launch, record in zip(launches, collectives, strict=False):  # gloo takes them in the order of their launches
        phase, unit = host.collective_at(launch["ts"])
        operation = _collective(launch["name"]) or _collective(record["name"]) or COLLECTIVES[-1]
        yield Bar("communication", operation, unit, phase, record["ts"], record["ts"] + record["dur"])
    bars, inner = [], dict[int, _Record]()
    for record in records:
        if record.get("cat") != "cpu_op" or record["tid"] in threads:
            continue
        before = inner.get(record["tid"])
        if before is not None and record["ts"] >= before["ts"] + before["dur"]:
            bars.append(before)
        inner[record["tid"]] = record  # one that begins before the last has ended is called by it
    for record in (*bars, *inner.values()):
        if "c10d" not in record["name"]:
            phase, unit = host.at(record["ts"])
            yield Bar("compute", "compute", unit, phase, record["ts"], record["ts"] + record["dur"])


def _collective(name: str) -> str:
    """`ncclDevKernel_AllGather_RING_LL` and `c10d::_allgather_base_` as "all_gather"; "" for what is none."""
    plain = name.lower().replace("_", "")
    return next((operation for operation in COLLECTIVES if operation.replace("_", "") in plain), "")
