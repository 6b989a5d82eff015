"""Check the rules of a correct wrap plan on a model, for plans made elsewhere or changed by hand too.

rule 1   no module that runs in a block of a major stack is left in the root unit; 0-d and empty ones are replicated
rule 2   no unit gathers more than `size_bound`
rule 3   modules and parameters exist, each module once, children before parents; tied parameters are in one unit
rule 4   every unit runs, and on all ranks: no container, no single expert
rule 5   the trainable parameters of a unit have one dtype
"""

from dataclasses import replace

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, Weight, class_name, has_forward
from hf_fsdp_tools.modeling.roles import lists_of_experts
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.stacks import find_blocks, major_blocks
from hf_fsdp_tools.text import grouped, listed


def size_bound(tree: ModuleTree, stacks: list[list[ModuleNode]]) -> int:
    """Parameters that no unit may exceed: twice the largest block or the largest indivisible set (rule 2).

    An indivisible set is the parameters of one module, with those of holders below it that never run (`ParameterList`).
    """
    sets: dict[ModuleNode, int] = {}
    for node in reversed(tree.nodes):  # children before parents
        held = sum(sets[child] for child in node.children if not has_forward(child.module))
        sets[node] = held + sum(weight.numel for weight in set(node.own))
    return 2 * max([*sets.values(), *(block.extent for block in major_blocks(tree, stacks))])


def check_wrap_plan(model: nn.Module, plan: WrapPlan) -> tuple[str, ...]:
    """The rules that `plan` breaks on `model`, one sentence each; empty for a correct plan.

    Only names, shapes and dtypes are read, on any device, meta included. Any rank may call; nothing is communicated.

    Args:
        model: plain, or sharded by this plan.
        plan: from `make_wrap_plan`, read from JSON, or changed by hand.

    Raises:
        BlockDetectionError: the model has no parameters, or lazy ones.
    """
    tree = ModuleTree(model)
    return broken_rules(tree, find_blocks(tree), plan)


def broken_rules(tree: ModuleTree, stacks: list[list[ModuleNode]], plan: WrapPlan) -> tuple[str, ...]:
    """`check_wrap_plan` for a tree and its stacks."""
    if broken := _broken_names(tree, plan):
        return tuple(broken)
    unit_of = units_by_node(tree, plan)
    replicated = {tree.weight(name) for name in plan.replicated}
    held: dict[int, list[Weight]] = {}
    broken = [
        f"Rule 1: {weight.names[0]!r}, 0-d or empty, cannot be sharded; add it to the plan's replicated parameters."
        for weight in tree.weights
        if (weight.ndim == 0 or not weight.numel) and weight not in replicated
    ]
    for weight in tree.weights:
        if weight in replicated:
            continue
        units = {unit_of[owner] for owner in weight.owners}
        if len(units) > 1:
            names = ", ".join(_name(plan, index) for index in sorted(units))
            broken.append(f"Rule 3: tied parameter {' = '.join(weight.names)} lies in several units: {names}.")
        held.setdefault(min(units), []).append(weight)
    bound = size_bound(tree, stacks)
    for index, weights in held.items():
        if (size := sum(weight.numel for weight in weights)) > bound:
            broken.append(
                f"Rule 2: unit {_name(plan, index)} gathers {size:,} parameters; the bound is {bound:,}, twice the "
                "largest block or the largest set of parameters on one module."
            )
    in_root = {node for node, index in unit_of.items() if index == len(plan.units) - 1 and has_forward(node.module)}
    in_root = {node for node in in_root if not replicated.issuperset(node.own)}
    if left := [block.fqn for block in major_blocks(tree, stacks) if not in_root.isdisjoint(block.walk())]:
        broken.append(f"Rule 1: {len(left)} blocks are left in the root unit: {listed(left, 3)}.")
    broken += _broken_containers(tree, stacks, plan)
    for index, weights in held.items():
        dtypes = sorted({str(weight.dtype) for weight in weights if weight.requires_grad})
        if len(dtypes) > 1:
            broken.append(f"Rule 5: unit {_name(plan, index)} mixes trainable dtypes {', '.join(dtypes)}.")
    return tuple(broken)


def _broken_names(tree: ModuleTree, plan: WrapPlan) -> list[str]:
    names = [name for unit in plan.units for name in unit.modules]
    broken = [f"Rule 3: the model has no module {name!r}." for name in names if name not in tree.by_fqn]
    broken += [f"Rule 3: the model has no parameter {name!r}." for name in plan.replicated if not tree.has_weight(name)]
    modules = [tree.by_fqn[name].module for name in names if name in tree.by_fqn]
    if len(modules) != len(set(modules)):
        broken.append("Rule 3: a module is in two units.")
    if not plan.units or plan.units[-1].modules != ("",):
        broken.append('The root must be the last unit, alone: modules == ("",).')
    if broken:
        return broken
    rank = {name: index for index, unit in enumerate(plan.units) for name in unit.modules}
    for name, index in rank.items():
        late = [above.fqn for above in tree.by_fqn[name].ancestors() if rank.get(above.fqn, len(rank)) < index]
        if late:
            broken.append(f"Children come before parents: {name!r} comes after {late[0]!r}.")
    return broken


def units_by_node(tree: ModuleTree, plan: WrapPlan) -> dict[ModuleNode, int]:
    """The index of the unit to which the parameters registered on a node belong, by node."""
    by_module = {tree.by_fqn[name].module: i for i, unit in enumerate(plan.units) for name in unit.modules}
    unit_of: dict[ModuleNode, int] = {}
    for node in tree:
        above = unit_of[node.parent] if node.parent else len(plan.units) - 1
        unit_of[node] = by_module.get(node.module, above)
    return unit_of


def measured(plan: WrapPlan, tree: ModuleTree) -> WrapPlan:
    """The plan with the sizes that its units have in a tree; units without parameters are left out."""
    unit_of = units_by_node(tree, plan)
    replicated = {tree.weight(name) for name in plan.replicated}
    held = grouped((unit_of[weight.owners[0]], weight) for weight in tree.weights if weight not in replicated)
    units = [
        replace(
            unit,
            num_params=sum(weight.numel for weight in held.get(index, ())),
            num_bytes=sum(weight.nbytes for weight in held.get(index, ())),
        )
        for index, unit in enumerate(plan.units)
        if index in held or unit.modules == ("",)
    ]
    return replace(plan, units=tuple(units), num_params=tree.num_params)


def _broken_containers(tree: ModuleTree, stacks: list[list[ModuleNode]], plan: WrapPlan) -> list[str]:
    units = {name for unit in plan.units for name in unit.modules if name}
    broken = [
        f"Rule 4: unit {name!r} is a {class_name(tree.by_fqn[name].module)}, whose forward never runs."
        for name in sorted(units)
        if not has_forward(tree.by_fqn[name].module)
    ]
    for block in (block for stack in stacks for block in stack):
        for experts in lists_of_experts(block):
            below = [node.fqn for node in experts.walk() if node is not experts and node.fqn in units]
            broken += [
                f"Rule 4: unit {name!r} is (in) a single expert of {experts.fqn!r}, which some ranks skip."
                for name in below
            ]
    return broken


def _name(plan: WrapPlan, index: int) -> str:
    modules = plan.units[index].modules
    return repr(modules[0] or "(root)") + (f" (+ {len(modules) - 1} modules)" if len(modules) > 1 else "")
