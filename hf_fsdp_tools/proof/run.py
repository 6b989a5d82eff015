"""The check of a layout: what CPU ranks compute, compared with one process, as a value, a table and JSON."""

import json
import math
import multiprocessing
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import FSDPToolsError
from hf_fsdp_tools.proof.case import given_batches, telling, tiny_case, with_adapter, with_kinds
from hf_fsdp_tools.proof.compare import Found, Sharded, examine, load_sharded, worst
from hf_fsdp_tools.proof.plain import PRECISIONS, plain_figures
from hf_fsdp_tools.proof.resume import resume
from hf_fsdp_tools.testing import PRELOAD, run_ranks
from hf_fsdp_tools.text import first_line, show_count, table

WORDS = 13
"""Tokens of a random row: no power of two divides them, so that ranks with the same rows have padding."""

_LIMIT_S = 600.0
"""How long ranks may take: tiny models take seconds, and loading libraries a few. (assumed)"""

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


NOT_COMPARED = (f"rows of more than {3 * WORDS} tokens", "generation", "logits_to_keep")
"""What a check says nothing of, whatever the layout."""


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
        """What differs; nothing where the layout is verified."""
        whole = [row for row in self.checks if row["problem"] and "module" not in row]
        return [f"{row['precision']} {_title(row)}: {row['problem']}" for row in whole]

    @property
    def is_verified(self) -> bool:
        """Whether everything that was compared agrees."""
        return bool(self.checks) and not self.problems

    def to_json(self) -> str:
        """The whole result."""
        return json.dumps({"is_verified": self.is_verified, **vars(self), "not_compared": self.not_compared}, indent=1)

    @property
    def not_compared(self) -> list[str]:
        """What the check says nothing of: packed and long rows are made of tokens alone."""
        inputs = self.model["inputs"].split()
        has_senses = any(name.startswith(("pixel_", "input_features", "input_values")) for name in inputs)
        seen = {row["check"] for row in self.checks}
        absent = ["resumed states"] * ("weights" not in seen) + ["the base model alone"] * ("base" not in seen)
        return [*NOT_COMPARED, *absent, *["packed and long rows with images or sound"] * has_senses]

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
        if self.is_verified:
            return "\n".join([*lines, "verified"])
        lines += [f"differs  {problem}" for problem in self.problems]
        if self.first_module:
            lines.append(f"The first module that differs: {self.first_module}")
        return "\n".join([*lines, "not verified"])

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
    sequence_parallel: bool = False,
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
        sequence_parallel: whether ranks that share layers hold their own tokens between these.
        adapter: a LoRA configuration of PEFT, or True for one on all linear layers; None trains all weights.
        rows: as a dataset gives them; two make a batch, by `collator`.

    Starts `num_processes` processes, without GPUs; none of this process's own groups is used.

    Raises:
        ConfigError: no such model can be made small, or the layout refuses it.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, "hf_fsdp_tools.proof.run"])
    forkserver.ensure_running()  # ranks import next to the plain model
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
        case = replace(case, sequence_parallel=sequence_parallel)
        if adapter is not None:
            case = with_adapter(case, None if adapter is True else adapter)
        torch.save((case, {precision: plain_figures(case, precision) for precision in PRECISIONS}), folder / "plain.pt")
        ranks = _run(num_processes, folder)
    sizes = {name: size for name, size in vars(dims).items() if size > 1 or name == "dp_shard_size"}
    layout = {"num_processes": num_processes, **sizes, "fsdp_version": fsdp_version, "adapter": adapter is not None}
    layout |= {"sequence_parallel": True} if sequence_parallel else {}
    layout["activation_checkpointing"] = activation_checkpointing
    return make_proof(facts | {"model_type": config.model_type}, layout, ranks, left_out)


def make_proof(facts: Row, layout: Row, ranks: list[Row], left_out: dict[str, str]) -> Proof:
    """The result that the findings of all ranks make: of each check the worst."""
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
            found[precision] |= resume(Sharded(case, model, figures, precision))
    return found


def _run(size: int, folder: Path) -> list[Row]:
    """The findings of all ranks; `error` of those that failed."""
    try:
        return run_ranks(_examined, size, folder, timeout_s=_LIMIT_S)
    except AssertionError:
        files = [folder / f"{rank}.failure" for rank in range(size)]
        ranks = [torch.load(file, weights_only=False) for file in files if file.exists()]
        if refusal := next((each["refusal"] for each in ranks if "refusal" in each), None):
            raise refusal from None
        return ranks or [{"error": f"a rank died, or did not end in {_LIMIT_S:.0f} s"}]


def _examined(folder: Path) -> Row:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    try:
        return examine_on_rank(folder)
    except Exception as error:
        where, rank = traceback.extract_tb(error.__traceback__)[-1], dist.get_rank()
        said = f"rank {rank} failed: {first_line(error)} ({Path(where.filename).name}, line {where.lineno})"
        is_refusal = isinstance(error, FSDPToolsError)
        torch.save({"refusal": error} if is_refusal else {"error": said}, folder / f"{rank}.failure")
        raise
