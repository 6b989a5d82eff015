"""A wrap plan for every architecture that transformers registers, checked by rules written apart from the planner.

    python benchmarks/census.py                         # every type, four classes of each
    python benchmarks/census.py --only llama t5 swin    # some types
    python benchmarks/census.py --output benchmarks/results/census.csv
    python benchmarks/census.py --train                 # instead: train a tiny model of every type on 2 ranks
    python benchmarks/census.py --stream                # instead: what live_weights gives, beside the files

Each model is built on the meta device in bf16 from its default configuration (repaired where the default cannot be
built), in a process of its own with a time limit. A plan passes when `fully_shard` over 8 ranks (fake process group)
and the root's lazy initialisation raise nothing; no unit is a container; every tied set is in one unit; no block of a
list that holds 10 % of the model is left in the root; no unit exceeds 1.05 × 2 × the largest block or the largest set
of parameters on one module; and there are about two units per block at most.

--train     a tiny checkpoint of every type is loaded, trained, saved and reopened on 2 ranks, beside the plain model in
            one process (see `hf_fsdp_tools/proof`). A row is written as it comes, and what has a row is not run
            again, unless --only asks for it; the summary beside the rows is written at the end. Types that take other
            inputs than words, images and sound take no part. With `--dequantize false`, a checkpoint in FP8 is loaded
            as it is stored and as floats, and both train the same adapter
"""

import argparse
import csv
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.architectures import packed, streamed
from benchmarks.architectures.cases import OnMesh, write_census
from benchmarks.architectures.defaults import CONFIG_MAPPING, OTHER_MAPPINGS, build_config, classes_by_default
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.blocks import detect_blocks
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.testing import hide_gpus, run_ranks

WORLD = 8
TIMEOUT_S = 300.0
COLUMNS = [
    "type", "role", "class", "parameters", "stacks", "blocks", "units", "largest_unit", "largest_params", "replicated",
    "seconds", "verdict", "why",
]  # fmt: skip
Unit = tuple[tuple[str, ...], bool | None]  # module fqns, reshard_after_forward


# ---- building ----


def build(model_type: str, candidates: list[str]) -> nn.Module:
    """The first class of `candidates` that can be built on meta."""
    errors: list[Exception] = []
    for auto_class in (getattr(transformers, name) for name in candidates):
        try:
            return build_meta_model(build_config(model_type), auto_class=auto_class, dtype=torch.bfloat16)
        except Exception as error:
            errors.append(error)
    raise errors[0]


# ---- the test, apart from the planner --------------------------------------------------------------------------------


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def repeating_lists(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Innermost lists of composite members of recurring classes that hold at least 10 % of the model."""
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or "expert" in fqn:
            continue
        members = [(f"{fqn}.{name}".lstrip("."), child) for name, child in module.named_children() if numel(child)]
        members = [item for item in members if sum(p.ndim > 1 for p in item[1].parameters()) > 1]
        classes = Counter(type(child).__name__ for _, child in members)
        if classes and (max(classes.values()) > 1 or (len(module) == 1 and isinstance(module, nn.ModuleList))):
            lists[fqn] = members

    def is_outer(members: list[tuple[str, nn.Module]]) -> bool:
        whole = sum(numel(member) for _, member in members)
        names = tuple(f"{name}." for name, _ in members)
        inner = {fqn: sum(numel(m) for _, m in found) for fqn, found in lists.items() if fqn.startswith(names)}
        outermost = [n for fqn, n in inner.items() if not any(fqn.startswith(f"{other}.") for other in inner)]
        return sum(outermost) >= 0.5 * whole

    total = numel(model)
    innermost = [members for members in lists.values() if not is_outer(members)]
    return [members for members in innermost if sum(numel(member) for _, member in members) >= 0.1 * total]


def verdict(model: nn.Module, units: list[Unit], replicated: Iterable[str] = ()) -> list[str]:
    """What is wrong with these units on this model; empty for a correct plan. Shards the model as it goes."""
    named = [fqn for names, _ in units for fqn in names if fqn]
    faults = [f"container {n}" for n in named if type(model.get_submodule(n)).forward is nn.Module.forward]
    unit_of = {id(model.get_submodule(fqn)): index for index, (names, _) in enumerate(units) for fqn in names}
    ignored = {id(model.get_parameter(name)) for name in replicated}
    holds: dict[int, dict[int, int]] = {}
    homes: dict[int, set[int]] = {}
    root = len(units) - 1

    def visit(module: nn.Module, unit: int) -> None:
        unit = unit_of.get(id(module), unit)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in ignored:
                homes.setdefault(id(parameter), set()).add(unit)
                holds.setdefault(unit, {})[id(parameter)] = parameter.numel()
        for child in module.children():
            visit(child, unit)

    visit(model, root)
    names_of = {id(p): n for n, p in model.named_parameters()}
    faults += [f"tied set in {len(units_)} units: {names_of[p]}" for p, units_ in homes.items() if len(units_) > 1]
    lists = repeating_lists(model)
    leaves = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    bound = 2.1 * max([*leaves, *(numel(block) for members in lists for _, block in members)])
    sizes = {unit: sum(held.values()) for unit, held in holds.items()}
    faults += [f"unit {units[u][0][0]!r} holds {size} > {bound:.0f}" for u, size in sizes.items() if size > bound]
    in_root = holds.get(root, {})
    for members in lists:
        left = [fqn for fqn, block in members if any(id(p) in in_root for p in block.parameters() if p.ndim > 1)]
        if left:
            faults.append(f"{len(left)} blocks left in the root, {left[0]} first")
    return faults + sharding_error(model, units, ignored)


def sharding_error(model: nn.Module, units: list[Unit], ignored: set[int]) -> list[str]:
    """What `fully_shard` and the root's lazy initialisation say on 8 ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    mesh = init_device_mesh("cpu", (WORLD,))
    kept = {parameter for parameter in model.parameters() if id(parameter) in ignored}
    try:
        for names, reshard in units:
            modules = [model.get_submodule(name) for name in names]
            fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, ignored_params=kept)
        with mock.patch.object(FSDPParamGroup, "_validate_no_meta_params"):  # nothing is materialised
            fully_shard.state(model)._lazy_init()
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    return []


