"""The proof of a layout: what CPU ranks compute, compared with one process, as a value, a table and JSON."""

import json
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.mesh import ParallelDims, join_on_cpu
from hf_fsdp_tools.errors import FSDPToolsError
from hf_fsdp_tools.proof.case import given_batches, telling, tiny_case, with_adapter, with_kinds
from hf_fsdp_tools.proof.compare import Found, examine, load_sharded, worst
from hf_fsdp_tools.proof.plain import PRECISIONS, plain_figures
from hf_fsdp_tools.proof.resume import resume
from hf_fsdp_tools.text import first_line, show_count, table

WORDS = 13
"""Tokens of a random row: no power of two divides them, so that ranks with the same rows have padding."""

_LIMIT_S = 60.0
"""How long a rank may wait for the others: tiny models take a second, and loading libraries a few. (assumed)"""

_CHECKS = {
    "load": "loaded weights",
    "base": "base model alone",
    "outputs": "outputs in evaluation",
    "loss": "loss",
    "gradients": "gradients",
    "accumulated": "gradients of two micro-batches",
    "norm": "norm of all gradients",
    "step": "one step of AdamW",
    "save": "saved names and values",
    "weights": "resumed weights",
    "moments": "resumed moments and step counts",
    "schedule": "resumed schedule",
    "random": "resumed random states",
    "rows": "resumed order of rows",
    "continued": "losses after the resume",
}
Row = dict[str, Any]


NOT_COMPARED = (f"rows of more than {3 * WORDS} words", "generation", "logits_to_keep")
"""What a proof says nothing of, whatever the layout."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a layout computes, compared with what one process computes."""

    model: Row
    """Class, number of parameters and inputs of the tiny model, and the configuration that it was made of."""
    layout: Row
    """Degrees of parallelism, version of FSDP, and whether an adapter is trained."""
    checks: list[Row]
    """`check`, `rows`, `precision`, `difference` (None where values are equal or not) and `problem`."""
    left_out: dict[str, str]
    """Kinds of rows on which the plain model does not train, and why."""
    first_module: str
    """The first module whose outputs differ; "" where none does."""
    versions: dict[str, str]

    @property
    def problems(self) -> list[str]:
        """What differs; nothing where the layout is proved."""
        whole = [row for row in self.checks if row["problem"] and "module" not in row]
        return [f"{row['precision']} {_title(row)}: {row['problem']}" for row in whole]

    @property
    def is_proved(self) -> bool:
        """Whether everything that was compared agrees."""
        return bool(self.checks) and not self.problems

    def to_json(self) -> str:
        """The whole result."""
        return json.dumps({"is_proved": self.is_proved, **vars(self), "not_compared": self.not_compared}, indent=1)

    @property
    def not_compared(self) -> list[str]:
        """What the proof says nothing of: packed and long rows are made of words alone."""
        inputs = self.model["inputs"].split()
        has_senses = any(name.startswith(("pixel_", "input_features", "input_values")) for name in inputs)
        others = {
            "resumed states": self.layout["fsdp_version"] == 1,
            "the base model alone": not any(row["check"] == "base" for row in self.checks),
            "packed and long rows with images or sound": has_senses,
        }
        return [*NOT_COMPARED, *(name for name, is_left_out in others.items() if is_left_out)]

    def __str__(self) -> str:
        count = show_count(self.model["parameters"])
        degrees = " x ".join(f"{name} {size}" for name, size in self.layout.items() if name.endswith("_size"))
        kind = f"FSDP{self.layout['fsdp_version']}" + (", LoRA" if self.layout["adapter"] else "")
        kind += ", activation checkpointing" if self.layout.get("activation_checkpointing") else ""
        lines = [
            f"{self.model['class']} at a small size ({count} parameters, {self.model['inputs']})",
            f"{kind}, {degrees}: {self.layout['num_processes']} CPU ranks (gloo) compared with one process",
            ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            "",
            *table([("", *PRECISIONS), *self._table()], right=(1, 2)),
            "",
        ]
        lines += [f"{kind} rows were left out: {why}" for kind, why in self.left_out.items()]
        lines.append(f"not compared: {', '.join(self.not_compared)}")
        if self.is_proved:
            return "\n".join([*lines, "proved"])
        lines += [f"differs  {problem}" for problem in self.problems]
        if self.first_module:
            lines.append(f"The first module that differs: {self.first_module}")
        return "\n".join([*lines, "not proved"])

    def _table(self) -> Iterable[tuple[str, ...]]:
        cells: dict[str, dict[str, str]] = {}
        for row in self.checks:
            is_known = row["difference"] is not None and math.isfinite(row["difference"])
            shown = f"{row['difference']:.1e}{' !' if row['problem'] else ''}" if is_known else "equal"
            shown = "differs" if row["problem"] and not is_known else shown
            cells.setdefault(_title(row), {})[row["precision"]] = shown
        for title, by_precision in cells.items():
            yield (title, *(by_precision.get(precision, "") for precision in PRECISIONS))


