"""The pictures of the README and the documentation: memory and streams of a step, units of a plan, speed over GPUs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain, groupby, pairwise, repeat
from typing import Any, Literal

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Alloc, Event, Work, states
from hf_fsdp_tools.foresight.throughput import show_seconds
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.plots import INK, LINES, new_figure, styled
from hf_fsdp_tools.text import cut, show_bytes, show_count

BLUE, RED, GREEN, VIOLET, ORANGE, GRAY = LINES
LIMIT = "#e0483a"
MOST_POINTS = 1000  # About as many as a picture has columns of pixels
_FAR = 1.8  # A limit so many times above the memory is named and not drawn
_LETTER = 0.011  # Part of the axes that a letter of a phase's name takes


# ---- memory over a step ----


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory of one rank over one training step. All fields have one length."""

    seconds: tuple[float, ...]  # When the computation issued before each point ends
    phases: tuple[str, ...]
    allocated: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Index of the point with the most memory, the first of several."""
        return self.allocated.index(max(self.allocated))

    @property
    def peak_bytes(self) -> int:
        return max(self.allocated)


def memory_timeline(
    events: Sequence[Event],
    resident: Sequence[Alloc],
    spans: Sequence[tuple[float, float]],
    *,
    most_points: int = MOST_POINTS,
) -> Timeline:
    """The memory of an estimated step over time; of many points, those of highest and lowest memory."""
    allocated = [sum(now.values()) for _, now, _ in states(events, resident, range(len(events)))]
    phases = _phases(events)
    times, now_s, seconds = iter(spans), 0.0, []
    for event in events:
        if isinstance(event, Work):
            end = next(times)[1]
            now_s = max(now_s, end) if event.stream == "compute" else now_s
        seconds.append(now_s)
    kept = extremes(allocated, phases, most_points)
    columns = (tuple(column[i] for i in kept) for column in (seconds, phases, allocated))
    return Timeline(**dict(zip(("seconds", "phases", "allocated"), columns, strict=True)))


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


@styled
def draw_comparison(timelines: Mapping[str, Timeline], *, model: str, limit_bytes: int | None = None) -> Any:
    """The memory of one step under several ways to wrap a model, as lines over each other, phase by phase."""
    peaks = sorted((line.peak_bytes, name) for name, line in timelines.items())
    finding = ", ".join(
        f"{name} {'' if at else 'peaks '}at {show_bytes(peak)}" for at, (peak, name) in enumerate(peaks)
    )
    figure = new_figure(finding[0].upper() + finding[1:], 4.6)
    axes = figure.add_subplot(title=model)
    reference, highest = list(timelines.values())[-1], peaks[-1][0]
    for peak, name in reversed(peaks):
        line, color = timelines[name], {"hybrid": BLUE, "root-only": RED}.get(name, GREEN)
        x, y = _places(line, reference), line.allocated
        axes.fill_between(x, y, step="post", color=color, alpha=0.2, linewidth=0, rasterized=True)
        axes.step(x, y, where="post", color=color, linewidth=1.2, label=f"{name}: {show_bytes(peak)}")
        axes.plot(x[line.peak], y[line.peak], "o", markersize=5, color=color)
    _finish_axes(axes, reference, _places(reference, reference), highest, limit_bytes)
    axes.set(xticks=[], xlabel="one training step, phases drawn equally wide for all")
    figure.legend(loc="outside right center")
    return figure


def _places(timeline: Timeline, reference: Timeline) -> list[float]:
    """Times of a timeline from 0 on the axis of another: equal phases begin at equal places."""
    from numpy import interp

    own, other = (_runs(line) for line in (timeline, reference))
    matcher = SequenceMatcher(None, [key for key, _ in own], [key for key, _ in other], autojunk=False)
    first, last = reference.seconds[0], reference.seconds[-1]
    anchors = {timeline.seconds[0]: first}
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            anchors.setdefault(own[block.a + k][1], other[block.b + k][1])
    anchors.setdefault(timeline.seconds[-1], last)
    origins = sorted(anchors)
    places = interp(timeline.seconds, origins, [anchors[origin] for origin in origins])
    return [float(place - first) for place in places]


def _runs(timeline: Timeline) -> list[tuple[str, float]]:
    """Phase of each stretch of points that have the same, with the time of its first point."""
    runs = groupby(zip(timeline.phases, timeline.seconds, strict=True), key=lambda item: item[0])
    return [(key, next(group)[1]) for key, group in runs]


def _finish_axes(axes: Any, timeline: Timeline, x: Sequence[float], highest: int, limit_bytes: int | None) -> None:
    """Name both axes and the phases, and draw the device's limit."""
    from matplotlib.ticker import EngFormatter

    is_near = limit_bytes is not None and limit_bytes <= _FAR * highest
    top = 1.14 * max(highest, limit_bytes if is_near and limit_bytes else 0)
    axes.set(xlim=(0, x[-1] or 1), ylim=(0, top), ylabel="memory of one rank")
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    if limit_bytes is not None:
        label = f"the device: {show_bytes(limit_bytes)}"
        axes.axhline(limit_bytes, color=LIMIT, linewidth=1.2, linestyle="dashed", label=label)
    runs = [(phase, next(group)[1]) for phase, group in groupby(zip(timeline.phases, x, strict=True), lambda p: p[0])]
    for (phase, start), (_, end) in zip(runs, [*runs[1:], ("", x[-1])], strict=True):
        if start:
            axes.axvline(start, color=INK, linewidth=0.6, alpha=0.6)
        if end - start > _LETTER * len(phase) * x[-1]:
            axes.text((start + end) / 2, 0.985 * top, phase, fontsize=8, ha="center", va="top")


