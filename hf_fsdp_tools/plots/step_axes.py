"""What pictures of the memory of a step share: its axes, its phases, and two steps on one axis."""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.foresight.timeline import Timeline
from hf_fsdp_tools.plots.figure import Palette, Size, text_inches
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_REACH = 1.8
"""A limit so many times above the memory is told, not drawn: the memory would be a strip at the foot."""

_COLUMNS = 1500
"""Places along a picture that can be told apart."""


def byte_unit(num_bytes: int) -> tuple[float, str]:
    """The unit in which a picture counts, and its bytes: GB, MB or kB."""
    return next((unit for unit in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= unit[0]), (1e3, "kB"))


def scaled(positions: Sequence[float], reference: Sequence[float] | None = None) -> list[float]:
    """Positions as parts of a step, from 0 to 1."""
    ends = positions if reference is None else reference
    first, last = ends[0], ends[-1]
    return [(position - first) / ((last - first) or 1.0) for position in positions]


def columns(x: Sequence[float], values: Sequence[float]) -> list[int]:
    """Indices of the points to draw: of those in one column of pixels the first, the highest, the lowest, the last."""
    kept: list[int] = []
    for _, group in groupby(range(len(x)), key=lambda i: int(x[i] * _COLUMNS)):
        column = list(group)
        at = {column[0], max(column, key=values.__getitem__), min(column, key=values.__getitem__), column[-1]}
        kept += sorted(at)
    return kept


def fill_below(axes: "Axes", x: Sequence[float], y: Sequence[float], color: str, **style: Any) -> None:
    """Fill what lies below a line of steps: each value holds until the next point. What is there already is covered."""
    kept = columns(x, y)
    corners = [(x[kept[0]], 0.0)]
    for i in kept:
        corners += [(x[i], corners[-1][1]), (x[i], y[i])]
    corners = [corner for corner, _ in groupby([*corners, (corners[-1][0], 0.0)])]
    axes.fill(*zip(*corners, strict=True), facecolor=color, **style)


def laid_over(timeline: Timeline, reference: Timeline, *, by_unit: bool) -> list[float]:
    """Positions of a timeline on the axis of another: equal phases begin at equal places."""
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
    keys: Iterable[Hashable] = zip(timeline.phases, timeline.units, strict=True) if by_unit else timeline.phases
    return [(key, next(iter(group))[0]) for key, group in groupby(enumerate(keys), key=lambda item: item[1])]


def _between(place: float, places: Sequence[float], anchors: Mapping[float, float]) -> float:
    i = bisect_left(places, place)
    if places[i] == place:
        return anchors[place]
    low, high = places[i - 1], places[i]
    return anchors[low] + (anchors[high] - anchors[low]) * (place - low) / (high - low)


def draw_limit(axes: "Axes", palette: Palette, highest: int, limit_bytes: int | None, *, right: bool) -> None:
    """Set the vertical axis, in bytes of `byte_unit(highest)`, and draw the device's limit, or tell it where it is
    far.
    """
    size, unit = byte_unit(highest)
    near = limit_bytes is not None and limit_bytes <= _REACH * highest
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(highest, limit_bytes if near and limit_bytes else 0) * 1.14 / size)
    axes.set_ylabel(f"memory of one rank ({unit})")
    if limit_bytes is None:
        return
    if near:
        axes.axhline(limit_bytes / size, color=palette["exposed"], linewidth=1.2, linestyle=(0, (6, 3)))
    axes.annotate(
        f"{'' if near else '↑ '}the device has {show_bytes(limit_bytes)}",
        (0.995 if right else 0.005, limit_bytes / size if near else axes.get_ylim()[1]),
        xytext=(0, 3 if near else -2),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom" if near else "top",
        fontsize=8,
        color=palette["exposed"],
        bbox={"facecolor": palette["ground"], "edgecolor": "none", "alpha": 0.9, "pad": 0.5},
    )


def name_phases(axes: "Axes", palette: Palette, phases: Sequence[str], x: Sequence[float], size: Size) -> None:
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
