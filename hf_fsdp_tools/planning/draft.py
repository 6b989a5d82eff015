"""Units under construction: which module carries which unit, and the finished plan in order.

A draft is filled by the verbs of `choose` and rearranged by those of `arrange`, in the order of `make_wrap_plan`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import (
    ModuleNode,
    ModuleTree,
    Weight,
    has_forward,
)
from hf_fsdp_tools.planning.blocks import ModelBlocks
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.planning.rules import size_bound
from hf_fsdp_tools.planning.stacks import is_major, lists_of_experts

__all__ = ["THIN_WRAPPER_SHARE", "DraftUnit", "PlanDraft"]

THIN_WRAPPER_SHARE = 0.9
"""A module that is this much one part of it adds nothing but a norm, a bias or an adapter: the unit is the module. (assumed)"""


@dataclass(eq=False, slots=True)
class DraftUnit:
    """A unit under construction."""

    nodes: list[ModuleNode]
    reshard: bool | int | None
    reason: str


class PlanDraft:
    """Units under construction. A node belongs to the unit of the nearest module above it (or itself) that carries one."""

    def __init__(self, tree: ModuleTree, stacks: list[list[ModuleNode]], policy: HybridPolicy) -> None:
        self.tree, self.stacks, self.policy = tree, stacks, policy
        self.problems: list[str] = []
        self.bound = size_bound(tree, stacks)
        blocks = [block.extent for stack in stacks if is_major(tree, stack) for block in stack]
        given = policy.min_unit_params
        self.ceiling = min(self.bound, (max(blocks) if blocks else self.bound // 2) if given is None else given)
        self.floor = min(1e5, self.ceiling / 100) if policy.floor_params is None else policy.floor_params
        self.ceiling = max(self.ceiling, self.floor)
        self.root = DraftUnit([tree.root], None, "what no other unit holds")
        self.by_module: dict[int, DraftUnit] = {id(tree.root.module): self.root}
        self.replicated: dict[int, Weight] = {id(w): w for w in tree.weights if w.ndim == 0}
        self.blocks = {id(block) for stack in stacks for block in stack}
        self.in_block = {id(node) for stack in stacks for block in stack for node in block.walk() if node is not block}
        self.holders = {id(above) for stack in stacks for block in stack for above in block.ancestors()}
        self.fixed = self._fixed_nodes()
        self.order = {id(node): index for index, node in enumerate(tree)}

    def unit_of(self, node: ModuleNode) -> DraftUnit:
        """The unit that holds what is registered on this node."""
        for above in (node, *node.ancestors()):
            if unit := self.by_module.get(id(above.module)):
                return unit
        return self.root

    def can_run(self, node: ModuleNode) -> bool:
        return has_forward(node.module) and id(node) not in self.fixed

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

    def carry(self, node: ModuleNode, unit: DraftUnit) -> None:
        if id(node.module) not in self.by_module:
            unit.nodes.append(node)
            self.by_module[id(node.module)] = unit
            self.holders.update(id(above) for above in node.ancestors())

    def add(self, nodes: Iterable[ModuleNode], reshard: bool | int | None, reason: str) -> DraftUnit:
        unit = DraftUnit([], reshard, reason)
        for node in nodes:
            self.carry(node, unit)
        return unit

    def widened(self, node: ModuleNode) -> ModuleNode:
        """The outermost module that adds next to nothing to `node`: an adapter's wrapper, an embedding with its norm."""
        for above in node.ancestors():
            if above is self.tree.root or id(above) in self.holders or node.size < THIN_WRAPPER_SHARE * above.size:
                break
            if self.can_run(above):
                node = above
        return node

    def units(self) -> list[DraftUnit]:
        return list({id(unit): unit for unit in self.by_module.values() if unit.nodes}.values())

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

    def _in_order(self) -> list[DraftUnit]:
        """Units with children before parents, otherwise in registration order."""
        inside: dict[int, list[DraftUnit]] = {}
        for node in self.tree:
            if node.parent and id(node.module) in self.by_module:
                inside.setdefault(id(self.unit_of(node.parent)), []).append(self.by_module[id(node.module)])
        ordered: dict[int, DraftUnit] = {}

        def emit(unit: DraftUnit, above: tuple[int, ...]) -> None:
            for child in inside.get(id(unit), ()):
                if id(child) not in ordered and id(child) not in above and child is not unit:
                    emit(child, (*above, id(unit)))
            ordered[id(unit)] = unit

        emit(self.root, ())
        return list(ordered.values())

    def _by_first_use(self, unit: DraftUnit, blocks: ModelBlocks) -> list[ModuleNode]:
        """Modules of a unit with embeddings first, then in registration order: the first one to run gathers the unit."""
        tables = {part.fqn for part in blocks.embeddings}
        if len(unit.nodes) == 1:
            return unit.nodes
        return sorted(
            unit.nodes,
            key=lambda node: (not any(below.fqn in tables for below in node.walk()), self.order[id(node)]),
        )
