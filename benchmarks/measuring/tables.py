"""Kept cells as Markdown: a page of them, and what their tables have in common."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.process import Figures
from benchmarks.measuring.rounds import LIMIT, OURS, Row, median, ratios


@dataclass(frozen=True, kw_only=True)
class Page:
    """How the cells of one benchmark are shown."""

    title: str
    script: str
    """At whose top stands what the columns mean."""

    title_of: Callable[[Figures], str]
    """What was measured in a cell, in words."""

    table: Callable[[dict[str, Row]], list[str]]
    """The rows of a cell."""

    def render(self, records: Sequence[dict[str, Any]], preface: str = "") -> str:
        """All cells; of a cell that was measured twice, the last."""
        lines = [f"# {self.title}", "", f"What each column means is said at the top of `{self.script}`."]
        lines += ["", preface.strip()] if preface else []
        for where in dict.fromkeys(record["about"]["where"] for record in records):
            lines += ["", where]
        for title, record in {self.title_of(record["cell"]): record for record in records}.items():
            lines += ["", f"## {title}", "", f"`{record['about']['command']}`", "", *self.table(record["rows"])]
        return "\n".join(lines) + "\n"


def table_of(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns that hold nothing."""
    kept = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    shown = [[line[i] for i in kept] for line in [columns, ["---"] * len(columns), *lines]]
    return [f"| {' | '.join(line)} |" for line in shown]


def beside_limit_and_ours(name: str, rows: dict[str, Row], key: str = "seconds") -> list[str]:
    """Three columns: a contestant's seconds, and medians over rounds of their ratios to the limit and to ours."""
    took = rows[name][key]
    shown = f"{statistics.median(took):.2f} ({min(took):.2f}–{max(took):.2f})"
    return [shown, median(ratios(rows, name, LIMIT, key)), median(ratios(rows, name, OURS, key))]


def ranks_of(cell: Figures) -> str:
    """The ranks of a cell, in words."""
    ranks = f"{cell['ranks']} ranks" if cell["ranks"] > 1 else "1 rank"
    hsdp = f" (HSDP {cell['replicas']} × {cell['ranks'] // cell['replicas']})" if cell["replicas"] > 1 else ""
    return ranks + hsdp
