"""How fast a training runs: tokens per second, use of the GPU's peak, where the time goes, what it costs.

In a pass the slowest of computation, the host that issues kernels, collectives, copies, and an optimizer that steps on
the CPU hides the others. Waited for are the first gather, the last reduction, collectives between layers, and clipping
on the CPU.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Event, Work
from hf_fsdp_tools.foresight.forecast import Report, Source, step_of
from hf_fsdp_tools.foresight.memory import MemoryEstimate, memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Durations, Efficiency, efficiency_of, node_network
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.text import show_count

_HOST_SECONDS = 15e-6  # An operator that a model's Python calls. (assumed: 0.5 ms for the 30 to 40 of a decoder layer)
_AUTOGRAD_SECONDS = 7e-6  # The same where autograd's C++ calls it, in the backward pass. (assumed)
_HOST_COLLECTIVE_SECONDS = 150e-6  # A collective with FSDP2's Python around it. (assumed)
_COMPILED_HOST = 0.3  # Share that is left under `torch.compile`, which launches fused kernels. (assumed)
TRAINER = {
    "packed rows": (0.88, 1.03, "10 of TRL's SFTTrainer, A100, 4,096 tokens, 2024"),
    "padded rows": (0.62, 0.88, "9 of Liger's example, 4 A100, 512 tokens, padding counted, 2024"),
}
"""What transformers' `Trainer` reaches of the tokens per second of optimised loops, on which the efficiencies were
fitted, and the published trainings that say so (fms-acceleration's tables of 11 and 12/2024; Liger's example)."""
_PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "kernels bound by memory",
    "communication": "waiting for communication",
    "offload": "waiting for the CPU and its link",
    "host": "waiting for launches",
    "slowest GPU": "waiting for the slowest GPU",
}
_SHARED = "times of GPUs that divide rows, layers or experts were not compared with any real run"
_CLIPPED = (
    "the CPU steps once the norm of all gradients is known; with clip_by_last_norm or max_grad_norm 0, during the "
    "backward pass"
)
_OFFLOADED = "CPU offload was not timed; PyTorch's own (70 B on 8 A100) ran once at 0.6 of what was estimated for it"


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate(Report):
    """How fast a training runs, and where its time goes. Seconds are those of one optimizer step.

    Example:
        >>> estimate = estimate_throughput("checkpoint", num_processes=8, gpu="h100-80gb", max_length=32)
        >>> isinstance(estimate, ThroughputEstimate), 0 < estimate.mfu < 1
        (True, True)
    """

    _derived: ClassVar = ("tokens_per_second_per_gpu", "range", "trainer_ranges", "mfu", "hfu", "exposed_seconds")
    name: str
    setup: TrainingSetup
    step_seconds: float  # The slowest GPU's, for which all wait
    tokens_per_step: int  # One GPU's, over all its micro-batches
    model_flops: float
    """One GPU's in a step: matmuls and attention, forward and backward, each counted once (`Trace.model_flops`)."""
    hardware_flops: float  # `model_flops`, and what activation checkpointing recomputes
    parts: Mapping[str, float]  # Seconds of what the GPU does: `Timing.parts`, and `slowest GPU`, for which it waits
    communication_seconds: float  # All collectives', hidden or not
    error: float  # `Efficiency.error`; infinite where tokens per second are not estimated
    newest: float = 1.0  # How many times as fast with the kernels of 2026 (`Efficiency.gain`)
    source: str  # What the efficiencies were fitted on, or why tokens per second are not estimated
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def is_estimated(self) -> bool:
        """Whether published trainings of this kind are known; without, seconds serve to compare settings alone."""
        return math.isfinite(self.error)

    @property
    def range(self) -> tuple[float, float] | None:
        """Tokens per second and GPU of an optimised loop: of 2024 less the error, of the newest software plus it."""
        value = self.tokens_per_second_per_gpu
        return (value * (1 - self.error), value * self.newest * (1 + self.error)) if self.is_estimated else None

    @property
    def trainer_ranges(self) -> dict[str, tuple[float, float]]:
        """The same of transformers' `Trainer` by kind of rows (`TRAINER`), in the software of 2024."""
        value = self.tokens_per_second_per_gpu
        kinds = trainer_kinds(self.setup) if self.is_estimated else {}
        return {kind: (value * low, value * high) for kind, (low, high, _) in kinds.items()}

    def _share_of_peak(self, flops: float) -> float:
        precision = self.setup.mixed_precision
        peak = gpu_named(self.setup.gpu).peak(4 if precision == "fp32" else 2, precision)
        return flops / (self.step_seconds * peak)

    @property
    def mfu(self) -> float:
        """Model flops utilisation, from 0 to 1."""
        return self._share_of_peak(self.model_flops)

    @property
    def hfu(self) -> float:
        """Hardware flops utilisation, from 0 to 1."""
        return self._share_of_peak(self.hardware_flops)

    @property
    def exposed_seconds(self) -> float:
        return self.parts["communication"]

    def hours(self, tokens: float) -> float:
        """Hours in which all GPUs together see so many tokens."""
        return tokens / (self.tokens_per_second_per_gpu * self.setup.num_processes) / 3600

    def cost(self, tokens: float, price_per_gpu_hour: float) -> float:
        """What so many tokens cost, in the currency of the price."""
        return self.hours(tokens) * self.setup.num_processes * price_per_gpu_hour

    def __str__(self) -> str:
        setup, gpu = self.setup, gpu_named(self.setup.gpu)
        step, lines = show_seconds(self.step_seconds), [f"{self.name} on {setup.num_processes:,} × {gpu.title}"]
        if (nodes := math.ceil(setup.num_processes / setup.gpus_per_node)) > 1:
            network = node_network(setup, gpu) * 8 / 1e9
            lines[0] += f" ({nodes:,} machines of {setup.gpus_per_node}, {network:,.0f} Gbit/s each)"
        if self.range is None:
            lines += [f"  tokens/s are not estimated: {self.source}", f"  {step} per step, to compare settings:"]
        else:
            rate, (low, high) = self.tokens_per_second_per_gpu, self.range
            again = f", with what is recomputed {self.hfu:.1%}" * (self.hardware_flops > self.model_flops)
            newest = f" (kernels of 2026 {rate * self.newest:,.0f})" * (self.newest > 1)
            total, flops = f"{rate * setup.num_processes:,.0f} on all", self.model_flops / self.step_seconds / 1e12
            lines.append(f"  {rate:,.0f} tokens/s per GPU{newest}, {low:,.0f} to {high:,.0f}; {total}")
            for kind, (least, most) in self.trainer_ranges.items():
                lines.append(f"  with a Trainer, {kind}: {least:,.0f} to {most:,.0f} ({TRAINER[kind][2]})")
            lines.append(f"  {flops:,.0f} Tflop/s per GPU, {self.mfu:.1%} of its peak (MFU){again}")
            lines.append(f"  {step} per step of {self.tokens_per_step:,} tokens per GPU:")
        for part, seconds in self.parts.items():
            if seconds >= 0.0005 * self.step_seconds:
                lines.append(f"    {_PARTS[part]:<32} {show_seconds(seconds):>10} {seconds / self.step_seconds:>7.1%}")
        if self.communication_seconds:
            hidden = max(0.0, 1 - self.exposed_seconds / self.communication_seconds)
            lines.append(f"  {show_seconds(self.communication_seconds)} of communication, {hidden:.0%} of it hidden")
        lines += [f"  an optimised loop, software of 2024; efficiencies {self.source}"] * self.is_estimated
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def trainer_kinds(setup: TrainingSetup) -> dict[str, tuple[float, float, str]]:
    """The kinds of rows in `TRAINER` that a training can have: examples of several rows are not packed."""
    return {kind: about for kind, about in TRAINER.items() if setup.rows_per_example == 1 or kind != "packed rows"}