def _title(row: Row) -> str:
    kind = "" if row["rows"] == "rows" else f"{row['rows']} rows: "
    module = row.get("module")
    return f"  {kind}{module}" if module else f"{kind}{_CHECKS[row['check']]}"


def prove(
    config: PreTrainedConfig,
    model_class: Any,
    dims: ParallelDims,
    num_processes: int,
    *,
    fsdp_version: int = 2,
    activation_checkpointing: bool = False,
    adapter: Any = None,
    rows: Sequence[Any] = (),
    collator: Any = None,
) -> Proof:
    """Train a tiny model of a configuration's kind under a layout on CPU ranks, and next to it in this process.

    The configuration is made small by rule: few layers, experts, heads and words, of each kind of layer one. Compared
    are, in fp32 and bf16, the loaded weights, outputs in evaluation, loss and gradients of random, padded, packed and
    long rows (these counted as a Trainer counts), or of the given `rows`, and of two micro-batches; in fp32 the norm of
    gradients, one step of AdamW, and the saved names and values.

    Args:
        dims: the degrees, whose product is `num_processes`.
        adapter: a LoRA configuration of PEFT, or True for one on all linear layers; None trains all weights.
        rows: as a dataset gives them; two make a batch, by `collator`.

    Starts `num_processes` processes, without GPUs; none of this process's own groups is used.

    Raises:
        ConfigError: no such model can be made small, or the layout refuses it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_fsdp_tools.proof.run"])
    dims = dims.resolve(num_processes)
    count = num_processes // dims.ranks_per_row
    with tempfile.TemporaryDirectory(prefix="proof-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        case, facts = tiny_case(
            telling(config),
            [model_class],
            folder / "checkpoint",
            num_batches=count,
            words=WORDS,
            is_training=True,
            tp_size=dims.tp_size,
        )
        if rows:
            case = replace(case, batches={"rows": given_batches(rows, collator, count)})
        case, left_out = (case, {}) if rows else with_kinds(case)
        case = replace(case, dims=dims, fsdp_version=fsdp_version, activation_checkpointing=activation_checkpointing)
        if adapter is not None:
            case = with_adapter(case, None if adapter is True else adapter)
        torch.save((case, {precision: plain_figures(case, precision) for precision in PRECISIONS}), folder / "plain.pt")
        ranks = _run(context, num_processes, folder)
    sizes = {name: size for name, size in vars(dims).items() if size > 1 or name == "dp_shard_size"}
    layout = {"num_processes": num_processes, **sizes, "fsdp_version": fsdp_version, "adapter": adapter is not None}
    layout["activation_checkpointing"] = activation_checkpointing
    return make_proof(facts | {"model_type": config.model_type}, layout, ranks, left_out)


def make_proof(facts: Row, layout: Row, ranks: list[Row], left_out: dict[str, str]) -> Proof:
    """The proof that the findings of all ranks make: of each check the worst."""
    checks: list[Row] = []
    for precision in PRECISIONS:
        seen = [rank[precision] for rank in ranks if precision in rank]
        for name in dict.fromkeys(name for each in seen for name in each if name != "module"):
            values = [each[name] for each in seen if name in each]
            kind, _, check = name.rpartition(" ")
            row = {"check": check, "rows": kind or "rows", "precision": precision}
            if isinstance(values[0], str):
                checks.append(row | {"difference": None, "problem": next(filter(None, values), "")})
            elif isinstance(values[0], tuple):
                checks.append(_worst_row(row, dict(enumerate(values))))
            else:
                groups = _by_module({(i, name): found for i, each in enumerate(values) for name, found in each.items()})
                checks.append(
                    _worst_row(row, {key: found for group in groups.values() for key, found in group.items()})
                )
                if not kind:
                    checks += [_worst_row(row | {"module": module}, group) for module, group in groups.items()]
    problems = [rank["error"] for rank in ranks if "error" in rank]
    checks += [
        {"check": "loss", "rows": "rows", "precision": "fp32", "difference": None, "problem": p} for p in problems
    ]
    modules = [rank[precision]["module"] for precision in PRECISIONS for rank in ranks if precision in rank]
    return Proof(
        model=facts,
        layout=layout,
        checks=checks,
        left_out=left_out,
        first_module=next(filter(None, modules), ""),
        versions={name: version(name) for name in ("hf_fsdp_tools", "torch", "transformers", "accelerate")},
    )


def _worst_row(row: Row, found: dict[Any, Found]) -> Row:
    difference, problem = worst(found)
    return row | {"difference": float(f"{difference:.3g}"), "problem": problem}


def _by_module(found: dict[tuple[int, str], Found]) -> dict[str, dict[tuple[int, str], Found]]:
    """Findings of parameters by their module: of blocks, by their parts, all blocks together."""
    groups: dict[str, dict[tuple[int, str], Found]] = {}
    for (rank, name), each in found.items():
        module = re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0].removeprefix("base_model.model."))
        head, star, tail = module.partition(".*.")
        groups.setdefault(f"{head}{star}{tail.split('.')[0]}", {})[rank, name] = each
    return groups


# ---- ranks ----


def examine_on_rank(folder: Path) -> Row:
    """What this rank's shards of the case in a folder compute, by precision; every rank must call."""
    case, plain = torch.load(folder / "plain.pt", weights_only=False)
    found: Row = {}
    for precision, figures in plain.items():
        model = load_sharded(case, precision)
        found[precision] = examine(case, model, precision, figures, plain["fp32"].state)
        if figures.continued and case.fsdp_version == 2:
            found[precision] |= resume(case, model, figures)
    return found


