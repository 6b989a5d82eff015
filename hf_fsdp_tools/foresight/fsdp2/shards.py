"""How FSDP2 splits the parameters of a traced model between ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_fsdp_tools.foresight.events import Axis, Parameter, TensorSize
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.steps import SHARED_EXPERTS
from hf_fsdp_tools.sharding.placement import split_dim


@dataclass(frozen=True, kw_only=True)
class Shard(TensorSize):
    """A parameter's shard on the first rank, which has the longest one, in the dtype of the optimizer's updates; FSDP2
    pads the shards of all ranks to it. The gathered parameter has `parameter.dtype`."""

    parameter: Parameter
    dim: int  # The dimension that is split
    ranks: int  # Over which it is split
    axis: Axis  # Which ranks these are

    @cached_property
    def gathered_bytes(self) -> int:
        return self.numel * self.parameter.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.parameter.dtype


def split_parameters(
    parameters: Sequence[Parameter], plan: WrapPlan, setup: TrainingSetup
) -> list[tuple[WrapUnit, tuple[Shard, ...]]]:
    """The units of a plan, the root first and then in the order of their modules, with their shards in the order in
    which FSDP2 gathers them."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    first: dict[str, int] = {}
    members: dict[WrapUnit, list[tuple[int, int, Parameter]]] = {unit: [] for unit in plan.units}
    for at, parameter in enumerate(parameters):
        for name in (parameter.fqn, *parameter.other_names):
            for module in _modules_above(name):
                first.setdefault(module, at)
        if not parameter.is_whole:
            module = next(module for module in _modules_above(parameter.fqn) if module in unit_of)
            members[unit_of[module]].append((unit_of[module].modules.index(module), at, parameter))
    order = sorted(plan.units, key=lambda unit: min((first.get(m, len(parameters)), len(m)) for m in unit.modules))
    return [
        (unit, tuple(_shard(parameter, setup, unit) for *_, parameter in sorted(members[unit], key=lambda m: m[:2])))
        for unit in order
    ]


def _shard(parameter: Parameter, setup: TrainingSetup, unit: WrapUnit) -> Shard:
    is_dispatched = setup.ep_size > 1 and unit.reason == SHARED_EXPERTS
    ranks = setup.expert_shard_size if is_dispatched else setup.dp_shard_size
    dtype, shape = parameter.dtype, parameter.shape
    is_loaded_as_trained = setup.freeze_vision_tower and setup.lora_r is None  # LoRA's base is loaded in `precision`
    if (parameter.requires_grad or is_loaded_as_trained) and dtype.is_floating_point:
        dtype = DTYPES[setup.master_dtype]
    dim = split_dim(shape, parameter.numel * dtype.itemsize, ranks)
    own = (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
    axis: Axis = "expert_shard" if is_dispatched else "shard"
    return Shard(parameter=parameter, dtype=dtype, dim=dim, shape=own, ranks=ranks, axis=axis)


def _modules_above(fqn: str) -> list[str]:
    """The modules that a parameter is in, the innermost first, the root last."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
