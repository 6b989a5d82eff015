"""The pictures of the README and the documentation: memory of a step, units of a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, groupby
from typing import Any

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Work
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
    seconds_of: Callable[[Work], float],
    *,
    most_points: int = MOST_POINTS,
) -> Timeline:
    """The memory of an estimated step over the time of its computation; of many points, those of highest and lowest."""
    sizes = {each.block: each.num_bytes for each in resident}
    allocated, now = [], sum(sizes.values())
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.block] = event.num_bytes
            now += event.num_bytes
        elif isinstance(event, Free):
            now -= sizes.pop(event.block, 0)
        allocated.append(now)
    phases = _phases(events)
    works = (seconds_of(each) if isinstance(each, Work) and each.stream == "compute" else 0.0 for each in events)
    seconds = list(accumulate(works))
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


# ---- units of a plan ----


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
