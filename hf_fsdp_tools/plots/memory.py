"""Pictures of the memory of a training step: by kind, and of several ways to wrap a model beside each other."""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.foresight.timeline import Timeline
from hf_fsdp_tools.plots.figure import (
    Palette,
    Size,
    ThemeName,
    inches,
    new_figure,
    panel,
    short_unit,
    spread,
    text_inches,
)
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_memory"]

_STACK = (
    "optimizer",
    "parameters",
    "gradients",
    "inputs",
    "activations",
    "logits and loss",
    "gathered parameters",
    "gather buffers",
    "whole gradients",
    "reduce buffers",
    "temporaries",
)
"""From the bottom: what stays for the whole step, what the model makes, what FSDP makes for a while."""

_SMALL = 0.01
"""Part of the peak below which a kind is drawn with the other small ones."""


def draw_memory(
    timeline: Timeline,
    *,
    model: str,
    limit_bytes: int | None = None,
    measured: Timeline | None = None,
    theme: ThemeName = "light",
    size: Size = (10.0, 5.0),
) -> "Figure":
    """The memory of one step by kind, as areas on each other, with the peak, the device's limit and a real step.

    Args:
        timeline: predicted, or a measured one alone.
        model: what it is the memory of: model, GPUs, batch; stands below the title.
        limit_bytes: memory of the device.
        measured: of a real step, drawn as a line over the prediction, unit by unit.
        theme: light or dark.
        size: width and height in inches.

    Raises:
        ConfigError: matplotlib is absent.
    """
    figure, palette, top = new_figure(_finding(timeline, limit_bytes, measured), model, size=size, theme=theme)
    key_width, strip = 2.35, 0.24
    axes = panel(figure, 0.72, 0.52, size[0] - 0.72 - key_width - 0.2, top - 0.52 - strip, palette)
    stack = _merged(timeline)
    x = _scaled(timeline.positions)
    axes.stackplot(
        x,
        list(stack.values()),
        colors=[palette[kind] for kind in stack],
        edgecolor=palette["ground"],
        linewidth=0.25,
        step="post",
    )
    lines: list[tuple[str, int, str]] = []
    if timeline.reserved:
        axes.plot(x, _gb(timeline.reserved), color=palette["ink"], linewidth=0.9, linestyle=":", drawstyle="steps-post")
        lines.append(("reserved by the allocator", max(timeline.reserved), ":"))
    if measured is not None:
        moved = _scaled(_laid_over(measured, timeline), timeline.positions)
        axes.plot(moved, _gb(measured.allocated), color=palette["ink"], linewidth=1.1, drawstyle="steps-post")
        lines.append(("measured", measured.peak_bytes, "-"))
    highest = max([timeline.peak_bytes, *(value for _, value, _ in lines)])
    _frame(axes, palette, highest, limit_bytes, timeline)
    _phase_strip(axes, palette, timeline.phases, x, size)
    _mark_peak(axes, palette, x[timeline.peak], timeline)
    _key(figure, palette, stack, timeline, lines, (size[0] - key_width, top - strip), key_width)
    return figure


def _finding(timeline: Timeline, limit_bytes: int | None, measured: Timeline | None) -> str:
    phase = f"in the {_spoken(timeline.peak_phase)}"
    if measured is not None:
        predicted, real = show_bytes(timeline.peak_bytes), show_bytes(measured.peak_bytes)
        off = 100 * (timeline.peak_bytes / measured.peak_bytes - 1)
        return f"Predicted to peak at {predicted} {phase}, measured {real} ({off:+.1f}\N{NO-BREAK SPACE}%)"
    verb = "Peaks" if timeline.origin == "predicted" else "Peaked"
    finding = f"{verb} at {show_bytes(timeline.peak_bytes)} {phase}"
    if limit_bytes is None:
        return finding
    left = limit_bytes - max([timeline.peak_bytes, *timeline.reserved])
    return f"{finding}, {show_bytes(abs(left))} {'below' if left >= 0 else 'ABOVE'} the limit of the device"


def _spoken(phase: str) -> str:
    return {"loss": "loss", "clip": "clipping of gradients", "optimizer": "optimizer step"}.get(phase, f"{phase} pass")


def _gb(values: Sequence[int]) -> list[float]:
    return [value / 1e9 for value in values]


def _merged(timeline: Timeline) -> dict[str, list[float]]:
    """GB of the kinds to draw, from the bottom, kinds that are always small together as "other"."""
    order = sorted(timeline.kinds, key=lambda kind: _STACK.index(kind) if kind in _STACK else len(_STACK))
    least = _SMALL * timeline.peak_bytes
    large = {kind: _gb(timeline.kinds[kind]) for kind in order if max(timeline.kinds[kind]) >= least}
    small = [timeline.kinds[kind] for kind in order if kind not in large]
    if small and any(map(any, small)):
        large["other"] = [sum(column) / 1e9 for column in zip(*small, strict=True)]
    return large


