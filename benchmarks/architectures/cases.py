"""Rows of the training census: each type in processes of its own, with a time limit, by a tiny checkpoint and a batch
with which the plain model trains."""

import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures.agree import examine_sharded
from benchmarks.architectures.defaults import CONFIG_MAPPING, build_config, class_names, classes_by_default, classes_of
from benchmarks.measuring import table_of
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.proof.batches import WORDS
from hf_fsdp_tools.proof.case import NotBuiltError, telling, tiny_case, with_kinds
from hf_fsdp_tools.proof.compare import PRECISIONS, plain_figures
from hf_fsdp_tools.proof.run import WORDS as ODD_WORDS
from hf_fsdp_tools.testing import run_ranks

WORLD = 2
TIMEOUT_S = 180.0
MOST_CLASSES = 3
Row = dict[str, Any]
PREFACE = """# Census of training

Every model type that transformers registers with a model class, at a small size, on {size} ranks (gloo, CPU), beside
the plain model in one process. Made with {versions} by

    python benchmarks/census.py {command}

`{output}` holds one row of each type. The default configuration is shrunk by rule (`hf_fsdp_tools/proof/shrink.py`),
weights are random, transformers writes the checkpoint, and `from_pretrained` of this package loads it.
`hf_fsdp_tools/proof/compare.py` says what is compared and with what. {mode} A type stands here with one class and the
fullest batch that its plain model takes; `inputs` of a row names it. Rows are kept between runs.{shared}
"""
MODE = "Both sides are in evaluation mode."
SHARED_MODE = "Losses are those of training mode without dropout."
SHARED = """

Degrees: {mesh}. Of ranks that share rows, each has a part of every sequence. Rows have 13 tokens, so that no number of
ranks divides them, and windows are 5 tokens long. Beside plain rows stand padded ones and packed ones (several rows in
one, with positions from 0 each) where the plain model trains on them. Types are those with a causal model or a model of
images and text. Outputs are compared without labels. What cannot share rows is refused by name before it is loaded."""
DEGREES = {
    "replicate": "dp_replicate_size",
    "shard": "dp_shard_size",
    "cp": "cp_size",
    "tp": "tp_size",
    "ep": "ep_size",
}


def dims_of(mesh: str) -> ParallelDims:
    """The degrees of a mesh such as shard2xcp2; those of plain FSDP where it is empty. In shard2xep2, each expert is
    sharded over 2 of 4 ranks, and all other weights over 4."""
    sizes = {DEGREES[name]: int(size) for name, size in re.findall(r"([a-z]+?)(\d+)(?:x|$)", mesh)}
    if "ep_size" in sizes:
        sizes["dp_shard_size"] = size_of(mesh) // math.prod(sizes.get(n, 1) for n in ("cp_size", "tp_size"))
    return ParallelDims(**sizes)


def size_of(mesh: str) -> int:
    """How many ranks a mesh takes: at least two."""
    return max(math.prod(map(int, re.findall(r"\d+", mesh))), WORLD)


def write_census(output: Path, only: list[str], jobs: int, kind: Any) -> int:
    """Write a row of each type to a file as it comes, and the summary beside it; return the exit status.

    `kind` has `takes_part`, `row_of` and `render`: `OnMesh`, or the module `packed` or `streamed`.
    """
    written = written_rows(output)
    types = only or [name for name in sorted(CONFIG_MAPPING) if name not in written and kind.takes_part(name)]
    with output.open("a") as file, ThreadPoolExecutor(jobs) as pool:  # each job takes two processes
        for count, future in enumerate(as_completed([pool.submit(kind.row_of, name) for name in types]), 1):
            row = future.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{count} of {len(types)}: {row['type']} {row['verdict']} {row['why']}", file=sys.stderr)
    rows = written_rows(output)
    output.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))  # the last row of each type
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    output.with_suffix(".md").write_text(kind.render(rows.values(), versions, output.name))
    return int(any(rows[name]["verdict"] == "failed" for name in types))


class OnMesh:
    """The census of plain checkpoints on a mesh."""

    def __init__(self, mesh: str) -> None:
        self.takes_part = partial(takes_part, mesh=mesh)
        self.row_of = partial(row_of, mesh=mesh)
        self.render = partial(render, mesh=mesh)


def takes_part(model_type: str, mesh: str) -> bool:
    """Whether a type has a row: one with a model class, on other meshes than the plain one for next tokens, and with a
    plan where layers or experts are divided."""
    causal = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")
    if not mesh:
        return bool(classes_by_default(model_type))
    if not any(class_names(mapping, model_type) for mapping in causal):
        return False
    config = CONFIG_MAPPING[model_type]
    configs = [config, *(config.sub_configs or {}).values()]
    plans = [f"base_model_{kind}_plan" for kind in ("tp", "ep") if kind in mesh.replace("replicate", "")]
    return all(any(getattr(each, plan, None) for each in configs) for plan in plans)


