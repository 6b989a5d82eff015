"""One optimizer step as the host issues it: FSDP2's schedule laid over the events of a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_tools.foresight.build import DTYPES
from hf_fsdp_tools.foresight.events import Alloc, Event, EventWriter, Free, Gradient, Mark, TensorSize, Trace
from hf_fsdp_tools.foresight.fsdp2.optimizer import OptimizerStep, optimizer_step
from hf_fsdp_tools.foresight.fsdp2.replicated import AveragedGradients, BucketedGradients, kept_bytes
from hf_fsdp_tools.foresight.fsdp2.schedule import Fsdp2Schedule
from hf_fsdp_tools.foresight.fsdp2.shard_sizes import Shard, split_parameters
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.planning.plan import WrapPlan


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a training that has run some steps already, on the rank that holds most (the first)."""

    events: tuple[Event, ...]
    """All micro-steps, clipping and the optimizer. The number of a block that was freed may be taken again."""
    optimizer_at: int
    """Index of the first event of clipping and the optimizer."""
    parameters: tuple[Alloc, ...]
    """Shards, buffers and other memory that is there from the beginning and for good."""
    state: tuple[Alloc, ...]
    host_bytes: int
    """Host memory of this rank under CPU offload: shards, gradients, optimizer state."""

    @property
    def resident(self) -> tuple[Alloc, ...]:
        return self.parameters + self.state

    @property
    def first(self) -> Iterator[Event]:
        """The first step of the training, in which the optimizer takes its state."""
        yield from self.events[: self.optimizer_at]
        yield from self.state
        yield from self.events[self.optimizer_at :]


def compose(trace: Trace, plan: WrapPlan, setup: TrainingSetup) -> Step:
    """Lay FSDP2's schedule over a trace: a step of a training that has its optimizer's state, and no gradients yet."""
    writer = EventWriter(max((event.block for event in trace.events if type(event) is Alloc), default=0))
    is_fsdp = setup.wrapping != "none"
    units = split_parameters(trace.parameters, plan, setup) if is_fsdp else ()
    whole = [parameter for parameter in trace.parameters if parameter.is_whole]
    schedule = Fsdp2Schedule(writer, units, setup) if is_fsdp else None
    replicated = AveragedGradients(writer, whole, setup) if is_fsdp else BucketedGradients(writer, whole, setup)
    shards = [shard for unit in units for shard in unit.shards]
    lasting = {parameter.fqn for parameter in whole}
    if not setup.sync_each_batch:  # autograd adds to what has the dtype of the reduction already
        lasting |= {each.fqn for each in trace.parameters if each.dtype == DTYPES[setup.reduce_dtype]}
    micro_step = _MicroStep(trace, lasting)
    for number in range(setup.gradient_accumulation_steps):
        is_last = number == setup.gradient_accumulation_steps - 1
        for each in (schedule, replicated):
            if each is not None:
                each.reduces = is_last or setup.sync_each_batch
        micro_step.write(writer, schedule, replicated, is_last=is_last)
    optimizer_at = len(writer.events)
    # An optimizer has no state of a parameter without a gradient (the vision tower, where the batch has no images).
    reached = {event.parameter for event in trace.events if type(event) is Gradient}
    updated: list[TensorSize] = [shard for shard in shards if shard.parameter.fqn in reached]
    master = DTYPES[setup.master_dtype]
    updated += [each if is_fsdp else replace(each, dtype=master) for each in whole if each.fqn in reached]
    update = optimizer_step(updated, setup)
    state = _write_optimizer(writer, update, setup, shards)
    if schedule is not None:
        schedule.end_step(parameter.fqn for parameter in trace.parameters)
    replicated.end_step()
    parameters = [] if setup.offload else [writer.alloc(shard.num_bytes, "parameters") for shard in shards]
    parameters += [writer.alloc(each.num_bytes if is_fsdp else kept_bytes(each, setup), "parameters") for each in whole]
    parameters += [writer.alloc(trace.buffer_bytes, "parameters")] if trace.buffer_bytes else []
    if isinstance(replicated, BucketedGradients):
        parameters += [writer.alloc(num_bytes, "gradients") for num_bytes in replicated.resident()]
    host_bytes = 0
    if setup.offload:
        host_bytes = sum(shard.num_bytes * (2 if shard.parameter.requires_grad else 1) for shard in shards)
        host_bytes += sum(update.state)
    return Step(
        events=tuple(writer.events),
        optimizer_at=optimizer_at,
        parameters=tuple(parameters),
        state=tuple(state),
        host_bytes=host_bytes,
    )


class _MicroStep:
    """The events of a trace, between which FSDP2 acts."""

    def __init__(self, trace: Trace, lasting: set[str]) -> None:
        self._events = events = trace.events
        alive = {event.block: at for at, event in enumerate(events) if type(event) is Alloc}
        inputs = {event.block for event in events if type(event) is Alloc and event.kind == "inputs"}
        end = len(events)
        while end and type(events[end - 1]) is Free and events[end - 1].block in inputs:  # type: ignore[union-attr]
            end -= 1
        self._end = end  # Where the backward pass is over: inputs are given back after it
        for event in events:
            if type(event) is Free or type(event) is Gradient:
                del alive[event.block]
        self._left = tuple(alive)  # Blocks that the trace does not free: the loss, for example
        blocks = {event.block for event in events if type(event) is Gradient and event.parameter in lasting}
        self._lasting = {
            at: event.block for at, event in enumerate(events) if type(event) is Alloc and event.block in blocks
        }
        """Where gradients are taken that may stay until the end of the step."""

    def write(
        self,
        writer: EventWriter,
        schedule: Fsdp2Schedule | None,
        replicated: AveragedGradients | BucketedGradients,
        *,
        is_last: bool,
    ) -> None:
        events: list[Any] = list(self._events)
        renamed = {} if is_last else {block: writer.new_block() for block in self._lasting.values()}
        for at, block in self._lasting.items() if renamed else ():
            events[at] = replace(events[at], block=renamed[block])
        if isinstance(replicated, BucketedGradients):
            replicated.begin_forward()
        for event in events[: self._end]:
            if type(event) is Gradient:
                block = renamed.get(event.block, event.block)
                if schedule is None or not schedule.gradient(event.parameter, block):
                    replicated.gradient(event.parameter, block)
                continue
            writer.events.append(event)
            if type(event) is Mark and schedule is not None:
                schedule.mark(event)
        writer.phase = "backward"
        if schedule is not None:
            schedule.end_backward()
        replicated.end_backward()
        writer.phase = "forward"
        writer.events.extend(events[self._end :])
        writer.free(*self._left)


def _write_optimizer(
    writer: EventWriter, update: OptimizerStep, setup: TrainingSetup, shards: Sequence[Shard]
) -> list[Alloc]:
    """Write clipping and the optimizer's step; the state that is on the GPU."""
    if setup.offload and shards:  # the CPU computes, from and to its own memory
        writer.phase = "optimizer"
        writer.work("memory", update.num_bytes, "offload", dtype_bytes=4)
        writer.wait_on_host(writer.record("offload"))
        writer.phase = "forward"
        return []
    writer.extend_renumbered(update.events)
    return [writer.alloc(num_bytes, "optimizer") for num_bytes in update.state]