def _scaled(positions: Sequence[float], reference: Sequence[float] | None = None) -> list[float]:
    """Positions as parts of the step, from 0 to 1."""
    first, last = (reference or positions)[0], (reference or positions)[-1]
    return [(position - first) / ((last - first) or 1.0) for position in positions]


def _laid_over(timeline: Timeline, reference: Timeline, *, by_unit: bool = True) -> list[float]:
    """Positions of a timeline on the axis of another: equal phases and units begin at equal places."""
    own, other = (_runs(line, by_unit) for line in (timeline, reference))
    matcher = SequenceMatcher(None, [key for key, _ in own], [key for key, _ in other], autojunk=False)
    anchors = {timeline.positions[0]: reference.positions[0]}
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            at = timeline.positions[own[block.a + k][1]]
            anchors.setdefault(at, reference.positions[other[block.b + k][1]])
    anchors.setdefault(timeline.positions[-1], reference.positions[-1])
    places = sorted(anchors)
    return [_between(place, places, anchors) for place in timeline.positions]


def _runs(timeline: Timeline, by_unit: bool) -> list[tuple[Hashable, int]]:
    """Phase, and unit, of each stretch of points that have the same, with its first point."""
    keys = zip(timeline.phases, timeline.units, strict=True) if by_unit else timeline.phases
    return [(key, next(iter(group))[0]) for key, group in groupby(enumerate(keys), key=lambda item: item[1])]


def _between(place: float, places: Sequence[float], anchors: Mapping[float, float]) -> float:
    i = bisect_left(places, place)
    if places[i] == place:
        return anchors[place]
    low, high = places[i - 1], places[i]
    return anchors[low] + (anchors[high] - anchors[low]) * (place - low) / (high - low)


