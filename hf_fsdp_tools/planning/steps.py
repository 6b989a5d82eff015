"""The steps from an empty draft to a finished one; `make_plan.STEPS` is their order.

    choosing    which modules become units: the policy's, blocks, experts, the ends, other large modules
    arranging   which units gather what: tied weights together, the final norm with the head, dtypes apart

A step is a function of the draft. It asks the draft questions, changes it by the draft's verbs, and does the same on
every rank.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from hf_fsdp_tools.modeling.module_tree import ModuleNode, Weight, class_name, has_forward
from hf_fsdp_tools.modeling.notes import Divided
from hf_fsdp_tools.modeling.roles import lists_of_experts
from hf_fsdp_tools.planning.draft import THIN_WRAPPER_SHARE, DraftUnit, PlanDraft
from hf_fsdp_tools.planning.policy import matching_nodes, nearest_names
from hf_fsdp_tools.planning.stacks import is_major
from hf_fsdp_tools.text import dtype_name, listed

_END_PARAMS = 2e7
"""Parameters (40 MB in bf16) from which an embedding or a head is a unit; a tenth of the ceiling, if that is less. In
the root it would be gathered from the first forward to the last backward. (assumed; common in size policies)"""

_MAX_REPLICATED_SHARE = 0.01
"""Share of a unit that every rank may hold whole, because its modules also hold another dtype. (assumed)"""


# ---- choosing: the policy's units ----


def replicate_chosen(draft: PlanDraft) -> None:
    """Keep parameters that the policy names whole on every rank, after the 0-d ones, with which the draft begins."""
    for pattern in draft.policy.replicate:
        weights = [weight for weight in draft.tree.weights if any(_is_below(name, pattern) for name in weight.names)]
        if not weights:
            draft.problems.append(f"replicate: {pattern!r} matches nothing{nearest_names(draft.tree, pattern)}")
        draft.replicate(weights)


def add_chosen_units(draft: PlanDraft) -> None:
    """Make units of the modules that the policy's predicates and block types match."""
    for node in draft.tree if draft.policy.units else ():
        answers = (predicate(node.fqn, node.module) for predicate in draft.policy.units)
        if answer := next(filter(None, answers), None):
            options = dict(answer) if isinstance(answer, Mapping) else {}
            if unknown := sorted(options.keys() - {"reshard_after_forward", "reason"}):
                draft.problems.append(
                    f"units: the predicate gave {node.fqn!r} the unknown options {', '.join(unknown)}; "
                    "known are reshard_after_forward and reason."
                )
            reason = str(options.get("reason", "chosen by a predicate"))
            _add_chosen(draft, node, options.get("reshard_after_forward", True), reason)
    for wanted in draft.policy.block_types or ():
        name = wanted if isinstance(wanted, str) else wanted.__name__
        for node in matching_nodes(draft.tree, wanted, problems=draft.problems):
            _add_chosen(draft, node, True, f"chosen by block_types: {name}")
            draft.chosen.append(node.fqn)


def _add_chosen(draft: PlanDraft, node: ModuleNode, reshard: bool | int | None, reason: str) -> None:
    if node is draft.tree.root or not node.extent:
        return
    if not has_forward(node.module):
        draft.problems.append(
            f"Rule 4: {node.fqn!r} is a {class_name(node.module)}, whose forward never runs; choose its members."
        )
    else:
        draft.extend(DraftUnit([], reshard, reason), node)  # this very module, an nn.Sequential too


def _is_below(name: str, pattern: str) -> bool:
    """Whether a parameter name, or a module that holds it, matches an fqn pattern."""
    names = name.split(".")
    return any(fnmatchcase(".".join(names[:end]), pattern) for end in range(1, len(names) + 1))


# ---- choosing: units from the structure ----


def add_blocks(draft: PlanDraft) -> None:
    """Make units of the blocks of major stacks, and of minor stacks that exceed the ceiling."""
    for stack in draft.stacks:
        if not is_major(draft.tree, stack) and sum(block.size for block in stack) <= draft.ceiling:
            continue
        for block in stack:
            if draft.is_in_root(block) or draft.holds_units(block):
                draft.add_unit(_runnable(block), True, f"block {class_name(block.module)}")


