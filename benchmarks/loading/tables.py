"""Kept cells as Markdown: a table per cell."""

from typing import Any

from benchmarks.measuring.rounds import LIMIT, OURS, Row
from benchmarks.measuring.tables import beside_limit_and_ours, ranks_of, table_of

__all__ = ["table", "title_of"]


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16", cell["dtype"], f"{cell['cache']} cache"]
    parts.append("rank 3 of 8 alone" if cell["mode"] == "alone" else ranks_of(cell))
    parts += ["to GPUs"] if cell["device"] == "cuda" else []
    parts += [f"slow storage: {cell['storage']}"] if cell["storage"] else []
    return ", ".join(parts)


def table(rows: dict[str, Row]) -> list[str]:
    """One row per loader; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["loader", "seconds: median (min–max)", "÷ limit", "÷ ours", "read() MB by rank", "÷ share"]
    columns += ["disk MB by rank", "÷ share", "above the shards MB by rank (mapped files)"]
    columns += ["GPU MB above (stays reserved); pinned (stays in use)", "result"]
    lines = [cells_of(name, row, rows) for name, row in rows.items()]
    return table_of(columns, lines) + remarks(rows)


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 8, row["failed"]]
    by_rank = {key: ", ".join(f"{r.get(key, 0) / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
    read, disk = (max(r[key] / r["share"] for r in row["ranks"]) for key in ("read", "disk"))
    on_gpu = any(r.get("pinned") or r.get("above_device") for r in row["ranks"])
    return [
        name,
        *beside_limit_and_ours(name, rows),
        by_rank["read"],
        f"{read:.3f}",
        by_rank["disk"],
        f"{disk:.2f}",
        f"{by_rank['above']} ({by_rank['mapped']})",
        gpu_cell(by_rank) if on_gpu else "",
        row["wrong"],
    ]


def gpu_cell(by_rank: dict[str, str]) -> str:
    """Memory of and for the GPU, by rank."""
    above, reserved = by_rank["above_device"], by_rank["reserved_left"]
    return f"{above} ({reserved}); {by_rank['pinned']} ({by_rank['pinned_left']})"


def remarks(rows: dict[str, Row]) -> list[str]:
    """What does not fit into columns."""
    lines = []
    ours, limit = rows.get(OURS, {}), rows.get(LIMIT, {})
    if stages := ours.get("stages"):
        shown = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        lines.append(f"hf_fsdp_tools, rank 0, last run: {shown} s; the rest is building and sharding on meta.")
    if "copy_bytes_s" in limit:
        speeds = [
            f"{what} {limit[key] / 1e9:.1f} GB/s" for what, key in (("read", "read_bytes_s"), ("copy", "copy_bytes_s"))
        ]
        threads = f" on {limit['threads']} threads" if "threads" in limit else ""
        lines.append(f"Limit, each rank{threads}: {', '.join(speeds)}.")
    return [line for remark in lines for line in ("", remark)]
