"""How FSDP2 splits parameters, and what it does at each module's passes: gathers, copies, frees, reductions, in the
order of `FSDPParamGroup`, `foreach_all_gather` and `foreach_reduce` in torch 2.13."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from hf_fsdp_tools.foresight.events import Axis, EventWriter, Kind, Mark, Parameter, TensorSize
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
    """The units of a plan, the root first, with their shards in the order in which FSDP2 gathers them."""
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
    if dtype.is_floating_point:
        dtype = setup.dtype_in_memory(is_trained=parameter.requires_grad)
    dim = split_dim(shape, parameter.numel * dtype.itemsize, ranks)
    own = (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
    axis: Axis = "expert_shard" if is_dispatched else "shard"
    return Shard(parameter=parameter, dtype=dtype, dim=dim, shape=own, ranks=ranks, axis=axis)


def _modules_above(fqn: str) -> list[str]:
    """The modules that a parameter is in, the innermost first, the root last."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


@dataclass(eq=False)
class _Unit:
    """One `FSDPState` with its `FSDPParamGroup`."""

    unit: WrapUnit
    shards: tuple[Shard, ...]
    is_kept: bool  # Whether its parameters stay gathered after the forward pass
    state: Literal["idle", "forward", "backward", "reduced"] = "idle"
    to_run: set[str] = field(default_factory=set)  # Modules that have not run in this forward pass
    entry: str | None = None  # The module whose inputs end the backward pass
    exit: str | None = None  # The module whose output begins the backward pass
    pending: tuple[int, ...] | None = None  # The buffer of a gather that was not yet copied out; on one rank none
    gathered: list[int] = field(default_factory=list)  # Memory of the gathered parameters
    gradients: dict[str, int] = field(default_factory=dict)  # Memory of the whole gradients, by parameter
    uses: list[int] = field(default_factory=list)  # Places in the order of forward passes
    shard_gradients: int | None = None  # Memory of the shards of gradients
    has_gradients: bool = False
    all_reduced: int | None = None  # Under HSDP, what is summed over the replicas, kept until that has ended
    following: "_Unit | None" = None  # What a forward pass gathers next, where one rank is offloaded

    @property
    def name(self) -> str:
        return self.unit.modules[0]


