"""Make the wrap plan of a model: run the steps in their order, then check the rules."""

from collections.abc import Callable, Sequence

from torch import nn

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.draft import PlanDraft
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.policy import WrapPolicy, as_policy
from hf_fsdp_tools.planning.rules import broken_rules
from hf_fsdp_tools.planning.steps import (
    add_blocks,
    add_by_size,
    add_chosen_units,
    add_ends,
    add_experts,
    add_own_roots,
    join_tail,
    join_ties,
    override_reshard,
    part_dtypes,
    replicate_chosen,
)

STEPS: tuple[Callable[[PlanDraft], None], ...] = (
    # the user's choices come first: a module keeps the first unit that it gets
    replicate_chosen,
    add_chosen_units,
    # units from the model's structure: blocks, and large modules inside or outside blocks
    add_blocks,
    add_experts,
    add_ends,
    add_by_size,
    add_own_roots,
    # every module has its unit: parameters that must, or should, be gathered together or apart
    join_ties,
    join_tail,
    part_dtypes,
    # the units are final
    override_reshard,
)
"""The steps that make a plan, in the order in which they change the draft."""


def make_wrap_plan(
    model: nn.Module, *, policy: WrapPolicy | None = None, steps: Sequence[Callable[[PlanDraft], None]] = STEPS
) -> WrapPlan:
    """Decide which parameters of `model` FSDP gathers together, and why; return the plan.

    Only names, classes, shapes and dtypes are read, on any device, meta included. Any rank may call; nothing is
    communicated, and every rank gets the same plan (compare `WrapPlan.digest`).

    Args:
        model: any module, before FSDP is applied. Names in the plan are names in this model.
        policy: changes to the defaults; None for none. The name or class of a block, or several, mean a policy with
            these `block_types`.
        steps: functions that change the draft, in order; `STEPS` with your own among them (`docs/extending.md`). Every
            rank must give the same steps, and each step must do the same on every rank.

    Raises:
        BlockDetectionError: the model has no parameters.
        WrapPlanError: the policy names something that the model lacks, or the plan would break a rule of a correct
            plan; all problems are listed.

    Example:
        >>> plan = make_wrap_plan(build_meta_model("checkpoint"))
        >>> print(plan)
        LlamaForCausalLM: 45.9 K parameters in 5 units
        unit ...
    """
    return plan_with_tree(model, policy, steps)[0]


def plan_with_tree(
    model: nn.Module, policy: WrapPolicy | None = None, steps: Sequence[Callable[[PlanDraft], None]] = STEPS
) -> tuple[WrapPlan, ModuleTree]:
    """The plan of `make_wrap_plan`, and the tree of the model's modules for which its rules were checked."""
    draft = PlanDraft(model, as_policy(policy) or WrapPolicy())
    for step in steps:
        step(draft)
    plan = draft.finish()
    if broken := broken_rules(draft.tree, draft.stacks, plan):
        raise WrapPlanError(
            f"This policy gives {plan.model_class} a plan that breaks rules:\n  - "
            + "\n  - ".join(broken)
            + "\nChange block_types, units or replicate so that the named modules are units of their own, or not."
        )
    return plan, draft.tree