SHARED_EXPERTS = "experts that ranks share"
"""Reason of units of `ep_size`, which are sharded over fewer ranks."""


def add_experts(draft: PlanDraft) -> None:
    """Inside blocks, make experts a unit where they are large: a fused module, or the list of experts as a whole; those
    that ranks share (`parallelize_model`) are always units, of fewer ranks."""
    for node in draft.tree:
        if Divided.of(node.module).is_dispatched:
            draft.add_unit([node], True, SHARED_EXPERTS)
    large = draft.policy.expert_unit_params
    for block in (block for stack in draft.stacks for block in stack if draft.unit_at(block)):
        if block.extent < large or _mixes_dtypes(draft, block):
            continue
        fused = [node for node in block.walk() if any(weight.ndim > 2 for weight in node.own)]
        for experts in [*fused, *lists_of_experts(block)]:
            if experts.extent < large:
                continue
            home = next((node for node in (experts, *experts.ancestors()) if draft.can_be_unit(node)), block)
            if home is not block:
                draft.add_unit([home], True, f"experts of {class_name(block.module)}")


def add_ends(draft: PlanDraft) -> None:
    """Make units of the largest embedding and of the head, so that the root, which stays gathered, is small."""
    ends = [("embedding", part) for part in draft.blocks.embeddings[:1]]
    ends += [("head", draft.blocks.head)] if draft.blocks.head else []
    for role, part in ends:
        node = draft.tree.by_fqn[part.fqn]
        is_large = node.size >= min(_END_PARAMS, draft.ceiling / 10)
        if is_large and draft.is_in_root(node) and draft.can_be_unit(node):
            draft.add_unit([draft.widened(node)], True, role)


def add_by_size(draft: PlanDraft) -> None:
    """Outside blocks, make a module a unit if it holds more parameters outside other units than the ceiling."""
    rest: dict[ModuleNode, int] = {}
    for node in reversed(draft.tree.nodes):  # children before parents
        own = {weight for weight in node.own if weight.owners[0] is node and not draft.is_replicated(weight)}
        rest[node] = sum(weight.numel for weight in own) + sum(rest[child] for child in node.children)
        if draft.unit_at(node) and node.parent:
            rest[node] = 0
        elif rest[node] > draft.ceiling and not draft.is_inside_block(node):
            _split_by_size(draft, node, rest)


def add_own_roots(draft: PlanDraft) -> None:
    """Where the root never runs (a holder of several models), make a unit of each model below: it runs as a root."""
    if not has_forward(draft.tree.root.module):
        for node in _runnable(draft.tree.root):
            if draft.is_in_root(node):
                # An nn.Sequential too: members that share a unit cannot be a root.
                draft.extend(DraftUnit([], None, "runs by itself: the model's own forward never does"), node)


def _runnable(node: ModuleNode) -> list[ModuleNode]:
    """The node, or, where it has no forward (a plain holder of modules), the nearest nodes below that have one."""
    if has_forward(node.module):
        return [node]
    return [below for child in node.children if child.extent for below in _runnable(child)]


def _mixes_dtypes(draft: PlanDraft, block: ModuleNode) -> bool:
    """Whether the block has trainable parameters of several dtypes, and so gets a unit for the rarer dtype anyway."""
    weights = (w for node in block.walk() for w in node.own if w.requires_grad and not draft.is_replicated(w))
    return len({weight.dtype for weight in weights}) > 1


