"""Rows of training: a tiny checkpoint of each type on a mesh, beside the plain model."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_tools import ParallelDims
from hf_fsdp_tools.proof import compare
from hf_fsdp_tools.proof.batches import WORDS
from tests.api import (
    PRECISIONS,
    Case,
    forward,
    load_sharded,
    loss_of,
    plain_figures,
    telling,
    tiny_case,
    with_adapter,
    with_kinds,
)
from tests.api import WORDS as ODD_WORDS
from tests.census.defaults import CONFIG_MAPPING, build_config, classes_by_default
from tests.census.rows import Census, Row, is_causal, model_classes
from tests.census.sizes import SIZES

ABOUT = """A tiny model of each type, its default configuration shrunk, is written by transformers, loaded by
`from_pretrained` and compared with the plain model in one process by `hf_fsdp_tools/proof/compare.py`."""
ABOUT_MESH = """ Degrees: {}. Rows have 13 tokens, which no number of ranks divides, and windows are 5 tokens long;
padded and packed rows are compared too where the plain model trains on them, and losses are those of training mode
without dropout. What cannot be divided is refused by name before it is loaded."""
DEGREES = {"replicate": "dp_replicate_size", "shard": "dp_shard_size"}
DEGREES |= {name: f"{name}_size" for name in ("cp", "tp", "ep")}


def census_on(mesh: str, *, has_adapter: bool = False, recomputes: bool = False) -> Census:
    """The census on a mesh such as shard2xcp2, or on 2 ranks of plain FSDP; of all weights, or of LoRA; with activation
    checkpointing, where gradients show a router that chooses other experts when its block runs again."""
    return Census(
        about=ABOUT
        + (ABOUT_MESH.format(mesh) if mesh else "")
        + (" LoRA on all linear layers." if has_adapter else ""),
        takes_part=partial(takes_part, mesh=mesh),
        prepare=partial(examine_plain, mesh=mesh, has_adapter=has_adapter, recomputes=recomputes),
        compare=examine_on_ranks,
        judge=judged,
        ranks=size_of(mesh),
    )


def dims_of(mesh: str) -> ParallelDims:
    """In shard2xep2, each expert is sharded over 2 of 4 ranks, and all other weights over 4."""
    sizes = {DEGREES[name]: int(size) for name, size in re.findall(r"([a-z]+?)(\d+)(?:x|$)", mesh)}
    if "ep_size" in sizes:
        sizes["dp_shard_size"] = size_of(mesh) // math.prod(sizes.get(n, 1) for n in ("cp_size", "tp_size"))
    return ParallelDims(**sizes)


def size_of(mesh: str) -> int:
    """How many ranks a mesh takes: at least two."""
    return max(math.prod(map(int, re.findall(r"\d+", mesh))), 2)


def takes_part(model_type: str, mesh: str) -> bool:
    """One with a model class; on a mesh one for next tokens, and with a plan where layers or experts are divided."""
    if not mesh:
        return bool(classes_by_default(model_type))
    config = CONFIG_MAPPING[model_type]
    configs = [config, *(config.sub_configs or {}).values()]
    plans = [f"base_model_{kind}_plan" for kind in ("tp", "ep") if kind in mesh.replace("replicate", "")]
    return is_causal(model_type) and all(any(getattr(each, plan, None) for each in configs) for plan in plans)


def examine_plain(
    model_type: str,
    folder: Path,
    precisions: Iterable[str] = PRECISIONS,
    mesh: str = "",
    has_adapter: bool = False,
    recomputes: bool = False,
) -> Row:
    """Facts of a case, which is left in the folder with what the plain model computes."""
    dims, config = dims_of(mesh), build_config(model_type)
    case, row = tiny_case(
        telling(config) if mesh or recomputes else config,
        model_classes(model_type, config),
        folder / "checkpoint",
        num_batches=size_of(mesh) // dims.ranks_per_row,
        words=ODD_WORDS if mesh else WORDS,
        is_training=bool(mesh) or recomputes,
        tp_size=dims.tp_size,
        sizes=SIZES,
    )
    if mesh:
        case, _ = with_kinds(case)
        row["kinds"] = " ".join(case.batches)
    if has_adapter:
        try:
            case = with_adapter(case)
        except ValueError as error:  # PEFT finds nothing to adapt
            return {**row, "why": str(error)[:200]}
    case = replace(case, dims=dims, activation_checkpointing=recomputes)
    plain = {}
    for precision in precisions:
        try:
            plain[precision] = plain_figures(case, precision)
        except Exception as error:
            row[f"{precision}_plain_fails"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    torch.save((case, plain), folder / "plain.pt")
    if "fp32" not in plain:
        return {**row, "why": "the plain model, reopened, fails"}
    return {**row, "verdict": "ready"}


def examine_on_ranks(folder: Path) -> Row:
    """What this rank's shards of the case in a folder compute, beside the plain model."""
    case, plain = torch.load(folder / "plain.pt", weights_only=False)
    rows = {}
    for precision, figures in plain.items():
        seen = compare.examine(case, load_sharded(case, precision), precision, figures, plain["fp32"].state)
        seen.pop("module")
        rows[precision] = {key: compare.worst(each) if isinstance(each, dict) else each for key, each in seen.items()}
    rows |= {precision: {"runs": fault_of(case, precision)} for precision in PRECISIONS if precision not in plain}
    return {f"{precision}_{key}": value for precision, row in rows.items() for key, value in row.items()}


def fault_of(case: Case, precision: str) -> str:
    """What a step of training raises where the plain model, with weights in this precision, does not train: one with
    weights in fp32 has reasons to."""
    model, batches = load_sharded(case, precision), case.batches_of("rows", "fp32")
    try:
        batch = batches[dist.get_rank() // case.dims.ranks_per_row]
        loss_of(forward(model.train(case.is_training), batch)).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a model's code raises is what the row says
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def judged(ranks: list[Row]) -> Row:
    """One row of all ranks: the worst of each check, a verdict, and why."""
    row: Row = {}
    faults: list[str] = []
    for key in ranks[0]:
        values = [rank[key] for rank in ranks]
        if isinstance(values[0], tuple):
            row[key] = max(value for value, _ in values)
            faults += [f"{key}: {what}" for _, what in values if what][:1]
        elif isinstance(values[0], str):
            row[key] = "differs" if any(values) else "ok"
            faults += [f"{key}: {what}" for what in values if what][:1]
        else:
            row[key] = max(values)
    why = "; ".join(dict.fromkeys(faults))
    return row | {"verdict": "failed" if why else "agrees", "why": why}
