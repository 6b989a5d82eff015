"""A wrap plan under construction: which module carries which unit, and the finished plan in order.

    carry       a module carries a unit if `fully_shard` will be given the module; several modules can carry one unit
    belong      a parameter belongs to the unit of the nearest module that carries one, from its own module upwards
    root unit   the unit of all other parameters; it stays gathered from the first forward to the last backward

A step of `steps` asks the draft questions and changes it by its verbs alone; the draft does the bookkeeping.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import MethodType

from torch import nn
from torch.nn.utils import parametrize

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import (
    ModuleNode,
    ModuleTree,
    Weight,
    has_forward,
    reads_given_table,
    reads_weight,
)
from hf_fsdp_tools.modeling.roles import lists_of_experts
from hf_fsdp_tools.planning.blocks import ModelBlocks, describe_blocks
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.policy import WrapPolicy
from hf_fsdp_tools.planning.rules import measured, size_bound
from hf_fsdp_tools.planning.stacks import find_blocks, major_blocks

THIN_WRAPPER_SHARE = 0.9
"""Share of a module's parameters in one part from which the rest is only a norm, a bias or an adapter. (assumed)"""


@dataclass(eq=False, slots=True)
class DraftUnit:
    """A unit under construction; compared by identity, so that it can be a key."""

    nodes: list[ModuleNode]
    """The nodes of the modules that carry it, none below another. Changed by the draft alone."""
    reshard: bool | int | None
    """`reshard_after_forward` of the unit, as in `WrapUnit`. A step may set it."""
    reason: str
    """Why it is a unit, for the plan's table. A step may set it."""