# ---- streams over a step ----

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


def step_schedule(events: Sequence[Event], spans: Sequence[tuple[float, float]]) -> Schedule:
    """The streams of a predicted step over its course."""
    works = (event for event in events if isinstance(event, Work))
    bars = []
    for work, (start, end) in zip(works, spans, strict=True):
        is_copy, is_collective = work.operation in COPIES, work.operation in COLLECTIVES
        track: Track = "host" if is_copy else "communication" if is_collective else "compute"
        operation = "compute" if track == "compute" else work.operation
        bars.append(Bar(track, operation, work.unit, work.phase, start, end, work.again))
    return make_schedule(bars)


def make_schedule(bars: Iterable[Bar]) -> Schedule:
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
        is_same = before and (bar.unit, bar.phase, bar.again) == (before.unit, before.phase, before.again)
        if before and is_same and bar.start_s - before.end_s <= unseen:
            merged[computed] = replace(before, end_s=max(before.end_s, bar.end_s))
        else:
            computed = len(merged) if bar.track == "compute" else computed
            merged.append(bar)
    return Schedule(bars=tuple(merged), exposed=tuple(exposed))


def _stretches(bars: Iterable[Bar]) -> Iterator[tuple[float, float, bool, bool]]:
    """Yield start and end of each stretch of time, whether a collective runs in it, and whether anything computes."""
    lasting = [bar for bar in bars if bar.end_s > bar.start_s]
    changes = sorted((time, bar.track, by) for bar in lasting for time, by in ((bar.start_s, 1), (bar.end_s, -1)))
    running: Counter[str] = Counter()
    for (start, track, by), (end, _, _) in pairwise(changes):
        running[track] += by
        if end > start:
            yield start, end, running["communication"] > 0, running["compute"] > 0


_ROWS = {"communication": (1.46, 0.5), "exposed": (1.13, 0.11), "compute": (0.76, 0.5)}  # Centre and height of each row

_ROLES = {
    "all-gather": "#f6c667",
    "reduce-scatter": VIOLET,
    "all-reduce": "#cc5a1e",
    "exposed": LIMIT,
    "forward": "#5a9ed8",
    "backward": "#2a6db0",
    "computed again": "#2a6db0",
    "loss, clip, optimizer": "#7f8790",
    "copies to and from the host": GREEN,
}
_COMPUTE = ("forward", "backward")

_CLOSE = 4  # Units in a picture from near
_UNIT_LETTER = 0.018  # Part of a picture's width that a letter of a unit's name takes

_Window = tuple[str, float, float]  # The name, start and end of a stretch of a step to draw