def show_seconds(seconds: float) -> str:
    """0.0123 as "12.3 ms"."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def estimate_throughput(
    name_or_model: Source,
    setup: TrainingSetup | None = None,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ThroughputEstimate:
    """How fast a training runs, found by a dry run on this machine; arguments and errors as of `estimate_memory`.

        print(estimate_throughput("meta-llama/Llama-3.1-8B", num_processes=64, gpu="h100-80gb", max_length=8192))

    Example:
        >>> estimate = estimate_throughput("checkpoint", num_processes=16, gpu="h100-80gb", max_length=32)
        >>> estimate.tokens_per_second_per_gpu > 0
        True
    """
    forecast = step_of(name_or_model, TrainingSetup.of(setup, **fields), **(model_kwargs or {}))
    return throughput_of(memory_of(forecast))


def throughput_of(memory: MemoryEstimate, *, efficiency: Efficiency | None = None) -> ThroughputEstimate:
    """The throughput of the forecast whose memory was estimated."""
    setup, trace = memory.forecast.setup, memory.forecast.trace
    steps = setup.gradient_accumulation_steps
    efficiency = efficiency or efficiency_of(gpu_named(setup.gpu), has_experts=trace.has_experts)
    timing = step_time(memory.forecast.step.events, setup, efficiency=efficiency)
    passes = f"the passes of {', '.join(setup.frozen_models)}" if setup.frozen_models else ""
    untimed, notes = setup.untimed or passes, trace.notes
    notes += (_SHARED,) if setup.shares else ()
    notes += (_OFFLOADED,) if setup.offload_params else ()
    notes += (_CLIPPED,) if setup.offload_params and _waits_for_norm(setup) else ()
    if memory.spare_bytes < 0:
        notes += ("the step has no room, or no cache, in the memory of this GPU; the times are those of one with more",)
    late = efficiency.straggler * math.sqrt(2 * math.log(setup.num_processes)) * timing.seconds
    repeated_flops = sum(work.flops for work in trace.events if isinstance(work, Work) and work.again)
    return ThroughputEstimate(
        name=f"{memory.model_class} with {show_count(memory.num_params)} parameters",
        setup=setup,
        step_seconds=timing.seconds + late,
        tokens_per_step=trace.tokens * steps,
        model_flops=trace.model_flops * steps,
        hardware_flops=(trace.model_flops + repeated_flops) * steps,
        parts={**timing.parts, "slowest GPU": late},
        communication_seconds=timing.communication,
        error=math.inf if untimed else efficiency.error,
        newest=efficiency.gain(timing.seconds, timing.parts["attention"] * (setup.attn_implementation == "sdpa")),
        source=f"a step also has {untimed}, which is not timed" if untimed else efficiency.source,
        notes=notes,
    )


# ---- a step in time ----


@dataclass(frozen=True)
class Timing:
    """How long a step takes on one rank, and why."""

    parts: dict[str, float]  # Seconds in which the GPU computes, or waits, by the first of `_PARTS`
    communication: float  # Seconds of all collectives, hidden or exposed

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time(events: Sequence[Event], setup: TrainingSetup, *, efficiency: Efficiency | None = None) -> Timing:
    """The timing of a step (`Forecast.step.events`) on the setup's GPUs and links."""
    gpu = gpu_named(setup.gpu)
    durations = Durations(setup, gpu, efficiency or efficiency_of(gpu))
    works = _away([event for event in events if isinstance(event, Work)], setup)
    passes = groupby(works, lambda work: {"loss": "forward", "clip": "optimizer"}.get(work.phase, work.phase))
    rows = [_pass_time(phase == "forward", some, durations, setup) for phase, some in passes]
    # of more than three micro-batches three are in the events: all others are like the second
    rows += rows[2:4] * (setup.gradient_accumulation_steps - 3)
    parts = {part: sum(row[part] for row in rows) for part in _PARTS if part != "slowest GPU"}
    return Timing(parts, communication=sum(row["all communication"] for row in rows))


