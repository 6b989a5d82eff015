"""Models that other code has sharded with FSDP2, taken up as they were made.

transformers shards while it loads (`from_pretrained(distributed_config=DistributedConfig(fsdp_size=…))`), scripts call
`fully_shard` themselves. Their units, mesh, precision and offload become a `Sharding`, and what `shard_model` gives a
model besides FSDP2 is added: methods that work on shards, units that a rank does not run, adapters and copies later on.
"""

from functools import partial

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend
from hf_fsdp_tools.modeling.module_tree import ModuleTree, class_name
from hf_fsdp_tools.modeling.tree_copy import bare_model, is_wrapper
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.fsdp2_internals import (
    UnitAsMade,
    copy_released,
    release,
    units_as_made,
    unpin_on_cpu,
)
from hf_fsdp_tools.sharding.recompute import Recompute
from hf_fsdp_tools.sharding.shard import Sharding, apply_again, complete_sharding, copy_sharded, sharding_of

REASON = "as it was made"
"""Of every unit of such a model."""


def take_up(base: nn.Module) -> Sharding | None:
    """Note how other code has sharded a model with FSDP2, and add what `shard_model` adds; return it as a value.

    Values, units, mesh, dtypes and offload stay as they are, but for tied weights: transformers (5.23) leaves a head in
    another unit than its embedding, and where the ranks do not divide the rows, the two gather from different memory,
    of which optimizers step one. They are put into one unit. None, and nothing is changed, where `shard_model` made the
    model, where it is no FSDP2 module itself, and where a `Sharding` cannot say how it was made: units of several
    meshes or dtypes, other dimensions than 0 (tensor parallelism), or parameters that train outside all units, for
    which the code that made it answers. Pinned memory for offloaded shards, which CPUs do not have, is given up on a
    mesh of CPUs: the first forward pass would fail.

    Args:
        base: of a `PeftModel`, its base; adapters that are not sharded yet may be in it, for `shard_added`.

    Every rank must call it, but nothing is communicated.
    """
    if sharding_of(base) is not None or not isinstance(base, FSDPModule):
        return None
    unpin_on_cpu(base)
    renew(base)  # of what transformers has put in the place of the parameters that it sharded
    made = units_as_made(base)
    ways = {(unit.mesh, unit.mp_policy, type(unit.offload_policy)) for unit in made}
    placements = {p.placements for p in base.parameters() if isinstance(p, DTensor)}
    mesh, mp_policy, _ = next(iter(ways))
    if len(ways) > 1 or mesh is None or any(not isinstance(p[-1], Shard) or p[-1].dim for p in placements):
        return None
    is_complete = getattr(base, "is_distributed_loading_by_transformers", False)  # what is whole was added later
    if any(p.requires_grad and not isinstance(p, DTensor) for p in base.parameters()) and not is_complete:
        return None
    is_recomputed = any(getattr(module, "gradient_checkpointing", False) is True for module in base.modules())
    sharding = Sharding(
        plan=_plan_of(base, made),
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=made[0].offload_policy,
        activation_checkpointing=Recompute() if is_recomputed else None,
        is_as_made=True,
    )
    if isinstance(sharding.offload_policy, CPUOffloadPolicy) or mesh.device_type == "cpu":
        for group in sharding.axes.groups():
            add_cpu_backend(group)
    if sharding.plan.units != _plan_of(base, made, together=False).units and not any(map(is_wrapper, base.modules())):
        release(base)
        apply_again(base, sharding, lambda old, made: old, dtypes={})
    else:  # with adapters, `shard_added` applies the plan anew
        for unit in made:
            for module in unit.modules:
                copy = copy_sharded if module is base else copy_released
                module.__deepcopy__ = partial(copy, module)  # type: ignore[assignment]  # no submodule
        complete_sharding(base, sharding, ModuleTree(base))
    vars(base).pop("_tp_size", None)  # 1, for which PEFT gathers adapters on rank 0 alone
    return sharding


def _plan_of(base: nn.Module, made: list[UnitAsMade], *, together: bool = True) -> WrapPlan:
    """The units as a plan, named as in the base without adapters, children first; tied modules `together` in one."""
    bare = bare_model(base)
    names = {bare.originals[twin]: name for name, twin in bare.model.named_modules()}
    made = sorted(
        made, key=lambda unit: -max(bool(name) + name.count(".") for name in (names[module] for module in unit.modules))
    )
    first: dict[nn.Parameter, list[nn.Module]] = {}
    members = {unit: list(unit.modules) for unit in made}
    for unit in made:
        for shard, owners in unit.parameters:
            if together and shard in first:
                moved = [owner for owner in owners if owner not in first[shard]]
                first[shard] += moved
                members[unit] = [module for module in members[unit] if module not in moved]
            first.setdefault(shard, members[unit])
    units = []
    for unit in made:
        own = [shard for shard, _ in unit.parameters if first[shard] is members[unit] or not together]
        if not members[unit]:
            continue  # a head that is with its embedding now
        units.append(
            WrapUnit(
                modules=tuple(names[module] for module in members[unit]),
                reshard_after_forward=unit.reshard_after_forward,
                num_params=sum(shard.numel() for shard in own),
                num_bytes=sum(shard.numel() * shard.element_size() for shard in own),
                reason=REASON,
                kept_for="tail" if unit.reshard_after_forward is False else None,
            )
        )
    return WrapPlan(
        units=tuple(units),
        replicated=tuple(name for name, p in bare.model.named_parameters() if not isinstance(p, DTensor)),
        model_class=class_name(base),
        num_params=sum(p.numel() for p in bare.model.parameters()),
        notes=("other code made these units",),
    )
