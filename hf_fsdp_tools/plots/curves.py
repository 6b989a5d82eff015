"""Pictures of the losses of runs, and of throughput per GPU over the number of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.plots.figure import COLORS, LINE_ROLES, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def draw_losses(runs: Mapping[str, Sequence[tuple[int, float]]], *, title: str | None = None, setting: str) -> "Figure":
    """The loss of each run over its steps."""
    if not runs or not all(runs.values()):
        raise ConfigError("There is a run without steps, or no run at all. Give (step, loss) of each logged step.")
    if title is None:
        name, points = next(iter(runs.items()))
        (first, before), (last, after) = points[0], points[-1]
        title = f"Loss of {name}: {before:.3g} at step {first:,}, {after:.3g} at {last:,}"
    figure = new_figure(title, 4.2)
    axes = figure.add_subplot(title=setting, xlabel="optimizer step", ylabel="loss")
    for (name, points), role in zip(runs.items(), LINE_ROLES, strict=False):
        axes.plot(*zip(*points, strict=True), color=COLORS[role], label=name)
    axes.legend()
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
def draw_scaling(curves: Sequence[ScalingCurve], *, setting: str, quantity: str = "TFLOP/s per GPU") -> "Figure":
    """Throughput per GPU over the number of GPUs."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        raise ConfigError("No setting fits at any number of GPUs, so there is no curve to draw. Allow more GPUs.")
    figure = new_figure(_finding(curves, quantity), 4.8)
    axes = figure.add_subplot(xscale="log", xlabel="GPUs (circles: published)", ylabel=quantity)
    axes.set_title(setting, wrap=True)
    for curve, role in zip(curves, chain(LINE_ROLES, repeat(LINE_ROLES[-1])), strict=False):
        axes.plot(*zip(*curve.points, strict=True), "o-", color=COLORS[role], markersize=4.5, label=curve.name)
        if curve.published:
            axes.plot(*zip(*curve.published, strict=True), "o", color=COLORS[role], markersize=10, fillstyle="none")
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
