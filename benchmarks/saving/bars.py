"""The figures that were set for saving, and what the kept cells say about each."""

from collections.abc import Callable
from typing import Any

from benchmarks.measuring.bars import MIB, Bar, at_most, over, worst_rank
from benchmarks.measuring.rounds import LIMIT, OURS
from benchmarks.measuring.tables import Page

from .savers import BEGUN, PEERS
from .tables import table, title_of

__all__ = ["PAGE"]


def cached(cache: str) -> Callable[[dict[str, Any]], bool]:
    return lambda cell: bool(cell["cache"] == cache)


def above_one(figure: float, cell: dict[str, Any]) -> bool:
    return figure > 1


BARS = (
    Bar(
        figure="a new folder: ours ÷ limit, both synced",
        bar="≤ 1.2",
        cells=cached("cold"),
        reached=over(OURS, LIMIT),
        met=at_most(1.2),
    ),
    Bar(
        figure="over an earlier save: ours ÷ limit, both synced",
        bar="≤ 1.2",
        cells=cached("warm"),
        reached=over(OURS, LIMIT),
        met=at_most(1.2),
    ),
    Bar(
        figure=f"ours ÷ {BEGUN}",
        bar="≤ 1.2 (our own)",
        cells=lambda cell: True,
        reached=over(OURS, BEGUN),
        met=at_most(1.2),
    ),
    *(
        Bar(
            figure=f"{name} ÷ ours{', ' * (key == 'on_disk')}{'until on disk' * (key == 'on_disk')}",
            bar="> 1",
            cells=lambda cell: True,
            reached=over(name, OURS, key),
            met=above_one,
        )
        for name in PEERS
        for key in ("seconds", "on_disk")
    ),
    Bar(
        figure="host memory above the model, MiB",
        bar="≤ 64",
        cells=lambda cell: bool(cell["device"] == "cpu"),
        reached=worst_rank("above", MIB),
        met=at_most(64),
        digits=0,
    ),
    Bar(
        figure="HSDP: bytes written by a rank ÷ an even part",
        bar="≤ 1.05 (our own)",
        cells=lambda cell: cell["replicas"] > 1,
        reached=worst_rank("written", "even"),
        met=at_most(1.05),
    ),
)


def short(cell: dict[str, Any]) -> str:
    """A cell's name within a line."""
    parts = [f"{cell['model']} {cell['bytes'] / 1e9:.1f} GB", *(["from fp32"] if cell["dtype"] == "fp32" else [])]
    parts += ["new" if cell["cache"] == "cold" else "over"]
    parts.append(f"{cell['ranks']} ranks" if cell["ranks"] > 1 else "1 rank")
    parts += [f"HSDP {cell['replicas']}×{cell['ranks'] // cell['replicas']}"] if cell["replicas"] > 1 else []
    parts += ["GPU"] if cell["device"] == "cuda" else []
    return " ".join(parts)


PAGE = Page(
    title="Saving from FSDP2 shards",
    script="benchmarks/save.py",
    title_of=title_of,
    short=short,
    table=table,
    bars=BARS,
)