def _split_by_size(draft: PlanDraft, node: ModuleNode, rest: dict[ModuleNode, int]) -> None:
    """Make `node` a unit; or, where it holds units already or is too large, make units of its largest parts first."""
    is_root = node is draft.tree.root
    if not is_root and not draft.can_be_unit(node):
        return  # a container: the module above decides
    if not is_root and not draft.holds_units(node) and rest[node] <= draft.bound:
        draft.add_unit([draft.widened(node)], True, "above the size ceiling")
        rest[node] = 0
        return
    parts = sorted(_possible_units(draft, node, rest), key=lambda part: rest[part])
    while rest[node] > draft.ceiling and parts:
        if rest[parts[-1]] < draft.floor and rest[node] <= draft.bound:
            break  # the largest part left is too small for collectives of its own, and the rules allow it here
        part = draft.widened(parts.pop())
        alike = next((stack for stack in draft.stacks if part in stack), [part])
        if sum(rest[block] for block in alike) < rest[node] / 2:
            alike = [part]
        for each in alike:  # the other blocks of the stack too, where it is most of what exceeds the ceiling
            if rest[each] and draft.unit_at(each) is None and draft.can_be_unit(each):
                draft.add_unit([each], True, "largest part of what exceeds the size ceiling")
                rest[node] -= rest[each]
                rest.update((below, 0) for below in each.walk())
    if rest[node] > draft.ceiling and not is_root:
        draft.add_unit([node], True, "above the size ceiling")
        rest[node] = 0


def _possible_units(draft: PlanDraft, node: ModuleNode, rest: dict[ModuleNode, int]) -> Iterator[ModuleNode]:
    """Yield the nearest modules below `node` that can be units and hold parameters."""
    for child in node.children:
        if not rest.get(child) or draft.is_inside_block(child):
            continue
        if draft.can_be_unit(child) and not draft.holds_units(child):
            yield child
        else:
            yield from _possible_units(draft, child, rest)


# ---- arranging: tied weights ----


def join_ties(draft: PlanDraft) -> None:
    """Bring every tied set into one unit, gathered at its first use and kept, because the head needs it again."""
    for _ in range(len(draft.tree.weights)):  # a new carrier can part an older set, so repeat until nothing moves
        parted = [weight for weight in draft.tree.weights if _is_parted(draft, weight)]
        if not parted:
            return
        for weight in parted:
            carriers = [carrier for owner in weight.owners if (carrier := _carrier(draft, owner)) is not None]
            if len(carriers) < len(weight.owners):  # registered on the root or where nothing runs
                _bring_to_root(draft, weight)
            else:
                in_blocks = any(_is_of_block(draft, carrier) for carrier in carriers)
                draft.join(carriers, in_blocks, f"tied: {weight.names[0]}")


def _is_parted(draft: PlanDraft, weight: Weight) -> bool:
    """Whether the owners of a tied weight are in different units."""
    is_tied = len(weight.owners) > 1 and not draft.is_replicated(weight)
    return is_tied and len({draft.unit_of(owner) for owner in weight.owners}) > 1


def _is_of_block(draft: PlanDraft, node: ModuleNode) -> bool:
    return draft.is_block(node) or draft.is_inside_block(node)


def _carrier(draft: PlanDraft, owner: ModuleNode) -> ModuleNode | None:
    """The module that carries the joined unit on the side of one owner; None where only the root can."""
    root = draft.tree.root
    here = next((node for node in (owner, *owner.ancestors()) if draft.unit_at(node)), root)
    if here is not root and _tied_share(here) >= THIN_WRAPPER_SHARE:
        return here
    carrier = owner
    for above in owner.ancestors():  # the largest part of a block that is nearly all tied
        if above is here.parent or not _is_of_block(draft, above) or _tied_share(above) < THIN_WRAPPER_SHARE:
            break
        carrier = above
    return next((n for n in (carrier, *carrier.ancestors()) if n is not root and draft.can_be_unit(n)), None)


def _bring_to_root(draft: PlanDraft, weight: Weight) -> None:
    """Dissolve the units that hold a tied weight, so that the root has it; in blocks, replicate the weight instead."""
    units = {draft.unit_of(owner) for owner in weight.owners} - {draft.root}
    if any(_is_of_block(draft, node) for unit in units for node in unit.nodes):
        draft.replicate([weight])
        return
    for unit in units:
        draft.dissolve(unit)


def _tied_share(node: ModuleNode) -> float:
    """The share of a node's parameters that are tied to something outside it."""
    inside = set(node.walk())
    weights = [weight for below in inside for weight in below.own]
    return sum(w.numel for w in weights if not inside.issuperset(w.owners)) / max(node.extent, 1)


# ---- arranging: the tail, dtypes, resharding ----