def _frame(axes: "Axes", palette: Palette, highest: int, limit_bytes: int | None, timeline: Timeline) -> None:
    """Limits and labels of the axes, and the line of the device's limit if it is within reach."""
    near = limit_bytes is not None and limit_bytes <= 2.5 * highest
    top = max(highest, limit_bytes if near and limit_bytes else 0) * 1.12 / 1e9
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top)
    axes.set_ylabel("memory of one rank (GB)")
    seconds = timeline.positions[-1] - timeline.positions[0]
    if timeline.axis == "seconds":
        _second_ticks(axes, seconds)
        axes.set_xlabel("time in the step (s)" if seconds >= 1 else "time in the step (ms)")
    else:
        axes.set_xticks([])
        axes.set_xlabel("one training step, in the order in which memory is taken and given back")
    if limit_bytes is not None and near:
        axes.axhline(limit_bytes / 1e9, color=palette["exposed"], linewidth=1.2, linestyle=(0, (6, 3)))
        right = timeline.peak < len(timeline.positions) / 2
        axes.annotate(
            f"the device has {show_bytes(limit_bytes)}",
            (0.995 if right else 0.005, limit_bytes / 1e9),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right" if right else "left",
            va="bottom",
            fontsize=8,
            color=palette["exposed"],
            bbox={"facecolor": palette["ground"], "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
        )


def _second_ticks(axes: "Axes", seconds: float) -> None:
    from matplotlib.ticker import MaxNLocator

    unit = 1.0 if seconds >= 1 else 1e-3
    ticks = [tick for tick in MaxNLocator(6).tick_values(0, seconds / unit) if 0 <= tick <= seconds / unit]
    axes.set_xticks([tick * unit / seconds for tick in ticks], [f"{tick:g}" for tick in ticks])


def _phase_strip(axes: "Axes", palette: Palette, phases: Sequence[str], x: Sequence[float], size: Size) -> None:
    """Name the phases above the axes, each over its own part where its name has room, and draw where they begin."""
    place = axes.get_xaxis_transform()
    width = axes.get_position().width * size[0]
    runs = [(phase, next(iter(group))[0]) for phase, group in groupby(enumerate(phases), key=lambda item: item[1])]
    for (phase, first), (_, following) in zip(runs, [*runs[1:], ("", len(x) - 1)], strict=True):
        start, end = x[first], x[following]
        if first:
            axes.axvline(start, color=palette["muted"], linewidth=0.6, alpha=0.6)
        if text_inches(phase, 8.0) + 0.06 <= (end - start) * width:
            axes.text((start + end) / 2, 1.02, phase, transform=place, ha="center", fontsize=8, color=palette["muted"])


def _mark_peak(axes: "Axes", palette: Palette, x: float, timeline: Timeline) -> None:
    unit = short_unit(timeline.peak_unit)
    text = f"peak {show_bytes(timeline.peak_bytes)}" + (f", at {unit}" if unit != "root" else "")
    left = x > 0.5
    axes.plot([x], [timeline.peak_bytes / 1e9], marker="o", markersize=5, color=palette["ink"], clip_on=False)
    axes.annotate(
        text,
        (x, timeline.peak_bytes / 1e9),
        xytext=(-7 if left else 7, 2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        color=palette["ink"],
        bbox={"facecolor": palette["ground"], "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )


def _key(
    figure: "Figure",
    palette: Palette,
    stack: dict[str, list[float]],
    timeline: Timeline,
    lines: Sequence[tuple[str, int, str]],
    corner: tuple[float, float],
    width: float,
) -> None:
    """Name the colours at the right, in the order of the areas, each with its bytes at the peak."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    total_width, total_height = figure.get_size_inches()
    left, y = corner
    row = min(0.235, (y - 0.4) / (len(stack) + len(lines) + 1.4))

    def write(x: float, text: str, **style: Any) -> None:
        style = {"fontsize": 8.5, "color": palette["ink"], "va": "center", **style}
        figure.text(x / total_width, y / total_height, text, **style)

    write(left + width - 0.18, "GB at the peak", ha="right", color=palette["muted"], fontsize=8.0)
    for kind in reversed(stack):
        y -= row
        corner_of = ((left + 0.05) / total_width, (y - 0.06) / total_height)
        swatch = Rectangle(corner_of, 0.16 / total_width, 0.12 / total_height, color=palette[kind], linewidth=0)
        figure.add_artist(swatch)
        write(left + 0.29, kind)
        at_peak = stack[kind][timeline.peak]
        write(left + width - 0.18, f"{at_peak:,.1f}" if at_peak >= 0.05 * min(1, max(stack[kind])) else "–", ha="right")
    y -= 0.4 * row
    for name, value, style in lines:
        y -= row
        xs = [(left + 0.02) / total_width, (left + 0.22) / total_width]
        figure.add_artist(
            Line2D(
                xs,
                [y / total_height] * 2,
                color=palette["ink"],
                linewidth=1.1,
                linestyle="dotted" if style == ":" else "solid",
            )
        )
        write(left + 0.29, name)
        write(left + width - 0.18, f"{value / 1e9:,.1f}", ha="right")


def draw_comparison(
    timelines: Mapping[str, Timeline],
    *,
    model: str,
    limit_bytes: int | None = None,
    theme: ThemeName = "light",
    size: Size = (10.0, 4.6),
) -> "Figure":
    """The memory of one step under several ways to wrap a model, as lines over each other, phase by phase.

    Args:
        timelines: by name, "root-only" and "hybrid" in red and blue; the last one gives the lengths of the phases.
        model: what they are the memory of; stands below the title.
        limit_bytes: memory of the device.
        theme: light or dark.
        size: width and height in inches.

    Raises:
        ConfigError: matplotlib is absent.
    """
    peaks = sorted((line.peak_bytes, name) for name, line in timelines.items())
    said = f"{_named(peaks[0][1])} peaks at {show_bytes(peaks[0][0])}"
    said = ", ".join([said, *(f"{name} at {show_bytes(value)}" for value, name in peaks[1:])])
    figure, palette, top = new_figure(said[0].upper() + said[1:], model, size=size, theme=theme)
    strip = 0.24
    axes = panel(figure, 0.72, 0.42, size[0] - 0.72 - 0.25, top - 0.42 - strip, palette)
    reference = list(timelines.values())[-1]
    colors = dict(zip(timelines, _line_colors(timelines, palette), strict=True))
    marks = []
    for name, line in sorted(timelines.items(), key=lambda item: -item[1].peak_bytes):
        x = _scaled(_laid_over(line, reference, by_unit=False), reference.positions)
        y = _gb(line.allocated)
        axes.fill_between(x, y, step="post", color=palette["ground"], linewidth=0)
        axes.fill_between(x, y, step="post", color=colors[name], alpha=0.2, linewidth=0)
        axes.plot(x, y, color=colors[name], linewidth=1.2, drawstyle="steps-post")
        marks.append((name, x[line.peak], y[line.peak]))
    _frame(axes, palette, peaks[-1][0], limit_bytes, reference)
    axes.set_xticks([])
    axes.set_xlabel("one training step, phases drawn equally wide for all")
    _phase_strip(axes, palette, reference.phases, _scaled(reference.positions), size)
    _label_peaks(axes, palette, marks, colors, size)
    return figure


def _named(name: str) -> str:
    return f"{name} wrapping" if name in ("hybrid", "root-only") else name


def _line_colors(names: Mapping[str, Any], palette: Palette) -> list[str]:
    """Red for root-only, blue for hybrid, another colour for others."""
    return [palette[name if name in ("root-only", "hybrid") else "third"] for name in names]


def _label_peaks(
    axes: "Axes", palette: Palette, marks: Sequence[tuple[str, float, float]], colors: Mapping[str, str], size: Size
) -> None:
    """Name each line beside its peak, the names one above the other where peaks are near."""
    height = axes.get_position().height * size[1]
    top = axes.get_ylim()[1]
    gap = top * inches() * 1.25 / height
    places = spread([y + 0.6 * gap for _, _, y in marks], gap, gap, top - 0.3 * gap)
    for (name, x, y), place in zip(marks, places, strict=True):
        left = x > 0.5
        axes.plot([x], [y], marker="o", markersize=5, color=colors[name], clip_on=False)
        axes.annotate(
            f"{name}: {y:,.1f} GB",
            (x, place),
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color=colors[name],
            bbox={"facecolor": palette["ground"], "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
        )
