"""Picture of the memory of a training step, by kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_fsdp_tools.foresight.timeline import Timeline
from hf_fsdp_tools.plots.figure import Palette, Size, ThemeName, new_figure, panel, short_unit
from hf_fsdp_tools.plots.step_axes import byte_unit, columns, draw_limit, fill_below, laid_over, name_phases, scaled
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """The memory of one step by kind, as areas on each other, with the peak, the device's limit and a real step."""
    figure, palette, top = new_figure(_finding(timeline, limit_bytes, measured), model, size=size, theme=theme)
    key_width, strip = 2.35, 0.24
    axes = panel(figure, 0.72, 0.52, size[0] - 0.72 - key_width - 0.2, top - 0.52 - strip, palette)
    x = scaled(timeline.positions)
    lines = _lines(timeline, measured, x)
    highest = max([timeline.peak_bytes, *(max(line.values) for line in lines)])
    unit_bytes = byte_unit(highest)[0]
    stack = _merged(timeline, unit_bytes)
    draw_limit(axes, palette, highest, limit_bytes, right=timeline.peak < len(x) / 2)
    upper = [0.0] * len(x)
    edges = [upper := [low + own for low, own in zip(upper, values, strict=True)] for values in stack.values()]
    for kind, edge in reversed(list(zip(stack, edges, strict=True))):  # the highest first: each covers what is above it
        fill_below(axes, x, edge, palette[kind], edgecolor=palette["ground"], linewidth=0.25)
    for line in lines:
        kept = columns(line.x, line.values)
        drawn = [line.x[i] for i in kept], [line.values[i] / unit_bytes for i in kept]
        axes.plot(*drawn, color=palette[line.role], linewidth=1.0, linestyle=line.style, drawstyle="steps-post")
    _time_axis(axes, timeline)
    name_phases(axes, palette, timeline.phases, x, size)
    _mark_peak(axes, palette, x[timeline.peak], timeline, unit_bytes)
    _key(figure, palette, stack, timeline, lines, (size[0] - key_width, top - strip))
    return figure


@dataclass(frozen=True)
class _Line:
    """A line over the areas."""

    name: str
    x: Sequence[float]
    values: Sequence[int]
    style: Literal["dotted", "solid"]
    role: str


def _lines(timeline: Timeline, measured: Timeline | None, x: Sequence[float]) -> list[_Line]:
    """What the allocator holds, and the measured step; a step that was measured on a CPU has no caching allocator."""
    lines = []
    if timeline.reserved and (measured is None or measured.reserved):
        lines.append(_Line("reserved", x, timeline.reserved, "dotted", "ink"))
    if measured is not None:
        moved = scaled(laid_over(measured, timeline, by_unit=True), timeline.positions)
        if measured.reserved:
            lines.append(_Line("reserved, measured", moved, measured.reserved, "dotted", "exposed"))
        lines.append(_Line("measured", moved, measured.allocated, "solid", "ink"))
    return lines


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
    if timeline.reserved:
        held, device = show_bytes(max(timeline.reserved)), show_bytes(limit_bytes)
        return f"{finding}; the allocator takes {held} of the device's {device}"
    return f"{finding}, of the device's {show_bytes(limit_bytes)}"


def _spoken(phase: str) -> str:
    return {"loss": "loss", "clip": "clipping of gradients", "optimizer": "optimizer step"}.get(phase, f"{phase} pass")


def _merged(timeline: Timeline, unit_bytes: float) -> dict[str, list[float]]:
    """The kinds to draw, from the bottom, in the picture's unit; kinds that are always small together as "other"."""
    order = sorted(timeline.kinds, key=lambda kind: _STACK.index(kind) if kind in _STACK else len(_STACK))
    least = _SMALL * timeline.peak_bytes
    large = [kind for kind in order if max(timeline.kinds[kind]) >= least]
    stack = {kind: [value / unit_bytes for value in timeline.kinds[kind]] for kind in large}
    small = [timeline.kinds[kind] for kind in order if kind not in stack]
    if small and any(map(any, small)):
        stack["other"] = [sum(column) / unit_bytes for column in zip(*small, strict=True)]
    return stack


def _time_axis(axes: "Axes", timeline: Timeline) -> None:
    """Seconds or milliseconds below the axes, where the points lie in time."""
    seconds = timeline.positions[-1] - timeline.positions[0]
    axes.set_xticks([])
    if timeline.axis == "events" or not seconds:
        axes.set_xlabel("one training step, in the order in which memory is taken and given back")
        return
    from matplotlib.ticker import MaxNLocator

    size, unit = (1.0, "s") if seconds >= 1 else (1e-3, "ms")
    ticks = [tick for tick in MaxNLocator(6).tick_values(0, seconds / size) if 0 <= tick <= seconds / size]
    axes.set_xticks([tick * size / seconds for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(f"time in the step ({unit})")


def _mark_peak(axes: "Axes", palette: Palette, x: float, timeline: Timeline, unit_bytes: float) -> None:
    unit = short_unit(timeline.peak_unit)
    text = f"peak {show_bytes(timeline.peak_bytes)}" + (f", at {unit}" if unit != "root" else "")
    left, place = x > 0.5, (x, timeline.peak_bytes / unit_bytes)
    axes.plot(*place, marker="o", markersize=5, color=palette["ink"], clip_on=False, zorder=4)
    axes.annotate(
        text,
        place,
        xytext=(-7 if left else 7, 2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        color=palette["ink"],
        bbox={"facecolor": palette["ground"], "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )


def _key(
    figure: "Figure",
    palette: Palette,
    stack: dict[str, list[float]],
    timeline: Timeline,
    lines: Sequence[_Line],
    corner: tuple[float, float],
) -> None:
    """Name the colours at the right, in the order of the areas, each with its size at the peak."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    unit_bytes, unit = byte_unit(max([timeline.peak_bytes, *(max(line.values) for line in lines)]))
    left, y = corner
    row = min(0.235, (y - 0.2) / (len(stack) + len(lines) + 1))

    def write(x: float, text: str, **style: Any) -> None:
        style = {"fontsize": min(8.5, 72 * row / 1.3), "color": palette["ink"], "va": "center", **style}
        figure.text(x / width, y / height, text, **style)

    def write_size(value: float) -> None:
        write(width - 0.18, f"{value:,.1f}" if value >= 0.05 else "–", ha="right")

    write(width - 0.18, f"{unit} at the peak", ha="right", color=palette["muted"])
    for kind in reversed(stack):
        y -= row
        swatch = Rectangle(((left + 0.05) / width, (y - 0.05) / height), 0.16 / width, 0.1 / height, linewidth=0)
        swatch.set_color(palette[kind])
        figure.add_artist(swatch)
        write(left + 0.29, kind)
        write_size(stack[kind][timeline.peak])
    for line in lines:
        y -= row
        xs = [(left + 0.02) / width, (left + 0.22) / width]
        figure.add_artist(Line2D(xs, [y / height] * 2, color=palette[line.role], linewidth=1.1, linestyle=line.style))
        write(left + 0.29, line.name)
        write_size(max(line.values) / unit_bytes)
