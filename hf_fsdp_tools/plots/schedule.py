"""Picture of a training step as FSDP runs it: communication above, computation below, unit by unit."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.throughput import show_seconds
from hf_fsdp_tools.foresight.timeline import Bar, Schedule
from hf_fsdp_tools.plots.figure import COLORS, INK, new_figure, short_unit, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ROWS = {"communication": (1.46, 0.5), "exposed": (1.13, 0.11), "compute": (0.76, 0.5)}  # Centre and height of each row

_ROLES = {
    "all-gather": "gather buffers",
    "reduce-scatter": "third",
    "all-reduce": "whole gradients",
    "exposed": "exposed",
    "forward": "parameters",
    "backward": "optimizer",
    "computed again": "optimizer",
    "loss, clip, optimizer": "temporaries",
    "copies to and from the host": "activations",
}
_COMPUTE = ("forward", "backward")

_CLOSE = 4  # Units in a picture from near
_LETTER = 0.018  # Part of a picture's width that a letter of a unit's name takes

_Window: TypeAlias = tuple[str, float, float]  # The name, start and end of a stretch of a step to draw


@styled
def draw_schedule(schedule: Schedule, *, model: str, measured: Schedule | None = None) -> "Figure":
    """Collectives and computation of one step, the whole of it and a few units of each pass from near.

    What is hidden behind computation stands above it; below the collectives, a red line marks where nothing computes.
    """
    from matplotlib.patches import Patch

    drawn = [schedule] if measured is None else [schedule, measured]
    if not all(one.seconds for one in drawn):
        raise ConfigError("The schedule is empty: nothing ran in its step. Record or simulate a whole training step.")
    rows: list[tuple[Schedule, list[_Window]]] = []
    for one in drawn:
        rows.append((one, [(f"{one.origin}, whole step", 0.0, one.seconds)]))
        rows += [(one, windows)] if (windows := _windows(one)) else []
    figure = new_figure(_finding(drawn), 1 + 1.6 * len(rows))
    for strip, (one, windows) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for axes, window in zip(strip.subplots(1, len(windows), squeeze=False)[0], windows, strict=True):
            _draw_window(axes, one, window)
    figure.axes[0].set_title(model)
    bars = [bar for one in drawn for bar in one.bars]
    used = {_role(bar) for bar in bars} | {"exposed"} | {"computed again" for bar in bars if bar.again}
    handles = [
        Patch(facecolor=COLORS[color], hatch="////" if role == "computed again" else None, label=role)
        for role, color in _ROLES.items()
        if role in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _finding(drawn: Sequence[Schedule]) -> str:
    return "\n".join(
        f"{one.origin.capitalize()}: {show_seconds(one.exposed_seconds)} of {show_seconds(one.communication_seconds)} "
        f"of communication exposed, {one.exposed_seconds / one.seconds:.1%} of a step of {show_seconds(one.seconds)}"
        for one in drawn
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
        label = f"{phase}, {short_unit(name)} to {short_unit(last)}"
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


def _role(bar: Bar) -> str:
    if bar.track == "communication":
        return bar.operation.replace("_", "-")
    if bar.track == "host":
        return "copies to and from the host"
    return bar.phase if bar.phase in _COMPUTE else "loss, clip, optimizer"


def _look(bar: Bar) -> tuple[str, bool]:
    return _role(bar), bar.again


def _draw_window(axes: "Axes", schedule: Schedule, window: _Window) -> None:
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
    for (role, again), group in groupby(sorted(inside, key=_look), key=_look):
        bars = list(group)
        centre, height = _ROWS["communication" if bars[0].track == "communication" else "compute"]
        axes.broken_barh(
            [(bar.start_s, bar.end_s - bar.start_s) for bar in bars],
            (centre - height / 2, height),
            facecolor=COLORS[_ROLES[role]],
            edgecolor="white" if is_near or again else "face",  # an edge of its own colour keeps a narrow bar visible
            linewidth=0.4,
            hatch="////" if again else None,
        )
        for bar in bars if is_near and not again else ():
            name, room = short_unit(bar.unit), (bar.end_s - bar.start_s) / length
            is_whole = begin <= bar.start_s and bar.end_s <= finish
            if is_whole and room > _LETTER * len(name):
                middle = (bar.start_s + bar.end_s) / 2
                axes.text(middle, centre, name, fontsize=7, ha="center", va="center", color="#101214")
    centre, height = _ROWS["exposed"]
    spans = [(start, end - start) for start, end in schedule.exposed]
    axes.broken_barh(spans, (centre - height / 2, height), color=COLORS["exposed"], linewidth=0.4)
    computed = [bar for bar in inside if bar.operation == "compute"]
    for phase, group in groupby(computed, key=lambda bar: bar.phase):
        bars = list(group)
        start, end = max(bars[0].start_s, begin), min(bars[-1].end_s, finish)
        if end - start > 0.1 * length:
            axes.text((start + end) / 2, 1.88, phase, fontsize=8, ha="center", va="top")
        if start > begin:
            axes.axvline(start, color=INK, linewidth=0.6, alpha=0.5)
