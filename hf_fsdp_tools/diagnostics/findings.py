"""The checks of a live model that one rank can make alone, one per function; nothing is communicated."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.diagnostics.live import LiveModel
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.modeling.module_tree import ModuleNode, class_name, plain_name
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.rules import size_bound
from hf_fsdp_tools.planning.stacks import find_blocks, major_blocks
from hf_fsdp_tools.sharding.placement import is_much_padding, padded_ratio
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import dtype_name, listed, merge_alike, show_bytes, show_count

_MAX_PADDING_SHARE = 0.1
"""Share of the model's bytes from which padding in FSDP2's shards is worth a warning. (assumed)"""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of a model or a machine, as `diagnose` and `LaunchConfig.check_file` report it."""

    code: str
    """Its kind, as a short word in kebab-case that stays the same between versions."""
    severity: Literal["error", "warning", "info"]
    """error: wrong results, a hang, or no benefit; warning: costs memory or time; info: good to know."""
    problem: str
    """The problem as a sentence, with its figure."""
    fix: str
    """What to do about it, as a sentence."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.code}\n    {self.problem}\n    {self.fix}"

    def to_json(self) -> str:
        """This finding as JSON text."""
        return json.dumps(asdict(self), indent=1)


SEVERITIES = ("error", "warning", "info")

error, warning = partial(Finding, severity="error"), partial(Finding, severity="warning")
info = partial(Finding, severity="info")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of one look at a model or a machine."""

    findings: tuple[Finding, ...]
    """Errors first, then warnings, then infos; empty where nothing is wrong."""

    @property
    def has_errors(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> str:
        """This value as JSON text."""
        return json.dumps(asdict(self), indent=1)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, errors first."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def check_model(
    model: nn.Module, live: LiveModel, plan: WrapPlan, *, compare_units: bool, world_size: int
) -> Iterator[Finding]:
    """Yield the findings that this rank can make alone."""
    if live.units:
        yield from _check_units(live, plan)
        yield from _check_managed(live)
    elif (sharding := sharding_of(model)) is None or not sharding.is_whole:
        yield from _not_sharded(live, world_size)
    if compare_units and live.units:
        yield from _check_plan(live, plan)
    yield from _check_meta(live, model)
    yield from _check_padding(live)
    yield from _check_precision(live)


def _not_sharded(live: LiveModel, world_size: int) -> Iterator[Finding]:
    size = show_bytes(sum(weight.nbytes for weight in live.tree.weights))
    holder = "this process" if world_size == 1 else f"each of {world_size} ranks"
    yield Finding(
        code="not-sharded",
        severity="info" if world_size == 1 else "error",
        problem=f"The model has no FSDP unit: {holder} holds all {size} of it.",
        fix="Load it with from_pretrained(...), or call shard_model(model, make_wrap_plan(model)). Under Accelerate, "
        "make the accelerator with make_accelerator(): a plain one drops FSDP without a word where it finds no GPU.",
    )


def _check_units(live: LiveModel, plan: WrapPlan) -> Iterator[Finding]:
    stacks = find_blocks(live.tree)
    bound = size_bound(live.tree, stacks)
    blocks = major_blocks(live.tree, stacks)
    missed = [block for block in blocks if _is_missed(block, live, bound)]
    if finding := _root_only(live, plan, blocks_have_units=len(missed) < len(blocks)):
        yield finding
        return
    if missed:
        yield warning(
            code="missed-blocks",
            problem=f"{len(missed)} of {len(blocks)} blocks have no unit and are gathered with what is around them: "
            f"{listed([block.fqn for block in missed])} ({_classes(missed)}).",
            fix=f"Name every block class in the wrap policy ({_classes(blocks)}), or use make_wrap_plan(model): it "
            "finds them.",
        )
    if large := [unit for unit in live.units if unit.num_params > bound]:
        worst = max(large, key=lambda unit: unit.num_params)
        yield warning(
            code="oversize-unit",
            problem=f"{len(large)} of {len(live.units)} units gather more than twice the largest block or layer "
            f"({show_count(bound)} parameters). The largest is {worst.name} with {show_count(worst.num_params)} "
            f"({show_bytes(worst.num_bytes)}).",
            fix="Make its largest parts units of their own; make_wrap_plan(model) does, and "
            "WrapPolicy(min_unit_params=...) sets from which size.",
        )


