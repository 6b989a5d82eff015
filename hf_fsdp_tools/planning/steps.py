"""What becomes a unit: the policy's choices, blocks, experts, the ends, and whatever else is too large."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from hf_fsdp_tools.modeling.module_tree import ModuleNode, Weight, class_name, has_forward
from hf_fsdp_tools.planning.blocks import ModelBlocks
from hf_fsdp_tools.planning.draft import THIN_WRAPPER_SHARE, DraftUnit, PlanDraft
from hf_fsdp_tools.planning.policy import matching_nodes, nearest_names
from hf_fsdp_tools.planning.stacks import is_major, lists_of_experts

__all__ = [
    "add_blocks",
    "add_by_size",
    "add_chosen_units",
    "add_ends",
    "add_experts",
    "add_own_roots",
    "join_tail",
    "join_ties",
    "override_reshard",
    "part_dtypes",
    "replicate",
]

_END_PARAMS = 2e7
"""An embedding or head of this many parameters (40 MB in bf16), or of a tenth of the ceiling, does not stay in the root, which
is gathered from the first forward to the last backward. (the classic threshold of size policies)"""


def replicate(draft: PlanDraft) -> None:
    """Keep what the policy names (and 0-d parameters, which FSDP refuses) out of every unit."""
    for pattern in draft.policy.replicate:
        found = [weight for weight in draft.tree.weights if any(_below(name, pattern) for name in weight.names)]
        if not found:
            draft.problems.append(f"replicate: {pattern!r} matches nothing; {nearest_names(draft.tree, pattern)}")
        draft.replicated.update((id(weight), weight) for weight in found)


def add_chosen_units(draft: PlanDraft) -> None:
    """Add what the policy's predicates and block types match."""
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


def add_blocks(draft: PlanDraft) -> None:
    """Make every block of a major stack a unit, and of a minor one where the stack exceeds the ceiling."""
    for stack in draft.stacks:
        if not is_major(draft.tree, stack) and sum(block.size for block in stack) <= draft.ceiling:
            continue
        for block in stack:
            if draft.unit_of(block) is draft.root or id(block) in draft.holders:
                draft.add(_runnable(block), True, f"block {class_name(block.module)}")


def add_experts(draft: PlanDraft) -> None:
    """Inside blocks, make experts a unit where they alone are a large working set: fused, or the list as a whole."""
    for block in (block for stack in draft.stacks for block in stack if id(block.module) in draft.by_module):
        if block.extent < draft.policy.expert_unit_params or _mixes_dtypes(draft, block):
            continue
        fused = [node for node in block.walk() if any(weight.ndim > 2 for weight in node.own)]
        for node in [*fused, *lists_of_experts(block)]:
            if node.extent < draft.policy.expert_unit_params:
                continue
            home = next((n for n in (node, *node.ancestors()) if draft.can_run(n)), block)
            if home is not block and id(home.module) not in draft.by_module:
                draft.add([home], True, f"experts of {class_name(block.module)}")


def add_ends(draft: PlanDraft, blocks: ModelBlocks) -> None:
    """Make the largest embedding and the head units, so that the root, which stays gathered, does not hold them."""
    for part in (*blocks.embeddings[:1], *([blocks.head] if blocks.head else [])):
        node = draft.tree.by_fqn[part.fqn]
        if (
            draft.unit_of(node) is draft.root
            and draft.can_run(node)
            and node.size >= min(_END_PARAMS, draft.ceiling / 10)
        ):
            draft.add([draft.widened(node)], True, "embedding" if part is not blocks.head else "head")


def add_by_size(draft: PlanDraft) -> None:
    """Outside blocks, make a module a unit when what it holds beside other units exceeds the ceiling."""
    rest: dict[int, int] = {}
    for node in reversed(draft.tree.nodes):  # children before parents
        rest[id(node)] = sum(rest[id(child)] for child in node.children) + sum(
            weight.numel
            for weight in {id(w): w for w in node.own}.values()
            if weight.owners[0] is node and id(weight) not in draft.replicated
        )
        if id(node.module) in draft.by_module and node.parent:
            rest[id(node)] = 0
        elif rest[id(node)] > draft.ceiling and id(node) not in draft.in_block:
            _cut(draft, node, rest)


def add_own_roots(draft: PlanDraft) -> None:
    """Where the root never runs (a holder of several models), give each model below a unit: it is a root when it runs."""
    if not has_forward(draft.tree.root.module):
        for node in _runnable(draft.tree.root):
            if draft.unit_of(node) is draft.root:
                draft.add([node], None, "runs by itself: the model's own forward never does")


def _add_chosen(draft: PlanDraft, node: ModuleNode, reshard: bool | int | None, reason: str) -> None:
    if node is draft.tree.root or not node.extent:
        return
    if not has_forward(node.module):
        draft.problems.append(
            f"Rule 4: {node.fqn!r} is a {class_name(node.module)}, whose forward never runs; choose its members."
        )
    else:
        draft.add([node], reshard, reason)


def _mixes_dtypes(draft: PlanDraft, block: ModuleNode) -> bool:
    """Whether the block gets a unit for its rarer dtype anyway: a third unit per block would not pay."""
    weights = (w for node in block.walk() for w in node.own if w.requires_grad and id(w) not in draft.replicated)
    return len({weight.dtype for weight in weights}) > 1


def _cut(draft: PlanDraft, node: ModuleNode, rest: dict[int, int]) -> None:
    """Make `node` a unit, or, where it holds units already or is too large, its largest parts until it is small."""
    is_root = node is draft.tree.root
    if not is_root and not draft.can_run(node):
        return  # a container: the module above decides
    if not is_root and id(node) not in draft.holders and rest[id(node)] <= draft.bound:
        draft.add([draft.widened(node)], True, "above the size ceiling")
        rest[id(node)] = 0
        return
    parts = sorted(_parts(draft, node, rest), key=lambda part: rest[id(part)])
    while rest[id(node)] > draft.ceiling and parts:
        if rest[id(parts[-1])] < draft.floor and rest[id(node)] <= draft.bound:
            break  # what is left is too small for collectives of its own, and the rules allow it here
        part = draft.widened(parts.pop())
        if id(part.module) not in draft.by_module:
            draft.add([part], True, "largest part of what exceeds the size ceiling")
            rest[id(node)] -= rest[id(part)]
            rest.update((id(below), 0) for below in part.walk())
    if rest[id(node)] > draft.ceiling and not is_root:
        draft.add([node], True, "above the size ceiling")
        rest[id(node)] = 0


def _parts(draft: PlanDraft, node: ModuleNode, rest: dict[int, int]) -> Iterator[ModuleNode]:
    """The nearest modules below `node` that could be units and hold something."""
    for child in node.children:
        if not rest.get(id(child)) or id(child) in draft.in_block:
            continue
        if draft.can_run(child) and id(child) not in draft.holders:
            yield child
        else:
            yield from _parts(draft, child, rest)


def _below(name: str, pattern: str) -> bool:
    """Whether a parameter name, or a module that holds it, matches an fqn pattern."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _runnable(node: ModuleNode) -> list[ModuleNode]:
    """The node, or, where it has no forward (a plain holder of a block's parts), the nearest ones below that run."""
    if has_forward(node.module):
        return [node]
    return [below for child in node.children if child.extent for below in _runnable(child)]


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