def _run(context: Any, size: int, folder: Path) -> list[Row]:
    """The findings of all ranks; `error` of those that failed."""
    processes = [context.Process(target=_rank_main, args=(rank, size, folder), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 10 * _LIMIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    ranks: list[Row] = []
    for rank, process in enumerate(processes):
        file, has_ended = folder / f"{rank}.result", not process.is_alive()
        process.kill()
        how = f"ended with status {process.exitcode}" if has_ended else f"did not end in {10 * _LIMIT_S:.0f} s"
        ranks.append(torch.load(file, weights_only=False) if file.exists() else {"error": f"rank {rank} {how}"})
    if refusal := next((each["refusal"] for each in ranks if "refusal" in each), None):
        raise refusal
    return ranks


def _rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    try:
        join_on_cpu(f"file://{folder / 'meeting'}", rank, size, timedelta(seconds=_LIMIT_S))
        torch.save(examine_on_rank(folder), folder / f"{rank}.result")
        dist.barrier()
    except FSDPToolsError as error:
        _fail({"refusal": error}, folder / f"{rank}.result")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, line {where.lineno}"
        _fail({"error": f"rank {rank} failed: {first_line(error)} ({place})"}, folder / f"{rank}.result")
    dist.destroy_process_group()


def _fail(result: Row, file: Path) -> None:
    """Leave the error of this rank in its file, and end at once: the other ranks may never come to an end together."""
    torch.save(result, file)
    os._exit(1)
