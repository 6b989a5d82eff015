"""Make the plan of a model with adapters: the plan of its base without adapters, extended to the adapters."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ModuleTree, Weight
from hf_fsdp_tools.modeling.peft_view import bare_model, base_of, is_wrapper
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.planning.rules import units_by_node
from hf_fsdp_tools.sharding.injection import refuse_for_any


def plan_with_adapters(model: nn.Module, policy: HybridPolicy) -> WrapPlan:
    """The plan of a PEFT model's base, made without its adapters and then extended to them by `laid_over`.

    For a model without adapters this is `make_wrap_plan`. No rank communicates.
    """
    base = base_of(model)
    for config in getattr(model, "peft_config", {}).values():
        refuse_for_any(config)
    plan = make_wrap_plan(bare_model(base).model, policy=policy)
    return laid_over(plan, base) if any(is_wrapper(module) for module in base.modules()) else plan


def laid_over(plan: WrapPlan, base: nn.Module) -> WrapPlan:
    """A plan for a base with adapters, from the plan of the base without them or with some of them.

    The units are the same; of a wrapped module, the wrapper is in the unit. Parameters that PEFT gives to modules of
    several units (VB-LoRA's bank) are replicated. No rank communicates.
    """
    bare = bare_model(base)
    units: list[WrapUnit] = []
    for unit in plan.units:
        modules = tuple(bare.places.get(name, name) for name in unit.modules)
        units += [*_trained_whole(modules, unit, base), replace(unit, modules=modules)]
    units = list({unit.modules: unit for unit in units}.values())
    names = (name.rpartition(".") for name in plan.replicated)
    replicated = [".".join(filter(None, (bare.names.get(module, module), key))) for module, _, key in names]
    laid, tree = replace(plan, units=tuple(units), replicated=tuple(replicated)), ModuleTree(base)
    unit_of = units_by_node(tree, laid)
    replicated += [
        weight.names[0]
        for weight in tree.weights
        if (weight.ndim == 0 or not weight.numel or len({unit_of[owner] for owner in weight.owners}) > 1)
        and not set(replicated).intersection(weight.names)
    ]
    return measured(replace(laid, replicated=tuple(replicated)), tree)


def _trained_whole(names: Iterable[str], unit: WrapUnit, base: nn.Module) -> Iterator[WrapUnit]:
    """Yield the units inside the wrappers of a unit's modules that PEFT trains as copies.

    The frozen original is a unit, so that it is gathered only if it runs. Where the original is tied to another module,
    it stays in their common unit, and the copies are units; copies that are tied too are one unit.
    """
    tied: dict[nn.Parameter, list[str]] = {}
    for name in names:
        wrapper = base.get_submodule(name)
        copies = wrapper._modules.get("modules_to_save") if is_wrapper(wrapper) else None
        original = wrapper._modules.get("original_module")
        if copies is None or original is None:
            continue
        own = set(original.parameters())
        below = set(original.modules())
        others = (module for module in base.modules() if module not in below)
        if any(parameter in own for module in others for parameter in module._parameters.values()):
            for key, copy in copies._modules.items():
                if copy is not None:
                    tied.setdefault(next(copy.parameters()), []).append(f"{name}.modules_to_save.{key}")
        else:
            yield replace(
                unit,
                modules=(f"{name}.original_module",),
                reshard_after_forward=True,
                reason="frozen, its copy is trained",
                kept_for=None,
            )
    for together in tied.values():
        yield replace(unit, modules=tuple(together), reason="trained copy of a tied module")


def measured(plan: WrapPlan, tree: ModuleTree) -> WrapPlan:
    """The plan with the sizes that its units have in a tree; units without parameters are left out."""
    unit_of = units_by_node(tree, plan)
    whole = {id(tree.weight(name)) for name in plan.replicated}
    held: dict[int, list[Weight]] = {}
    for weight in tree.weights:
        if id(weight) not in whole:
            held.setdefault(unit_of[weight.owners[0]], []).append(weight)
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