class Fsdp2Schedule:
    """Follows the marks of a trace and writes what FSDP2 does there."""

    def __init__(
        self, writer: EventWriter, parameters: Sequence[Parameter], plan: WrapPlan, setup: TrainingSetup
    ) -> None:
        self.writer, self._setup, self._dtype = writer, setup, DTYPES[setup.reduce_dtype]
        self._units = []
        for unit, shards in split_parameters(parameters, plan, setup) if not setup.is_plain else ():
            # FSDP2 keeps the root where the plan does not say
            is_freed = unit.modules[0] != "" if unit.reshard_after_forward is None else unit.reshard_after_forward
            self._units.append(_Unit(unit, shards, not (setup.reshard_after_forward and is_freed)))
        if setup.offload_params and setup.dp_shard_size == 1:
            for each, following in pairwise([each for each in self._units if each.shards]):
                each.following = following
        self._by_module = {module: unit for unit in self._units for module in unit.unit.modules}
        self._of_parameter = {shard.parameter.fqn: unit for unit in self._units for shard in unit.shards}
        self.shards = [shard for unit in self._units for shard in unit.shards]
        self._place = {parameter.fqn: at for at, parameter in enumerate(parameters)}
        self.reduces = True  # `set_requires_gradient_sync`: False keeps the gradients of a backward pass whole
        self._kept_gather: tuple[int, ...] = ()  # The buffer of the last gather of the forward pass
        self._inputs: list[int] = []  # The input of the last reduction
        self._order: list[_Unit] = []  # In which the forward passes ran
        self._late: list[_Unit] = []  # Units with modules that never ran, whose backward pass begins with the root's
        self._whole: dict[str, int] = {}  # Whole gradients of earlier micro-batches in the reduction's dtype

    def mark(self, mark: Mark) -> None:
        """A pass of a module begins or ends; modules that are in no unit's list do not matter."""
        if (unit := self._by_module.get(mark.module)) is None:
            return
        self.writer.unit, is_root = unit.name, unit is self._units[0]
        is_backward = unit.state in ("backward", "reduced")  # activation checkpointing recomputes the module
        if mark.where == "before_forward":
            if not is_backward and not unit.to_run:
                unit.state, unit.entry, unit.to_run = "forward", mark.module, set(unit.unit.modules)
            self._gather(unit)
            if not is_backward and unit.following is not None:
                self._gather(unit.following)  # on one rank, sent one unit ahead (`streamed`)
                self.writer.unit = unit.name
            self._copy_out(unit)
        elif mark.where == "after_forward" and not is_backward:
            unit.to_run.discard(mark.module)
            if not unit.to_run:
                unit.exit = unit.exit if mark.again else mark.module
                self._end_forward(unit, again=mark.again)
            if is_root:
                for other in reversed(self._units):
                    if other.to_run and not mark.again:
                        other.exit = None
                        self._end_forward(other, again=False)
                        self._late.append(other)
                self.writer.free(*self._kept_gather)
                self._kept_gather = ()
        elif mark.where == "before_backward" and mark.module == unit.exit:
            self.writer.phase = "backward"
            for each in (unit, *(self._late if is_root else ())):
                self._before_backward(each)
            self._late = [] if is_root else self._late
        elif mark.where == "after_backward" and mark.module == unit.entry:
            self._after_backward(unit)
        self.writer.unit = ""

    def gradient(self, parameter: str, block: int) -> bool:
        """A whole gradient is complete; whether it belongs to a unit."""
        if (unit := self._of_parameter.get(parameter)) is not None:
            unit.gradients[parameter] = block
        return unit is not None

    def end_backward(self) -> None:
        """Units whose inputs have no gradients are reduced."""
        for unit in self._units:
            self.writer.unit = unit.name
            if unit.shards and unit.state != "reduced":
                self._after_backward(unit)
            self._end_all_reduce(unit)
            self.writer.free(*(unit.pending or ()))  # prefetched and not used
            unit.pending, unit.state = None, "idle"
            unit.to_run.clear()
            unit.uses.clear()
        self._order.clear()
        self.writer.free(*self._inputs)
        self._inputs.clear()
        self.writer.unit, self.writer.phase = "", "forward"

    def end_step(self) -> None:
        """Gradients are set to None in the order of parameters; a unit's memory goes with its last one."""
        last = {unit: max((self._place[s.parameter.fqn] for s in unit.shards), default=0) for unit in self._units}
        for unit in sorted(self._units, key=last.__getitem__):
            self.writer.free(*[] if unit.shard_gradients is None else [unit.shard_gradients])
            unit.shard_gradients, unit.has_gradients = None, False

    def _end_forward(self, unit: _Unit, *, again: bool) -> None:
        if unit.shards and not again:
            if not unit.is_kept:
                self.writer.free(*unit.gathered)
                unit.gathered = []
            unit.uses.append(len(self._order))
            self._order.append(unit)
        unit.to_run.clear()
        unit.state = "idle"

    def _before_backward(self, unit: _Unit) -> None:
        """The unit is gathered, and after it the one that ran before it in the forward pass."""
        if unit.state == "backward":
            return
        unit.state = "backward"
        self.writer.unit = unit.name
        self._gather(unit)
        self._copy_out(unit)
        if unit.uses and (at := unit.uses.pop()) > 0:
            self.writer.unit = self._order[at - 1].name
            self._gather(self._order[at - 1])

    def _after_backward(self, unit: _Unit) -> None:
        if not unit.shards:
            return
        unit.state = "reduced"
        gradients = self._added_up(unit)
        self.writer.free(*unit.gathered)
        unit.gathered = []
        if self.reduces:
            self.writer.free(*self._inputs)
            self._inputs.clear()
        if self.reduces and gradients:
            self._reduce(unit, gradients)
        for shard, block in gradients if not self.reduces else ():  # kept for the next micro-batch
            whole = shard.parameter
            if whole.dtype != self._dtype:
                kept = self.writer.take(whole.numel * self._dtype.itemsize, "whole gradients")
                self.writer.work("memory", whole.numel * (whole.dtype.itemsize + self._dtype.itemsize))
                self.writer.free(block)
                block = kept
            self._whole[whole.fqn] = block

    def _gather(self, unit: _Unit) -> None:
        """`foreach_all_gather`: shards are cast together, or copied from the host one by one."""
        if unit.pending is not None or unit.gathered or not unit.shards:
            return
        writer, (first, *_) = self.writer, unit.shards
        if first.ranks == 1:
            if self._setup.offload_params:
                writer.unit = unit.name
                unit.gathered = [self._sent(shard, "gathered parameters", "compute") for shard in unit.shards]
            unit.pending = ()
            return
        inputs: list[int] = []
        cast = [shard for shard in unit.shards if shard.is_cast]
        if self._setup.offload_params:
            inputs = [self._sent(shard, "gather buffers", "copy_in") for shard in unit.shards]
        elif cast:
            num_bytes = sum(shard.gathered_bytes for shard in cast)
            inputs.append(writer.take(num_bytes, "gather buffers", "copy_in"))
            writer.work("memory", sum(shard.num_bytes for shard in cast) + num_bytes, "copy_in")
        own_bytes = sum(shard.gathered_bytes for shard in unit.shards)
        output = writer.take(own_bytes * first.ranks, "gather buffers", "copy_in")
        writer.work("memory", 2 * own_bytes, "copy_in")
        writer.work("all_gather", own_bytes * first.ranks, "all_gather", ranks=first.ranks, axis=first.axis)
        unit.pending = (output,)
        writer.free(*inputs)

    def _sent(self, shard: Shard, kind: Kind, stream: Literal["compute", "copy_in"]) -> int:
        """A shard that is copied from the host under CPU offload, in the dtype of computation."""
        self.writer.work("host_to_device", shard.gathered_bytes, "copy_in")
        return self.writer.take(shard.gathered_bytes, kind, stream)

    def _copy_out(self, unit: _Unit) -> None:
        """`wait_for_unshard`; the buffer of a forward pass stays until the next, so that gathers overlap."""
        if unit.pending is None:
            return
        writer, buffer, is_forward = self.writer, unit.pending, unit.state == "forward"
        if not (self._setup.offload_params and unit.shards[0].ranks == 1):
            unit.gathered = list(self._copied_out(unit))
        unit.pending = None
        if is_forward:
            buffer, self._kept_gather = self._kept_gather, buffer
        writer.free(*buffer)

    def _copied_out(self, unit: _Unit) -> Iterator[int]:
        """Yield the memory of gathered parameters: those that are split along another dimension than 0 are copied
        twice; on one rank, what is frozen and has the dtype of computation is used where it lies."""
        writer, ranks = self.writer, unit.shards[0].ranks
        copies: list[int] = []
        copied_bytes = 0
        for shard in unit.shards:
            num_bytes = shard.gathered_bytes * ranks
            if ranks == 1:
                if not (shard.parameter.requires_grad or shard.is_cast):
                    continue
                made = []
                if shard.is_cast:
                    made = [writer.take(shard.gathered_bytes, "gather buffers")]
                    writer.work("memory", shard.num_bytes + shard.gathered_bytes)
                writer.free(*copies)
                copies = made
            yield writer.take(num_bytes, "gathered parameters")
            copied_bytes += num_bytes
            if shard.dim:
                copies.append(writer.take(num_bytes, "gather buffers"))
                writer.work("memory", 2 * num_bytes)
        writer.work("memory", 2 * copied_bytes)
        writer.free(*copies)

    def _added_up(self, unit: _Unit) -> list[tuple[Shard, int]]:
        """Shard and memory of each parameter's whole gradient, with those of earlier micro-batches."""
        result = []
        for shard in unit.shards:
            whole = shard.parameter
            block, kept = unit.gradients.pop(whole.fqn, None), self._whole.pop(whole.fqn, None)
            if kept is not None:
                shard = replace(shard, parameter=replace(whole, dtype=self._dtype))
                if block is not None:
                    self.writer.work("memory", whole.num_bytes + 2 * shard.parameter.num_bytes)
                    self.writer.free(block)
                block = kept
            if block is not None:
                result.append((shard, block))
        return result

    def _reduce(self, unit: _Unit, gradients: list[tuple[Shard, int]]) -> None:
        """`foreach_reduce`: gradients are joined, reduced to shards, summed over replicas, and added to what is there;
        those that are split along another dimension than 0 are copied first."""
        writer, (first, _), setup = self.writer, gradients[0], self._setup
        ranks, axis, size, master = first.ranks, first.axis, self._dtype.itemsize, first.dtype
        self._end_all_reduce(unit)  # of the same unit, where it is used twice
        for at, (shard, block) in enumerate(gradients):
            if ranks > 1 and shard.dim:
                num_bytes = shard.gathered_bytes * ranks
                gradients[at] = (shard, writer.take(num_bytes, "reduce buffers"))
                writer.work("memory", 2 * num_bytes)
                writer.free(block)
        numel = sum(shard.numel for shard, _ in gradients)
        buffer = writer.take(numel * ranks * size, "reduce buffers")
        read = sum(shard.gathered_bytes for shard, _ in gradients) * ranks
        writer.work("memory", read + numel * ranks * size)
        *rest, last = (block for _, block in gradients)
        writer.free(*reversed(rest))  # the last one is a variable of torch's loop until the end
        is_kept = master == self._dtype and not setup.offload_params and not unit.has_gradients
        output = writer.take(numel * size, "gradients" if is_kept else "reduce buffers", "reduce_scatter")
        if setup.reduce_dtype == "fp16":  # it is divided before and after
            writer.work("memory", 2 * numel * (ranks + 1) * size, "reduce_scatter")
        if ranks > 1:
            num_bytes = numel * ranks * size
            writer.work("reduce_scatter", num_bytes, "reduce_scatter", dtype_bytes=size, ranks=ranks, axis=axis)
        else:
            writer.work("memory", 2 * numel * size, "reduce_scatter")
        self._inputs.append(buffer)
        stream: Literal["all_reduce", "reduce_scatter"] = "reduce_scatter"
        if (replicas := setup.num_copies) > 1:
            stream = "all_reduce"
            writer.work("all_reduce", numel * size, stream, dtype_bytes=size, ranks=replicas, axis="replicate")
        block = output
        if master != self._dtype:
            kind: Literal["gradients", "reduce buffers"] = "reduce buffers" if unit.has_gradients else "gradients"
            block = writer.take(numel * master.itemsize, kind, stream)
            writer.work("memory", numel * (size + master.itemsize), stream)
        if setup.offload_params:
            for shard, _ in gradients:
                writer.work("device_to_host", shard.num_bytes, stream)
                if unit.has_gradients:  # a thread adds them up
                    writer.work("memory", 3 * shard.num_bytes, "offload")
        elif not unit.has_gradients:
            unit.shard_gradients = block
        else:
            writer.work("memory", 3 * numel * master.itemsize, stream)
        unit.has_gradients = True
        if replicas > 1 and output != unit.shard_gradients:
            unit.all_reduced = output
        writer.free(*({output, block} - {unit.shard_gradients, unit.all_reduced}), last)

    def _end_all_reduce(self, unit: _Unit) -> None:
        self.writer.free(*[] if unit.all_reduced is None else [unit.all_reduced])
        unit.all_reduced = None