@styled
def draw_schedule(schedule: Schedule, *, model: str) -> Any:
    """Collectives and computation of one step, the whole of it and a few units of each pass from near.

    What is hidden behind computation stands above it; below the collectives, a red line marks where nothing computes.
    """
    from matplotlib.patches import Patch

    rows: list[list[_Window]] = [[("predicted, whole step", 0.0, schedule.seconds)]]
    rows += [windows] if (windows := _windows(schedule)) else []
    figure = new_figure(_exposure(schedule), 1 + 1.6 * len(rows))
    for strip, windows in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for axes, window in zip(strip.subplots(1, len(windows), squeeze=False)[0], windows, strict=True):
            _draw_window(axes, schedule, window)
    figure.axes[0].set_title(model)
    used = {_role(bar) for bar in schedule.bars} | {"exposed"}
    used |= {"computed again" for bar in schedule.bars if bar.again}
    handles = [
        Patch(facecolor=color, hatch="////" if role == "computed again" else None, label=role)
        for role, color in _ROLES.items()
        if role in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _exposure(one: Schedule) -> str:
    return (
        f"Predicted: {show_seconds(one.exposed_seconds)} of {show_seconds(one.communication_seconds)} of communication "
        f"exposed, {one.exposed_seconds / one.seconds:.1%} of a step of {show_seconds(one.seconds)}"
    )


def _windows(schedule: Schedule) -> list[_Window]:
    """The beginning of the forward pass and the middle of the backward pass; none of a step with few units."""
    windows = []
    for phase in _COMPUTE:
        units = _computed(schedule, phase)
        if len(units) <= 2 * _CLOSE:
            return []
        first = 0 if phase == "forward" else len(units) // 2
        (name, start, _), *_, (last, _, end) = units[first : first + _CLOSE]
        label = f"{phase}, {_short(name)} to {_short(last)}"
        windows.append((label, 0.0 if phase == "forward" else start, end))
    return windows


def _computed(schedule: Schedule, phase: str) -> list[tuple[str, float, float]]:
    """Each unit of the first pass of a phase with the start and the end of its computation, without small copies."""
    bars = [bar for bar in schedule.bars if bar.track == "compute" and bar.phase == phase]
    longest = max((bar.end_s - bar.start_s for bar in bars), default=0.0)
    spans: dict[str, tuple[float, float]] = {}
    for bar in bars:
        if bar.unit and bar.end_s - bar.start_s >= longest / 10:
            start, end = spans.setdefault(bar.unit, (bar.start_s, bar.end_s))
            if bar.start_s - end < longest:
                spans[bar.unit] = (start, bar.end_s)
    return [(unit, start, end) for unit, (start, end) in spans.items()]


def _short(fqn: str) -> str:
    """The end of a unit's name: "31" for model.layers.31, "embed_tokens" for model.embed_tokens, "root" for ""."""
    return fqn.rpartition(".")[2] or "root"


def _role(bar: Bar) -> str:
    if bar.track == "communication":
        return bar.operation.replace("_", "-")
    if bar.track == "host":
        return "copies to and from the host"
    return bar.phase if bar.phase in _COMPUTE else "loss, clip, optimizer"


def _draw_window(axes: Any, schedule: Schedule, window: _Window) -> None:
    """Draw one stretch of the step into its axes."""
    from matplotlib.ticker import EngFormatter

    title, begin, finish = window
    length = finish - begin
    is_near = length < schedule.seconds
    axes.grid(False)
    axes.set(xlim=(begin, finish), ylim=(0.5, 1.9), xlabel=title)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_yticks([middle for middle, _ in _ROWS.values()], list(_ROWS))
    inside = [bar for bar in schedule.bars if bar.end_s >= begin and bar.start_s <= finish]

    def look(bar: Bar) -> tuple[str, bool]:
        return _role(bar), bar.again

    for (role, again), group in groupby(sorted(inside, key=look), key=look):
        bars = list(group)
        centre, height = _ROWS["communication" if bars[0].track == "communication" else "compute"]
        axes.broken_barh(
            [(bar.start_s, bar.end_s - bar.start_s) for bar in bars],
            (centre - height / 2, height),
            facecolor=_ROLES[role],
            edgecolor="white" if is_near or again else "face",  # an edge of its own colour keeps a narrow bar visible
            linewidth=0.4,
            hatch="////" if again else None,
        )
        for bar in bars if is_near and not again else ():
            name, room = _short(bar.unit), (bar.end_s - bar.start_s) / length
            is_whole = begin <= bar.start_s and bar.end_s <= finish
            if is_whole and room > _UNIT_LETTER * len(name):
                middle = (bar.start_s + bar.end_s) / 2
                axes.text(middle, centre, name, fontsize=7, ha="center", va="center", color="#101214")
    centre, height = _ROWS["exposed"]
    spans = [(start, end - start) for start, end in schedule.exposed]
    axes.broken_barh(spans, (centre - height / 2, height), color=LIMIT, linewidth=0.4)
    computed = [bar for bar in inside if bar.operation == "compute"]
    for phase, group in groupby(computed, key=lambda bar: bar.phase):
        bars = list(group)
        start, end = max(bars[0].start_s, begin), min(bars[-1].end_s, finish)
        if end - start > 0.1 * length:
            axes.text((start + end) / 2, 1.88, phase, fontsize=8, ha="center", va="top")
        if start > begin:
            axes.axvline(start, color=INK, linewidth=0.6, alpha=0.5)


# ---- units of a plan, and speed over GPUs ----


@styled
def draw_units(plan: WrapPlan) -> Any:
    """The units of a plan as bars, equal ones in one row."""
    _, *rows = plan.table()
    largest, total = plan.largest_unit, sum(unit.num_bytes for unit in plan.units)
    title = f"{len(plan.units)} units; the largest gathers {show_bytes(largest.num_bytes)} of {show_bytes(total)}"
    figure = new_figure(title, 0.8 + 0.3 * len(rows))
    axes = figure.add_subplot(title=f"{plan.model_class}, {show_count(plan.num_params)} parameters", xticks=[])
    axes.grid(False)
    sizes = [units[0].num_bytes for units in plan.alike]
    bars = axes.barh(range(len(rows)), sizes, height=0.5, color=ORANGE)
    axes.bar_label(bars, [f"{count} {size}, {why}" for _, count, _, size, _, why in rows], padding=4)
    axes.set_yticks(range(len(rows)), [cut(name, 60) for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=2.2 * max(sizes))
    axes.spines["bottom"].set_visible(False)
    return figure


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """Throughput of one model on one kind of GPU over the number of GPUs."""

    name: str
    num_gpus: tuple[int, ...]
    values: tuple[float | None, ...]  # Per GPU at each number; None where the model does not fit
    published: tuple[tuple[int, float], ...] = ()  # (number of GPUs, value) that others measured, drawn as open circles

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(n, value) for n, value in zip(self.num_gpus, self.values, strict=True) if value is not None]


@styled
def draw_scaling(curves: Sequence[ScalingCurve], *, setting: str, quantity: str = "TFLOP/s per GPU") -> Any:
    """Throughput per GPU over the number of GPUs."""
    curves = [curve for curve in curves if curve.points]
    figure = new_figure(_finding(curves, quantity), 4.8)
    axes = figure.add_subplot(xscale="log", xlabel="GPUs (circles: published)", ylabel=quantity)
    axes.set_title(setting, wrap=True)
    for curve, color in zip(curves, chain(LINES, repeat(LINES[-1])), strict=False):
        axes.plot(*zip(*curve.points, strict=True), "o-", color=color, markersize=4.5, label=curve.name)
        if curve.published:
            axes.plot(*zip(*curve.published, strict=True), "o", color=color, markersize=10, fillstyle="none")
    numbers = sorted({n for curve in curves for n, _ in (*curve.points, *curve.published)})
    axes.set_xticks(numbers, [f"{n:,}" for n in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center")
    return figure


def _finding(curves: Sequence[ScalingCurve], quantity: str) -> str:
    """The throughput at the end of each curve, and how far published points lie from the curves."""
    if len(curves) > 2:
        most = max(curve.points[-1][0] for curve in curves)
        kept = [100 * curve.points[-1][1] / curve.points[0][1] for curve in curves]
        finding = f"At {most:,} GPUs each keeps {min(kept):.0f} to {max(kept):.0f} % of its throughput per GPU"
    else:
        ends = (f"{curve.name}: {curve.points[-1][1]:,.0f} at {curve.points[-1][0]:,} GPUs" for curve in curves)
        finding = f"{quantity.partition(',')[0]} of {'; '.join(ends)}"
    off = [
        100 * (value / known - 1)
        for curve in curves
        for n, value in curve.published
        if (known := dict(curve.points).get(n))
    ]
    return finding + (f"; published figures differ by {min(off):+.0f} to {max(off):+.0f} %" if off else "")
