"""The wrap plan of a model: the steps in their order, and the rules that hold whatever the steps did."""

from collections.abc import Callable, Sequence

from torch import nn

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.planning.draft import PlanDraft
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.policy import HybridPolicy
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

__all__ = ["STEPS", "make_wrap_plan"]

_DEFAULT_POLICY = HybridPolicy()

STEPS: tuple[Callable[[PlanDraft], None], ...] = (
    # what the user names comes first: a module keeps the first unit that it gets
    replicate_chosen,
    add_chosen_units,
    # what the model shows: blocks, and what is large inside or outside them
    add_blocks,
    add_experts,
    add_ends,
    add_by_size,
    add_own_roots,
    # the units of all modules are known: what must, or should, be gathered together or apart
    join_ties,
    join_tail,
    part_dtypes,
    # the units are final
    override_reshard,
)
"""The steps that make a plan, in the order in which they change the draft."""


def make_wrap_plan(
    model: nn.Module,
    *,
    policy: HybridPolicy = _DEFAULT_POLICY,
    steps: Sequence[Callable[[PlanDraft], None]] = STEPS,
) -> WrapPlan:
    """Decide what FSDP shards together in `model`, and why.

    Works on any device, meta included; only names, classes, shapes and dtypes are read and nothing is communicated.
    Every rank gets the same plan (`WrapPlan.digest` proves it). A 70B model takes well under a second.

    Args:
        model: any module, before FSDP is applied. Names in the plan are names in this model.
        policy: what to change about the defaults.
        steps: functions that change the draft, in order; your own among `STEPS` (`docs/extending.md`). Every rank must
            give the same ones, and each must do the same on every rank.

    Raises:
        BlockDetectionError: the model has no parameters.
        WrapPlanError: the policy names something the model does not have, or the plan would break a rule of a correct
            plan. All problems are listed at once.

    Example:
        >>> print(make_wrap_plan(model, policy=HybridPolicy(min_unit_params=2e7)))
    """
    draft = PlanDraft(model, policy)
    for step in steps:
        step(draft)
    plan = draft.finish()
    if broken := broken_rules(draft.tree, draft.stacks, plan):
        raise WrapPlanError(
            f"This policy gives {plan.model_class} a plan that breaks rules:\n  - "
            + "\n  - ".join(broken)
            + "\nChange block_types, units or replicate so that the named modules are units of their own, or not."
        )
    return plan
