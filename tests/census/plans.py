"""A wrap plan for every architecture that transformers registers, checked by rules written apart from the planner.

Each model is built on the meta device in bf16 from its default configuration (repaired where the default cannot be
built). A plan passes when `fully_shard` over 8 ranks (fake process group) and the root's lazy initialisation raise
nothing; no unit is a container; every tied set is in one unit; no block of a list that holds 10 % of the model is left
in the root; no unit exceeds 1.05 × 2 × the largest block or the largest set of parameters on one module; and there are
about two units per block at most.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_fsdp_tools.steps import build_meta_model, detect_blocks, make_wrap_plan
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row

WORLD = 8
Unit = tuple[tuple[str, ...], bool | None]  # module fqns, reshard_after_forward


def build(model_type: str, candidates: list[str]) -> nn.Module:
    """The first class of `candidates` that can be built on meta."""
    errors: list[Exception] = []
    for auto_class in (getattr(transformers, name) for name in candidates):
        try:
            return build_meta_model(build_config(model_type), auto_class=auto_class, dtype=torch.bfloat16)
        except Exception as error:
            errors.append(error)
    raise errors[0]


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


def examine(model_type: str, candidates: list[str]) -> Row:
    """What one class of a type gets, in a process group of 8."""
    try:
        model = build(model_type, candidates)
    except Exception as error:
        return {"verdict": "not built", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    try:
        plan = make_wrap_plan(model)
    except Exception as error:
        return {"verdict": "failed", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    blocks = sum(stack.count for stack in detect_blocks(model).stacks)
    faults = verdict(model, [(unit.modules, unit.reshard_after_forward) for unit in plan.units], plan.replicated)
    if len(plan.units) > 2 * blocks + 6:  # six for what stands around the blocks
        faults.append(f"{len(plan.units)} units for {blocks} blocks")
    why = "; ".join(f"{type(model).__name__}: {fault}" for fault in faults[:3])
    return {"verdict": "failed" if why else "agrees", "why": why, "blocks": blocks, "units": len(plan.units)}


def examine_roles(model_type: str, folder: Path) -> Row:
    """The worst of what the classes of a type get; in a process of its own."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = [examine(model_type, names) for names in classes_by_default(model_type).values()]
    of = {verdict: [row for row in found if row["verdict"] == verdict] for verdict in ("failed", "agrees", "not built")}
    rows = of["failed"] or of["agrees"] or of["not built"]
    return {**rows[0], "classes": len(of["agrees"]), "classes_not_built": len(of["not built"])}


CENSUS = Census(
    about="Up to four classes of each type: with a main head, without one, for classes of sequences and of tokens.",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=examine_roles,
)
