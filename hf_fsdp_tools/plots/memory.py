"""Pictures of the memory of a training step: by kind, and under several ways to wrap a model."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.timeline import Timeline
from hf_fsdp_tools.plots.figure import COLORS, INK, LINE_ROLES, new_figure, short_unit, styled
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SMALL = 0.01  # Part of the peak below which a kind is drawn with the other small ones

_FAR = 1.8  # A limit so many times above the memory is named and not drawn

_LETTER = 0.011  # Part of the axes that a letter of a phase's name takes


@styled
def draw_memory(
    timeline: Timeline, *, model: str, limit_bytes: int | None = None, measured: Timeline | None = None
) -> "Figure":
    """The memory of one step by kind, as areas on each other, with the peak, the device's limit and a real step."""
    figure = new_figure(_finding(timeline, limit_bytes, measured), 5.0)
    axes = figure.add_subplot(title=model)
    lines: list[tuple[str, Timeline, Sequence[int], str, str]] = []
    if timeline.reserved and (measured is None or measured.reserved):
        lines.append(("reserved", timeline, timeline.reserved, "dotted", INK))
    if measured is not None:
        if measured.reserved:
            lines.append(("reserved, measured", measured, measured.reserved, "dotted", COLORS["exposed"]))
        lines.append(("measured", measured, measured.allocated, "solid", INK))
    highest = max([timeline.peak_bytes, *(max(values) for _, _, values, _, _ in lines)])
    stack = _merged(timeline)
    x = _places(timeline, timeline)
    axes.stackplot(
        x,
        *stack.values(),
        labels=[f"{kind}  {show_bytes(values[timeline.peak])}" for kind, values in stack.items()],
        colors=[COLORS.get(kind, COLORS["other"]) for kind in stack],
        step="post",
        rasterized=True,  # thousands of corners
    )
    for name, line, values, style, color in lines:
        label, places = f"{name}  {show_bytes(max(values))}", _places(line, timeline, by_unit=True)
        axes.step(places, values, where="post", color=color, linewidth=1, linestyle=style, label=label)
    _finish_axes(axes, timeline, x, highest, limit_bytes)
    at, peak = x[timeline.peak], timeline.peak_bytes
    axes.plot(at, peak, "o", markersize=5, color=INK)
    left = at > x[-1] / 2
    axes.annotate(
        f"peak {show_bytes(peak)}, at {short_unit(timeline.peak_unit)}",
        (at, peak),
        xytext=(-7 if left else 7, 2),
        textcoords="offset points",
        horizontalalignment="right" if left else "left",
        fontweight="bold",
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", title="at the peak")
    return figure


@styled
def draw_comparison(timelines: Mapping[str, Timeline], *, model: str, limit_bytes: int | None = None) -> "Figure":
    """The memory of one step under several ways to wrap a model, as lines over each other, phase by phase."""
    if not timelines:
        raise ConfigError("There is nothing to compare. Give at least one timeline by its name.")
    peaks = sorted((line.peak_bytes, name) for name, line in timelines.items())
    finding = ", ".join(
        f"{name} {'' if at else 'peaks '}at {show_bytes(peak)}" for at, (peak, name) in enumerate(peaks)
    )
    figure = new_figure(finding[0].upper() + finding[1:], 4.6)
    axes = figure.add_subplot(title=model)
    reference, highest = list(timelines.values())[-1], peaks[-1][0]
    others = iter(LINE_ROLES[2:])
    for peak, name in reversed(peaks):
        line, color = timelines[name], COLORS[name if name in LINE_ROLES[:2] else next(others, "other")]
        x, y = _places(line, reference), line.allocated
        axes.fill_between(x, y, step="post", color=color, alpha=0.2, linewidth=0, rasterized=True)
        axes.step(x, y, where="post", color=color, linewidth=1.2, label=f"{name}: {show_bytes(peak)}")
        axes.plot(x[line.peak], y[line.peak], "o", markersize=5, color=color)
    _finish_axes(axes, reference, _places(reference, reference), highest, limit_bytes)
    axes.set(xticks=[], xlabel="one training step, phases drawn equally wide for all")
    figure.legend(loc="outside right center")
    return figure


def _finding(timeline: Timeline, limit_bytes: int | None, measured: Timeline | None) -> str:
    phase = {"clip": "clipping of gradients", "optimizer": "optimizer step", "loss": "loss"}.get(
        timeline.peak_phase, f"{timeline.peak_phase} pass"
    )
    peak = f"at {show_bytes(timeline.peak_bytes)} in the {phase}"
    if measured is not None:
        off = 100 * (timeline.peak_bytes / measured.peak_bytes - 1)
        return f"Predicted to peak {peak}, measured {show_bytes(measured.peak_bytes)} ({off:+.1f} %)"
    finding = f"{'Peaks' if timeline.origin == 'predicted' else 'Peaked'} {peak}"
    if limit_bytes is None:
        return finding
    if timeline.reserved:
        return f"{finding}; the allocator takes {show_bytes(max(timeline.reserved))} of {show_bytes(limit_bytes)}"
    return f"{finding}, of the device's {show_bytes(limit_bytes)}"


def _merged(timeline: Timeline) -> dict[str, Sequence[int]]:
    """The kinds to draw, from the bottom; kinds that are always small together as "other"."""
    known = list(COLORS)
    order = sorted(timeline.kinds, key=lambda kind: known.index(kind) if kind in known else len(known))
    least = _SMALL * timeline.peak_bytes
    stack: dict[str, Sequence[int]] = {
        kind: timeline.kinds[kind] for kind in order if max(timeline.kinds[kind]) >= least
    }
    small = [timeline.kinds[kind] for kind in order if kind not in stack]
    if any(map(any, small)):
        stack["other"] = tuple(map(sum, zip(*small, strict=True)))
    return stack


def _places(timeline: Timeline, reference: Timeline, *, by_unit: bool = False) -> list[float]:
    """Positions of a timeline from 0 on the axis of another: equal phases, or units of them, begin at equal places."""
    from numpy import interp

    own, other = (_runs(line, by_unit) for line in (timeline, reference))
    matcher = SequenceMatcher(None, [key for key, _ in own], [key for key, _ in other], autojunk=False)
    first, last = reference.positions[0], reference.positions[-1]
    anchors = {timeline.positions[0]: first}
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            anchors.setdefault(own[block.a + k][1], other[block.b + k][1])
    anchors.setdefault(timeline.positions[-1], last)
    origins = sorted(anchors)
    places = interp(timeline.positions, origins, [anchors[origin] for origin in origins])
    return [float(place - first) for place in places]


def _runs(timeline: Timeline, by_unit: bool) -> list[tuple[Hashable, float]]:
    """Phase, and unit, of each stretch of points that have the same, with the position of its first point."""
    keys: Iterable[Hashable] = zip(timeline.phases, timeline.units, strict=True) if by_unit else timeline.phases
    runs = groupby(zip(keys, timeline.positions, strict=True), key=lambda item: item[0])
    return [(key, next(group)[1]) for key, group in runs]


def _finish_axes(axes: "Axes", timeline: Timeline, x: Sequence[float], highest: int, limit_bytes: int | None) -> None:
    """Name both axes and the phases, and draw the device's limit."""
    from matplotlib.ticker import EngFormatter

    is_near = limit_bytes is not None and limit_bytes <= _FAR * highest
    top = 1.14 * max(highest, limit_bytes if is_near and limit_bytes else 0)
    axes.set(xlim=(0, x[-1] or 1), ylim=(0, top), ylabel="memory of one rank")
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    if limit_bytes is not None:
        label = f"the device: {show_bytes(limit_bytes)}"
        axes.axhline(limit_bytes, color=COLORS["exposed"], linewidth=1.2, linestyle="dashed", label=label)
    if timeline.axis == "events":
        axes.set(xticks=[], xlabel="one training step, in the order in which memory is taken and given back")
    else:
        axes.set_xlabel("time in the step")
        axes.xaxis.set_major_formatter(EngFormatter("s"))
    runs = [(phase, next(group)[1]) for phase, group in groupby(zip(timeline.phases, x, strict=True), lambda p: p[0])]
    for (phase, start), (_, end) in zip(runs, [*runs[1:], ("", x[-1])], strict=True):
        if start:
            axes.axvline(start, color=INK, linewidth=0.6, alpha=0.6)
        if end - start > _LETTER * len(phase) * x[-1]:
            axes.text((start + end) / 2, 0.985 * top, phase, fontsize=8, ha="center", va="top")
