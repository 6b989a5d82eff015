"""Kept cells as Markdown: a table per cell."""

from typing import Any

from benchmarks.measuring.rounds import Row, median
from benchmarks.measuring.tables import beside_limit_and_ours, ranks_of, table_of

from .savers import SAVERS

__all__ = ["table", "title_of"]


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16"]
    parts += ["from fp32"] if cell["dtype"] == "fp32" else []
    parts += ["a new folder" if cell["cache"] == "cold" else "over an earlier save"]
    parts.append(ranks_of(cell))
    parts += ["from GPUs"] if cell["device"] == "cuda" else []
    return ", ".join(parts)


def table(rows: dict[str, Row]) -> list[str]:
    """One row per saver; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["saver", "seconds: median (min–max)", "÷ limit", "÷ ours", "synced by itself", "seconds until on disk"]
    columns += ["÷ limit", "÷ ours", "pause", "written MB by rank", "above the model MB by rank"]
    columns += ["GPU MB above; pinned", "result"]
    lines = [cells_of(name, row, rows) for name, row in rows.items()]
    return table_of(columns, lines)


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 10, row["failed"]]
    by_rank = {key: ", ".join(f"{r[key] / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
    on_gpu = any(r["pinned"] or r["above_device"] for r in row["ranks"])
    return [
        name,
        *beside_limit_and_ours(name, rows),
        SAVERS[name].syncs,
        *beside_limit_and_ours(name, rows, "on_disk"),
        median(row.get("pause", ())),
        by_rank["written"],
        by_rank["above"],
        f"{by_rank['above_device']}; {by_rank['pinned']}" if on_gpu else "",
        row["wrong"],
    ]
