"""Plan models with adapters, and shard what was added to a sharded model, in the units of its base.

Plans are made of the base without adapters, so that a model has the same units with and without them.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import same_on_all_ranks
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.packed import trains_in_fp32
from hf_fsdp_tools.modeling.tree_copy import bare_model, base_of, is_wrapper
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.policy import WrapPolicy
from hf_fsdp_tools.planning.rules import measured, units_by_node
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.checks import check_parameters
from hf_fsdp_tools.sharding.fsdp2_internals import managed_parameters, release
from hf_fsdp_tools.sharding.hf_interface import install_model_methods, override_method
from hf_fsdp_tools.sharding.injection import guarded, names_as_saved, refuse_for_any
from hf_fsdp_tools.sharding.replicated import average_gradients, is_averaged
from hf_fsdp_tools.sharding.shard import apply_again, apply_sharding, features_of
from hf_fsdp_tools.sharding.sharding import Sharding, sharded_module, sharding_of


def plan_with_adapters(model: nn.Module, policy: WrapPolicy) -> WrapPlan:
    """The plan of a PEFT model's base, made without its adapters and then extended to them by `plan_of_adapted`."""
    base = base_of(model)
    for config in getattr(model, "peft_config", {}).values():
        refuse_for_any(config)
    plan = make_wrap_plan(bare_model(base).model, policy=policy)
    return plan_of_adapted(plan, base) if any(is_wrapper(module) for module in base.modules()) else plan


def plan_of_adapted(plan: WrapPlan, base: nn.Module) -> WrapPlan:
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

    The frozen original is a unit, so that it is gathered only if it runs. Where it is tied to another module, the
    copies are units instead; copies that are tied too are one.
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
            )
    for together in tied.values():
        yield replace(unit, modules=tuple(together), reason="trained copy of a tied module")


def shard_added(model: nn.Module) -> dict[torch.Tensor, nn.Parameter]:
    """Shard adapters and heads that were added to a sharded model, in place, in the units of its plan.

    Added trainable weights become fp32 where computation is in a lower precision, where their dtypes differ, and on a
    4-bit base. Parameters that PEFT keeps outside the base (prompt encoders) stay whole, with averaged gradients.
    Return the new parameter for each that was replaced, for an optimizer that was made before.

    Every rank must call, not between a forward and its backward pass. The ranks exchange the plan's digest; rank 0
    sends the added values.
    """
    base, sharding = sharded_module(model), sharding_of(model)
    if base is None or sharding is None:
        return {}
    inside = set(base.modules())
    for feature in features_of(base, sharding):
        feature.added(model)
    replaced = _shard_new_parameters(model, base, sharding) if sharding.is_whole else _shard(model, base, sharding)
    for module in model.modules():
        if module is not base and getattr(vars(module).get("forward"), "__self__", None) is base:
            # Adaption prompts have it: they would call the base past FSDP's hooks.
            module.forward = base.__call__  # type: ignore[operator]  # mypy takes it for a submodule
    for module in model.modules():
        if module not in inside:  # PEFT's give what they lack of the base, and so its way to be copied
            module.__deepcopy__ = partial(_copy_around, module)  # type: ignore[assignment]  # mypy takes it for a submodule
    install_model_methods(model)  # PEFT's, like transformers'
    for module in model.modules():
        if module not in inside and hasattr(type(module), "peft_config") and "add_adapter" not in module.__dict__:
            override_method(module, "add_adapter", _add_adapter)
            override_method(module, "load_adapter", _load_adapter)
    return replaced