def join_tail(draft: PlanDraft) -> None:
    """Gather the final norm with the head and keep both: backward begins with them."""
    head, norm = draft.blocks.head, draft.blocks.final_norm
    if not draft.policy.group_tail or head is None:
        return
    unit = draft.unit_of(draft.tree.by_fqn[head.fqn])
    if unit is draft.root or any(draft.is_block(node) for node in unit.nodes):
        return
    if unit.reshard is not False:
        unit.reshard = False
    node = draft.tree.by_fqn[norm.fqn] if norm else None
    if node is None or not draft.is_in_root(node) or not draft.can_be_unit(node):
        return
    if all(len(weight.owners) == 1 for weight in node.own):  # a tied norm stays with its other owners
        draft.extend(unit, node)
        unit.reason = f"{unit.reason}, with the final norm"


def part_dtypes(draft: PlanDraft) -> None:
    """Where a unit has trainable parameters of several dtypes, give all but one dtype units of their own inside it.

    The most frequent dtype stays. Parameters of other dtypes that share a module with it cannot be parted, and are
    replicated. Where they are more than a hundredth of the unit, the dtype with most such parameters stays instead.
    """
    trainable: dict[DraftUnit, dict[torch.dtype, list[Weight]]] = {}
    for weight in draft.tree.weights:
        if weight.requires_grad and not draft.is_replicated(weight):
            by_dtype = trainable.setdefault(draft.unit_of(weight.owners[0]), {})
            by_dtype.setdefault(weight.dtype, []).append(weight)
    for unit, by_dtype in trainable.items():
        if len(by_dtype) == 1:
            continue
        fixed = {dtype: sum(w.numel for w in _inseparable(draft, weights)) for dtype, weights in by_dtype.items()}
        held = {dtype: sum(weight.numel for weight in weights) for dtype, weights in by_dtype.items()}
        stays = max(held, key=lambda dtype: held[dtype])
        if sum(fixed.values()) - fixed[stays] > _MAX_REPLICATED_SHARE * sum(held.values()):
            stays = max(fixed, key=lambda dtype: (fixed[dtype], held[dtype]))
        for dtype in [dtype for dtype in by_dtype if dtype is not stays]:
            _move_inside(draft, by_dtype[dtype], unit, dtype)


def override_reshard(draft: PlanDraft) -> None:
    """Set `reshard_after_forward` of the finished units as the policy says."""
    for pattern, value in draft.policy.reshard_after_forward.items():
        chosen = [unit for unit in draft.units() if any(fnmatchcase(node.fqn, pattern) for node in unit.nodes)]
        if not chosen:
            names = sorted({node.fqn for unit in draft.units() for node in unit.nodes})
            draft.problems.append(
                f"reshard_after_forward: {pattern!r} matches no unit; units are {listed(map(repr, names))}."
            )
        for unit in chosen:
            unit.reshard = value


def _move_inside(draft: PlanDraft, weights: list[Weight], unit: DraftUnit, dtype: torch.dtype) -> None:
    """Move weights into a new unit inside `unit`; replicate those that cannot be moved."""
    left = _inseparable(draft, weights)
    draft.add_unit(
        _separable_owners(draft, weights),
        True if unit.reshard is None else unit.reshard,
        f"{dtype_name(dtype)} parameters inside a unit of another dtype",
    )
    draft.replicate(left)


def _separable_owners(draft: PlanDraft, weights: list[Weight]) -> dict[ModuleNode, None]:
    """The owners of the weights, in order, that can carry a unit and hold no other trainable weights."""
    wanted = set(weights)
    return {
        owner: None
        for weight in weights
        for owner in weight.owners
        if draft.can_be_unit(owner)
        and draft.unit_at(owner) is None
        and all(w in wanted for below in owner.walk() for w in below.own if w.requires_grad)
    }


def _inseparable(draft: PlanDraft, weights: list[Weight]) -> list[Weight]:
    """The weights with an owner that cannot carry a unit of these weights alone."""
    owners = _separable_owners(draft, weights)
    return [weight for weight in weights if any(owner not in owners for owner in weight.owners)]
