"""Picture of the memory of a training step under several ways to wrap a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.timeline import Timeline
from hf_fsdp_tools.plots.figure import Palette, Size, ThemeName, name_lines, new_figure, panel, text_inches
from hf_fsdp_tools.plots.step_axes import byte_unit, columns, draw_limit, fill_below, laid_over, name_phases, scaled
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_OTHERS = ("third", "gathered parameters", "other")


def draw_comparison(
    timelines: Mapping[str, Timeline],
    *,
    model: str,
    limit_bytes: int | None = None,
    theme: ThemeName = "light",
    size: Size = (10.0, 4.6),
) -> "Figure":
    """The memory of one step under several ways to wrap a model, as lines over each other, phase by phase."""
    if not timelines:
        raise ConfigError("There is nothing to compare. Give at least one timeline by its name.")
    figure, palette, top = new_figure(_finding(timelines), model, size=size, theme=theme)
    right = 0.35 + max(text_inches(text, 9.5, "bold") for text in (*timelines, "1,234.5 GB"))
    axes = panel(figure, 0.72, 0.42, size[0] - 0.72 - right, top - 0.42 - 0.24, palette)
    reference = list(timelines.values())[-1]
    highest = max(line.peak_bytes for line in timelines.values())
    colors = _colors(timelines, palette)
    draw_limit(axes, palette, highest, limit_bytes, right=False)
    for name, line in sorted(timelines.items(), key=lambda item: -item[1].peak_bytes):
        x = scaled(laid_over(line, reference, by_unit=False), reference.positions)
        y = [value / byte_unit(highest)[0] for value in line.allocated]
        fill_below(axes, x, y, palette["ground"], linewidth=0)
        fill_below(axes, x, y, colors[name], alpha=0.2, linewidth=0)
        kept = columns(x, y)
        axes.plot([x[i] for i in kept], [y[i] for i in kept], color=colors[name], linewidth=1.2, drawstyle="steps-post")
        peak = (x[line.peak], y[line.peak])
        axes.plot(*peak, marker="o", markersize=5, color=colors[name], clip_on=False, zorder=4)
        axes.plot([peak[0], 1], [peak[1]] * 2, color=colors[name], linewidth=0.8, linestyle=":", zorder=3)
    axes.set_xticks([])
    axes.set_xlabel("one training step, phases drawn equally wide for all")
    name_phases(axes, palette, reference.phases, scaled(reference.positions), size)
    ends = [
        (f"{name}\n{show_bytes(line.peak_bytes)}", line.peak_bytes / byte_unit(highest)[0], colors[name])
        for name, line in timelines.items()
    ]
    name_lines(axes, ends, rows=2.5, points=9.5)
    return figure


def _finding(timelines: Mapping[str, Timeline]) -> str:
    peaks = sorted((line.peak_bytes, name) for name, line in timelines.items())
    least = f"{peaks[0][1]} wrapping" if peaks[0][1] in ("hybrid", "root-only") else peaks[0][1]
    said = f"{least} peaks at {show_bytes(peaks[0][0])}"
    said = ", ".join([said, *(f"{name} at {show_bytes(value)}" for value, name in peaks[1:])])
    return said[0].upper() + said[1:]


def _colors(names: Mapping[str, Any], palette: Palette) -> dict[str, str]:
    """Red for root-only, blue for hybrid, other colours for others."""
    others = iter(_OTHERS)
    return {name: palette[name if name in ("root-only", "hybrid") else next(others, "other")] for name in names}
