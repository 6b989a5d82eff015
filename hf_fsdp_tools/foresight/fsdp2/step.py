"""One optimizer step as the host issues it: FSDP2's schedule laid over the events of a trace."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.muon.matrices import BUCKET_BYTES, NEWTON_SCHULZ_STEPS, newton_schulz_flops
from hf_fsdp_tools.foresight.events import (
    Alloc,
    Event,
    EventWriter,
    Free,
    Gradient,
    Mark,
    Parameter,
    Phase,
    Trace,
    Work,
)
from hf_fsdp_tools.foresight.fsdp2.schedule import Fsdp2Schedule, Shard
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.checks import check_kind
from hf_fsdp_tools.text import did_you_mean


@dataclass(frozen=True)
class Step:
    """One step of a training that has run some steps already, on the rank that holds most (the first)."""

    events: tuple[Event, ...]  # All micro-batches, clipping and the optimizer; the number of a freed block comes again
    optimizer_at: int  # Index of the first event of clipping and the optimizer
    parameters: tuple[Alloc, ...]  # Shards, buffers and other memory that is there from the beginning and for good
    state: tuple[Alloc, ...]  # The optimizer's
    host_bytes: int  # This rank's shards, gradients, optimizer state under CPU offload, and blocks' inputs

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
    whole = [parameter for parameter in trace.parameters if parameter.is_whole]
    schedule, replicated = Fsdp2Schedule(writer, trace.parameters, plan, setup), _WholeGradients(writer, whole, setup)
    _write_micro_steps(trace, setup, schedule, replicated)
    optimizer_at, shards = len(writer.events), schedule.shards
    # An optimizer has no state of a parameter without a gradient (the vision tower, where the batch has no images).
    reached = {event.parameter for event in trace.events if type(event) is Gradient}
    updated: list[Shard | Parameter] = [shard for shard in shards if shard.parameter.fqn in reached]
    updated += [each for each in whole if each.fqn in reached]
    on_host = setup.offload_params and bool(shards)  # where the CPU computes, from and to its own memory
    update = EventWriter() if on_host else writer
    state_bytes, state = optimizer_step(update, updated, setup), list[Alloc]()
    writer.phase = "optimizer"
    if on_host:
        phases: tuple[tuple[Phase, int], ...] = (("clip", 0), ("optimizer", 1))
        for phase, more in phases:
            moved = sum(event.num_bytes for event in update.events if type(event) is Work and event.phase == phase)
            # copies in the dtype of computation are made where the shard has just been stepped
            moved += more * sum(each.gathered_bytes for each in updated if isinstance(each, Shard) and each.is_cast)
            writer.phase = phase
            if moved:
                writer.work("memory", moved, "offload", dtype_bytes=4)
    else:
        state = [writer.alloc(num_bytes, "optimizer") for num_bytes in state_bytes]
    if setup.optimizer == "muon":
        write_muon(writer, updated, setup)
    writer.phase = "forward"
    schedule.end_step()
    replicated.end_step()
    frozen_bytes = -(-trace.frozen_bytes // setup.gpus_per_copy)
    sizes = [] if setup.offload_params else [*(shard.num_bytes for shard in shards), frozen_bytes]
    sizes += [*(each.num_bytes for each in whole), trace.buffer_bytes]
    parameters = [writer.alloc(num_bytes, "parameters") for num_bytes in sizes if num_bytes]
    parameters += [writer.alloc(num_bytes, "gradients") for num_bytes in replicated.resident]
    copies = sum(shard.num_bytes * (1 + shard.parameter.requires_grad) for shard in shards)
    inputs = (event for event in trace.events if type(event) is Work and event.stream == "activations")
    host_bytes = int(sum(work.num_bytes for work in inputs if work.operation == "device_to_host"))
    copies += sum(shard.gathered_bytes for shard in shards if shard.is_cast)
    host_bytes += frozen_bytes + copies + sum(state_bytes) if setup.offload_params else 0
    return Step(tuple(writer.events), optimizer_at, tuple(parameters), tuple(state), host_bytes)


def _write_micro_steps(trace: Trace, setup: TrainingSetup, schedule: Fsdp2Schedule, replicated: Any) -> None:
    """Write the events of a trace once for each micro-batch; FSDP2 acts between them."""
    events, writer = trace.events, schedule.writer
    inputs = {event.block for event in events if type(event) is Alloc and event.kind == "inputs"}
    end = len(events)  # of the backward pass: inputs are given back after it
    while end and isinstance(event := events[end - 1], Free) and event.block in inputs:
        end -= 1
    # what the trace does not free: the loss, for example
    gone = {event.block for event in events if isinstance(event, Free | Gradient)}
    left = [event.block for event in events if type(event) is Alloc and event.block not in gone]
    # In each micro-batch but the last, gradients, which may stay until the end of the step, have another number.
    staying = {event.block for event in events if type(event) is Gradient}
    taken = {at: event.block for at, event in enumerate(events) if type(event) is Alloc and event.block in staying}
    for left_over in reversed(range(setup.gradient_accumulation_steps)):
        renamed = {block: next(writer.numbers) for block in taken.values()} if left_over else {}
        schedule.reduces = replicated.reduces = not left_over or setup.sync_each_batch
        for at, event in enumerate(events[:end]):
            if isinstance(event, Gradient):
                writer.phase = "backward"
                block = renamed.get(event.block, event.block)
                if not schedule.gradient(event.parameter, block):
                    replicated.gradient(event.parameter, block)
                continue
            if renamed and at in taken and isinstance(event, Alloc):
                event = replace(event, block=renamed[event.block])
            writer.events.append(event)
            if type(event) is Mark:
                schedule.mark(event)
        writer.phase = "backward"
        schedule.end_backward()
        writer.phase = "backward"
        replicated.end_backward()
        writer.phase = "forward"
        writer.events.extend(events[end:])
        writer.free(*left)


_BUCKET = 25 * 2**20  # Bytes that DDP reduces at once (`bucket_cap_mb=25` of `DistributedDataParallel`)


class _WholeGradients:
    """Gradients of parameters that every rank holds whole: next to shards they are averaged after each backward pass,
    without FSDP as by DDP with `gradient_as_bucket_view`, whose buckets are there from the beginning."""

    def __init__(self, writer: EventWriter, parameters: list[Parameter], setup: TrainingSetup) -> None:
        self._writer, self._setup = writer, setup
        self._is_ddp = setup.wrapping == "none"
        self._parameters = {parameter.fqn: parameter for parameter in parameters}
        self.reduces = True  # False inside of DDP's `no_sync`
        has_buckets = self._is_ddp and setup.num_processes > 1
        self.resident = [each.num_bytes for each in reversed(parameters) if has_buckets and each.requires_grad]
        self._gradients: dict[str, int] = {}
        self._unsent = 0  # Bytes of gradients that are not reduced yet

    def gradient(self, name: str, block: int) -> None:
        """The gradient of this micro-batch is complete: it is kept, or added to what is there."""
        writer, num_bytes = self._writer, self._parameters[name].num_bytes
        if name in self._gradients or self.resident:
            writer.work("memory", (2 if self.resident else 3) * num_bytes)
            writer.free(block)
        else:
            self._gradients[name] = block
        self._unsent += num_bytes

    def end_backward(self) -> None:
        """Gradients are summed over ranks, by DDP in buckets."""
        more: dict[str, Any] = {"stream": "all_reduce" if self._is_ddp else "compute"}
        ranks, most = self._setup.num_processes, _BUCKET if self._is_ddp else self._unsent
        for sent in range(0, self._unsent, most) if ranks > 1 and self.reduces and self._unsent else ():
            num_bytes = min(most, self._unsent - sent)
            self._writer.work("all_reduce", num_bytes, dtype_bytes=4, ranks=ranks, axis="all", **more)
        self._unsent = 0

    def end_step(self) -> None:
        """Gradients are set to None."""
        self._writer.free(*self._gradients.values())
        self._gradients.clear()


# ---- clipping and the optimizer: the memory and the traffic of torch's own, as a dry run of it counts them


@dataclass(frozen=True)
class _Rule:
    """What an optimizer has and does for one shard, in multiples of the shard's bytes."""

    states: int
    touched: float  # Tensors that its kernels read or write, each counted once for a kernel
    temporary: int = 0


