"""What becomes a unit: the policy's choices, blocks, experts, the ends, and whatever else is too large."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from hf_fsdp_tools.blocks import ModelBlocks
from hf_fsdp_tools.draft import PlanDraft
from hf_fsdp_tools.policy import matching_nodes, nearest_names
from hf_fsdp_tools.stacks import is_major, lists_of_experts
from hf_fsdp_tools.tree import ModuleNode, class_name, has_forward

__all__ = ["add_blocks", "add_by_size", "add_chosen_units", "add_ends", "add_experts", "add_own_roots", "replicate"]

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
