"""Kept cells as Markdown: a table per cell."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring.rounds import LIMIT, OURS, Row, median, ratios

from .savers import SAVERS

__all__ = ["render", "table", "title_of"]


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16"]
    parts += ["from fp32"] if cell["dtype"] == "fp32" else []
    parts += ["a new folder" if cell["cache"] == "cold" else "over an earlier save"]
    parts.append(f"{cell['ranks']} ranks" if cell["ranks"] > 1 else "1 rank")
    if cell["replicas"] > 1:
        parts[-1] += f" (HSDP {cell['replicas']} × {cell['ranks'] // cell['replicas']})"
    parts += ["from GPUs"] if cell["device"] == "cuda" else []
    return ", ".join(parts)


def table(rows: dict[str, Row]) -> list[str]:
    """One row per saver; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["saver", "seconds: median (min–max)", "÷ limit", "÷ ours", "synced by itself", "seconds until on disk"]
    columns += ["÷ limit", "÷ ours", "pause", "written MB by rank", "above the model MB by rank"]
    columns += ["GPU MB above; pinned", "result"]
    lines = [cells_of(name, row, rows) for name, row in rows.items()]
    kept = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    shown = [[line[i] for i in kept] for line in [columns, ["---"] * len(columns), *lines]]
    return [f"| {' | '.join(line)} |" for line in shown]


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 10, row["failed"]]
    by_rank = {key: ", ".join(f"{r[key] / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
    on_gpu = any(r["pinned"] or r["above_device"] for r in row["ranks"])
    return [
        name,
        *times(name, rows, "seconds", SAVERS[name].syncs),
        *times(name, rows, "on_disk"),
        f"{statistics.median(row['pause']):.2f}" if "pause" in row else "",
        by_rank["written"],
        by_rank["above"],
        f"{by_rank['above_device']}; {by_rank['pinned']}" if on_gpu else "",
        row["wrong"],
    ]


def times(name: str, rows: dict[str, Row], key: str, *more: str) -> list[str]:
    took = rows[name][key]
    shown = f"{statistics.median(took):.2f} ({min(took):.2f}–{max(took):.2f})"
    return [shown, median(ratios(rows, name, LIMIT, key)), median(ratios(rows, name, OURS, key)), *more]


def render(records: Sequence[dict[str, Any]], *, summary: Sequence[str] = (), preface: str = "") -> str:
    """All cells as one Markdown page; of a cell that was measured twice, the last."""
    lines = ["# Saving from FSDP2 shards", "", "What each column means is said at the top of `benchmarks/save.py`."]
    lines += ["", *summary] if summary else []
    lines += ["", preface.strip()] if preface else []
    for where in dict.fromkeys(record["about"]["where"] for record in records):
        lines += ["", where]
    for record in {title_of(record["cell"]): record for record in records}.values():
        lines += ["", f"## {title_of(record['cell'])}", "", f"`{record['about']['command']}`", ""]
        lines += table(record["rows"])
    return "\n".join(lines) + "\n"