OPTIMIZERS: dict[str, tuple[str, _Rule | None]] = {
    "adamw": ("adamw_torch_fused", _Rule(states=2, touched=4)),
    "adamw_foreach": ("adamw_torch", _Rule(states=2, touched=14, temporary=1)),
    "adamw_8bit": ("adamw_torch_8bit", None),
    "muon": ("muon", None),
    "sgd": ("sgd", _Rule(states=0, touched=2)),
    "sgd_momentum": ("sgd --optim_args momentum=0.9", _Rule(states=1, touched=5)),
}
"""By name in `TrainingSetup.optimizer`: `--optim` of transformers' `TrainingArguments`, and the rule, which a test
compares with torch's own. `adamw_8bit` is torchao's; `muon` this package's: AdamW, SGD's momentum, `write_muon`."""


def optimizer_step(writer: EventWriter, updated: Sequence[Shard | Parameter], setup: TrainingSetup) -> list[int]:
    """Write clipping and the optimizer's step, of Muon what each rank does alone; return the sizes of its state."""
    if setup.optimizer == "muon":
        matrices = [each for each in updated if each.parameter.matrices is not None]
        others = [each for each in updated if each.parameter.matrices is None]
        sizes = optimizer_step(writer, others, replace(setup, optimizer="adamw"))
        return sizes + optimizer_step(writer, matrices, replace(setup, optimizer="sgd_momentum"))
    if setup.optimizer == "adafactor":
        check_kind(torch.optim.Adafactor)
    if setup.optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer {setup.optimizer!r} is not estimated{did_you_mean(setup.optimizer, OPTIMIZERS)}")
    sizes = [each.num_bytes for each in updated if each.numel]
    if setup.max_grad_norm is not None:
        writer.phase = "clip"
        writer.work("memory", 2 * sum(sizes), dtype_bytes=4)
    writer.phase = "optimizer"
    rule = OPTIMIZERS[setup.optimizer][1]
    if rule is None:
        states = [size for each in updated if each.numel for size in _states_8bit(each)]
        writer.work("memory", 2 * sum(states) + 3 * sum(sizes), dtype_bytes=1)
        return states
    taken = [writer.take(rule.temporary * size, "temporaries") for size in sizes if rule.temporary]
    writer.work("memory", rule.touched * sum(sizes), dtype_bytes=4)
    writer.free(*taken)
    return [own for own in sizes for _ in range(rule.states)]


