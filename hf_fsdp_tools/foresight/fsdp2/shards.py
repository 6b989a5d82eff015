"""How FSDP2 splits the parameters of a traced model between ranks, and reduces whole gradients to shards: torch 2.13's
`foreach_reduce`, and what `FSDPParamGroup` keeps for it."""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hf_fsdp_tools.foresight.events import Axis, EventWriter, Parameter, Stream, TensorSize
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.planning.steps import SHARED_EXPERTS
from hf_fsdp_tools.sharding.placement import split_dim

BEFORE_2_15 = torch.__version__ < "2.15"
"""Whether FSDP2 gathers and reduces in functions that are so long that their variables keep tensors meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Shard(TensorSize):
    """One parameter's shard on the first rank, which has the longest one; FSDP2 pads the shards of all ranks to it.

    Its dtype is that of the optimizer's updates; the gathered parameter has `parameter.dtype`.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShards:
    """One unit of a plan with its shards."""

    unit: WrapUnit
    shards: tuple[Shard, ...]  # In the order in which FSDP2 gathers them

    @property
    def name(self) -> str:
        """Fqn of the unit's first module; "" for the root."""
        return self.unit.modules[0]


def split_parameters(parameters: Sequence[Parameter], plan: WrapPlan, setup: TrainingSetup) -> tuple[UnitShards, ...]:
    """The units of a plan, the root first and then in the order of their modules, with their shards."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    first: dict[str, int] = {}
    members: dict[WrapUnit, list[tuple[int, int, Parameter]]] = {unit: [] for unit in plan.units}
    for at, parameter in enumerate(parameters):
        for name in (parameter.fqn, *parameter.other_names):
            for module in _modules_above(name):
                first.setdefault(module, at)
        if not parameter.is_whole:
            module = next(module for module in _modules_above(parameter.fqn) if module in unit_of)
            unit = unit_of[module]
            members[unit].append((unit.modules.index(module), at, parameter))
    order = sorted(plan.units, key=lambda unit: min((first.get(m, len(parameters)), len(m)) for m in unit.modules))
    return tuple(
        UnitShards(
            unit=unit,
            shards=tuple(
                _shard(parameter, setup, unit) for _, _, parameter in sorted(members[unit], key=lambda m: m[:2])
            ),
        )
        for unit in order
    )


def _shard(parameter: Parameter, setup: TrainingSetup, unit: WrapUnit) -> Shard:
    is_dispatched = setup.ep_size > 1 and unit.reason == SHARED_EXPERTS
    ranks, shape = setup.expert_shard_size if is_dispatched else setup.dp_shard_size, parameter.shape
    dtype = parameter.dtype
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


class Reducer:
    """Writes the reductions of all units of a step, and remembers the shards of gradients between micro-steps."""

    def __init__(self, writer: EventWriter, setup: TrainingSetup) -> None:
        self._writer = writer
        self._setup = setup
        self._dtype = DTYPES[setup.reduce_dtype]
        self._inputs: list[int] = []  # `reduce_scatter_states`: the input of the last reduction
        self._all_reduced: dict[str, int] = {}  # `_all_reduce_state` by unit
        self._gradients: dict[str, int] = {}  # Memory of the shards of gradients, one block for a unit
        self._has_gradients: set[str] = set()
        self._whole: dict[str, int] = {}  # Whole gradients of earlier micro-steps, reduction's dtype, by parameter

    def release_inputs(self) -> None:
        """Free the input of the last reduction."""
        self._writer.free(*self._inputs)
        self._inputs.clear()

    def finalize(self, unit: str) -> None:
        """All reductions have ended: free what a unit kept for its own."""
        if unit in self._all_reduced:
            self._writer.free(self._all_reduced.pop(unit))

    def drop_gradients(self, units: Iterable[str]) -> None:
        """Gradients are set to None, unit by unit."""
        self._writer.free(*(self._gradients[unit] for unit in units if unit in self._gradients))
        self._gradients.clear()
        self._has_gradients.clear()

    def added_up(self, shards: Sequence[Shard], gradients: MutableMapping[str, int]) -> list[tuple[Shard, int]]:
        """Shard and memory of each parameter's whole gradient: `FSDPParam.accumulate_unsharded_grad_if_needed`."""
        result = []
        for shard in shards:
            whole = shard.parameter
            new, kept = gradients.pop(whole.fqn, None), self._whole.pop(whole.fqn, None)
            if kept is not None:
                shard = replace(shard, parameter=replace(whole, dtype=self._dtype))
                if new is not None:
                    self._writer.work("memory", whole.num_bytes + 2 * shard.parameter.num_bytes)
                    self._writer.free(new)
            if (block := new if kept is None else kept) is not None:
                result.append((shard, block))
        return result

    def keep_whole(self, gradients: Sequence[tuple[Shard, int]]) -> None:
        """Keep gradients for the next micro-step instead of reducing them: `to_accumulated_grad_if_needed`."""
        for shard, block in gradients:
            whole = shard.parameter
            self._whole[whole.fqn] = block
            if whole.dtype != self._dtype:
                num_bytes = whole.numel * self._dtype.itemsize
                self._whole[whole.fqn] = self._writer.take(num_bytes, "whole gradients")
                self._writer.work("memory", whole.num_bytes + num_bytes)
                self._writer.free(block)

    def reduce(self, gradients: Sequence[tuple[Shard, int]]) -> None:
        """Reduce the gradients of the unit that the writer is at, and free them."""
        writer, ranks = self._writer, gradients[0][0].ranks
        unit = writer.unit
        self.finalize(unit)  # `_wait_for_post_backward`: of the same unit, where it is used twice
        late: set[int] = set()
        if ranks > 1:
            gradients, late = self._split_otherwise(gradients)
        numel = sum(shard.numel for shard, _ in gradients)
        size = self._dtype.itemsize
        read = sum(shard.gathered_bytes for shard, _ in gradients) * ranks
        buffer = writer.take(numel * ranks * size, "reduce buffers")
        writer.work("memory", read + numel * ranks * size)
        writer.free(*(block for _, block in reversed(gradients) if block not in late))  # a list clears from its end
        master = gradients[0][0].dtype
        is_kept = master == self._dtype and not self._setup.offload and unit not in self._has_gradients
        output = writer.take(numel * size, "gradients" if is_kept else "reduce buffers", "reduce_scatter")
        self._divide(numel * ranks * size, "reduce_scatter")
        if ranks > 1:
            axis = gradients[0][0].axis
            writer.work(
                "reduce_scatter", numel * ranks * size, "reduce_scatter", dtype_bytes=size, ranks=ranks, axis=axis
            )
        else:
            writer.work("memory", 2 * numel * size, "reduce_scatter")
        self._inputs.append(buffer)
        stream = self._all_reduce(unit, output, numel * size)
        self._divide(numel * size, stream)
        shards = [shard for shard, _ in gradients]
        self._keep(unit, shards, output, stream)
        writer.free(*late)

    def _split_otherwise(self, gradients: Sequence[tuple[Shard, int]]) -> tuple[list[tuple[Shard, int]], set[int]]:
        """Copy gradients that are split along another dimension than 0; with those that are freed at the end, since
        variables of torch's loop keep them until the function returns."""
        writer, result = self._writer, list(gradients)
        copied: set[int] = set()
        for at, (shard, block) in enumerate(gradients):
            if shard.dim:
                writer.free(*copied)
                num_bytes = shard.gathered_bytes * shard.ranks
                result[at] = (shard, writer.take(num_bytes, "reduce buffers"))
                writer.work("memory", 2 * num_bytes)
                copied = {block}
        if BEFORE_2_15:
            return result, {gradients[-1][1]} | copied
        writer.free(*copied)
        return result, set()

    def _divide(self, num_bytes: int, stream: Stream) -> None:
        """fp16 is divided before and after the reduction, in place (`_get_gradient_divide_factors`)."""
        if self._setup.reduce_dtype == "fp16" and self._setup.num_gpus > 1:
            self._writer.work("memory", 2 * num_bytes, stream)

    def _all_reduce(self, unit: str, output: int, num_bytes: int) -> Stream:
        """HSDP: sum over the replicas; the stream of what follows."""
        replicas = self._setup.dp_replicate_size
        if replicas == 1:
            return "reduce_scatter"
        writer = self._writer
        size = self._dtype.itemsize
        writer.work("all_reduce", num_bytes, "all_reduce", dtype_bytes=size, ranks=replicas, axis="replicate")
        self._all_reduced[unit] = output
        return "all_reduce"

    def _keep(self, unit: str, shards: Sequence[Shard], output: int, stream: Stream) -> None:
        """Make the reduced gradients the shards' gradients, or add them to these."""
        writer, master = self._writer, shards[0].dtype
        numel = sum(shard.numel for shard in shards)
        is_first = unit not in self._has_gradients
        block = output
        if master != self._dtype:
            block = writer.take(numel * master.itemsize, "gradients" if is_first else "reduce buffers", stream)
            writer.work("memory", numel * (self._dtype.itemsize + master.itemsize), stream)
        if self._setup.offload:
            for shard in shards:
                writer.work("device_to_host", shard.num_bytes, stream)
        elif is_first:
            self._gradients[unit] = block
        else:
            writer.work("memory", 3 * numel * master.itemsize, stream)
        self._has_gradients.add(unit)
        kept = self._gradients.get(unit)
        if output == kept:
            self._all_reduced.pop(unit, None)
        is_held = unit in self._all_reduced
        writer.free(*(each for each in {output, block} if each != kept and not (is_held and each == output)))