def _root_only(live: LiveModel, plan: WrapPlan, *, blocks_have_units: bool) -> Finding | None:
    """The finding that one unit gathers all blocks, or the whole of a model without blocks; None if it does not."""
    planned = [unit for unit in plan.units if unit.num_params]
    full = [unit for unit in live.units if unit.weights]
    worst = max(live.units, key=lambda unit: unit.num_params)
    is_split = blocks_have_units and len(full) > 1
    if is_split or len(planned) < 2 or worst.num_params <= plan.largest_unit.num_params:
        return None
    return error(
        code="root-only",
        problem=f"No block has a unit: each forward pass gathers {show_count(worst.num_params)} of "
        f"{show_count(live.tree.num_params)} parameters ({show_bytes(worst.num_bytes)}) at once, in {worst.name}, "
        f"much as plain data parallelism holds them. The plan has {len(planned)} units of at most "
        f"{show_count(plan.largest_unit.num_params)}.",
        fix="Shard a fresh model with shard_model(model, make_wrap_plan(model)), or give Accelerate a "
        "FSDPPlugin(). Its own wrap policy is NO_WRAP, or names classes that the model does not have.",
    )


def _is_missed(block: ModuleNode, live: LiveModel, bound: int) -> bool:
    """Whether a matrix of the block is gathered by a unit around the block that is a root or too large."""
    modules = {id(node.module) for node in block.walk()}
    for node in block.walk():
        for weight in node.own:
            unit = live.parameters[weight.names[0]].unit
            if unit is None or weight.ndim < 2 or len(weight.owners) > 1:
                continue
            outside = not any(id(own.module) in modules for own in unit.nodes)
            if outside and (unit.parent is None or unit.num_params > bound):
                return True
    return False


def _check_plan(live: LiveModel, plan: WrapPlan) -> Iterator[Finding]:
    planned = {frozenset(plain_name(name) for name in unit.modules): unit for unit in plan.units if unit.num_params}
    made = {frozenset(node.fqn for node in unit.nodes): unit for unit in live.units if unit.weights}
    extra = [unit.name for names, unit in made.items() if names not in planned]
    absent = [" + ".join(unit.modules) or "(root)" for names, unit in planned.items() if names not in made]
    if absent or extra:
        lists = [f"{len(absent)} of its {len(planned)} units are not there ({listed(absent)})"] if absent else []
        lists += [f"{len(extra)} units are not in it ({listed(extra)})"] if extra else []
        yield warning(
            code="plan-mismatch",
            problem=f"The model is not sharded as the plan says: {' and '.join(lists)}.",
            fix="Shard a fresh model with shard_model(model, plan), and add adapters or heads before that; or make "
            "the plan from this model.",
        )


def _check_meta(live: LiveModel, model: nn.Module) -> Iterator[Finding]:
    names = [name for name, parameter in live.parameters.items() if Held.of(parameter.tensor).memory.is_meta]
    buffers = [plain_name(name) for name, buffer in model.named_buffers() if buffer.is_meta]
    if len(names) == len(live.parameters):
        yield info(
            code="meta-parameters",
            problem=f"All {len(names)} parameters are on meta: the model has shapes and no values yet.",
            fix="Fill it with load_weights(model, ...) before the first forward pass.",
        )
    elif names or buffers:
        yield error(
            code="meta-parameters",
            problem=f"{len(names)} of {len(live.parameters)} parameters and {len(buffers)} buffers are still on meta: "
            f"{listed([*names, *buffers])}.",
            fix="Load the whole model with load_weights(model, ...), which also initialises what the checkpoint "
            "lacks; give modules that were added later values before they are used.",
        )