class PlanDraft:
    """The units of one model while steps choose and rearrange them; at first, the root unit holds all parameters."""

    tree: ModuleTree
    """The model as nodes and weights. Read once, never changed."""
    stacks: list[list[ModuleNode]]
    """The blocks of every stack, as nodes, in registration order. Never changed."""
    blocks: ModelBlocks
    """The same stacks as text and numbers, with the embeddings, the final norm and the head (by fqn). Never changed."""
    policy: WrapPolicy
    """The user's wishes. Never changed."""
    bound: int
    """Parameters that no finished unit may exceed (rule 2). Never changed."""
    floor: float
    """Parameters below which a module outside blocks stays with its neighbours. Never changed."""
    ceiling: float
    """Parameters above which a module outside blocks becomes a unit: the policy's `min_unit_params`, else the largest
    block; at most `bound`, at least `floor`. Never changed."""
    root: DraftUnit
    """The root unit, carried by the root of the tree. Always there, and never joined with another."""
    chosen: list[str]
    """Names of the modules that `block_types` chose. Steps append."""
    problems: list[str]
    """Wishes of the policy that the model cannot fulfil, as sentences with a cure. Steps append; `finish` raises."""

    def __init__(self, model: nn.Module, policy: WrapPolicy) -> None:
        self.tree, self.policy, self.problems, self.chosen = ModuleTree(model), policy, [], []
        self.stacks = find_blocks(self.tree)
        self.blocks = describe_blocks(self.tree, self.stacks)
        self._set_sizes()
        self.root = DraftUnit([self.tree.root], None, "what no other unit holds")
        blocks = list(chain.from_iterable(self.stacks))
        # The unit that each module carries, also below another module of the same unit (`nodes` leaves these out).
        self._unit_at: dict[nn.Module, DraftUnit] = {self.tree.root.module: self.root}
        self._replicated = dict.fromkeys(weight for weight in self.tree.weights if weight.ndim == 0 or not weight.numel)
        self._blocks = set(blocks)
        self._inside_blocks = {node for block in blocks for node in block.walk() if node is not block}
        self._above_units = {above for block in blocks for above in block.ancestors()}
        self._never_units = set(self._find_never_units())
        self._position = {node: index for index, node in enumerate(self.tree)}

    # ---- questions ----

    def unit_at(self, node: ModuleNode) -> DraftUnit | None:
        """The unit that a module carries itself, or None; the same for all nodes of a module registered twice."""
        return self._unit_at.get(node.module)

    def unit_of(self, node: ModuleNode) -> DraftUnit:
        """The unit to which the parameters registered on a module belong."""
        units = (self.unit_at(above) for above in (node, *node.ancestors()))
        return next((unit for unit in units if unit is not None), self.root)

    def units(self) -> list[DraftUnit]:
        """Every unit, the root first, then in the order in which they were added."""
        return list(dict.fromkeys(unit for unit in self._unit_at.values() if unit.nodes))

    def is_in_root(self, node: ModuleNode) -> bool:
        """Whether the parameters registered on a module belong to the root unit."""
        return self.unit_of(node) is self.root

    def is_block(self, node: ModuleNode) -> bool:
        """Whether the node is a block of a stack, major or minor."""
        return node in self._blocks

    def is_inside_block(self, node: ModuleNode) -> bool:
        """Whether the node lies below a block; a block that lies below another is both."""
        return node in self._inside_blocks

    def holds_units(self, node: ModuleNode) -> bool:
        """Whether a block, or a module that carries a unit, lies below the node; blocks count before they are units."""
        return node in self._above_units

    def can_be_unit(self, node: ModuleNode) -> bool:
        """Whether a module may carry a unit: its forward runs, on all ranks, and before its weights are read."""
        return has_forward(node.module) and node not in self._never_units

    def is_replicated(self, weight: Weight) -> bool:
        """Whether every rank keeps the weight whole; it then belongs to no unit."""
        return weight in self._replicated

    def widened(self, node: ModuleNode) -> ModuleNode:
        """The outermost module around `node` that adds few parameters: an adapter's wrapper, or an embedding's norm."""
        for above in node.ancestors():
            if above is self.tree.root or self.holds_units(above) or node.size < THIN_WRAPPER_SHARE * above.size:
                break
            if self._is_called_from_outside(node):
                break
            if self.can_be_unit(above):
                node = above
        return node

    # ---- verbs ----

    def add_unit(self, nodes: Iterable[ModuleNode], reshard: bool | int | None, reason: str) -> DraftUnit:
        """Make one unit that all of `nodes` carry; a module that carries a unit already keeps that one.

        For a plain `nn.Sequential` its members carry it: many models run these one by one, and never the Sequential.
        """
        unit = DraftUnit([], reshard, reason)
        for node in nodes:
            for member in _members(node):
                self.extend(unit, member)
        return unit

    def extend(self, unit: DraftUnit, node: ModuleNode) -> None:
        """Let `node` carry `unit` too, unless it carries one already."""
        if self.unit_at(node) is None:
            unit.nodes.append(node)
            self._unit_at[node.module] = unit
            self._above_units.update(node.ancestors())

    def join(self, nodes: Iterable[ModuleNode], reshard: bool | int | None, reason: str) -> None:
        """Make one unit of `nodes` and all units that they carry; of nested modules, the plan names the outermost."""
        joined = DraftUnit([], reshard, reason)
        for node in nodes:
            unit = self.unit_at(node)
            if unit is None:
                self.extend(joined, node)
            elif unit is not joined:
                joined.nodes += unit.nodes
                self._unit_at.update(dict.fromkeys(self._modules_of(unit), joined))
        modules = {node.module for node in joined.nodes}
        joined.nodes = [node for node in joined.nodes if modules.isdisjoint(a.module for a in node.ancestors())]

    def dissolve(self, unit: DraftUnit) -> None:
        """Remove a unit other than the root; its parameters then belong to the units above."""
        for module in self._modules_of(unit):
            del self._unit_at[module]

    def replicate(self, weights: Iterable[Weight]) -> None:
        """Keep weights whole on every rank, out of every unit."""
        self._replicated.update(dict.fromkeys(weights))

    # ---- the plan ----

    def finish(self) -> WrapPlan:
        """The plan: units with their sizes, children before parents; units without parameters are left out."""
        if self.problems:
            raise WrapPlanError("The policy does not fit the model:\n  - " + "\n  - ".join(self.problems))
        units = [
            WrapUnit(
                modules=tuple(node.fqn for node in self._by_first_use(unit)),
                reshard_after_forward=unit.reshard,
                num_params=0,
                num_bytes=0,
                reason=unit.reason,
            )
            for unit in self._children_first()
        ]
        plan = WrapPlan(
            units=tuple(units),
            replicated=tuple(weight.names[0] for weight in self._replicated),
            model_class=self.blocks.model_class,
            num_params=0,
            notes=tuple(self._notes()),
            blocks=tuple(self.chosen),
        )
        return measured(plan, self.tree)

    def _notes(self) -> Iterator[str]:
        if not self.blocks.major_stacks:
            yield "no stack of blocks holds 10 % of the model: units are chosen by size"
        if self._replicated:
            yield (
                f"{len(self._replicated)} parameters ({sum(w.nbytes for w in self._replicated):,} bytes) stay whole on "
                "every rank: FSDP cannot shard 0-d or empty ones, nor two dtypes on one module, and leaves out what "
                "the policy names"
            )

    def _children_first(self) -> list[DraftUnit]:
        """Units with children before parents, otherwise in registration order."""
        inside: dict[DraftUnit, list[DraftUnit]] = {}
        for node in self.tree:
            unit = self.unit_at(node)
            if node.parent and unit is not None:
                inside.setdefault(self.unit_of(node.parent), []).append(unit)
        ordered: dict[DraftUnit, None] = {}

        def emit(unit: DraftUnit, above: tuple[DraftUnit, ...]) -> None:
            for child in inside.get(unit, ()):
                if child not in ordered and child not in above and child is not unit:
                    emit(child, (*above, unit))
            ordered[unit] = None

        emit(self.root, ())
        return list(ordered)

    def _by_first_use(self, unit: DraftUnit) -> list[ModuleNode]:
        """The nodes of a unit, embeddings first, then in registration order: the first one to run gathers the unit."""
        tables = {part.fqn for part in self.blocks.embeddings}
        if len(unit.nodes) == 1:
            return unit.nodes
        return sorted(
            unit.nodes, key=lambda node: (not any(below.fqn in tables for below in node.walk()), self._position[node])
        )

    # ---- bookkeeping ----

    def _set_sizes(self) -> None:
        self.bound = size_bound(self.tree, self.stacks)
        usual = max((block.extent for block in major_blocks(self.tree, self.stacks)), default=self.bound // 2)
        ceiling = min(self.bound, usual if self.policy.min_unit_params is None else self.policy.min_unit_params)
        self.floor = min(1e5, ceiling / 100) if self.policy.floor_params is None else self.policy.floor_params
        self.ceiling = max(ceiling, self.floor)

    def _find_never_units(self) -> Iterator[ModuleNode]:
        """Yield nodes whose weights are read without a forward call of their own, and nodes that some ranks skip."""
        for node in self.tree:
            if isinstance(node.module, nn.MultiheadAttention) or parametrize.is_parametrized(node.module):
                yield from (below for below in node.walk() if below is not node)
            if reads_given_table(node.module):
                for other in self.tree:
                    if isinstance(other.module, nn.Embedding):
                        yield from (other, *other.ancestors())
            for child in node.children:
                # A tied table is in the unit of the head, which stays gathered from its first call on.
                is_tied = any(len(weight.owners) > 1 for weight in child.own)
                if not is_tied and reads_weight(node.module, child.module, child.name):
                    yield child
        for block in chain.from_iterable(self.stacks):
            for experts in lists_of_experts(block):
                yield from experts.walk()

    def _is_called_from_outside(self, node: ModuleNode) -> bool:
        """Whether a model above hands this embedding out (`get_input_embeddings`): a wrapper's forward may not run."""
        for above in node.ancestors():
            hand_out = getattr(above.module, "get_input_embeddings", None)
            if isinstance(hand_out, MethodType):
                with suppress(NotImplementedError, AttributeError):  # transformers' own answer where it finds none
                    if hand_out() is node.module:
                        return True
        return False

    def _modules_of(self, unit: DraftUnit) -> list[nn.Module]:
        """Every module that carries a unit, also below another module of the unit."""
        return [module for module, carried in self._unit_at.items() if carried is unit]


def _members(node: ModuleNode) -> Iterator[ModuleNode]:
    """Yield the members of a plain `nn.Sequential` that hold parameters, also inside further ones; or the node."""
    if type(node.module).forward is not nn.Sequential.forward or node.own:
        yield node
        return
    for child in node.children:
        if child.extent:
            yield from _members(child)
