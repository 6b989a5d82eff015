"""Diagnose a sharded model: findings as data, each with a code, a problem with its figure, and a fix."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.diagnostics.findings import SEVERITIES, Finding, Report, by_severity, check_model, error
from hf_fsdp_tools.diagnostics.live import LiveModel, UnitTree, read_live_model, unit_tree
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import plain_name
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.policy import WrapPolicy, as_policy
from hf_fsdp_tools.sharding.sharding import sharded_module, sharding_of
from hf_fsdp_tools.text import dtype_name, grouped, listed

_DOING = "diagnosing the model"


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Report):
    """What `diagnose` found; the same on every rank."""

    units: UnitTree
    """The model's units, nested and with sizes, equal siblings as one; `str(…)` is a tree."""

    def __str__(self) -> str:
        counts: Counter[str] = Counter(finding.severity for finding in self.findings)
        summary = ", ".join(f"{counts[s]} {s}{'s' * (counts[s] != 1)}" for s in SEVERITIES if counts[s])
        return "\n".join([str(self.units), "", summary or "no findings", *map(str, self.findings)])


def diagnose(
    model: nn.Module, *, plan: WrapPlan | None = None, policy: WrapPolicy | None = None, values: bool = False
) -> Diagnosis:
    """Check a model against a plan, before the first step or at any time; give the problems and their cures.

    The model may be sharded by `shard_model`, by Accelerate, by hand with FSDP2, or not at all; on any device, meta
    included. It is not changed.

    Args:
        model: as it is trained. Names in findings are those of the model without wrappers around its modules.
        plan: to check against; None means the plan with which `shard_model` sharded the model, or else a plan made from
            the model's structure.
        policy: for the plan that is made from the structure.
        values: also look for NaN and infinity in every parameter and buffer; reads all of this rank's shards once.

    Every rank of the default process group must call. The ranks gather a few short findings and two checksums each;
    where checksums differ, rank 0 also sends its table of units, shapes and buffers (about 100 bytes per parameter).
    Non-persistent buffers are copied to the CPU one by one. Under the "fake" backend nothing is communicated.

    Raises:
        ConfigError: both `plan` and `policy` are given, or FSDP1 wraps the model.
        BlockDetectionError: the model has no parameters, on some rank.
        WrapPlanError: `policy` does not fit the model.

    Example:
        >>> print(diagnose(from_pretrained("checkpoint", load_kwargs={"progress": False})))
        LlamaForCausalLM: 45.9 K parameters, whole on one rank
        <BLANKLINE>
        no findings
    """
    world_size = len(all_ranks(None, _DOING))
    with agreed(_DOING):
        report = _inspect(model, plan, as_policy(policy), values=values, world_size=world_size)
    findings = _merged_findings(all_ranks(report.findings, _DOING))
    findings += _differences_between_ranks(report)
    findings += _counted_findings(all_ranks(report.counts, _DOING))
    return Diagnosis(findings=by_severity(findings), units=all_ranks(report.units, _DOING)[0])


# ---- the findings of one rank ----


@dataclass(frozen=True, kw_only=True)
class _RankReport:
    """The state of the model on one rank."""

    findings: tuple[Finding, ...]
    counts: dict[tuple[str, str], int]
    """Counts that may differ between ranks, by (kind, name)."""
    structure: dict[str, str]
    """Descriptions of units and parameters by name, which must be equal on all ranks."""
    buffers: dict[str, str]
    """Checksums of non-persistent buffers by name, which must be equal on all ranks."""
    units: UnitTree


def _inspect(
    model: nn.Module, plan: WrapPlan | None, policy: WrapPolicy | None, *, values: bool, world_size: int
) -> _RankReport:
    if plan is not None and policy is not None:
        raise ConfigError("plan and policy are both given; a policy makes a plan, so give one of the two.")
    live = read_live_model(model)
    sharding = sharding_of(model)
    if plan is None and policy is None and sharding is not None:
        plan = _renamed(sharding.plan, model)
    compare_units = plan is not None
    plan = plan or make_wrap_plan(live.tree.root.module, policy=policy or WrapPolicy())
    findings = check_model(model, live, plan, compare_units=compare_units, world_size=world_size)
    return _RankReport(
        findings=tuple(findings),
        counts=_counts(live, model, values=values),
        structure=_structure(live, plan),
        buffers=_buffer_checksums(live),
        units=unit_tree(live, is_whole=sharding is not None and sharding.is_whole),
    )


def _renamed(plan: WrapPlan, model: nn.Module) -> WrapPlan:
    """`plan` with the names that its modules have in `model`, which may wrap the model that was sharded."""
    base = sharded_module(model)
    place = next(name for name, module in model.named_modules() if module is base)

    def rename(name: str) -> str:
        return ".".join(part for part in (place, name) if part)

    units = [replace(unit, modules=tuple(rename(name) for name in unit.modules)) for unit in plan.units]
    return replace(plan, units=tuple(units), replicated=tuple(rename(name) for name in plan.replicated))


def _counts(live: LiveModel, model: nn.Module, *, values: bool) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for weight in live.tree.weights:
        tensors = list({id(t): t for name in weight.names if (t := live.parameters[name].tensor) is not None}.values())
        if len(tensors) > 1:
            counts["tie", " = ".join(weight.names)] = int(not _equal(tensors))
    tensors_by_name = [*model.named_parameters(), *model.named_buffers()] if values else []
    for name, tensor in tensors_by_name:
        local = Held.of(tensor).memory
        if local.is_floating_point() and not local.is_meta:
            # Masks in buffers may be infinite on purpose.
            bad = ~local.isfinite() if isinstance(tensor, nn.Parameter) else local.isnan()
            if count := int(bad.sum()):
                counts["values", plain_name(name)] = count
    return counts