def _check_managed(live: LiveModel) -> Iterator[Finding]:
    twice, alone = [], []
    for weight in live.tree.weights:
        places = [live.parameters[name] for name in weight.names]
        units = {place.unit.name if place.unit else "no unit" for place in places}
        if len({id(place.tensor) for place in places}) == 1 and len(units) > 1:
            twice.append(f"{' = '.join(weight.names)} (in {' and in '.join(sorted(units))})")
        place = places[0]
        if len(units) > 1 or place.unit or isinstance(place.tensor, DTensor):
            continue
        # shard_model, or a user, averages by a hook
        if place.tensor.requires_grad and not place.tensor._post_accumulate_grad_hooks:
            alone.append(weight.names[0])
    if twice:
        yield error(
            code="managed-twice",
            problem=f"{len(twice)} tied parameters are in one unit under one name and elsewhere under another: "
            f"{listed(twice)}. Their gradients or values diverge, or the forward pass sees a shard instead of the "
            "whole.",
            fix="Tie weights before sharding, keep each tied set in one unit (fully_shard([embedding, head]); "
            "make_wrap_plan does it), and do not call tie_weights() on a sharded model.",
        )
    if alone:
        yield error(
            code="unmanaged-parameters",
            problem=f"{len(alone)} trainable parameters are in no unit: {listed(alone)}. Nobody averages their "
            "gradients, so each rank trains its own copy.",
            fix="Add adapters and heads to the plain model and shard the whole, the root included (fully_shard(model) "
            "last). What must stay whole belongs in WrapPolicy(replicate=...), for which shard_model averages "
            "gradients.",
        )


def _check_padding(live: LiveModel) -> Iterator[Finding]:
    """Yield a finding where FSDP2 pads shards much: dimensions with fewer indices than ranks, as of fused experts."""
    total = padding = 0.0
    padded: list[str] = []
    for weight in live.tree.weights:
        tensor = live.parameters[weight.names[0]].tensor
        total += weight.nbytes
        if isinstance(tensor, DTensor):
            ratio = math.prod(
                padded_ratio(tensor.shape[placement.dim], ranks) if isinstance(placement, Shard) else 1.0
                for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            )
            if is_much_padding(weight.nbytes, ratio):
                padding += weight.nbytes * (ratio - 1)
                padded.append(weight.names[0])
    if padding > _MAX_PADDING_SHARE * total:
        yield warning(
            code="padded-shards",
            problem=f"Gathering the model carries {1 + padding / total:.1f} times its bytes, and the ranks that hold "
            f"anything of these hold as much more than their share: {listed(merge_alike(padded))} have too few rows "
            "for the ranks, and FSDP2 makes all shards as long as the longest.",
            fix="Shard with shard_model or from_pretrained, which split another dimension where one can be split "
            "evenly; if they made this, take a number of ranks that divides a dimension, or replicas of fewer shards "
            "(dp_replicate_size).",
        )


def _check_precision(live: LiveModel) -> Iterator[Finding]:
    trainable = [weight for weight in live.tree.weights if weight.requires_grad and weight.dtype.is_floating_point]
    low = [weight for weight in trainable if weight.dtype in _LOW_PRECISION]
    if low:
        dtypes = " and ".join(sorted({dtype_name(weight.dtype) for weight in low}))
        yield info(
            code="low-precision-masters",
            problem=f"{show_count(sum(w.numel for w in low))} of {show_count(sum(w.numel for w in trainable))} "
            f"trainable parameters are {dtypes}: the optimizer's updates are rounded to it, and small ones are lost.",
            fix="For float32 master weights, load with dtype=torch.float32 and compute in low precision by "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16). Fine as it is for inference, or on purpose.",
        )


def _classes(nodes: Iterable[ModuleNode]) -> str:
    return ", ".join(sorted({class_name(node.module) for node in nodes}))
