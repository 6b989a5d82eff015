"""The wrap plan of a model: blocks by structure, everything else by size, ties and tails grouped.

`make_wrap_plan` reads as a list of verbs; each changes the draft that the plan is made from.
"""

from torch import nn

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.blocks import describe_blocks
from hf_fsdp_tools.planning.draft import PlanDraft
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.planning.rules import broken_rules, check_wrap_plan
from hf_fsdp_tools.planning.stacks import find_blocks
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
    replicate,
)

__all__ = ["HybridPolicy", "WrapPlan", "WrapUnit", "check_wrap_plan", "make_wrap_plan"]

_DEFAULT_POLICY = HybridPolicy()


def make_wrap_plan(model: nn.Module, *, policy: HybridPolicy = _DEFAULT_POLICY) -> WrapPlan:
    """Decide what FSDP shards together in `model`, and why.

    Works on any device, meta included; only names, classes, shapes and dtypes are read and nothing is communicated. Every
    rank gets the same plan (`WrapPlan.digest` proves it). A 70B model takes well under a second.

    Args:
        model: Any module, before FSDP is applied. Names in the plan are names in this model.
        policy: What to change about the defaults.

    Raises:
        BlockDetectionError: The model has no parameters.
        WrapPlanError: The policy names something the model does not have, or would break a rule of a correct plan. All
            problems are listed at once.

    Example:
        >>> print(make_wrap_plan(model, policy=HybridPolicy(min_unit_params=2e7)))
    """
    tree = ModuleTree(model)
    stacks = find_blocks(tree)
    blocks = describe_blocks(tree, stacks)
    draft = PlanDraft(tree, stacks, policy)
    replicate(draft)
    add_chosen_units(draft)
    add_blocks(draft)
    add_experts(draft)
    add_ends(draft, blocks)
    add_by_size(draft)
    add_own_roots(draft)
    join_ties(draft)
    join_tail(draft, blocks)
    part_dtypes(draft)
    override_reshard(draft)
    plan = draft.finish(blocks)
    if broken := broken_rules(tree, stacks, plan):
        raise WrapPlanError(
            f"This policy gives {blocks.model_class} a plan that breaks rules:\n  - "
            + "\n  - ".join(broken)
            + "\nChange block_types, units or replicate so that the named modules are units of their own, or not."
        )
    return plan
