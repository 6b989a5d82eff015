"""Certificates: what agrees with one process, of each model type of the installed transformers; one table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedConfig

from tests.census import kept, plans
from tests.census.defaults import CONFIG_MAPPING, build_config, classes_by_default
from tests.census.rows import Census, Row, is_causal, markdown, written_rows
from tests.census.trained import census_on, takes_part


def is_mixture(model_type: str) -> bool:
    """Whether the default configuration of a type, or a part of it, has a number of experts."""
    if not (classes_by_default(model_type) and is_causal(model_type)):
        return False
    parts = [build_config(model_type)]
    for part in parts:
        parts += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]
    return any("expert" in name for part in parts for name, value in vars(part).items() if value)


CENSUSES: dict[str, Census] = {
    "plan": plans.CENSUS,
    "fsdp": replace(census_on(""), takes_part=lambda name: takes_part(name, "") and not is_causal(name)),
    "fsdp_packed": census_on("shard2"),
    "tp2": census_on("tp2"),
    "ep2": replace(census_on("ep2"), takes_part=lambda name: takes_part(name, "ep2") and is_mixture(name)),
    "cp2": census_on("cp2"),
    "lora": replace(census_on("", has_adapter=True), takes_part=is_causal),
    "resumed": kept.RESUMED,
    "routers": replace(census_on("", recomputes=True), takes_part=is_mixture),
    "live_weights": replace(kept.STREAMED, takes_part=is_causal),
}
"""By the name of the file with its rows. Models of words train with packed rows, too; others on rows alone."""

COLUMNS = (
    "plan", "load", "FSDP", "TP 2", "EP 2", "CP 2", "packed rows", "LoRA", "resumed on 2 ranks",
    "recomputed routers", "live weights",
)  # fmt: skip


_REOPENED = "transformers reopens what it wrote itself with other weights"
_UNSET = "oneDNN leaves a part of a convolution's gradient unset (benchmarks/reports/torch_conv_padding.py)"
_JOINED = "the numbers agree: FSDP2 gathers branches that are joined at the same time, as their gradients come"
EXPLAINED = {
    "chinese_clip": _REOPENED,
    "shieldgemma2": _REOPENED,
    "d_fine": _JOINED,
    "deimv2": _JOINED,
    "rt_detr_v2": _JOINED,
    "squeezebert": "its code calls layer.forward, past all hooks",
    "rwkv": "its code writes to a state that is an input of the next block, which FSDP2's own functions hand on",
    "mra": "its code makes fp32 of bf16 and multiplies both; autocast, which would cast, is off inside of units",
    "xlnet": "its code multiplies fp32 by weights in bf16, in one process too",
    "fnet": "CPUs have no Fourier transform in bf16",
    "grounding-dino": _UNSET,
    "mm-grounding-dino": _UNSET,
    "fast_vlm": "batch norms keep statistics of each rank's own rows, as in all data parallelism",
}
"""Why types differ, found by hand with transformers 5.23 and 5.24."""


def certify(folder: Path, only: list[str], jobs: int) -> int:
    """Run what has no row of today's code, census by census; write the table; return the exit status."""
    folder.mkdir(exist_ok=True)
    status = [census.write(folder / f"{name}.jsonl", only, jobs) for name, census in CENSUSES.items()]
    rows = {name: written_rows(folder / f"{name}.jsonl") for name in CENSUSES}
    (folder / "certificates.md").write_text(table(rows), encoding="utf-8")
    return max(status)


def cells_of(model_type: str, rows: dict[str, dict[str, Row]]) -> list[tuple[str, str]]:
    """(mark, why) of each column: ✓, refused, differs (in bf16 alone), or – where nothing was compared."""
    own = {name: of_types.get(model_type, {}) for name, of_types in rows.items()}
    trained = own["fsdp_packed"] or own["fsdp"]
    found_in_files = {"ok": "agrees", "differs": "failed"}.get(trained.get("fp32_load", ""), trained.get("verdict"))
    loaded = trained | {"verdict": found_in_files}
    has_packed = "packed" in trained.get("kinds", "")
    found = (own["plan"], loaded, trained, own["tp2"], own["ep2"], own["cp2"], trained if has_packed else {})
    found += (own["lora"], own["resumed"], own["routers"], own["live_weights"])
    return [(mark_of(row), row.get("why", "")) for row in found]


def mark_of(row: Row) -> str:
    """What a cell says."""
    if row.get("verdict") == "failed" and all(fault.startswith("bf16_") for fault in row["why"].split("; ")):
        return "in bf16"
    return {"agrees": "✓", "refused": "refused", "failed": "differs"}.get(row.get("verdict", ""), "–")


def table(rows: dict[str, dict[str, Row]]) -> str:
    """Totals, a line for each type, and why something is refused or differs."""
    types = sorted({name for of_types in rows.values() for name in of_types} & set(CONFIG_MAPPING))
    cells = {name: cells_of(name, rows) for name in types}
    counts = [Counter(cells[name][i][0] for name in types) for i in range(len(COLUMNS))]
    totals = [(mark, *(str(count[mark]) for count in counts)) for mark in ("✓", "refused", "differs", "in bf16", "–")]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for name in types:
        for column, (mark, why) in zip(COLUMNS, cells[name], strict=True):
            if mark not in ("✓", "–"):
                explained = f"{EXPLAINED[name]}: {why}" if mark != "refused" and name in EXPLAINED else why
                reasons.setdefault((name, mark, explained), []).append(column)
    seconds = sum(row["seconds"] for of_types in rows.values() for row in of_types.values())
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "accelerate"))
    parts: Iterable[tuple[tuple[str, ...], Iterable[tuple[str, ...]]]] = (
        (("", *COLUMNS), totals),
        (("type", *COLUMNS), ((name, *(mark for mark, _ in cells[name])) for name in types)),
        (("type", "", "columns", "why"), ((n, mark, ", ".join(c), why) for (n, mark, why), c in reasons.items())),
    )
    about = (
        "What a small model of each type computes on 2 CPU ranks, compared with one process: "
        f"`python -m tests.census all FOLDER`.\nMade with {versions}, in {seconds / 3600:.1f} hours of jobs. –: it has "
        "no such part, or no small model of it was made. in bf16: it differs there alone, and agrees in fp32."
    )
    return "\n\n".join(["# Certificates", about, *("\n".join(markdown(*part)) for part in parts)]) + "\n"
