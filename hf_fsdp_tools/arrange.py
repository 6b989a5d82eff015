"""How chosen units are arranged: ties in one unit, the tail together, one trainable dtype per unit."""

from fnmatch import fnmatchcase

import torch

from hf_fsdp_tools.blocks import ModelBlocks
from hf_fsdp_tools.draft import THIN_WRAPPER_SHARE, DraftUnit, PlanDraft
from hf_fsdp_tools.tree import ModuleNode, Weight

__all__ = ["join_tail", "join_ties", "override_reshard", "part_dtypes"]

_WHOLE_SHARE = 0.01
"""Share of a unit that may stay whole on every rank because it shares its modules with another dtype. (assumed)"""


def join_ties(draft: PlanDraft) -> None:
    """Bring every tied set into one unit that gathers at its first use and is kept: the head needs it again."""
    for _ in range(len(draft.tree.weights)):  # a new carrier can part an older set, so repeat until nothing moves
        parted = [
            weight
            for weight in draft.tree.weights
            if len(weight.owners) > 1
            and id(weight) not in draft.replicated
            and len({id(draft.unit_of(owner)) for owner in weight.owners}) > 1
        ]
        if not parted:
            return
        for weight in parted:
            _join(draft, weight)


def join_tail(draft: PlanDraft, blocks: ModelBlocks) -> None:
    """Gather the final norm with the head and keep both: backward begins with them."""
    if not draft.policy.group_tail or blocks.head is None:
        return
    unit = draft.unit_of(draft.tree.by_fqn[blocks.head.fqn])
    if unit is draft.root or any(id(node) in draft.blocks for node in unit.nodes):
        return
    unit.reshard = False
    norm = draft.tree.by_fqn[blocks.final_norm.fqn] if blocks.final_norm else None
    if norm is None or draft.unit_of(norm) is not draft.root or id(norm) in draft.fixed:
        return
    if all(len(weight.owners) == 1 for weight in norm.own):  # a tied norm stays with its other owners
        draft.carry(norm, unit)
        unit.reason = f"{unit.reason}, with the final norm"


def part_dtypes(draft: PlanDraft) -> None:
    """Where a unit has trainable parameters of several dtypes, give all but one dtype units of their own inside it.

    The most frequent dtype stays, unless others are so mixed with it on single modules that more than a hundredth of the
    unit could not be parted and would stay whole on every rank.
    """
    trainable: dict[int, dict[torch.dtype, list[Weight]]] = {}
    units: dict[int, DraftUnit] = {}
    for weight in draft.tree.weights:
        if weight.requires_grad and id(weight) not in draft.replicated:
            unit = draft.unit_of(weight.owners[0])
            units[id(unit)] = unit
            trainable.setdefault(id(unit), {}).setdefault(weight.dtype, []).append(weight)
    for key, by_dtype in trainable.items():
        if len(by_dtype) == 1:
            continue
        fixed = {dtype: _fixed_params(draft, weights) for dtype, weights in by_dtype.items()}
        held = {dtype: sum(weight.numel for weight in weights) for dtype, weights in by_dtype.items()}
        stays = max(held, key=lambda dtype: held[dtype])
        if sum(fixed.values()) - fixed[stays] > _WHOLE_SHARE * sum(held.values()):
            stays = max(fixed, key=lambda dtype: (fixed[dtype], held[dtype]))
        for dtype in [dtype for dtype in by_dtype if dtype is not stays]:
            _part(draft, by_dtype[dtype], units[key], dtype)


def override_reshard(draft: PlanDraft) -> None:
    """Lay the policy's reshard_after_forward over the finished units."""
    for pattern, value in draft.policy.reshard_after_forward.items():
        found = [unit for unit in draft.units() if any(fnmatchcase(node.fqn, pattern) for node in unit.nodes)]
        if not found:
            names = sorted({node.fqn for unit in draft.units() for node in unit.nodes})
            draft.problems.append(
                f"reshard_after_forward: {pattern!r} matches no unit; units are {', '.join(names[:6])}, …"
            )
        for unit in found:
            unit.reshard = value


