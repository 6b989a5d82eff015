"""Picture of a training step as FSDP runs it: communication above, computation below, unit by unit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.streams import Bar, Schedule
from hf_fsdp_tools.plots.figure import Palette, ThemeName, new_figure, panel, readable_on, short_unit, text_inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ROWS = {"communication": (1.46, 0.5), "exposed": (1.13, 0.11), "compute": (0.76, 0.5), "free": (0.41, 0.0)}
"""Centre and height of each row."""

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

_PANEL, _GAP, _STRIP = 1.0, 0.5, 0.2  # inches: height of a panel, what is below it, and names of phases above it
_NAMES = 1.12  # inches for the names of the rows
_KEY_LINE = 0.18  # inches
_LEAST = 0.008  # inches: width of a bar that would be too narrow to see
_CLOSE = 4  # units in a picture from near


@dataclass(frozen=True)
class _Window:
    """A stretch of a step to draw."""

    name: str
    start: float
    end: float


def draw_schedule(
    schedule: Schedule,
    *,
    model: str,
    measured: Schedule | None = None,
    theme: ThemeName = "light",
    width: float = 10.0,
) -> "Figure":
    """Collectives and computation of one step, the whole of it and a few units of each pass from near.

    What is hidden behind computation stands above it; below the collectives, a red line marks where nothing computes.
    """
    drawn = [schedule] if measured is None else [schedule, measured]
    if not all(one.seconds for one in drawn):
        raise ConfigError("The schedule is empty: nothing ran in its step. Record or simulate a whole training step.")
    near = [_windows(one) for one in drawn]
    rows = sum(1 + bool(windows) for windows in near)
    key = _key_lines(_used(drawn), width)
    height = 0.87 + _KEY_LINE * len(key) + rows * (_PANEL + _GAP + _STRIP)
    figure, palette, top = new_figure(_finding(drawn), model, size=(width, height), theme=theme)
    for one, windows in zip(drawn, near, strict=True):
        whole = _Window(f"{one.origin}, whole step", 0.0, one.seconds)
        halves = (width - _NAMES - 0.25 - 0.3) / 2
        for places in (
            [(whole, _NAMES, width - _NAMES - 0.25)],
            [(w, _NAMES + i * (halves + 0.3), halves) for i, w in enumerate(windows)],
        ):
            if not places:
                continue
            top -= _PANEL + _STRIP
            for window, left, long in places:
                axes = panel(figure, left, top, long, _PANEL, palette)
                _draw_window(axes, palette, one, window, long, named=left == _NAMES)
            top -= _GAP
    _draw_key(figure, palette, key, (width, height))
    return figure


def _finding(drawn: Sequence[Schedule]) -> str:
    said = []
    for one in drawn:
        share = f"{100 * one.exposed_seconds / one.seconds:.1f}\N{NO-BREAK SPACE}%"
        who = "" if len(drawn) == 1 else f"{one.origin}: "
        said.append(
            f"{who}{_time(one.exposed_seconds)} of {_time(one.communication_seconds)} of communication are exposed, "
            f"{share} of a step of {_time(one.seconds)}"
        )
    text = "; ".join(said)
    return text[0].upper() + text[1:]


def _time(seconds: float) -> str:
    return f"{seconds:,.2f}\N{NO-BREAK SPACE}s" if seconds >= 1 else f"{1e3 * seconds:,.1f}\N{NO-BREAK SPACE}ms"


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
        windows.append(_Window(label, 0.0 if phase == "forward" else start, end))
    return windows


def _computed(schedule: Schedule, phase: str) -> list[tuple[str, float, float]]:
    """Each unit of the first pass of a phase with the start and the end of its computation, without small copies."""
    bars = [b for b in schedule.bars if b.track == "compute" and b.operation == "compute" and b.phase == phase]
    longest = max((bar.end_s - bar.start_s for bar in bars), default=0.0)
    found: dict[str, tuple[float, float]] = {}
    for bar in bars:
        if bar.unit and bar.end_s - bar.start_s >= longest / 10:
            found.setdefault(bar.unit, (bar.start_s, bar.end_s))
            if bar.start_s - found[bar.unit][1] < longest:
                found[bar.unit] = (found[bar.unit][0], bar.end_s)
    return [(unit, start, end) for unit, (start, end) in found.items()]


def _role(bar: Bar) -> str:
    if bar.track == "communication":
        return bar.operation.replace("_", "-")
    if bar.track == "host":
        return "copies to and from the host"
    return bar.phase if bar.phase in _COMPUTE else "loss, clip, optimizer"


def _draw_window(
    axes: "Axes", palette: Palette, schedule: Schedule, window: _Window, inches: float, *, named: bool
) -> None:
    """Draw one stretch of the step into its axes."""
    unit, name = (1.0, "s") if window.end - window.start >= 1 else (1e-3, "ms")
    axes.grid(False)
    axes.set_xlim(window.start / unit, window.end / unit)
    axes.set_ylim(0.3, 1.75)
    axes.set_yticks([])
    axes.set_xlabel(f"{window.name} ({name})", labelpad=1)
    inside = [bar for bar in schedule.bars if bar.end_s >= window.start and bar.start_s <= window.end]
    for (role, again), group in groupby(sorted(inside, key=_look), key=_look):
        bars = list(group)
        if role == "free":
            low = _ROWS["free"][0]
            axes.plot([b.start_s / unit for b in bars], [low] * len(bars), "v", markersize=3.2, color=palette["muted"])
            continue
        centre, height = _ROWS["communication" if bars[0].track == "communication" else "compute"]
        least = _LEAST * (window.end - window.start) / inches
        axes.broken_barh(
            [(b.start_s / unit, max(b.end_s - b.start_s, least) / unit) for b in bars],
            (centre - height / 2, height),
            facecolor=palette[_ROLES[role]],
            edgecolor=palette["ground"],
            linewidth=0.3 if max(b.end_s - b.start_s for b in bars) > 10 * least else 0.0,
            hatch="////" if again else None,
        )
        if not again:
            _name_bars(axes, palette, bars, centre, window, inches)
    centre, height = _ROWS["exposed"]
    least = _LEAST * (window.end - window.start) / inches
    spans = [(start / unit, max(end - start, least) / unit) for start, end in schedule.exposed]
    axes.broken_barh(spans, (centre - height / 2, height), facecolor=palette["exposed"], linewidth=0)
    if named:
        for row, (middle, _) in _ROWS.items():
            role = "exposed" if row == "exposed" else "muted"
            axes.annotate(
                row,
                (0, middle),
                xycoords=axes.get_yaxis_transform(),
                xytext=(-6, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
                color=palette[role],
                annotation_clip=False,
            )
    _name_phases(axes, palette, inside, window, inches, unit)


def _look(bar: Bar) -> tuple[str, bool]:
    return ("free", False) if bar.operation == "free" else (_role(bar), bar.again)


def _name_bars(
    axes: "Axes", palette: Palette, bars: Iterable[Bar], centre: float, window: _Window, inches: float
) -> None:
    """Write the units into the bars that are wide enough and whole."""
    unit = 1.0 if window.end - window.start >= 1 else 1e-3
    for bar in bars:
        name = short_unit(bar.unit)
        room = (bar.end_s - bar.start_s) / (window.end - window.start) * inches
        whole = window.start <= bar.start_s and bar.end_s <= window.end
        if whole and text_inches(name, 7.5) + 0.04 <= room:
            color = readable_on(palette[_ROLES[_role(bar)]])
            middle = (bar.start_s + bar.end_s) / 2 / unit
            axes.text(middle, centre, name, ha="center", va="center", fontsize=7.5, color=color)


def _name_phases(
    axes: "Axes", palette: Palette, bars: Sequence[Bar], window: _Window, inches: float, unit: float
) -> None:
    """Name the phases above the axes where their names have room."""
    computed = [bar for bar in bars if bar.track == "compute" and bar.operation == "compute"]
    runs = [(phase, list(group)) for phase, group in groupby(computed, key=lambda bar: bar.phase)]
    for phase, group in runs:
        start, end = max(group[0].start_s, window.start), min(group[-1].end_s, window.end)
        if text_inches(phase, 8.0) + 0.06 <= (end - start) / (window.end - window.start) * inches:
            middle = (start + end) / 2 / unit
            place = axes.get_xaxis_transform()
            axes.text(middle, 1.02, phase, transform=place, ha="center", fontsize=8, color=palette["muted"])
        if start > window.start:
            axes.axvline(start / unit, color=palette["muted"], linewidth=0.6, alpha=0.5)


def _used(drawn: Sequence[Schedule]) -> list[str]:
    bars = [bar for one in drawn for bar in one.bars]
    roles = {_role(bar) for bar in bars} | {"exposed"} | ({"computed again"} if any(b.again for b in bars) else set())
    return [role for role in _ROLES if role in roles]


def _key_lines(roles: Sequence[str], width: float) -> list[list[tuple[float, str, str]]]:
    """The names of the colours in as many lines as they need: place in inches, role, text."""
    lines: list[list[tuple[float, str, str]]] = [[]]
    x = 0.18
    for role in roles:
        text = "exposed: a collective runs, nothing computes" if role == "exposed" else role
        room = 0.2 + text_inches(text, 8.0) + 0.2
        if x + room > width and lines[-1]:
            lines.append([])
            x = 0.18
        lines[-1].append((x, role, text))
        x += room
    return lines


def _draw_key(
    figure: "Figure", palette: Palette, lines: Sequence[Sequence[tuple[float, str, str]]], size: tuple[float, float]
) -> None:
    """Name the colours at the foot."""
    from matplotlib.patches import Rectangle

    for i, line in enumerate(reversed(lines)):
        y = 0.12 + i * _KEY_LINE
        for x, role, text in line:
            swatch = Rectangle((x / size[0], (y - 0.05) / size[1]), 0.14 / size[0], 0.1 / size[1], linewidth=0)
            swatch.set(facecolor=palette[_ROLES[role]], edgecolor=palette["ground"])
            swatch.set_hatch("//////" if role == "computed again" else "")
            figure.add_artist(swatch)
            place = ((x + 0.2) / size[0], y / size[1])
            figure.text(*place, text, va="center", fontsize=8, color=palette["muted"])
