"""A wrap plan as PyTorch's FSDP1 wrap policy.

FSDP1 lacks some of what FSDP2 has, which changes a plan:

    grouped units      FSDP1 wraps single modules. Each member of a group ([final norm, head]) is its own unit.
    tied parameters    must lie in one flat parameter, so units that hold one are dissolved into the unit of their
                       lowest common ancestor, as a rule the root.
    whole parameters   (0-d, `replicate`) are refused.
    resharding         follows `sharding_strategy`, the same for all units; to an int, it does not exist.
    one dtype          per unit, also for frozen parameters.
"""

from torch import nn

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import ModuleTree, class_name
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.policy import WrapPolicy, as_policy
from hf_fsdp_tools.planning.rules import check_wrap_plan
from hf_fsdp_tools.text import dtype_name, listed


class HybridAutoWrapPolicy:
    """The units of a wrap plan as an FSDP1 auto-wrap policy for one model; `hybrid_auto_wrap_policy` makes it.

    Call it as `(module, recurse, nonwrapped_numel) -> bool`, alone or in `functools.partial(_or_policy, policies=[…])`.
    It knows the modules of its model by identity: make it after adapters are added. `units` are the fqns of the modules
    to wrap, children before parents, without the root, which FSDP1 always wraps.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan) -> None:
        tree = ModuleTree(model)
        names = _unit_names(tree, plan)
        _refuse_mixed_dtypes(tree, names, plan.model_class)
        self.plan, self._model = plan, model
        self.units = tuple(name for unit in plan.units for name in unit.modules if name in names and name)
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

    def begins_unit(self, module: nn.Module) -> bool:
        """Whether FSDP1 wraps this very module, the root included."""
        return module in self._modules or module is self._model


def hybrid_auto_wrap_policy(
    model: nn.Module, *, plan: WrapPlan | None = None, policy: WrapPolicy | None = None
) -> HybridAutoWrapPolicy:
    """The wrap plan of `model` as an FSDP1 auto-wrap policy: a callable `(module, recurse, nonwrapped_numel) -> bool`.

    The units are those of the plan, as far as FSDP1 can make them. Nothing is communicated.

    Args:
        model: not wrapped yet; any device, meta included.
        plan: the units; None makes the plan from `policy`.
        policy: as in `make_wrap_plan`, of which it makes the plan; None means `WrapPolicy()`.

    Raises:
        WrapPlanError: the plan breaks a rule for this model, or needs what FSDP1 lacks; all such units are listed.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> policy = hybrid_auto_wrap_policy(model)  # FullyShardedDataParallel(model, auto_wrap_policy=policy)
        >>> policy(model.model.layers[0], recurse=False, nonwrapped_numel=0)
        True
    """
    if plan is None:
        plan = make_wrap_plan(model, policy=as_policy(policy) or WrapPolicy())
    elif problems := check_wrap_plan(model, plan):
        raise WrapPlanError(f"The plan does not fit {class_name(model)}: " + "; ".join(problems))
    every = {unit.modules[0] or "(root)": unit.reshard_after_forward for unit in plan.units}
    if degrees := [f"{name} ({to})" for name, to in every.items() if to not in (None, True, False)]:
        raise WrapPlanError(
            f"FSDP1 cannot reshard to a smaller world, as {listed(degrees)} ask for. Set reshard_after_forward to True "
            "or False for them, or use FSDP2 (shard_model)."
        )
    if plan.replicated:
        raise WrapPlanError(
            f"FSDP1 shards whole units, and {listed(plan.replicated)} of {plan.model_class} must stay whole on every "
            "rank (0-d, or in `replicate`). Use FSDP2 (shard_model)."
        )
    return HybridAutoWrapPolicy(model, plan)


def _unit_names(tree: ModuleTree, plan: WrapPlan) -> set[str]:
    """The modules of a plan that can begin a unit of FSDP1: none parts the owners of a tied parameter."""
    names = {name for unit in plan.units for name in unit.modules}
    for weight in tree.weights:
        paths = [[owner, *owner.ancestors()] for owner in weight.owners]
        common = next(node for node in paths[0] if all(node in path for path in paths))
        if len(paths) > 1:
            names -= {node.fqn for path in paths for node in path[: path.index(common)]}
    return names


def _refuse_mixed_dtypes(tree: ModuleTree, names: set[str], model_class: str) -> None:
    held: dict[str, set[str]] = {}
    for weight in tree.weights:  # a tied one counts at its first owner, where FSDP1 flattens it
        owner = weight.owners[0]
        unit = next(node.fqn for node in (owner, *owner.ancestors()) if node.fqn in names)
        held.setdefault(unit, set()).add(dtype_name(weight.dtype))
    mixed = [f"{name or '(root)'} ({', '.join(sorted(dtypes))})" for name, dtypes in held.items() if len(dtypes) > 1]
    if mixed:
        raise WrapPlanError(
            f"FSDP1 needs one dtype per unit, frozen parameters included, but {len(mixed)} units of {model_class} mix "
            f"them: {listed(mixed)}. Cast the model to one dtype (adapters too) and let MixedPrecision compute in "
            "another, or use FSDP2 (shard_model)."
        )
