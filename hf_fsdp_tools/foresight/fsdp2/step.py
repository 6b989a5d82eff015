"""One optimizer step as the host issues it: FSDP2's schedule laid over the events of a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_tools.foresight.events import Alloc, Event, EventWriter, Free, Gradient, Mark, Parameter, Trace, Work
from hf_fsdp_tools.foresight.fsdp2.optimizer import optimizer_step, write_muon
from hf_fsdp_tools.foresight.fsdp2.schedule import Fsdp2Schedule
from hf_fsdp_tools.foresight.fsdp2.shards import Shard, split_parameters
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.planning.plan import WrapPlan


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a training that has run some steps already, on the rank that holds most (the first)."""

    events: tuple[Event, ...]
    """All micro-steps, clipping and the optimizer. The number of a block that was freed may be taken again."""
    optimizer_at: int  # Index of the first event of clipping and the optimizer
    parameters: tuple[Alloc, ...]  # Shards, buffers and other memory that is there from the beginning and for good
    state: tuple[Alloc, ...]
    host_bytes: int
    """Host memory of this rank: shards, gradients, optimizer state under CPU offload, and blocks' inputs."""

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
    replicated = (_AveragedGradients if is_fsdp else _BucketedGradients)(writer, whole, setup)
    _write_micro_steps(writer, trace, setup, schedule, replicated)
    optimizer_at = len(writer.events)
    shards = [shard for unit in units for shard in unit.shards]
    # An optimizer has no state of a parameter without a gradient (the vision tower, where the batch has no images).
    reached = {event.parameter for event in trace.events if type(event) is Gradient}
    updated: list[Shard | Parameter] = [shard for shard in shards if shard.parameter.fqn in reached]
    master = DTYPES[setup.master_dtype]
    updated += [each if is_fsdp else replace(each, dtype=master) for each in whole if each.fqn in reached]
    on_host = setup.offload and bool(shards)  # where the CPU computes, from and to its own memory
    update = EventWriter() if on_host else writer
    state_bytes = optimizer_step(update, updated, setup)
    state: list[Alloc] = []
    writer.phase = "optimizer"
    if on_host:
        num_bytes = sum(event.num_bytes for event in update.events if type(event) is Work)
        writer.work("memory", num_bytes, "offload", dtype_bytes=4)
    else:
        state = [writer.alloc(num_bytes, "optimizer") for num_bytes in state_bytes]
    writer.phase = "forward"
    if setup.optimizer == "muon":
        write_muon(writer, updated, setup)
    if schedule is not None:
        schedule.end_step(parameter.fqn for parameter in trace.parameters)
    replicated.end_step()
    frozen_bytes = -(-trace.frozen_bytes // setup.gpus_per_copy)
    sizes = [] if setup.offload else [*(shard.num_bytes for shard in shards), *[frozen_bytes] * (frozen_bytes > 0)]
    sizes += [each.num_bytes if is_fsdp else _kept_bytes(each, setup) for each in whole]
    sizes += [trace.buffer_bytes] if trace.buffer_bytes else []
    parameters = [writer.alloc(num_bytes, "parameters") for num_bytes in sizes]
    if isinstance(replicated, _BucketedGradients):
        parameters += [writer.alloc(num_bytes, "gradients") for num_bytes in replicated.resident()]
    host_bytes = 0
    if setup.offload:
        host_bytes = frozen_bytes + sum(
            shard.num_bytes * (2 if shard.parameter.requires_grad else 1) for shard in shards
        )
        host_bytes += sum(state_bytes)
    works = (event for event in trace.events if type(event) is Work and event.stream == "activations")
    host_bytes += int(sum(work.num_bytes for work in works if work.operation == "device_to_host"))
    return Step(
        events=tuple(writer.events),
        optimizer_at=optimizer_at,
        parameters=tuple(parameters),
        state=tuple(state),
        host_bytes=host_bytes,
    )


def _write_micro_steps(
    writer: EventWriter,
    trace: Trace,
    setup: TrainingSetup,
    schedule: Fsdp2Schedule | None,
    replicated: "_AveragedGradients | _BucketedGradients",
) -> None:
    """Write the events of a trace once for each micro-step; FSDP2 acts between them."""
    events: list[Any] = list(trace.events)
    inputs = {event.block for event in events if type(event) is Alloc and event.kind == "inputs"}
    end = len(events)  # of the backward pass: inputs are given back after it
    while end and type(events[end - 1]) is Free and events[end - 1].block in inputs:
        end -= 1
    # what the trace does not free: the loss, for example
    left = dict.fromkeys(event.block for event in events if type(event) is Alloc)
    for event in events:
        if type(event) is Free or type(event) is Gradient:
            del left[event.block]
    lasting = {parameter.fqn for parameter in trace.parameters if parameter.is_whole}
    if not setup.sync_each_batch:  # autograd adds to what has the dtype of the reduction already
        lasting |= {each.fqn for each in trace.parameters if each.dtype == DTYPES[setup.reduce_dtype]}
    # gradients that may stay until the end of the step, and where they are taken
    staying = {event.block for event in events if type(event) is Gradient and event.parameter in lasting}
    taken = {at: event.block for at, event in enumerate(events) if type(event) is Alloc and event.block in staying}
    for number in range(setup.gradient_accumulation_steps):
        is_last = number == setup.gradient_accumulation_steps - 1
        renamed = {} if is_last else {block: writer.new_block() for block in taken.values()}
        replicated.reduces = is_last or setup.sync_each_batch
        if schedule is not None:
            schedule.reduces = replicated.reduces
        if isinstance(replicated, _BucketedGradients):
            replicated.begin_forward()
        for at, event in enumerate(events[:end]):
            if type(event) is Gradient:
                writer.phase = "backward"
                block = renamed.get(event.block, event.block)
                if schedule is None or not schedule.gradient(event.parameter, block):
                    replicated.gradient(event.parameter, block)
                continue
            is_renamed = at in taken and not is_last
            writer.events.append(replace(event, block=renamed[event.block]) if is_renamed else event)
            if type(event) is Mark and schedule is not None:
                schedule.mark(event)
        writer.phase = "backward"
        if schedule is not None:
            schedule.end_backward()
        replicated.end_backward()
        writer.phase = "forward"
        writer.events.extend(events[end:])
        writer.free(*left)


# ---- gradients that every rank holds whole ----


_REDUCED_ALONE = 2**22  # Elements from which `sharding/whole.py` reduces a gradient where it lies
_FIRST_BUCKET = 2**20  # Bytes of DDP's first bucket (`_DEFAULT_FIRST_BUCKET_BYTES` of torch.distributed)
_BUCKET = 25 * 2**20  # Bytes of its other buckets (`bucket_cap_mb=25` of `DistributedDataParallel`)


class _Gradients:
    """Gradients that stay until the end of the step."""

    def __init__(self, writer: EventWriter, parameters: Sequence[Parameter], setup: TrainingSetup) -> None:
        self._writer, self._ranks = writer, setup.num_gpus
        self.reduces = True  # False inside of DDP's `no_sync`; `sharding/whole` averages after each backward pass
        self._parameters = {parameter.fqn: parameter for parameter in parameters}
        self._gradients: dict[str, int] = {}

    def end_step(self) -> None:
        """Gradients are set to None."""
        self._writer.free(*self._gradients.values())
        self._gradients.clear()


class _AveragedGradients(_Gradients):
    """Gradients of replicated parameters beside shards: `sharding/whole` averages them after each backward pass."""

    _pending: tuple[Parameter, ...] = ()

    def gradient(self, name: str, block: int) -> None:
        """The gradient of this micro-step is complete."""
        parameter = self._parameters[name]
        self._pending += (parameter,)
        if name not in self._gradients:
            self._gradients[name] = block
            return
        self._writer.work("memory", 3 * parameter.num_bytes)
        self._writer.free(block)

    def end_backward(self) -> None:
        """All gradients of a backward pass are sent at its end, small ones together in fp32."""
        writer, ranks = self._writer, self._ranks
        pending, self._pending = self._pending, ()
        if not pending or ranks == 1:
            return
        small = [each for each in pending if each.numel < _REDUCED_ALONE]
        for each in pending:
            if each.numel >= _REDUCED_ALONE:
                size = each.dtype.itemsize
                writer.work("all_reduce", each.num_bytes, dtype_bytes=size, ranks=ranks, axis="all")
                writer.work("memory", 2 * each.num_bytes)
        if not small:
            return
        copies = [writer.take(4 * each.numel, "reduce buffers") for each in small if each.dtype.itemsize < 4]
        num_bytes = 4 * sum(each.numel for each in small)
        joined = writer.take(num_bytes, "reduce buffers")
        writer.work("memory", 2 * num_bytes)
        writer.free(*copies)
        writer.work("all_reduce", num_bytes, dtype_bytes=4, ranks=ranks, axis="all")
        writer.work("memory", 4 * num_bytes)
        writer.free(joined)


class _BucketedGradients(_Gradients):
    """Gradients of a model that every rank holds whole, as `DistributedDataParallel` with `gradient_as_bucket_view` has
    them: copied into buckets that are there from the beginning, none on one GPU.

    Parameters that are computed with in another dtype are cast once in a forward pass; autograd keeps the copies until
    the gradient is there.
    """

    def __init__(self, writer: EventWriter, parameters: Sequence[Parameter], setup: TrainingSetup) -> None:
        super().__init__(writer, parameters, setup)
        self._buckets: list[list[Parameter]] = [[]]
        for parameter in reversed([each for each in parameters if each.requires_grad]):
            limit = _FIRST_BUCKET if len(self._buckets) == 1 else _BUCKET
            if sum(_kept_bytes(each, setup) for each in self._buckets[-1]) >= limit:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._bucket_of = {each.fqn: at for at, bucket in enumerate(self._buckets) for each in bucket}
        self._kept = {each.fqn: _kept_bytes(each, setup) for each in parameters}
        self._missing: list[int] = []
        self._copies: dict[str, int] = {}

    def resident(self) -> list[int]:
        return [] if self._ranks == 1 else [self._bytes_of(bucket) for bucket in self._buckets]

    def begin_forward(self) -> None:
        """Parameters are cast."""
        for name, parameter in self._parameters.items():
            if self._kept[name] != parameter.num_bytes:
                self._copies[name] = self._writer.take(parameter.num_bytes, "gathered parameters")
                self._writer.work("memory", self._kept[name] + parameter.num_bytes)

    def gradient(self, name: str, block: int) -> None:
        """The gradient of a parameter is complete; a bucket whose gradients are all there is sent."""
        writer, kept = self._writer, self._kept[name]
        is_cast = name in self._copies
        if is_cast:
            writer.free(self._copies.pop(name))
        if self._ranks == 1:
            if name in self._gradients:
                writer.work("memory", 3 * kept)
                writer.free(block)
            elif is_cast:
                self._gradients[name] = writer.take(kept, "gradients")
                writer.work("memory", 2 * kept)
                writer.free(block)
            else:
                self._gradients[name] = block
            return
        self._missing = self._missing or [len(bucket) for bucket in self._buckets]
        writer.work("memory", 2 * kept)
        writer.free(block)
        bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        if not self._missing[bucket] and self.reduces:
            num_bytes = self._bytes_of(self._buckets[bucket])
            size = kept // self._parameters[name].numel
            writer.work("all_reduce", num_bytes, "all_reduce", dtype_bytes=size, ranks=self._ranks, axis="all")

    def end_backward(self) -> None:
        """Copies of frozen parameters are freed."""
        self._writer.free(*self._copies.values())
        self._copies.clear()
        self._missing = []

    def _bytes_of(self, bucket: Sequence[Parameter]) -> int:
        return sum(self._kept[each.fqn] for each in bucket)


def _kept_bytes(parameter: Parameter, setup: TrainingSetup) -> int:
    """Bytes of a parameter of a model without FSDP, in the dtype that the optimizer updates."""
    is_master = parameter.requires_grad and parameter.dtype.is_floating_point
    return parameter.numel * (DTYPES[setup.master_dtype] if is_master else parameter.dtype).itemsize
