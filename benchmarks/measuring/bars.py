"""Figures that were set, and what kept cells say about each."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.rounds import OURS, ratios

__all__ = ["MIB", "Bar", "Record", "at_least", "at_most", "on", "over", "verdicts", "worst_rank"]

Record = dict[str, Any]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure that was set."""

    figure: str
    """Its name."""

    bar: str
    """In words."""

    cells: Callable[[dict[str, Any]], bool]
    """Which cells it is about."""

    reached: Callable[[dict[str, Any]], float | None]
    """The figure of a cell's rows; None where they do not have it."""

    met: Callable[[float, dict[str, Any]], bool]
    """Whether that figure of that cell is good enough."""

    digits: int = 2
    """After the point."""


def over(name: str, base: str, key: str = "seconds") -> Callable[[dict[str, Any]], float | None]:
    """Median, over rounds, of one contestant's time divided by another's."""
    return lambda rows: statistics.median(pairs) if (pairs := ratios(rows, name, base, key)) else None


def worst_rank(key: str, unit: str | float) -> Callable[[dict[str, Any]], float | None]:
    """The largest figure of ours over all ranks, in units of a number or of another figure of that rank."""

    def reached(rows: dict[str, Any]) -> float | None:
        ranks = rows.get(OURS, {}).get("ranks", [])
        return max((r[key] / (r[unit] if isinstance(unit, str) else unit) for r in ranks), default=None)

    return reached


def at_most(limit: float) -> Callable[[float, dict[str, Any]], bool]:
    return lambda figure, cell: figure <= limit


def at_least(limit: float) -> Callable[[float, dict[str, Any]], bool]:
    return lambda figure, cell: figure >= limit


def on(*cells: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    """Cells of which all is true."""
    return lambda cell: all(one(cell) for one in cells)


def verdicts(
    bars: Iterable[Bar],
    records: Iterable[Record],
    title_of: Callable[[dict[str, Any]], str],
    short: Callable[[dict[str, Any]], str],
) -> list[str]:
    """A table: for each bar what its cells reached, and whether that is enough. Cells that fall short are bold.

    Args:
        bars: in their order.
        records: of a cell that was measured twice, the last counts.
        title_of: the whole name of a cell, by which it is known.
        short: its name within a line.
    """
    cells = list({title_of(record["cell"]): record for record in records}.values())
    lines = ["| Figure | Bar | Reached, medians over rounds | Verdict |", "|---|---|---|---|"]
    for bar in bars:
        found = [
            (short(record["cell"]), figure, bar.met(figure, record["cell"]))
            for record in cells
            if bar.cells(record["cell"]) and (figure := bar.reached(record["rows"])) is not None
        ]
        lines.append(
            f"| {bar.figure} | {bar.bar} | {shown(found, bar.digits)} | {verdict([met for *_, met in found])} |"
        )
    return ["## Against the figures that were set", "", *lines]


def shown(found: Sequence[tuple[str, float, bool]], digits: int) -> str:
    """Every cell's figure; of many that are good enough their range alone."""
    good = [figure for _, figure, met in found if met]
    short_of = [f"**{name} {figure:.{digits}f}**" for name, figure, met in found if not met]
    if len(good) <= 4:
        return "; ".join([f"{name} {figure:.{digits}f}" for name, figure, met in found if met] + short_of)
    return "; ".join([f"{min(good):.{digits}f} to {max(good):.{digits}f} in {len(good)} cells", *short_of])


def verdict(met: Sequence[bool]) -> str:
    if not met:
        return "not measured"
    return "**met**" if all(met) else f"met in {sum(met)} of {len(met)} cells" if any(met) else "**not met**"
