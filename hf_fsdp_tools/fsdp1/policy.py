"""A wrap plan as PyTorch's FSDP1 wrap policy.

FSDP1 lacks some of what FSDP2 has, which changes a plan:

    grouped units      FSDP1 wraps single modules. Of a group ([final norm, head]) each member is its own unit.
    tied parameters    must lie in one flat parameter, so units that are (mostly) one of them are dissolved into the
                       unit that holds their lowest common ancestor, as a rule the root. Where that would dissolve a
                       whole block, the tied parameter stays whole on every rank instead.
    resharding         follows `sharding_strategy`, the same for all units; to an int, it does not exist.
    one dtype          per unit, also for frozen parameters.
"""

from torch import nn

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, Weight, class_name
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.policy import HybridPolicy, as_policy
from hf_fsdp_tools.planning.rules import check_wrap_plan
from hf_fsdp_tools.text import dtype_name, listed


class HybridAutoWrapPolicy:
    """The units of a wrap plan as an FSDP1 auto-wrap policy for one model; `hybrid_auto_wrap_policy` makes it.

    Call it as `(module, recurse, nonwrapped_numel) -> bool`, alone or in `functools.partial(_or_policy, policies=[…])`.
    It knows the modules of its model by identity: make it after adapters are added. `units` are the fqns of the modules
    to wrap, children before parents, without the root, which FSDP1 always wraps. `ignored` are the names of parameters
    that stay whole on every rank: pass `ignored_states=policy.ignored_states` to FSDP1, which does not reduce their
    gradients; `wrap_fsdp1` does.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan) -> None:
        tree = ModuleTree(model)
        units = _Units(tree, plan)
        units.join_ties()
        units.refuse_mixed_dtypes()
        self.plan, self._model = plan, model
        self.units = tuple(name for unit in plan.units for name in unit.modules if name in units.names and name)
        self.ignored = tuple(weight.names[0] for weight in units.ignored.values())
        self._modules = {tree.by_fqn[name].module for name in self.units}
        self._known = {node.module for node in tree}

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Answer FSDP1 whether a module is a unit; `nonwrapped_numel` is not used, because the plan knows all sizes."""
        if module not in self._known and not any(below in self._known for below in module.modules()):
            raise WrapPlanError(
                f"This policy was made for another {self.plan.model_class}: it does not know the "
                f"{class_name(module)} that FSDP asks about. Call hybrid_auto_wrap_policy with the very model that is "
                "wrapped, after adapters are added."
            )
        return recurse or module in self._modules

    @property
    def ignored_states(self) -> list[nn.Parameter]:
        """The live parameters behind `ignored`, for FSDP1's argument of this name."""
        return [self._model.get_parameter(name) for name in self.ignored]

    def begins_unit(self, module: nn.Module) -> bool:
        """Whether FSDP1 wraps this very module, the root included."""
        return module in self._modules or module is self._model


def hybrid_auto_wrap_policy(
    model: nn.Module, *, plan: WrapPlan | None = None, policy: HybridPolicy | None = None
) -> HybridAutoWrapPolicy:
    """The wrap plan of `model` as an FSDP1 auto-wrap policy: a callable `(module, recurse, nonwrapped_numel) -> bool`.

    The units are those of the plan, as far as FSDP1 can make them (see the top of this file). Any process may call;
    nothing is communicated.

    Args:
        model: not wrapped yet; any device, meta included.
        plan: the units; None makes the plan from `policy`.
        policy: as in `make_wrap_plan`, of which it makes the plan; None means `HybridPolicy()`.

    Raises:
        WrapPlanError: the plan breaks a rule for this model, or needs what FSDP1 lacks; all such units are listed.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> policy = hybrid_auto_wrap_policy(model)  # FullyShardedDataParallel(model, auto_wrap_policy=policy)
        >>> policy(model.model.layers[0], recurse=False, nonwrapped_numel=0)
        True
    """
    if plan is None:
        plan = make_wrap_plan(model, policy=as_policy(policy) or HybridPolicy())
    elif problems := check_wrap_plan(model, plan):
        raise WrapPlanError(f"The plan does not fit {class_name(model)}: " + "; ".join(problems))
    degrees = [
        f"{unit.modules[0] or '(root)'} ({unit.reshard_after_forward})"
        for unit in plan.units
        if unit.reshard_after_forward not in (None, True, False)
    ]
    if degrees:
        raise WrapPlanError(
            f"FSDP1 cannot reshard to a smaller world, as {listed(degrees)} ask for. Set reshard_after_forward to True "
            "or False for them, or use FSDP2 (shard_model)."
        )
    return HybridAutoWrapPolicy(model, plan)


class _Units:
    """The units of a plan that FSDP1 can have.

    `names` are those of the nodes that are units. A parameter belongs to the nearest unit at or above its node.
    """

    def __init__(self, tree: ModuleTree, plan: WrapPlan) -> None:
        self.tree, self.plan = tree, plan
        self.names = {name for unit in plan.units for name in unit.modules}
        kept = [tree.weight(name) for name in plan.replicated]
        self.ignored = {id(weight): weight for weight in kept}

    def join_ties(self) -> None:
        """Bring every tied parameter into one unit, or keep it whole on every rank."""
        tied = [weight for weight in self.tree.weights if len(weight.owners) > 1]
        for _ in tied:  # dissolving a unit can part another tied set, so repeat until nothing moves
            for weight in tied:
                if id(weight) not in self.ignored and len({self._unit_of(owner) for owner in weight.owners}) > 1:
                    self._join(weight)

    def refuse_mixed_dtypes(self) -> None:
        dtypes = {node: {dtype_name(weight.dtype) for weight in held} for node, held in self._held().items()}
        mixed = [
            f"{node.fqn or '(root)'} ({', '.join(sorted(names))})" for node, names in dtypes.items() if len(names) > 1
        ]
        if mixed:
            raise WrapPlanError(
                f"FSDP1 needs one dtype per unit, frozen parameters included, but {len(mixed)} units of "
                f"{self.plan.model_class} mix them: {listed(mixed)}. Cast the model to one dtype (adapters too) and "
                "let MixedPrecision compute in another, or use FSDP2 (shard_model)."
            )

    def _unit_of(self, node: ModuleNode) -> ModuleNode:
        """The node of the unit to which the parameters registered on `node` belong."""
        return next(above for above in (node, *node.ancestors()) if above.fqn in self.names)

    def _held(self) -> dict[ModuleNode, list[Weight]]:
        """The weights of each unit, by its node. A tied weight counts at its first owner, where FSDP1 flattens it."""
        held: dict[ModuleNode, list[Weight]] = {}
        for weight in self.tree.weights:
            if id(weight) not in self.ignored:
                held.setdefault(self._unit_of(weight.owners[0]), []).append(weight)
        return held

    def _join(self, weight: Weight) -> None:
        paths = [[owner, *owner.ancestors()] for owner in weight.owners]
        common = next(node for node in paths[0] if all(node in path for path in paths))
        between = [node for path in paths for node in path[: path.index(common)] if node.fqn in self.names]
        if all(_is_mostly_tied(node) for node in between):
            self.names -= {node.fqn for node in between}
        else:
            self.ignored[id(weight)] = weight


def _is_mostly_tied(node: ModuleNode) -> bool:
    """Whether at least half of the parameters below a node are tied to something outside it."""
    inside = {id(below) for below in node.walk()}
    below = {id(w): w for each in node.walk() for w in each.own}.values()
    tied = sum(w.numel for w in below if any(id(owner) not in inside for owner in w.owners))
    return 2 * tied >= sum(w.numel for w in below)