def _equal(tensors: list[torch.Tensor]) -> bool:
    """Whether this rank's parts of some tensors are equal; parts on meta or of different shapes count as equal."""
    parts = [Held.of(tensor).memory for tensor in tensors]
    comparable = not any(part.is_meta for part in parts) and len({part.shape for part in parts}) == 1
    return not comparable or all(torch.equal(parts[0], part.to(parts[0])) for part in parts[1:])


def _structure(live: LiveModel, plan: WrapPlan) -> dict[str, str]:
    """Descriptions of units and parameters by name; the plan's units where the model is not sharded."""
    units = [(unit.name, f"{unit.num_params} parameters") for unit in live.units if unit.weights]
    if not live.units:
        units = [(" + ".join(unit.modules) or "(root)", f"{unit.num_params} parameters") for unit in plan.units]
    table = {f"unit {name}": size for name, size in units}
    for name, parameter in live.parameters.items():
        tensor = parameter.tensor
        kind = "trainable" if tensor.requires_grad else "frozen"
        where = f" in {parameter.unit.name}" if parameter.unit else ""
        dtype = dtype_name(tensor.dtype)
        table[f"parameter {name}"] = f"{tuple(tensor.shape)} {dtype} {kind}{where}"
    return table


def _buffer_checksums(live: LiveModel) -> dict[str, str]:
    checksums = {}
    for node in live.tree:
        for key in sorted(node.module._non_persistent_buffers_set):
            buffer = node.module._buffers.get(key)
            if buffer is None or buffer.is_meta or isinstance(buffer, DTensor):
                continue
            data = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = dtype_name(buffer.dtype)
            name = f"{node.fqn}.{key}" if node.fqn else key
            checksums[name] = f"{tuple(buffer.shape)} {dtype} crc32 {zlib.crc32(data):08x}"
    return checksums


# ---- the findings of all ranks together ----


def _merged_findings(by_rank: list[tuple[Finding, ...]]) -> list[Finding]:
    """Each finding once; a finding of some ranks names these ranks."""
    ranks = grouped((finding, rank) for rank, findings in enumerate(by_rank) for finding in findings)
    return [
        finding if len(on) == len(by_rank) else replace(finding, problem=f"On {_ranks(on)}: {finding.problem}")
        for finding, on in ranks.items()
    ]


def _differences_between_ranks(report: _RankReport) -> Iterator[Finding]:
    if differing := _differing(report.structure):
        yield error(
            code="plans-differ",
            problem="Units or parameters differ between ranks, which would wait for each other for ever. "
            + "; ".join(differing),
            fix="Build the same model with the same policy on every rank: config, adapters, dtype, library versions.",
        )
    if differing := _differing(report.buffers):
        yield error(
            code="buffers-differ",
            problem=f"Non-persistent buffers differ between ranks; no checkpoint holds them. {'; '.join(differing)}",
            fix="Initialise them on every rank after allocating: load_weights does (initialize_missing); after a "
            "to_empty() of your own, run the model's _init_weights for the modules that own them.",
        )


def _differing(table: dict[str, str]) -> list[str]:
    """One line for the ranks whose tables differ from rank 0's alike; the same lines on every rank."""
    digests = all_ranks(zlib.crc32(json.dumps(sorted(table.items())).encode()), _DOING)
    if len(set(digests)) == 1:
        return []
    line = _difference(all_ranks(table if rank_and_size()[0] == 0 else {}, _DOING)[0], table)
    alike = grouped((other, rank) for rank, other in enumerate(all_ranks(line, _DOING)) if other)
    return [f"{_ranks(ranks)}: {line}" for line, ranks in alike.items()]


def _difference(first: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first differences of `here` from rank 0's table, as text; "" if they are equal."""
    lines = [f"{name} is not here" for name in first if name not in here]
    lines += [f"{name} ({value}) is not on rank 0" for name, value in here.items() if name not in first]
    lines += [f"{n} is {here[n]}, on rank 0 {first[n]}" for n in first if n in here and here[n] != first[n]]
    return f"{len(lines)} differences from rank 0: {listed(lines)}" if lines else ""


def _counted_findings(by_rank: list[dict[tuple[str, str], int]]) -> Iterator[Finding]:
    ties = {name: sum(c.get(("tie", name), 0) for c in by_rank) for what, name in by_rank[0] if what == "tie"}
    if ties:
        apart = sum(count > 0 for count in ties.values())
        yield error(
            code="tie-broken",
            problem=f"{len(ties)} tied sets are separate parameters now, {apart} of them with different values: "
            f"{listed(list(ties))}. They are trained separately, and a checkpoint keeps one of them.",
            fix="Call model.tie_weights() before sharding, gather tied modules in one unit, and fill the model with "
            "load_weights, which keeps ties: to_empty() makes each name a tensor of its own.",
        )
    bad: Counter[str] = Counter()
    for counts in by_rank:
        bad.update({name: count for (what, name), count in counts.items() if what == "values"})
    if bad:
        yield error(
            code="non-finite-values",
            problem=f"{len(bad)} tensors hold NaN or infinity: "
            f"{listed([f'{name} ({count} elements)' for name, count in bad.most_common()])}.",
            fix="Load the checkpoint again with load_weights, which initialises what it does not hold; memory that "
            "nobody wrote looks like this too. If the values came in training, go back to the last good checkpoint.",
        )


def _ranks(ranks: list[int]) -> str:
    shown = listed(ranks, 8)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