def _copy_around(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a module around a sharded base."""
    twin = memo[id(module)] = object.__new__(type(module))
    twin.__dict__.update({k: deepcopy(v, memo) for k, v in module.__dict__.items() if k != "__deepcopy__"})
    twin.__deepcopy__ = partial(_copy_around, twin)  # type: ignore[assignment]  # mypy takes it for a submodule
    return twin


def _shard_new_parameters(model: nn.Module, base: nn.Module, sharding: Sharding) -> dict[torch.Tensor, nn.Parameter]:
    """Let a whole base compute with what was added to it, as `_shard` does; no parameter is replaced."""
    plan = plan_of_adapted(sharding.plan, base)
    check_parameters(base, plan.replicated)
    own = set(bare_model(base).model.parameters())
    for parameter in _in_fp32(base, sharding, (p for p in base.parameters() if p not in own)):
        parameter.data = parameter.data.float()
    _bring_to_device(model, base, sharding.device)
    if plan != sharding.plan:
        apply_sharding(base, replace(sharding, plan=plan))
    return {}


def _in_fp32(base: nn.Module, sharding: Sharding, added: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable ones of added parameters, if they are to be in fp32."""
    trained = [parameter for parameter in added if parameter.requires_grad and parameter.is_floating_point()]
    is_low = sharding.mp_policy.param_dtype not in (None, torch.float32) or trains_in_fp32(base)
    return trained if is_low or len({parameter.dtype for parameter in trained}) > 1 else []


def _shard(model: nn.Module, base: nn.Module, sharding: Sharding) -> dict[torch.Tensor, nn.Parameter]:
    """Shard what was added to a base in units, and average the gradients of what PEFT keeps outside it."""
    if trains_in_fp32(base):
        _undo_casts(base)
    managed = set(managed_parameters(base))
    known = dict(base.named_parameters(remove_duplicate=False))
    replicated = {known[name] for name in sharding.plan.replicated if name in known}
    plain = (parameter for parameter in model.parameters() if not isinstance(parameter, DTensor))
    outside = [parameter for parameter in plain if parameter.is_floating_point() and not is_averaged(parameter)]
    inside = any(parameter not in managed and parameter not in replicated for parameter in base.parameters())
    # PEFT may have run the embedding alone for a prompt encoder, and FSDP2 then takes it for the root: shard again.
    replaced = _shard_again(base, sharding, managed) if inside or outside else {}
    outside = [parameter for parameter in outside if parameter not in replaced]
    _bring_to_device(model, base, torch.device(sharding.mesh.device_type))
    for parameter in outside:
        Held.of(parameter).fill_from_first(parameter, sharding.mesh)
    average_gradients(outside, sharding.mesh.get_all_groups())
    return replaced


def _add_adapter(
    model: nn.Module, plain: Callable[..., None], adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Answer `model.add_adapter(…)` of PEFT where another adapter is sharded: TRL copies that one into the new one."""
    with guarded(model, peft_config):
        plain(adapter_name, peft_config, *args, **kwargs)
    shard_added(model)


def _load_adapter(model: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Answer `model.load_adapter(…)` of PEFT, which adds one that it does not have."""
    with names_as_saved():
        return plain(*args, **kwargs)


def _shard_again(base: nn.Module, sharding: Sharding, managed: set[nn.Parameter]) -> dict[torch.Tensor, nn.Parameter]:
    """Take FSDP2 off, and apply it again with the added modules; parameters that were sharded keep their shards."""
    plan = plan_of_adapted(sharding.plan, base)
    check_parameters(base, plan.replicated)
    same_on_all_ranks("sharding what was added", ranks=sorted(sharding.mesh.mesh.flatten().tolist()), plan=plan)
    release(base)
    for module in base.modules():  # PEFT makes some buffers of an embedding's shard, which FSDP2 refuses
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                module._buffers[name] = Held.of(buffer).gather()
    kept = {base.get_parameter(name) for name in plan.replicated}
    added = set(base.parameters()) - kept - managed

    def fill(old: nn.Parameter, made: nn.Parameter) -> nn.Parameter:
        return old if old in managed else _shard_of(old, made, sharding.device)

    dtypes = dict.fromkeys(_in_fp32(base, sharding, added), torch.float32)
    shards = apply_again(base, replace(sharding, plan=plan), fill, dtypes=dtypes)
    return {old: shard for old, shard in shards.items() if old is not shard}


def _bring_to_device(model: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Bring what PEFT keeps outside the base, next to its shards, to the device of the computation."""
    for module in {*model.modules()} - {*base.modules()}:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)


def _undo_casts(base: nn.Module) -> None:
    """Cast trainable shards back to fp32: TRL casts them to bf16 by `parameter.data`, which FSDP2 does not notice."""
    cast = [p for p in base.parameters() if p.requires_grad and isinstance(p, DTensor) and p.dtype != torch.float32]
    for parameter in cast:
        parameter.data = parameter.data.to(torch.float32)
    if cast:
        renew(base)


def _shard_of(old: nn.Parameter, like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """This rank's shard, like `like`, of rank 0's whole parameter, or of a parameter that is sharded otherwise."""
    shard, value = like.data, old.data
    assert isinstance(shard, DTensor)
    if not isinstance(value, DTensor):
        memory = torch.empty(Held.of(shard).memory.shape, dtype=like.dtype, device=device)
        made = Held.of(shard).around(memory)
        Held.of(made).fill_from_first(value, shard.device_mesh)
    elif value.device_mesh != shard.device_mesh or value.placements != shard.placements:
        made = Held.of(shard).cut(Held.of(value).gather(), device=device, dtype=like.dtype)
    else:
        made = value.detach().to(device=device, dtype=like.dtype)
    new = nn.Parameter(made, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
