"""The figures that were set for loading, and what the kept cells say about each."""

from collections.abc import Callable
from typing import Any

from benchmarks.measuring.bars import MIB, Bar, at_least, at_most, on, over, worst_rank
from benchmarks.measuring.rounds import LIMIT, OURS
from benchmarks.measuring.tables import Page

from .loaders import LAZY, PLAIN, REPLAYED
from .tables import table, title_of

__all__ = ["PAGE"]


def local(**wanted: Any) -> Callable[[dict[str, Any]], bool]:
    """Cells on a plain disk, every rank there, on the CPU unless said."""
    return lambda cell: all(cell[k] == v for k, v in ({"mode": "side by side", "device": "cpu"} | wanted).items())


def is_moe(cell: dict[str, Any]) -> bool:
    return bool(cell["model"] == "moe")


def is_slow(cell: dict[str, Any]) -> bool:
    return bool(cell["mode"] == "slow storage")


EFFICIENT, EVERY = "accelerate FSDP2, RAM-efficient", "accelerate FSDP2, every rank loads all"
BROADCAST, DCP = "torch broadcast_from_rank0", "torch DCP HuggingFaceStorageReader"
READ_ONCE = "transformers native, then read once"

BARS = (
    Bar(
        figure="data bytes read by a rank ÷ its share",
        bar="≤ 1.01",
        cells=local(),
        reached=worst_rank("read", "share"),
        met=at_most(1.01),
        digits=3,
    ),
    Bar(
        figure="disk bytes ÷ share, rank 3 of 8 alone, cold",
        bar="≤ 1.2",
        cells=local(mode="alone"),
        reached=worst_rank("disk", "share"),
        met=at_most(1.2),
    ),
    Bar(
        figure="host memory above the shards, MiB",
        bar="≤ 64",
        cells=lambda cell: cell["mode"] != "alone",
        reached=worst_rank("above", MIB),
        met=at_most(64),
        digits=0,
    ),
    Bar(
        figure="warm: ours ÷ limit", bar="≤ 1.2", cells=local(cache="warm"), reached=over(OURS, LIMIT), met=at_most(1.2)
    ),
    Bar(
        figure="cold: ours ÷ limit",
        bar="≤ 1.15",
        cells=local(cache="cold"),
        reached=over(OURS, LIMIT),
        met=at_most(1.15),
    ),
    Bar(
        figure="warm, as stored: ours ÷ native, pages written",
        bar="≤ 0.8, MoE ≤ 0.6",
        cells=local(cache="warm", dtype="stored"),
        reached=over(OURS, LAZY),
        met=lambda figure, cell: figure <= (0.6 if is_moe(cell) else 0.8),
    ),
    Bar(
        figure="warm, into fp32: ours ÷ native, pages written",
        bar="≤ 0.6",
        cells=local(cache="warm", dtype="fp32"),
        reached=over(OURS, LAZY),
        met=at_most(0.6),
    ),
    Bar(
        figure="cold: ours ÷ native, pages written",
        bar="≤ 1",
        cells=local(cache="cold"),
        reached=over(OURS, LAZY),
        met=at_most(1),
    ),
    Bar(
        figure="cold: ours ÷ native, pages only read",
        bar="≤ 1",
        cells=local(cache="cold"),
        reached=over(OURS, READ_ONCE),
        met=at_most(1),
    ),
    Bar(
        figure="Accelerate, RAM-efficient ÷ ours",
        bar="≥ 4 at 2 ranks, ≥ 8 at 4",
        cells=on(local(), lambda cell: cell["ranks"] in (2, 4)),
        reached=over(EFFICIENT, OURS),
        met=lambda figure, cell: figure >= 2 * cell["ranks"],
    ),
    Bar(
        figure="Accelerate, every rank loads all ÷ ours",
        bar="> 1",
        cells=local(),
        reached=over(EVERY, OURS),
        met=at_least(1),
    ),
    Bar(figure="torch broadcast ÷ ours", bar="> 1", cells=local(), reached=over(BROADCAST, OURS), met=at_least(1)),
    Bar(
        figure="torch DCP reader ÷ ours, where it does not fail",
        bar="> 1",
        cells=local(),
        reached=over(DCP, OURS),
        met=at_least(1),
    ),
    Bar(
        figure="slow storage, no limit for all together: mapped files, replayed ÷ ours",
        bar="≥ 3",
        cells=lambda cell: is_slow(cell) and not cell["shared_bytes_s"],
        reached=over(REPLAYED, OURS),
        met=at_least(3),
    ),
    Bar(
        figure="slow storage, shared: mapped files, replayed ÷ ours",
        bar="> 1 (our own)",
        cells=lambda cell: is_slow(cell) and cell["shared_bytes_s"] > 0,
        reached=over(REPLAYED, OURS),
        met=at_least(1),
    ),
    Bar(
        figure="to GPUs: limit (storage or pinned copy) ÷ ours",
        bar="≥ 0.8",
        cells=local(device="cuda"),
        reached=over(LIMIT, OURS),
        met=at_least(0.8),
    ),
    Bar(
        figure="to GPUs: transformers' from_pretrained(device_map) ÷ ours",
        bar="> 1 (our own)",
        cells=local(device="cuda"),
        reached=over(PLAIN, OURS),
        met=at_least(1),
    ),
)


def short(cell: dict[str, Any]) -> str:
    """A cell's name within a line."""
    parts = [
        f"{cell['model']} {cell['bytes'] / 1e9:.1f} GB",
        *(["fp32"] if cell["dtype"] == "fp32" else []),
        cell["cache"],
    ]
    parts.append("alone" if cell["mode"] == "alone" else f"{cell['ranks']} ranks")
    parts += [f"HSDP {cell['replicas']}×{cell['ranks'] // cell['replicas']}"] if cell["replicas"] > 1 else []
    parts += [cell["storage"].rsplit(", ", 1)[1]] if cell["storage"] else []
    parts += ["GPU"] if cell["device"] == "cuda" else []
    return " ".join(parts)


PAGE = Page(
    title="Loading into FSDP2 shards",
    script="benchmarks/load.py",
    title_of=title_of,
    short=short,
    table=table,
    bars=BARS,
)