def _join(draft: PlanDraft, weight: Weight) -> None:
    carriers = [carrier for owner in weight.owners if (carrier := _tie_carrier(draft, owner)) is not None]
    if len(carriers) < len(weight.owners):  # registered on the root or where nothing runs
        _bring_to_root(draft, weight)
        return
    in_blocks = any(id(carrier) in draft.in_block or id(carrier) in draft.blocks for carrier in carriers)
    joined = DraftUnit([], in_blocks, f"tied: {weight.names[0]}")
    for carrier in carriers:
        unit = draft.by_module.get(id(carrier.module))
        if unit is None:
            draft.carry(carrier, joined)
        elif unit is not joined:
            joined.nodes += unit.nodes
            draft.by_module.update((id(node.module), joined) for node in unit.nodes)
    modules = {id(node.module) for node in joined.nodes}
    joined.nodes = [n for n in joined.nodes if not any(id(above.module) in modules for above in n.ancestors())]


def _tie_carrier(draft: PlanDraft, owner: ModuleNode) -> ModuleNode | None:
    """The module through which an owner of a tied weight joins the others; None where only the root could."""
    here = next((n for n in (owner, *owner.ancestors()) if id(n.module) in draft.by_module), draft.tree.root)
    if here is not draft.tree.root and _tied_share(here) >= THIN_WRAPPER_SHARE:
        return here
    carrier = owner
    for above in owner.ancestors():  # the largest part of a block that is nearly all tied
        in_block = id(above) in draft.in_block or id(above) in draft.blocks
        if above is here.parent or not in_block or _tied_share(above) < THIN_WRAPPER_SHARE:
            break
        carrier = above
    return next((n for n in (carrier, *carrier.ancestors()) if n is not draft.tree.root and draft.can_run(n)), None)


def _bring_to_root(draft: PlanDraft, weight: Weight) -> None:
    """Dissolve the size-based units that hold the tied weight; inside blocks, keep the weight whole on every rank."""
    units = [unit for unit in (draft.unit_of(owner) for owner in weight.owners) if unit is not draft.root]
    if any(id(node) in draft.blocks or id(node) in draft.in_block for unit in units for node in unit.nodes):
        draft.replicated[id(weight)] = weight
        return
    for node in (node for unit in units for node in unit.nodes):
        draft.by_module.pop(id(node.module), None)


def _part(draft: PlanDraft, weights: list[Weight], unit: DraftUnit, dtype: torch.dtype) -> None:
    """Move weights into a unit inside `unit`, and keep those whole that cannot be moved."""
    owners = _separable_owners(draft, weights)
    draft.add(
        owners.values(),
        True if unit.reshard is None else unit.reshard,
        f"{str(dtype).removeprefix('torch.')} parameters inside a unit of another dtype",
    )
    left = [weight for weight in weights if any(id(owner) not in owners for owner in weight.owners)]
    draft.replicated.update((id(weight), weight) for weight in left)


def _separable_owners(draft: PlanDraft, weights: list[Weight]) -> dict[int, ModuleNode]:
    """The modules that register these weights and, trainable, nothing else at or below them."""
    ids = {id(weight) for weight in weights}
    return {
        id(owner): owner
        for weight in weights
        for owner in weight.owners
        if draft.can_run(owner)
        and id(owner.module) not in draft.by_module
        and all(id(w) in ids for below in owner.walk() for w in below.own if w.requires_grad)
    }


def _fixed_params(draft: PlanDraft, weights: list[Weight]) -> int:
    owners = _separable_owners(draft, weights)
    return sum(w.numel for w in weights if any(id(owner) not in owners for owner in w.owners))


def _tied_share(node: ModuleNode) -> float:
    """The share of a node's parameters that are tied to something outside it."""
    inside = {id(below) for below in node.walk()}
    tied = sum(
        weight.numel
        for below in node.walk()
        for weight in below.own
        if any(id(owner) not in inside for owner in weight.owners)
    )
    return tied / max(node.extent, 1)
