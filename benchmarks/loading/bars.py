"""The figures that were set for loading, and what the kept cells say about each."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .loaders import LAZY, LIMIT, OURS, PLAIN, REPLAYED
from .tables import ratios, title_of

__all__ = ["summary"]

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


def over(name: str, base: str) -> Callable[[dict[str, Any]], float | None]:
    """Median, over rounds, of one loader's time divided by another's."""
    return lambda rows: statistics.median(pairs) if (pairs := ratios(rows, name, base)) else None


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


def local(**wanted: Any) -> Callable[[dict[str, Any]], bool]:
    """Cells on a plain disk, every rank there, on the CPU unless said."""
    return lambda cell: all(cell[k] == v for k, v in ({"mode": "side by side", "device": "cpu"} | wanted).items())


def on(*cells: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda cell: all(one(cell) for one in cells)


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


def summary(records: Iterable[Record]) -> list[str]:
    """A table: for each bar what its cells reached, and whether that is enough. Cells that fall short are bold."""
    cells = list({title_of(record["cell"]): record for record in records}.values())
    lines = ["| Figure | Bar | Reached, medians over rounds | Verdict |", "|---|---|---|---|"]
    for bar in BARS:
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