def written_rows(path: Path) -> dict[str, Row]:
    """The rows of a file by type, the last of each; none where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def row_of(model_type: str, mesh: str = "") -> Row:
    """The row of a type; a crash or a hang of its processes is in it as their error."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        row: Row = {"type": model_type, "verdict": "not built"}
        try:
            row |= run_ranks(examine_plain, 1, model_type, folder, tuple(PRECISIONS), mesh, timeout_s=TIMEOUT_S)[0]
            if row["verdict"] == "plain" and not row["why"]:
                row["verdict"] = "failed"
                row |= judged(run_ranks(examine_on_ranks, size_of(mesh), folder, timeout_s=TIMEOUT_S))
        except AssertionError as error:  # with the traceback of a rank
            row["why"] = str(error).strip().splitlines()[-1].replace(name, "")[:400]
            if "ConfigError" in row["why"]:
                row["verdict"] = "refused"
    return row | {"seconds": round(time.monotonic() - start, 1)}


def examine_plain(model_type: str, folder: Path, precisions: Iterable[str] = PRECISIONS, mesh: str = "") -> Row:
    """Facts of a case, which is left in the folder with what the plain model computes."""
    dims = dims_of(mesh)
    config = build_config(model_type)
    classes = classes_of(model_type, config)
    names = dict.fromkeys([*classes.get("main", [])[:MOST_CLASSES], *classes.get("base", [])])
    try:
        case, row = tiny_case(
            telling(config) if mesh else config,
            [getattr(transformers, name) for name in names],
            folder / "checkpoint",
            num_batches=size_of(mesh) // dims.ranks_per_row,
            words=ODD_WORDS if mesh else WORDS,
            is_training=bool(mesh),
            tp_size=dims.tp_size,
        )
    except NotBuiltError as error:
        return {"why": str(error)[:1500]}
    if mesh:
        case, _ = with_kinds(case)
        row["kinds"] = " ".join(case.batches)
    case = replace(case, dims=dims)
    plain = {}
    for precision in precisions:
        try:
            plain[precision] = plain_figures(case, precision)
        except Exception as error:
            row[f"{precision}_plain_fails"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    torch.save((case, plain), folder / "plain.pt")
    return {**row, "verdict": "plain", "why": "" if "fp32" in plain else "the plain model, reopened, fails"}


def examine_on_ranks(folder: Path) -> Row:
    """What this rank's shards of the case in a folder compute, beside the plain model."""
    case, plain = torch.load(folder / "plain.pt", weights_only=False)
    rows = {precision: examine_sharded(case, precision, plain[precision], plain["fp32"]) for precision in plain}
    return {f"{precision}_{key}": value for precision, row in rows.items() for key, value in row.items()}


def judged(ranks: list[Row]) -> Row:
    """One row of all ranks: the worst of each check, a verdict, and why."""
    row: Row = {}
    faults: list[str] = []
    for precision in PRECISIONS:
        for check in [key.partition("_")[2] for key in ranks[0] if key.startswith(precision)]:
            values = [rank[f"{precision}_{check}"] for rank in ranks]
            if isinstance(values[0], tuple):
                row[f"{precision}_{check}"] = max(value for value, _ in values)
                faults += [f"{precision} {check}: {what}" for _, what in values if what][:1]
            elif isinstance(values[0], str):
                row[f"{precision}_{check}"] = "differs" if any(values) else "ok"
                faults += [f"{precision} {check}: {what}" for what in values if what][:1]
            else:
                row[f"{precision}_{check}"] = max(values)
        if row.get(f"{precision}_gathered", 0) > row.get(f"{precision}_allowed", 0):
            faults.append(f"{precision}: {row[f'{precision}_gathered']} units gathered at a time")
    why = "; ".join(dict.fromkeys(faults))
    return row | {"verdict": "failed" if why else "agrees", "why": why}


def render(rows: Iterable[Row], versions: str, output: str, mesh: str) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    agrees = [row for row in rows if row["verdict"] == "agrees"]
    counts = [(verdict, str(count)) for verdict, count in Counter(row["verdict"] for row in rows).items()]
    largest = []
    kinds = ("outputs", "loss", "gradients")
    for check in (*kinds, *(f"{kind} {check}" for kind in ("padded", "packed") for check in kinds if mesh), "step"):
        worst = (max((row.get(f"{p}_{check}", 0.0) for row in agrees), default=0.0) for p in PRECISIONS)
        largest.append((check, *(f"{value:.1e}" for value in worst)))
    others = [(row["type"], row.get("class", ""), row["verdict"], row["why"]) for row in rows if row not in agrees]
    cells = [[cell[:200].replace("|", "\\|").replace("\n", " ") for cell in row] for row in others]
    command = f"--train --mesh {mesh}" if mesh else "--train"
    shared, mode, size = SHARED.format(mesh=mesh) if mesh else "", SHARED_MODE if mesh else MODE, size_of(mesh)
    preface = PREFACE.format(versions=versions, output=output, command=command, shared=shared, mode=mode, size=size)
    lines = [preface, *table_of(("", "types"), counts), ""]
    lines += table_of(("largest difference among those that agree", *PRECISIONS), largest)
    lines += ["", "## Do not agree, or take no part", "", *table_of(("type", "class", "", "why"), cells)]
    return "\n".join(lines) + "\n"