def _away(works: list[Work], setup: TrainingSetup) -> list[Work]:
    """The works of a step with those of a CPU that steps during a pass in this pass: the next forward pass, which waits
    unit by unit, or where no norm is waited for the last backward pass (`streamed`)."""
    if not (setup.offload_params and setup.optimizer in ("adamw", "adamw_foreach", "sgd_momentum")):
        return works
    phases = ("optimizer",) if _waits_for_norm(setup) else ("optimizer", "clip")
    away = [work for work in works if work.stream == "offload" and work.phase in phases]
    works = [work for work in works if work not in away]
    if _waits_for_norm(setup):
        return [*(replace(work, phase="forward") for work in away), *works]
    return [*works, *(replace(work, phase="backward") for work in away)]


def _waits_for_norm(setup: TrainingSetup) -> bool:
    """Whether a step begins when all gradients are there."""
    return setup.max_grad_norm is not None and not setup.clip_by_last_norm


def _pass_time(is_forward: bool, works: Iterable[Work], durations: Durations, setup: TrainingSetup) -> dict[str, float]:
    """What the GPU does in one pass, in seconds."""
    collectives: list[tuple[str, float]] = []  # Link and seconds of those that run during kernels
    parts = defaultdict[str, float](float)  # Kernels, and what is waited for
    beside = defaultdict[str, float](float)  # Host, links and copies, which run while kernels do
    for work in works:
        seconds, operation = durations.seconds(work), work.operation
        if operation in COLLECTIVES:
            parts["all communication"] += seconds
            beside["host"] += _HOST_COLLECTIVE_SECONDS
            if work.stream in ("compute", "exchange"):
                parts["communication"] += seconds
            else:
                collectives.append(("node" if durations.group(work).is_inside else "network", seconds))
        elif operation in COPIES and work.stream != "compute":
            beside[operation] += seconds
        elif work.stream == "offload" and work.phase in ("forward", "backward"):
            beside["cpu"] += seconds
        elif operation in COPIES or work.stream == "offload":
            parts["offload"] += seconds
        else:
            parts[operation] += seconds
            is_autograd = work.phase == "backward" and not work.again and work.stream == "compute"
            host = _AUTOGRAD_SECONDS if is_autograd else _HOST_SECONDS
            beside["host"] += host * (_COMPILED_HOST if setup.compile else 1)
    kernels = sum(parts[kind] for kind in ("matmul", "attention", "memory"))
    for link, seconds in collectives:
        beside[link] += seconds
    for link, seconds in collectives[:1] if is_forward else collectives[-1:]:
        beside[link] -= seconds  # nothing is computed before it, or after
        parts["communication"] += seconds
    others = {"host": beside["host"], "communication": max(beside["node"], beside["network"])}
    others["offload"] = max(beside[each] for each in (*COPIES, "cpu"))
    slowest = max(others, key=others.__getitem__)
    parts[slowest] += max(0.0, others[slowest] - kernels)
    return parts