# ---- one row ---------------------------------------------------------------------------------------------------------


def examine(model_type: str, role: str, candidates: list[str]) -> dict[str, Any]:
    """One row of the table, in a fake process group; for `run_ranks`."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    row: dict[str, Any] = {"type": model_type, "role": role, "class": candidates[0]}
    try:
        model = build(model_type, candidates)
        row["class"] = type(model).__name__
    except Exception as error:
        return {**row, "verdict": "not built", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    start = time.perf_counter()
    try:
        plan = make_wrap_plan(model)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        return {**row, "parameters": numel(model), "verdict": "failed", "why": why}
    row |= {"parameters": plan.num_params, **describe(model, plan), "seconds": f"{time.perf_counter() - start:.2f}"}
    faults = verdict(model, [(unit.modules, unit.reshard_after_forward) for unit in plan.units], plan.replicated)
    if row["units"] > 2 * row["blocks"] + 6:  # six for what stands around the blocks
        faults.append(f"{row['units']} units for {row['blocks']} blocks")
    return row | {"verdict": "failed" if faults else "ok", "why": "; ".join(faults[:3])}


def describe(model: nn.Module, plan: WrapPlan) -> dict[str, Any]:
    stacks = detect_blocks(model).stacks
    texts = [f"{s.fqn} {s.count}x {'|'.join(s.class_names)}" + ("" if s.is_major else " (minor)") for s in stacks]
    return {
        "stacks": "; ".join(texts),
        "blocks": sum(stack.count for stack in stacks),
        "units": len(plan.units),
        "largest_unit": plan.largest_unit.modules[0] or "(root)",
        "largest_params": plan.largest_unit.num_params,
        "replicated": len(plan.replicated),
    }


def run_one(task: tuple[str, str, list[str]]) -> dict[str, Any]:
    """Examine in a process: a crash or a hang costs one row."""
    try:
        return dict(run_ranks(examine, 1, *task, timeout_s=TIMEOUT_S)[0])
    except AssertionError as error:
        why = str(error).strip().splitlines()[-1]
        return {"type": task[0], "role": task[1], "class": task[2][0], "verdict": "failed", "why": why}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="model types; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the table here (csv; with --train jsonl)")
    parser.add_argument("--train", action="store_true", help="train a tiny model of every type on 2 ranks")
    about = "with --train: these degrees in place of FSDP on 2 ranks, such as cp2, cp4, shard2xcp2"
    parser.add_argument("--mesh", default="", metavar="DEGREES", help=about)
    about = "with --train: false compares bases that stay quantised with their floats"
    parser.add_argument("--dequantize", choices=("true", "false"), default="true", help=about)
    parser.add_argument("--stream", action="store_true", help="compare live_weights of every type with its files")
    arguments = parser.parse_args()
    if arguments.stream:
        hide_gpus()
        output = arguments.output or Path(__file__).parent / "results" / "census_stream.jsonl"
        return write_census(output, arguments.only, arguments.jobs, streamed)
    if arguments.train:
        name = "packed" if arguments.dequantize == "false" else arguments.mesh or "train"
        output = arguments.output or Path(__file__).parent / "results" / f"census_{name}.jsonl"
        kind = packed if arguments.dequantize == "false" else OnMesh(arguments.mesh)
        hide_gpus()  # so that processes begin with more imports behind them
        return write_census(output, arguments.only, arguments.jobs, kind)
    rows: list[dict[str, Any]] = []
    types = arguments.only or sorted(CONFIG_MAPPING)
    work = [(name, role, names) for name in types for role, names in classes_by_default(name).items()]
    with open(arguments.output or os.devnull, "w", newline="") as file, ThreadPoolExecutor(arguments.jobs) as pool:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in pool.map(run_one, work):
            rows.append(row)
            print(f"\r{len(rows)} of {len(work)}", end="", file=sys.stderr)
            writer.writerow(row)
            file.flush()  # a run takes half an hour: what is done is kept
    print(file=sys.stderr)
    for row in rows:
        if row["verdict"] == "failed" or arguments.only:
            print(*(f"{key}={value}" for key, value in row.items() if value != ""))
    for role in ("main", *OTHER_MAPPINGS):
        count = Counter(row["verdict"] for row in rows if row["role"] == role)
        print(f"{role}: {count['ok']} of {count['ok'] + count['failed']} correct, {count['not built']} not built")
    return int(any(row["verdict"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
