"""What FSDP2 does at each module's passes: gathers, copies, frees, reductions, and on which stream.

The order of memory is that of torch 2.13, `torch/distributed/fsdp/_fully_shard`. Each function below names the function
that it follows. Python's local variables keep some tensors until a function returns; this is followed too, and
that torch 2.15 has fewer of these.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hf_fsdp_tools.foresight.events import EventWriter, Mark, Stream
from hf_fsdp_tools.foresight.fsdp2.shards import BEFORE_2_15, Reducer, Shard, UnitShards
from hf_fsdp_tools.foresight.setup import TrainingSetup

_State = Literal["idle", "forward", "pre_backward", "post_backward"]  # `TrainingState`


@dataclass(eq=False)
class _Unit:
    """One `FSDPState` with its `FSDPParamGroup`."""

    split: UnitShards
    reshard: bool | int  # What `reshard_after_forward` comes to: False keeps the unit
    state: _State = "idle"  # That of the parameter group
    module_state: _State = "idle"  # That of the `FSDPState`
    to_run: set[str] = field(default_factory=set)
    """`_modules_to_run_forward`: modules of a unit of several that have not run in this pass."""
    entry: str | None = None  # The module whose inputs trigger the unit's post-backward
    exit: str | None = None  # The module whose output triggers its pre-backward
    gathered: list[int] = field(default_factory=list)  # Memory of the gathered parameters
    partly: list[int] = field(
        default_factory=list
    )  # Memory of shards over fewer ranks (a number as `reshard_after_forward`)
    pending: "_Gather | None" = None  # `_all_gather_result`: gathered, not yet copied out
    gradients: dict[str, int] = field(default_factory=dict)  # Memory of the whole gradients, by parameter
    uses: list[int] = field(default_factory=list)  # `_post_forward_indices`

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.split.shards

    @property
    def modules(self) -> tuple[str, ...]:
        return self.split.unit.modules


@dataclass(frozen=True, slots=True)
class _Gather:
    """`AllGatherResult`."""

    output: tuple[int, ...]  # The buffer; on one rank there is none
    ranks: int


class Fsdp2Schedule:
    """Follows the marks of a trace and writes what FSDP2 does there."""

    def __init__(self, writer: EventWriter, units: tuple[UnitShards, ...], setup: TrainingSetup) -> None:
        self._writer = writer
        self._setup = setup
        self._units = [_Unit(split, _reshard(split, setup)) for split in units]
        self._by_module = {module: unit for unit in self._units for module in unit.modules}
        self._of_parameter = {shard.parameter.fqn: unit for unit in self._units for shard in unit.shards}
        self._reducer = Reducer(writer, setup)
        self.reduces = True  # `set_requires_gradient_sync`: False keeps the gradients of a backward pass whole
        self._running_root: _Unit | None = None  # `iter_forward_root`
        self._kept_gather: int | None = None  # `all_gather_state`: the buffer of the last gather of forward
        self._order: list[_Unit] = []  # `post_forward_order`
        self._forced: list[_Unit] = []
        """Units that were completed after the pass of the whole model, whose pre-backward comes with the root's."""

    def mark(self, mark: Mark) -> None:
        """A pass of a module begins or ends; modules that are in no unit's list do not matter."""
        unit = self._by_module.get(mark.module)
        if unit is None:
            return
        self._writer.unit = unit.split.name
        if mark.where == "before_forward":
            self._before_forward(unit, mark)
        elif mark.where == "after_forward":
            self._after_forward(unit, mark)
        elif mark.where == "before_backward" and mark.module == unit.exit:
            self._writer.phase = "backward"
            self._before_backward(unit)
            if unit is self._units[0]:
                for other in self._forced:
                    self._writer.unit = other.split.name
                    self._before_backward(other)
                self._forced.clear()
        elif mark.where == "after_backward" and mark.module == unit.entry:
            self._post_backward(unit)
        self._writer.unit = ""

    def gradient(self, parameter: str, block: int) -> bool:
        """A whole gradient is complete; whether it belongs to a unit."""
        unit = self._of_parameter.get(parameter)
        if unit is None:
            return False
        unit.gradients[parameter] = block
        return True

    def end_backward(self) -> None:
        """`_root_post_backward_final_callback`: units whose inputs have no gradients are reduced."""
        writer = self._writer
        for unit in self._units:
            writer.unit = unit.split.name
            unit.to_run.clear()
            if unit.shards:
                if unit.state != "post_backward":
                    self._post_backward(unit)
                self._reducer.finalize(unit.split.name)
                if unit.pending is not None:  # prefetched and not used
                    writer.free(*unit.pending.output)
                    unit.pending = None
            unit.state = unit.module_state = "idle"
            unit.uses.clear()
        self._order.clear()
        self._running_root = None
        self._reducer.release_inputs()
        writer.unit = ""
        writer.phase = "forward"

    def end_step(self, parameters: Iterable[str]) -> None:
        """Gradients are set to None in the order of parameters; a unit's memory goes with its last one."""
        units = [self._of_parameter[name].split.name for name in parameters if name in self._of_parameter]
        self._reducer.drop_gradients(reversed(dict.fromkeys(reversed(units))))

    def _before_forward(self, unit: _Unit, mark: Mark) -> None:
        """`FSDPState._pre_forward`, `FSDPParamGroup.pre_forward`."""
        if unit.module_state == "pre_backward":  # computed again by activation checkpointing
            self._unshard(unit)
            self._wait_for_unshard(unit)
            return
        if len(unit.modules) > 1 and not unit.to_run:
            unit.to_run = set(unit.modules)
        if unit.module_state != "forward" and self._running_root is None:  # `_root_pre_forward`
            self._running_root = unit
        unit.module_state = "forward"
        if unit.state != "forward":
            unit.entry = mark.module
        unit.state = "forward"
        self._unshard(unit)
        self._wait_for_unshard(unit)

    def _after_forward(self, unit: _Unit, mark: Mark) -> None:
        """`FSDPState._post_forward`, with `_register_group_forward_hooks` for units of several modules."""
        if len(unit.modules) > 1 and mark.module not in unit.to_run:
            return
        unit.to_run.discard(mark.module)
        if unit.to_run or unit.module_state == "pre_backward":
            return
        self._end_forward(unit, again=mark.again)
        if not mark.again:
            unit.exit = mark.module
        if self._running_root is not unit:
            return
        if not mark.again:
            for other in reversed(self._units):  # `_force_complete_incomplete_states`
                if other is not unit and other.to_run:
                    self._end_forward(other, again=False)
                    other.exit = None
                    other.to_run.clear()
                    self._forced.append(other)
        self._writer.free(*self._wait_for_kept_gather())
        self._running_root = None

    def _end_forward(self, unit: _Unit, *, again: bool) -> None:
        """`FSDPParamGroup.post_forward`."""
        if unit.shards and not again:
            self._reshard(unit)
            unit.uses.append(len(self._order))
            self._order.append(unit)
        unit.state = unit.module_state = "idle"

    def _before_backward(self, unit: _Unit) -> None:
        """`FSDPState._pre_backward`, `FSDPParamGroup.pre_backward`, `_backward_prefetch`."""
        unit.module_state = "pre_backward"
        if unit.state == "pre_backward" or not unit.shards:
            return
        unit.state = "pre_backward"
        self._unshard(unit)
        self._wait_for_unshard(unit)
        if unit.uses and (at := unit.uses.pop()) > 0:
            target = self._order[at - 1]
            kept, target.state = target.state, "pre_backward"
            self._writer.unit = target.split.name
            self._unshard(target)
            self._writer.unit = unit.split.name
            target.state = kept

    def _post_backward(self, unit: _Unit) -> None:
        """`FSDPParamGroup.post_backward`."""
        if not unit.shards:
            return
        unit.state = "post_backward"
        gradients = self._reducer.added_up(unit.shards, unit.gradients)
        self._reshard(unit)
        if not self.reduces:
            self._reducer.keep_whole(gradients)
            return
        self._reducer.release_inputs()
        if gradients:
            self._reducer.reduce(gradients)

    def _unshard(self, unit: _Unit) -> None:
        """`FSDPParamGroup.unshard`, `foreach_all_gather`."""
        if unit.pending is not None or unit.gathered or not unit.shards:
            return
        writer = self._writer
        ranks = int(unit.reshard) if unit.partly else unit.shards[0].ranks
        if ranks == 1:
            unit.pending = _Gather((), 1)
            return
        apart = unit.state in ("forward", "pre_backward")  # `get_all_gather_streams`
        copy_in: Stream = "copy_in" if apart else "compute"
        stream: Stream = "all_gather" if apart else "compute"
        ratio = unit.shards[0].ranks // ranks
        own_bytes = ratio * sum(shard.gathered_bytes for shard in unit.shards)
        inputs = list(self._gather_inputs(unit, copy_in, ratio))
        output = writer.take(own_bytes * ranks, "gather buffers", copy_in)
        writer.work("memory", 2 * own_bytes, copy_in)
        writer.work("all_gather", own_bytes * ranks, stream, ranks=ranks, axis=unit.shards[0].axis)
        unit.pending = _Gather((output,), ranks)
        writer.free(*inputs)

    def _gather_inputs(self, unit: _Unit, stream: Stream, ratio: int) -> Iterator[int]:
        """`_get_param_all_gather_inputs`: shards that are cast together, or copied from the host one by one."""
        if self._setup.offload and not unit.partly:
            yield from (self._on_device(shard, stream) for shard in unit.shards)
            return
        if cast := [shard for shard in unit.shards if shard.is_cast]:
            to = ratio * sum(shard.gathered_bytes for shard in cast)
            yield self._writer.take(to, "gather buffers", stream)
            read = to if unit.partly else sum(shard.num_bytes for shard in cast)
            self._writer.work("memory", read + to, stream)

    def _on_device(self, shard: Shard, stream: Stream) -> int:
        """`FSDPParam.all_gather_inputs`: a shard copied from the host under CPU offload, and cast."""
        writer, copied = self._writer, 0
        if self._setup.offload:
            copied = writer.take(shard.num_bytes, "gather buffers", stream)
            writer.work("host_to_device", shard.num_bytes, stream)
            if not shard.is_cast:
                return copied
        cast = writer.take(shard.gathered_bytes, "gather buffers", stream)
        writer.work("memory", shard.num_bytes + shard.gathered_bytes, stream)
        if self._setup.offload:
            writer.free(copied)
        return cast

    def _wait_for_unshard(self, unit: _Unit) -> None:
        """`FSDPParamGroup.wait_for_unshard`."""
        writer, gather = self._writer, unit.pending
        if gather is None:
            return
        before = self._wait_for_kept_gather() if unit.state == "forward" else []
        if not BEFORE_2_15:
            writer.free(*before)
        if gather.ranks == 1:
            unit.gathered = list(self._copy_alone(unit))
        else:
            unit.gathered = self._copy_out(unit)
        writer.free(*unit.partly)
        unit.partly, unit.pending = [], None
        if gather.output and unit.state == "forward":
            self._kept_gather = gather.output[0]
        else:
            writer.free(*gather.output)
        if BEFORE_2_15:
            writer.free(*before)

    def _copy_out(self, unit: _Unit) -> list[int]:
        """`foreach_all_gather_copy_out`: parameters that are split along another dimension are copied twice."""
        writer, ranks = self._writer, unit.shards[0].ranks
        gathered, copies = [], []
        for shard in unit.shards:
            gathered.append(writer.take(shard.gathered_bytes * ranks, "gathered parameters"))
            if shard.dim:
                copies.append(writer.take(shard.gathered_bytes * ranks, "gather buffers"))
        writer.work("memory", 2 * ranks * sum(shard.gathered_bytes for shard in unit.shards))
        for shard in unit.shards:
            if shard.dim:
                writer.work("memory", 2 * ranks * shard.gathered_bytes)
        writer.free(*(copies if BEFORE_2_15 else reversed(copies)))  # since then with their list, from its end
        return gathered

    def _copy_alone(self, unit: _Unit) -> Iterator[int]:
        """On one rank nothing is gathered: each shard is cast and copied, one after the other.

        What is frozen and has the dtype of computation is used where it lies (`use_frozen_in_place`).
        """
        writer, last = self._writer, list[int]()
        for shard in unit.shards:
            if not (shard.parameter.requires_grad or shard.is_cast or self._setup.offload):
                continue
            made = [self._on_device(shard, "compute")] if self._setup.offload or shard.is_cast else []
            writer.free(*last)
            last = made
            yield writer.take(shard.gathered_bytes, "gathered parameters")
            writer.work("memory", 2 * shard.gathered_bytes)
        writer.free(*last)

    def _wait_for_kept_gather(self) -> list[int]:
        """[Note: Overlapping all-gather copy-in and all-gather]: the buffer that was kept until now, if one was."""
        if self._kept_gather is None:
            return []
        block, self._kept_gather = self._kept_gather, None
        return [block]

    def _reshard(self, unit: _Unit) -> None:
        """`FSDPParamGroup.reshard`."""
        writer, ranks = self._writer, self._setup.dp_shard_size
        if unit.state == "forward" and unit.reshard is False:
            return
        if unit.state == "forward" and unit.reshard is not True and unit.gathered and unit.reshard != ranks:
            for shard, block in zip(unit.shards, unit.gathered, strict=True):
                num_bytes = int(shard.gathered_bytes * (ranks / unit.reshard))
                unit.partly.append(writer.take(num_bytes, "gathered parameters"))
                writer.work("memory", 2 * num_bytes)
                writer.free(block)
            unit.gathered = []
            return
        writer.free(*unit.gathered, *unit.partly)
        unit.gathered, unit.partly = [], []


def _reshard(split: UnitShards, setup: TrainingSetup) -> bool | int:
    """Whether a unit is freed after forward; the root is kept where the plan leaves it to FSDP2 (`_lazy_init`)."""
    planned = split.unit.reshard_after_forward
    return setup.reshard_after_forward and (split.name != "" if planned is None else planned)
