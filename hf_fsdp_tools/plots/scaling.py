"""Picture of throughput per GPU over the number of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.plots.figure import LINE_ROLES, Size, ThemeName, name_lines, new_figure, panel, text_inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """Throughput of one model on one kind of GPU over the number of GPUs."""

    name: str
    """Written beside its end: "GPT-175B, A100-80GB"."""
    num_gpus: tuple[int, ...]
    """Numbers of GPUs, growing."""
    values: tuple[float | None, ...]
    """Per GPU at each number; None where the model does not fit."""
    published: tuple[tuple[int, float], ...] = ()
    """(number of GPUs, value) that others measured, drawn as open circles."""


def draw_scaling(
    curves: Sequence[ScalingCurve],
    *,
    setting: str,
    quantity: str = "TFLOP/s per GPU",
    theme: ThemeName = "light",
    size: Size = (10.0, 4.8),
) -> "Figure":
    """Throughput per GPU over the number of GPUs, each curve named at its end."""
    known = [curve for curve in curves if any(value is not None for value in curve.values)]
    if not known:
        raise ConfigError("No setting fits at any number of GPUs, so there is no curve to draw. Allow more GPUs.")
    figure, palette, top = new_figure(_finding(known, quantity), setting, size=size, theme=theme)
    right = 0.3 + max(text_inches(curve.name, 9.0, "bold") for curve in known)
    axes = panel(figure, 0.72, 0.5, size[0] - 0.72 - right, top - 0.5, palette)
    ends = []
    for curve, role in zip(known, chain(LINE_ROLES, repeat(LINE_ROLES[-1])), strict=False):
        points = [(n, v) for n, v in zip(curve.num_gpus, curve.values, strict=True) if v is not None]
        axes.plot(*zip(*points, strict=True), color=palette[role], linewidth=1.8, marker="o", markersize=4.5)
        if curve.published:
            axes.plot(
                *zip(*curve.published, strict=True),
                color=palette[role],
                linestyle="none",
                marker="o",
                markersize=10,
                markerfacecolor="none",
                markeredgewidth=1.4,
            )
        ends.append((*points[-1], curve.name, role))
    _axes(axes, known, quantity)
    places = name_lines(axes, [(name, value, palette[role]) for _, value, name, role in ends], distance=3)
    for (n, value, _, role), place in zip(ends, places, strict=True):
        axes.plot([n, axes.get_xlim()[1]], [value, place], color=palette[role], linewidth=0.6, clip_on=False)
    return figure


def _finding(curves: Sequence[ScalingCurve], quantity: str) -> str:
    """The throughput at the end of each curve, and what part it is of that at its beginning."""
    points = {c.name: [(n, v) for n, v in zip(c.num_gpus, c.values, strict=True) if v is not None] for c in curves}
    most = max(line[-1][0] for line in points.values())
    kept = [100 * line[-1][1] / line[0][1] for line in points.values() if len(line) > 1]
    if len(curves) > 2 and kept:
        low, high = f"{min(kept):.0f}", f"{max(kept):.0f}"
        share = low if low == high else f"{low} to {high}"
        finding = f"At {most:,} GPUs each keeps {share}\N{NO-BREAK SPACE}% of its throughput per GPU at the fewest"
        return finding + _told_published(curves)
    said: list[str] = []
    for name, line in points.items():
        (few, first), (many, last) = line[0], line[-1]
        share = f", {100 * last / first:.0f}\N{NO-BREAK SPACE}% of that at {few:,}" if many > few else ""
        what = "" if said else f"{quantity.partition(',')[0]} "
        said.append(f"{name}: {last:,.0f} {what}at {many:,} GPUs{share}")
    return "; ".join(said) + _told_published(curves)


def _told_published(curves: Sequence[ScalingCurve]) -> str:
    """How far the published points lie from the curves."""
    off = []
    for curve in curves:
        values = dict(zip(curve.num_gpus, curve.values, strict=True))
        off += [100 * (value / known - 1) for n, value in curve.published if (known := values.get(n))]
    if not off:
        return ""
    low, high = f"{min(off):+.0f}", f"{max(off):+.0f}"
    span = (low if low == high else f"{low} to {high}").replace(" ", "\N{NO-BREAK SPACE}")
    return f"; published figures differ by {span}\N{NO-BREAK SPACE}%"


def _axes(axes: "Axes", curves: Sequence[ScalingCurve], quantity: str) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    numbers = sorted({n for curve in curves for n in (*curve.num_gpus, *(n for n, _ in curve.published))})
    values = [v for curve in curves for v in (*curve.values, *(v for _, v in curve.published)) if v is not None]
    axes.set_xscale("log", base=2)
    axes.set_xlim(numbers[0] / 1.12, numbers[-1] * 1.12 if numbers[-1] > numbers[0] else numbers[0] * 1.2)
    axes.set_ylim(0, max(values) * 1.15)
    powers = [n for n in numbers if n & (n - 1) == 0] or numbers
    axes.set_xticks(powers, [f"{n:,}" for n in powers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs (logarithmic)" + ("; circles: published" if any(curve.published for curve in curves) else ""))
    axes.set_ylabel(quantity)
