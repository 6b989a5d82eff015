"""Rows of the training census: each type in processes of its own, with a time limit, by a tiny checkpoint and a batch
with which the plain model trains."""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, initialization

from benchmarks.architectures.agree import PRECISIONS, Case, examine_sharded, forward, loss_of, plain_figures
from benchmarks.architectures.batches import Batch, candidates, random_batch
from benchmarks.architectures.defaults import CONFIG_MAPPING, build_config, classes_by_default, classes_of
from benchmarks.architectures.shrink import LEVELS, shrink
from benchmarks.measuring import table_of
from tests._dist import run_ranks

WORLD = 2
TIMEOUT_S = 180.0
CHECKS = ("load", "outputs", "loss", "gradients", "step", "resharded", "save")
Row = dict[str, Any]
PREFACE = """# Census of training

Every model type that transformers registers with a model class, at a small size, on 2 ranks (gloo, CPU), beside the
plain model in one process. Made with {versions} by

    python benchmarks/census.py {command}

`{output}` holds one row of each type. The default configuration is shrunk by rule
(`benchmarks/architectures/shrink.py`), weights are random, transformers writes the checkpoint, and `from_pretrained` of
this package loads it. `benchmarks/architectures/agree.py` says what is compared and with what. Both sides are in
evaluation mode. A type stands here with one class and the fullest batch that its plain model takes; `inputs` of a row
names it. Rows are kept between runs.{shared}
"""
SHARED = """

The {cp_size} ranks share the rows of one batch (context parallelism, `cp_size={cp_size}`). TYPES are those with a
causal model or a model of images and text. Outputs are compared without labels. What cannot share rows is refused by
name before it is loaded; what failed stops with an error in the first step."""


def write_census(output: Path, only: list[str], jobs: int, cp_size: int = 1) -> int:
    """Write a row of each type to a file as it comes, and the summary beside it; return the exit status."""
    written = written_rows(output)
    types = only or [name for name in sorted(CONFIG_MAPPING) if name not in written and classes_by_default(name)]
    with output.open("a") as file, ThreadPoolExecutor(jobs) as pool:  # each job takes two processes
        for count, future in enumerate(as_completed([pool.submit(row_of, name, cp_size) for name in types]), 1):
            row = future.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{count} of {len(types)}: {row['type']} {row['verdict']} {row['why']}", file=sys.stderr)
    rows = written_rows(output)
    output.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))  # the last row of each type
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    output.with_suffix(".md").write_text(render(rows.values(), versions, output.name, cp_size))
    return int(any(rows[name]["verdict"] == "failed" for name in types))


def written_rows(path: Path) -> dict[str, Row]:
    """The rows of a file by type, the last of each; none where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def row_of(model_type: str, cp_size: int = 1) -> Row:
    """The row of a type; a crash or a hang of its processes is in it as their error."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        row: Row = {"type": model_type, "verdict": "not built"}
        try:
            row |= run_ranks(examine_plain, 1, model_type, folder, tuple(PRECISIONS), cp_size, timeout_s=TIMEOUT_S)[0]
            if row["verdict"] == "plain" and not row["why"]:
                row["verdict"] = "failed"
                row |= judged(run_ranks(examine_on_ranks, WORLD, folder, timeout_s=TIMEOUT_S))
        except AssertionError as error:  # with the traceback of a rank
            row["why"] = str(error).strip().splitlines()[-1].replace(name, "")[:400]
            if "cannot be trained with cp_size" in row["why"]:
                row["verdict"] = "refused"
    return row | {"seconds": round(time.monotonic() - start, 1)}


def examine_plain(model_type: str, folder: Path, precisions: Iterable[str] = PRECISIONS, cp_size: int = 1) -> Row:
    """Facts of a case, which is left in the folder with what the plain model computes."""
    try:
        case, row = make_case(model_type, folder / "checkpoint")
    except NotBuiltError as error:
        return {"why": str(error)[:1500]}
    case = replace(case, cp_size=cp_size)
    plain = {}
    for precision in precisions:
        try:
            plain[precision] = plain_figures(case, precision, WORLD)
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
        for check in (*CHECKS, "units", "gathered", "allowed"):
            values = [rank[f"{precision}_{check}"] for rank in ranks if f"{precision}_{check}" in rank]
            if not values:
                continue
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


def render(rows: Iterable[Row], versions: str, output: str, cp_size: int) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    agrees = [row for row in rows if row["verdict"] == "agrees"]
    counts = [(verdict, str(count)) for verdict, count in Counter(row["verdict"] for row in rows).items()]
    largest = []
    for check in ("outputs", "loss", "gradients", "step"):
        worst = (max((row.get(f"{p}_{check}", 0.0) for row in agrees), default=0.0) for p in PRECISIONS)
        largest.append((check, *(f"{value:.1e}" for value in worst)))
    others = [(row["type"], row.get("class", ""), row["verdict"], row["why"]) for row in rows if row not in agrees]
    cells = [[cell[:200].replace("|", "\\|").replace("\n", " ") for cell in row] for row in others]
    shared = "" if cp_size == 1 else SHARED.format(cp_size=cp_size)
    command = f"--train --cp-size {cp_size} --only TYPES" if cp_size > 1 else "--train"
    preface = PREFACE.format(versions=versions, output=output, command=command, shared=shared)
    lines = [preface, *table_of(("", "types"), counts), ""]
    lines += table_of(("largest difference among those that agree", *PRECISIONS), largest)
    lines += ["", "## Do not agree, or take no part", "", *table_of(("type", "class", "", "why"), cells)]
    return "\n".join(lines) + "\n"


# ---- cases ----

MOST_PARAMETERS = 40_000_000
MOST_CLASSES = 3


class NotBuiltError(Exception):
    """No class of the type was built and run at a small size; says what each said."""


def make_case(model_type: str, folder: Path) -> tuple[Case, dict[str, Any]]:
    """The case of a type, its checkpoint written by transformers to `folder`; and the row's facts of it."""
    said: list[str] = []
    config = build_config(model_type)
    classes = classes_of(model_type, config)
    for name in dict.fromkeys([*classes.get("main", [])[:MOST_CLASSES], *classes.get("base", [])]):
        for level in LEVELS:
            try:
                model = build(getattr(transformers, name), shrink(config, level))
                batches = list(candidates(model))
            except Exception as error:
                said.append(f"{name} {level}: {_said(error)}")
                continue
            for batch in batches:
                if problem := trains(model, batch):
                    said.append(f"{name} {level} ({' '.join(batch)}): {problem}")
                    continue
                model.save_pretrained(folder)
                count = sum(parameter.numel() for parameter in model.parameters())
                facts = {"class": name, "size": level, "parameters": count, "inputs": " ".join(batch)}
                frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
                return Case(model_class=type(model), folder=folder, batch=batch, frozen=frozen), facts
    raise NotBuiltError("; ".join(dict.fromkeys(said)))


def build(model_class: Any, config: Any) -> PreTrainedModel:
    """A plain model in fp32 on the CPU in evaluation mode, random throughout."""
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        size = sum(p.numel() for p in model_class._from_config(config, dtype=torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what is initialised with zeros or ones would hide what is read or averaged wrongly
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def trains(model: nn.Module, batch: Batch) -> str:
    """Why the plain model does not train on a batch; empty where it does."""
    model.zero_grad()
    try:
        loss = loss_of(forward(model, random_batch(batch, 1000)))
        if not loss.isfinite():
            return f"loss {float(loss)}"
        loss.backward()
    except Exception as error:
        return _said(error)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "gradients are not finite"
    return "" if any(bool(gradient.any()) for gradient in gradients) else "no gradients"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
