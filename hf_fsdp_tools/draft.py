"""Units under construction: the steps by which a wrap plan is drafted, each one verb of `make_wrap_plan`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils import parametrize

from hf_fsdp_tools.blocks import ModelBlocks
from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.policy import HybridPolicy, matching_nodes, nearest_names
from hf_fsdp_tools.rules import size_bound
from hf_fsdp_tools.stacks import is_major, lists_of_experts
from hf_fsdp_tools.tree import ModuleNode, ModuleTree, Weight, class_name, has_forward

__all__ = ["PlanDraft"]

_THIN_WRAPPER_SHARE = 0.9
"""A module that is this much one part of it adds nothing but a norm, a bias or an adapter: the unit is the module. (assumed)"""

_WHOLE_SHARE = 0.01
"""Share of a unit that may stay whole on every rank because it shares its modules with another dtype. (assumed)"""

_END_PARAMS = 2e7
"""An embedding or head of this many parameters (40 MB in bf16), or of a tenth of the ceiling, does not stay in the root, which
is gathered from the first forward to the last backward. (the classic threshold of size policies)"""


@dataclass(eq=False, slots=True)
class _Unit:
    """A unit under construction."""

    nodes: list[ModuleNode]
    reshard: bool | int | None
    reason: str


class PlanDraft:
    """Units under construction. A node belongs to the unit of the nearest module above it (or itself) that carries one.

    The verbs change the draft in place and are called in the order in which they stand here; `finish` returns the plan.
    """

    def __init__(self, tree: ModuleTree, stacks: list[list[ModuleNode]], policy: HybridPolicy) -> None:
        self.tree, self.stacks, self.policy = tree, stacks, policy
        self.problems: list[str] = []
        self.bound = size_bound(tree, stacks)
        blocks = [block.extent for stack in stacks if is_major(tree, stack) for block in stack]
        given = policy.min_unit_params
        self.ceiling = min(self.bound, (max(blocks) if blocks else self.bound // 2) if given is None else given)
        self.floor = min(1e5, self.ceiling / 100) if policy.floor_params is None else policy.floor_params
        self.ceiling = max(self.ceiling, self.floor)
        self.root = _Unit([tree.root], None, "what no other unit holds")
        self.by_module: dict[int, _Unit] = {id(tree.root.module): self.root}
        self.replicated: dict[int, Weight] = {id(w): w for w in tree.weights if w.ndim == 0}
        self.blocks = {id(block) for stack in stacks for block in stack}
        self.in_block = {id(node) for stack in stacks for block in stack for node in block.walk() if node is not block}
        self.holders = {id(above) for stack in stacks for block in stack for above in block.ancestors()}
        self.fixed = self._fixed_nodes()
        self.order = {id(node): index for index, node in enumerate(tree)}

    # ---- the verbs, in the order of make_wrap_plan -------------------------------------------------------------------

    def replicate(self) -> None:
        """Keep what the policy names (and 0-d parameters, which FSDP refuses) out of every unit."""
        for pattern in self.policy.replicate:
            found = [weight for weight in self.tree.weights if any(_below(name, pattern) for name in weight.names)]
            if not found:
                self.problems.append(f"replicate: {pattern!r} matches nothing; {nearest_names(self.tree, pattern)}")
            self.replicated.update((id(weight), weight) for weight in found)

    def add_chosen_units(self) -> None:
        """Add what the policy's predicates and block types match."""
        for node in self.tree if self.policy.units else ():
            answers = (predicate(node.fqn, node.module) for predicate in self.policy.units)
            if answer := next(filter(None, answers), None):
                options = dict(answer) if isinstance(answer, Mapping) else {}
                if unknown := sorted(options.keys() - {"reshard_after_forward", "reason"}):
                    self.problems.append(
                        f"units: the predicate gave {node.fqn!r} the unknown options {', '.join(unknown)}; "
                        "known are reshard_after_forward and reason."
                    )
                reason = str(options.get("reason", "chosen by a predicate"))
                self._add_chosen(node, options.get("reshard_after_forward", True), reason)
        for wanted in self.policy.block_types or ():
            name = wanted if isinstance(wanted, str) else wanted.__name__
            for node in matching_nodes(self.tree, wanted, problems=self.problems):
                self._add_chosen(node, True, f"chosen by block_types: {name}")

    def add_blocks(self) -> None:
        """Make every block of a major stack a unit, and of a minor one where the stack exceeds the ceiling."""
        for stack in self.stacks:
            if not is_major(self.tree, stack) and sum(block.size for block in stack) <= self.ceiling:
                continue
            for block in stack:
                if self.unit_of(block) is self.root or id(block) in self.holders:
                    self._add(_runnable(block), True, f"block {class_name(block.module)}")

    def add_experts(self) -> None:
        """Inside blocks, make experts a unit where they alone are a large working set: fused, or the list as a whole."""
        for block in (block for stack in self.stacks for block in stack if id(block.module) in self.by_module):
            if block.extent < self.policy.expert_unit_params or self._mixes_dtypes(block):
                continue
            fused = [node for node in block.walk() if any(weight.ndim > 2 for weight in node.own)]
            for node in [*fused, *lists_of_experts(block)]:
                if node.extent < self.policy.expert_unit_params:
                    continue
                home = next((n for n in (node, *node.ancestors()) if self._can_run(n)), block)
                if home is not block and id(home.module) not in self.by_module:
                    self._add([home], True, f"experts of {class_name(block.module)}")

    def add_ends(self, blocks: ModelBlocks) -> None:
        """Make the largest embedding and the head units, so that the root, which stays gathered, does not hold them."""
        for part in (*blocks.embeddings[:1], *([blocks.head] if blocks.head else [])):
            node = self.tree.by_fqn[part.fqn]
            if (
                self.unit_of(node) is self.root
                and self._can_run(node)
                and node.size >= min(_END_PARAMS, self.ceiling / 10)
            ):
                self._add([self._widened(node)], True, "embedding" if part is not blocks.head else "head")

    def add_by_size(self) -> None:
        """Outside blocks, make a module a unit when what it holds beside other units exceeds the ceiling."""
        rest: dict[int, int] = {}
        for node in reversed(self.tree.nodes):  # children before parents
            rest[id(node)] = sum(rest[id(child)] for child in node.children) + sum(
                weight.numel
                for weight in {id(w): w for w in node.own}.values()
                if weight.owners[0] is node and id(weight) not in self.replicated
            )
            if id(node.module) in self.by_module and node.parent:
                rest[id(node)] = 0
            elif rest[id(node)] > self.ceiling and id(node) not in self.in_block:
                self._cut(node, rest)

    def add_own_roots(self) -> None:
        """Where the root never runs (a holder of several models), give each model below a unit: it is a root when it runs."""
        if not has_forward(self.tree.root.module):
            for node in _runnable(self.tree.root):
                if self.unit_of(node) is self.root:
                    self._add([node], None, "runs by itself: the model's own forward never does")

    def join_ties(self) -> None:
        """Bring every tied set into one unit that gathers at its first use and is kept: the head needs it again."""
        for _ in range(len(self.tree.weights)):  # a new carrier can part an older set, so repeat until nothing moves
            parted = [
                weight
                for weight in self.tree.weights
                if len(weight.owners) > 1
                and id(weight) not in self.replicated
                and len({id(self.unit_of(owner)) for owner in weight.owners}) > 1
            ]
            if not parted:
                return
            for weight in parted:
                self._join(weight)

    def join_tail(self, blocks: ModelBlocks) -> None:
        """Gather the final norm with the head and keep both: backward begins with them."""
        if not self.policy.group_tail or blocks.head is None:
            return
        unit = self.unit_of(self.tree.by_fqn[blocks.head.fqn])
        if unit is self.root or any(id(node) in self.blocks for node in unit.nodes):
            return
        unit.reshard = False
        norm = self.tree.by_fqn[blocks.final_norm.fqn] if blocks.final_norm else None
        if norm is None or self.unit_of(norm) is not self.root or id(norm) in self.fixed:
            return
        if all(len(weight.owners) == 1 for weight in norm.own):  # a tied norm stays with its other owners
            self._carry(norm, unit)
            unit.reason = f"{unit.reason}, with the final norm"

    def part_dtypes(self) -> None:
        """Where a unit has trainable parameters of several dtypes, give all but one dtype units of their own inside it.

        The most frequent dtype stays, unless others are so mixed with it on single modules that more than a hundredth of the
        unit could not be parted and would stay whole on every rank.
        """
        trainable: dict[int, dict[torch.dtype, list[Weight]]] = {}
        units: dict[int, _Unit] = {}
        for weight in self.tree.weights:
            if weight.requires_grad and id(weight) not in self.replicated:
                unit = self.unit_of(weight.owners[0])
                units[id(unit)] = unit
                trainable.setdefault(id(unit), {}).setdefault(weight.dtype, []).append(weight)
        for key, by_dtype in trainable.items():
            if len(by_dtype) == 1:
                continue
            fixed = {dtype: self._fixed_params(weights) for dtype, weights in by_dtype.items()}
            held = {dtype: sum(weight.numel for weight in weights) for dtype, weights in by_dtype.items()}
            stays = max(held, key=lambda dtype: held[dtype])
            if sum(fixed.values()) - fixed[stays] > _WHOLE_SHARE * sum(held.values()):
                stays = max(fixed, key=lambda dtype: (fixed[dtype], held[dtype]))
            for dtype in [dtype for dtype in by_dtype if dtype is not stays]:
                self._part(by_dtype[dtype], units[key], dtype)

    def override_reshard(self) -> None:
        """Lay the policy's reshard_after_forward over the finished units."""
        for pattern, value in self.policy.reshard_after_forward.items():
            found = [unit for unit in self._units() if any(fnmatchcase(node.fqn, pattern) for node in unit.nodes)]
            if not found:
                names = sorted({node.fqn for unit in self._units() for node in unit.nodes})
                self.problems.append(
                    f"reshard_after_forward: {pattern!r} matches no unit; units are {', '.join(names[:6])}, …"
                )
            for unit in found:
                unit.reshard = value

    def finish(self, blocks: ModelBlocks) -> WrapPlan:
        """The units in order, with their sizes.

        Raises:
            WrapPlanError: The policy named things that are not there; every one is listed.
        """
        if self.problems:
            raise WrapPlanError("The policy does not fit the model:\n  - " + "\n  - ".join(self.problems))
        held: dict[int, list[Weight]] = {}
        for weight in self.tree.weights:
            if id(weight) not in self.replicated:
                held.setdefault(id(self.unit_of(weight.owners[0])), []).append(weight)
        units = [
            WrapUnit(
                modules=tuple(node.fqn for node in self._by_first_use(unit, blocks)),
                reshard_after_forward=unit.reshard,
                num_params=sum(weight.numel for weight in held.get(id(unit), ())),
                num_bytes=sum(weight.nbytes for weight in held.get(id(unit), ())),
                reason=unit.reason,
            )
            for unit in self._in_order()
            if id(unit) in held or unit is self.root
        ]
        return WrapPlan(
            units=tuple(units),
            replicated=tuple(weight.names[0] for weight in self.replicated.values()),
            model_class=blocks.model_class,
            num_params=self.tree.num_params,
            notes=tuple(self._notes(blocks)),
        )

    def _notes(self, blocks: ModelBlocks) -> Iterator[str]:
        if not blocks.major_stacks:
            yield "no stack of blocks holds 10 % of the model: units are chosen by size"
        if self.replicated:
            kept = self.replicated.values()
            yield (
                f"{len(kept)} parameters ({sum(w.nbytes for w in kept):,} bytes) stay whole on every rank: FSDP cannot shard "
                "0-d ones, nor two dtypes on one module, and leaves out what the policy names"
            )

    # ---- what the verbs are made of ----------------------------------------------------------------------------------

    def unit_of(self, node: ModuleNode) -> _Unit:
        """The unit that holds what is registered on this node."""
        for above in (node, *node.ancestors()):
            if unit := self.by_module.get(id(above.module)):
                return unit
        return self.root

    def _mixes_dtypes(self, block: ModuleNode) -> bool:
        """Whether the block gets a unit for its rarer dtype anyway: a third unit per block would not pay."""
        weights = (w for node in block.walk() for w in node.own if w.requires_grad and id(w) not in self.replicated)
        return len({weight.dtype for weight in weights}) > 1

    def _fixed_nodes(self) -> set[int]:
        """Nodes that must not be units: weights read without a forward call, and modules that only some ranks run."""
        fixed = [
            below
            for node in self.tree
            if isinstance(node.module, nn.MultiheadAttention) or parametrize.is_parametrized(node.module)
            for below in node.walk()
            if below is not node
        ]
        blocks = (block for stack in self.stacks for block in stack)
        experts = (experts for block in blocks for experts in lists_of_experts(block))
        return {id(node) for node in fixed} | {id(node) for each in experts for node in each.walk()}

    def _can_run(self, node: ModuleNode) -> bool:
        return has_forward(node.module) and id(node) not in self.fixed

    def _carry(self, node: ModuleNode, unit: _Unit) -> None:
        if id(node.module) not in self.by_module:
            unit.nodes.append(node)
            self.by_module[id(node.module)] = unit
            self.holders.update(id(above) for above in node.ancestors())

    def _add(self, nodes: Iterable[ModuleNode], reshard: bool | int | None, reason: str) -> _Unit:
        unit = _Unit([], reshard, reason)
        for node in nodes:
            self._carry(node, unit)
        return unit

    def _add_chosen(self, node: ModuleNode, reshard: bool | int | None, reason: str) -> None:
        if node is self.tree.root or not node.extent:
            return
        if not has_forward(node.module):
            self.problems.append(
                f"Rule 4: {node.fqn!r} is a {class_name(node.module)}, whose forward never runs; choose its members."
            )
        else:
            self._add([node], reshard, reason)

    def _cut(self, node: ModuleNode, rest: dict[int, int]) -> None:
        """Make `node` a unit, or, where it holds units already or is too large, its largest parts until it is small."""
        is_root = node is self.tree.root
        if not is_root and not self._can_run(node):
            return  # a container: the module above decides
        if not is_root and id(node) not in self.holders and rest[id(node)] <= self.bound:
            self._add([self._widened(node)], True, "above the size ceiling")
            rest[id(node)] = 0
            return
        parts = sorted(self._parts(node, rest), key=lambda part: rest[id(part)])
        while rest[id(node)] > self.ceiling and parts:
            if rest[id(parts[-1])] < self.floor and rest[id(node)] <= self.bound:
                break  # what is left is too small for collectives of its own, and the rules allow it here
            part = self._widened(parts.pop())
            if id(part.module) not in self.by_module:
                self._add([part], True, "largest part of what exceeds the size ceiling")
                rest[id(node)] -= rest[id(part)]
                rest.update((id(below), 0) for below in part.walk())
        if rest[id(node)] > self.ceiling and not is_root:
            self._add([node], True, "above the size ceiling")
            rest[id(node)] = 0

    def _parts(self, node: ModuleNode, rest: dict[int, int]) -> Iterator[ModuleNode]:
        """The nearest modules below `node` that could be units and hold something."""
        for child in node.children:
            if not rest.get(id(child)) or id(child) in self.in_block:
                continue
            if self._can_run(child) and id(child) not in self.holders:
                yield child
            else:
                yield from self._parts(child, rest)

    def _widened(self, node: ModuleNode) -> ModuleNode:
        """The outermost module that adds next to nothing to `node`: an adapter's wrapper, an embedding with its norm."""
        for above in node.ancestors():
            if above is self.tree.root or id(above) in self.holders or node.size < _THIN_WRAPPER_SHARE * above.size:
                break
            if self._can_run(above):
                node = above
        return node

    def _join(self, weight: Weight) -> None:
        carriers = [carrier for owner in weight.owners if (carrier := self._tie_carrier(owner)) is not None]
        if len(carriers) < len(weight.owners):  # registered on the root or where nothing runs
            self._bring_to_root(weight)
            return
        in_blocks = any(id(carrier) in self.in_block or id(carrier) in self.blocks for carrier in carriers)
        joined = _Unit([], in_blocks, f"tied: {weight.names[0]}")
        for carrier in carriers:
            unit = self.by_module.get(id(carrier.module))
            if unit is None:
                self._carry(carrier, joined)
            elif unit is not joined:
                joined.nodes += unit.nodes
                self.by_module.update((id(node.module), joined) for node in unit.nodes)
        modules = {id(node.module) for node in joined.nodes}
        joined.nodes = [n for n in joined.nodes if not any(id(above.module) in modules for above in n.ancestors())]

    def _tie_carrier(self, owner: ModuleNode) -> ModuleNode | None:
        """The module through which an owner of a tied weight joins the others; None where only the root could."""
        here = next((n for n in (owner, *owner.ancestors()) if id(n.module) in self.by_module), self.tree.root)
        if here is not self.tree.root and _tied_share(here) >= _THIN_WRAPPER_SHARE:
            return here
        carrier = owner
        for above in owner.ancestors():  # the largest part of a block that is nearly all tied
            in_block = id(above) in self.in_block or id(above) in self.blocks
            if above is here.parent or not in_block or _tied_share(above) < _THIN_WRAPPER_SHARE:
                break
            carrier = above
        return next((n for n in (carrier, *carrier.ancestors()) if n is not self.tree.root and self._can_run(n)), None)

    def _bring_to_root(self, weight: Weight) -> None:
        """Dissolve the size-based units that hold the tied weight; inside blocks, keep the weight whole on every rank."""
        units = [unit for unit in (self.unit_of(owner) for owner in weight.owners) if unit is not self.root]
        if any(id(node) in self.blocks or id(node) in self.in_block for unit in units for node in unit.nodes):
            self.replicated[id(weight)] = weight
            return
        for node in (node for unit in units for node in unit.nodes):
            self.by_module.pop(id(node.module), None)

    def _part(self, weights: list[Weight], unit: _Unit, dtype: torch.dtype) -> None:
        """Move weights into a unit inside `unit`, and keep those whole that cannot be moved."""
        owners = self._separable_owners(weights)
        self._add(
            owners.values(),
            True if unit.reshard is None else unit.reshard,
            f"{str(dtype).removeprefix('torch.')} parameters inside a unit of another dtype",
        )
        left = [weight for weight in weights if any(id(owner) not in owners for owner in weight.owners)]
        self.replicated.update((id(weight), weight) for weight in left)

    def _separable_owners(self, weights: list[Weight]) -> dict[int, ModuleNode]:
        """The modules that register these weights and, trainable, nothing else at or below them."""
        ids = {id(weight) for weight in weights}
        return {
            id(owner): owner
            for weight in weights
            for owner in weight.owners
            if self._can_run(owner)
            and id(owner.module) not in self.by_module
            and all(id(w) in ids for below in owner.walk() for w in below.own if w.requires_grad)
        }

    def _fixed_params(self, weights: list[Weight]) -> int:
        owners = self._separable_owners(weights)
        return sum(w.numel for w in weights if any(id(owner) not in owners for owner in w.owners))

    def _units(self) -> list[_Unit]:
        return list({id(unit): unit for unit in self.by_module.values() if unit.nodes}.values())

    def _in_order(self) -> list[_Unit]:
        """Units with children before parents, otherwise in registration order."""
        inside: dict[int, list[_Unit]] = {}
        for node in self.tree:
            if node.parent and id(node.module) in self.by_module:
                inside.setdefault(id(self.unit_of(node.parent)), []).append(self.by_module[id(node.module)])
        ordered: dict[int, _Unit] = {}

        def emit(unit: _Unit, above: tuple[int, ...]) -> None:
            for child in inside.get(id(unit), ()):
                if id(child) not in ordered and id(child) not in above and child is not unit:
                    emit(child, (*above, id(unit)))
            ordered[id(unit)] = unit

        emit(self.root, ())
        return list(ordered.values())

    def _by_first_use(self, unit: _Unit, blocks: ModelBlocks) -> list[ModuleNode]:
        """Modules of a unit with embeddings first, then in registration order: the first one to run gathers the unit."""
        tables = {part.fqn for part in blocks.embeddings}
        if len(unit.nodes) == 1:
            return unit.nodes
        return sorted(
            unit.nodes,
            key=lambda node: (not any(below.fqn in tables for below in node.walk()), self.order[id(node)]),
        )


def _below(name: str, pattern: str) -> bool:
    """Whether a parameter name, or a module that holds it, matches an fqn pattern."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _runnable(node: ModuleNode) -> list[ModuleNode]:
    """The node, or, where it has no forward (a plain holder of a block's parts), the nearest ones below that run."""
    if has_forward(node.module):
        return [node]
    return [below for child in node.children if child.extent for below in _runnable(child)]


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