def _states_8bit(shard: Shard | Parameter) -> list[int]:
    """torchao's AdamW8bit: two states of a byte per element, each with a scale for each block of 256 and a table."""
    if shard.numel < 4096 or shard.numel % 256:
        return 2 * [shard.num_bytes]
    return 2 * [shard.numel, 4 * shard.numel // 256, 4 * 256]


def write_muon(writer: EventWriter, updated: Sequence[Shard | Parameter], setup: TrainingSetup) -> None:
    """What ranks do of Muon's step together: matrices travel to their owners, are orthogonalised, and travel back."""
    ranks, travelling, flops, traffic, largest = setup.num_processes, 0.0, 0.0, 0.0, 0
    for each in updated:
        if (matrices := each.parameter.matrices) is None:
            continue
        count, rows, columns = matrices
        flops += count / ranks * newton_schulz_flops(rows, columns)
        traffic += count / ranks * NEWTON_SCHULZ_STEPS * 10 * (rows * columns + min(rows, columns) ** 2)
        largest = max(largest, 2 * rows * columns)
        stacked = each.parameter.shape[0] * (len(each.shape) > 2)
        is_home = getattr(each, "dim", None) == 0 and stacked and stacked % ranks == 0
        travelling += 0.0 if is_home else 2.0 * count * rows * columns / ranks
    if not flops:
        return
    num_buckets = max(1, math.ceil(travelling / BUCKET_BYTES))
    writer.phase = "optimizer"
    for _ in range(num_buckets):
        block = writer.take(int(4 * travelling / num_buckets) + 3 * largest, "temporaries")
        for copies in (1, setup.num_copies) if ranks > 1 else ():
            writer.work("all_to_all", copies * travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        writer.events.append(Work("matmul", flops / num_buckets, traffic / num_buckets, "", "optimizer"))
        writer.free(block)
