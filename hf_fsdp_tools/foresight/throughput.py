"""How fast a training runs: tokens per second, use of the GPU's peak, where the time goes, what it costs.

In a pass (forward, backward, the optimizer) the GPU computes while the host issues the next kernels, collectives run on
streams of their own and bytes go to the host and back; FSDP2 prefetches far enough that the slowest of these hides the
others. Waited for are the first gather of a forward pass and the last reduction of a backward pass, collectives between
layers, copies of one GPU and an optimizer on the CPU.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Event, Work
from hf_fsdp_tools.foresight.forecast import Report, Source, step_of
from hf_fsdp_tools.foresight.memory import MemoryEstimate, memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Durations, Efficiency, efficiency_of, node_network
from hf_fsdp_tools.foresight.timing.hardware import Gpu, gpu_named
from hf_fsdp_tools.text import show_count

_SEGMENT_SECONDS = 2e-3
"""Time for which the GPU stands still per segment that a full allocator gives back: `cudaFree`, and `cudaMalloc` of its
successor. (assumed; from the backward pass of GPT-175B in the FSDP paper, arXiv 2304.11277)"""

_HOST_SECONDS = 15e-6
"""Host time of an operator that a model's Python calls, with its kernel's launch. (assumed: 0.5 ms for the forward pass
of a decoder layer of transformers, which has 30 to 40)"""
_AUTOGRAD_SECONDS = 7e-6  # The same where autograd's C++ calls it, in the backward pass. (assumed)
_HOST_COLLECTIVE_SECONDS = 150e-6  # A collective with FSDP2's Python around it. (assumed)
_COMPILED_HOST = 0.3  # Share that is left under `torch.compile`, which launches fused kernels. (assumed)

TRAINER = {
    "packed rows": (0.88, 1.03, "10 of TRL's SFTTrainer, A100, 4,096 tokens, 2024"),
    "padded rows": (0.62, 0.88, "9 of Liger's example, 4 A100, 512 tokens, padding counted, 2024"),
}
"""What transformers' `Trainer` reaches of the tokens per second of tuned loops, on which the efficiencies were fitted,
and the published trainings that say so (fms-acceleration's tables of 11 and 12/2024; Liger's example)."""

_PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "kernels bound by memory",
    "communication": "waiting for communication",
    "offload": "waiting for the CPU and its link",
    "host": "waiting for launches",
    "allocator": "waiting for the full allocator",
    "slowest GPU": "waiting for the slowest GPU",
}

_SHARED = "times of GPUs that share rows, layers or experts were not compared with any real run"
_OFFLOADED = "with CPU offload one published full training (70 B on 8 A100) ran at 0.6 of the estimated tokens/s"


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate(Report):
    """How fast a training runs, and where its time goes. Seconds are those of one optimizer step.

    Example:
        >>> estimate = estimate_throughput("checkpoint", num_gpus=8, gpu="h100-80gb", seq_len=32)
        >>> isinstance(estimate, ThroughputEstimate), 0 < estimate.mfu < 1
        (True, True)
    """

    _derived: ClassVar = ("tokens_per_second_per_gpu", "range", "trainer_ranges", "mfu", "hfu", "exposed_seconds")
    name: str
    setup: TrainingSetup
    step_seconds: float  # The slowest GPU's, for which all wait
    tokens_per_step: int  # One GPU's, over all its micro-steps
    model_flops: float
    """One GPU's in a step: matmuls and attention, forward and backward, each counted once (`Trace.model_flops`)."""
    hardware_flops: float  # `model_flops`, and what activation checkpointing computes again
    parts: Mapping[str, float]  # Seconds of what the GPU does: `Timing.parts`, and `slowest GPU`, for which it waits
    communication_seconds: float  # All collectives', hidden or not
    error: float  # `Efficiency.error`; infinite where tokens per second are not estimated
    newest: float = 1.0  # `Efficiency.newest`
    source: str  # What the efficiencies were fitted on, or why tokens per second are not estimated
    notes: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu:
        return gpu_named(self.setup.gpu)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def is_estimated(self) -> bool:
        """Whether published trainings of this kind are known. Without any, seconds and tokens per second serve to
        compare settings with each other, and nothing else."""
        return math.isfinite(self.error)

    @property
    def range(self) -> tuple[float, float] | None:
        """Tokens per second and GPU of a tuned loop: with the software of 2024 less the error, with the newest plus the
        error; None where they are not estimated."""
        value = self.tokens_per_second_per_gpu
        return (value * (1 - self.error), value * self.newest * (1 + self.error)) if self.is_estimated else None

    @property
    def trainer_ranges(self) -> dict[str, tuple[float, float]]:
        """The same of transformers' `Trainer` by kind of rows (`TRAINER`), in the software of 2024."""
        value = self.tokens_per_second_per_gpu
        return {kind: (value * low, value * high) for kind, (low, high, _) in TRAINER.items() if self.is_estimated}

    @property
    def mfu(self) -> float:
        """Model flops utilisation, from 0 to 1."""
        return self.model_flops / (self.step_seconds * self._peak)

    @property
    def hfu(self) -> float:
        """Hardware flops utilisation, from 0 to 1."""
        return self.hardware_flops / (self.step_seconds * self._peak)

    @property
    def _peak(self) -> float:
        return self.gpu.peak(4 if self.setup.precision == "fp32" else 2, self.setup.precision)

    @property
    def exposed_seconds(self) -> float:
        """Communication that no computation hides."""
        return self.parts["communication"]

    def hours(self, tokens: float) -> float:
        """Hours in which all GPUs together see so many tokens."""
        return tokens / (self.tokens_per_second_per_gpu * self.setup.num_gpus) / 3600

    def cost(self, tokens: float, price_per_gpu_hour: float) -> float:
        """What so many tokens cost, in the currency of the price."""
        return self.hours(tokens) * self.setup.num_gpus * price_per_gpu_hour

    def __str__(self) -> str:
        setup = self.setup
        step, lines = show_seconds(self.step_seconds), [f"{self.name} on {setup.num_gpus:,} × {self.gpu.title}"]
        if (nodes := math.ceil(setup.num_gpus / setup.gpus_per_node)) > 1:
            network = node_network(setup, self.gpu) * 8 / 1e9
            lines[0] += f" ({nodes:,} machines of {setup.gpus_per_node}, {network:,.0f} Gbit/s each)"
        if self.range is None:
            lines += [f"  tokens/s are not estimated: {self.source}", f"  {step} per step, to compare settings:"]
        else:
            rate, (low, high) = self.tokens_per_second_per_gpu, self.range
            flops, is_repeated = self.model_flops / self.step_seconds, self.hardware_flops > self.model_flops
            again = f", with what is computed again {self.hfu:.1%}" * is_repeated
            newest = f" (kernels of 2026 {rate * self.newest:,.0f})" * (self.newest > 1)
            total = f"{rate * setup.num_gpus:,.0f} on all"
            lines.append(f"  {rate:,.0f} tokens/s per GPU{newest}, {low:,.0f} to {high:,.0f}; {total}")
            for kind, (least, most) in self.trainer_ranges.items():
                lines.append(f"  with a Trainer, {kind}: {least:,.0f} to {most:,.0f} ({TRAINER[kind][2]})")
            lines += [
                f"  {flops / 1e12:,.0f} Tflop/s per GPU, {self.mfu:.1%} of its peak (MFU){again}",
                f"  {step} per step of {self.tokens_per_step:,} tokens per GPU:",
            ]
        for part, seconds in self.parts.items():
            if seconds >= 0.0005 * self.step_seconds:
                lines.append(f"    {_PARTS[part]:<32} {show_seconds(seconds):>10} {seconds / self.step_seconds:>7.1%}")
        if self.communication_seconds:
            hidden = max(0.0, 1 - self.exposed_seconds / self.communication_seconds)
            lines.append(f"  {show_seconds(self.communication_seconds)} of communication, {hidden:.0%} of it hidden")
        lines += [f"  a tuned loop, software of 2024; efficiencies {self.source}"] * self.is_estimated
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


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

        print(estimate_throughput("meta-llama/Llama-3.1-8B", num_gpus=64, gpu="h100-80gb", seq_len=8192))

    Example:
        >>> estimate = estimate_throughput("checkpoint", num_gpus=16, gpu="h100-80gb", seq_len=32)
        >>> estimate.tokens_per_second_per_gpu > 0
        True
    """
    forecast = step_of(name_or_model, TrainingSetup.of(setup, **fields), **(model_kwargs or {}))
    return throughput_of(memory_of(forecast))


def throughput_of(memory: MemoryEstimate, *, efficiency: Efficiency | None = None) -> ThroughputEstimate:
    """The throughput of the forecast whose memory was estimated, slowed where the GPU's memory is full."""
    setup, trace = memory.forecast.setup, memory.forecast.trace
    steps = setup.gradient_accumulation_steps
    efficiency = efficiency or efficiency_of(gpu_named(setup.gpu), has_experts=trace.has_experts)
    stalls = {} if memory.is_full else {index: count * _SEGMENT_SECONDS for index, count in memory.retried}
    timing = step_time(memory.forecast.step.events, setup, efficiency=efficiency, stalls=stalls)
    notes = trace.notes
    notes += (_SHARED,) if max(setup.cp_size, setup.tp_size, setup.ep_size) > 1 else ()
    notes += (_OFFLOADED,) if setup.offload else ()
    if memory.is_full:
        notes += ("the step does not fit into the memory of this GPU; the times are those of one with more",)
    elif memory.retried:
        notes += (f"the memory is full {len(memory.retried)} times in a step, for which the GPU stands still",)
    late = efficiency.straggler * math.sqrt(2 * math.log(setup.num_gpus)) * timing.seconds
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
        error=efficiency.error,
        newest=efficiency.newest,
        source=efficiency.source,
        notes=notes,
    )


# ---- a step in time ----

_PASSES = {"loss": "forward", "clip": "optimizer"}


@dataclass(frozen=True)
class Timing:
    """How long a step takes on one rank, and why."""

    parts: dict[str, float]
    """Seconds in which the GPU does `matmul`, `attention`, `memory` (kernels that its memory bounds), or waits for
    `communication` (exposed), `offload` (copies, and an optimizer on the CPU), its `allocator`, or the `host`."""
    communication: float  # Seconds of all collectives, hidden or exposed

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class _Pass:
    """Seconds of one pass by what takes them."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.collectives: list[tuple[str, float]] = []  # Link and seconds of those that run beside kernels
        self.alone = defaultdict[str, float](float)  # Kernels, and what is waited for
        self.beside = defaultdict[str, float](float)  # Host, links and copies, which run while kernels do

    def add(self, work: Work, durations: Durations, host_factor: float) -> None:
        seconds = durations.seconds(work)
        if work.operation in COLLECTIVES:
            self.beside["host"] += _HOST_COLLECTIVE_SECONDS
            if work.stream in ("compute", "exchange"):
                self.alone["communication"] += seconds
            else:
                self.collectives.append(("node" if durations.group(work).is_inside else "network", seconds))
        elif work.operation in COPIES and work.stream != "compute":
            self.beside[work.operation] += seconds
        elif work.operation in COPIES or work.stream == "offload":
            self.alone["offload"] += seconds
        else:
            self.alone[work.operation] += seconds
            is_autograd = work.phase == "backward" and not work.again and work.stream == "compute"
            self.beside["host"] += (_AUTOGRAD_SECONDS if is_autograd else _HOST_SECONDS) * host_factor

    def parts(self) -> Mapping[str, float]:
        """What the GPU does in the pass."""
        parts, beside = self.alone.copy(), self.beside.copy()
        kernels = sum(parts[kind] for kind in ("matmul", "attention", "memory"))
        for link, seconds in self.collectives:
            beside[link] += seconds
        for link, seconds in self.collectives[:1] if self.name == "forward" else self.collectives[-1:]:
            beside[link] -= seconds  # nothing is computed before it, or after
            parts["communication"] += seconds
        others = {"host": beside["host"], "communication": max(beside["node"], beside["network"])}
        others["offload"] = max(beside[copy] for copy in COPIES)
        slowest = max(others, key=others.__getitem__)
        parts[slowest] += max(0.0, others[slowest] - kernels)
        return parts


def step_time(
    events: Sequence[Event],
    setup: TrainingSetup,
    *,
    efficiency: Efficiency | None = None,
    stalls: Mapping[int, float] | None = None,
) -> Timing:
    """The timing of a step (`Forecast.step.events`) on the setup's GPUs and links.

    `stalls`: by index of an event, before which the GPU stands still for so many seconds.
    """
    gpu, stalls = gpu_named(setup.gpu), stalls or {}
    durations = Durations(setup, gpu, efficiency or efficiency_of(gpu))
    passes = [_Pass()]
    for index, event in enumerate(events):
        passes[-1].alone["allocator"] += stalls.get(index, 0.0)
        if isinstance(event, Work):
            phase = _PASSES.get(event.phase, event.phase)
            passes[-1].name = passes[-1].name or phase
            if phase != passes[-1].name:
                passes.append(_Pass(phase))
            passes[-1].add(event, durations, _COMPILED_HOST if setup.compile else 1.0)
    steps = setup.gradient_accumulation_steps
    if steps > 3:  # of which three are in the events: all others are like the second
        passes += passes[2:4] * (steps - 3)
    rows = [each.parts() for each in passes]
    parts = {part: sum(row[part] for row in rows) for part in _PARTS if part != "slowest GPU"}
    communication = sum(each.alone["communication"] + sum(s for _, s in each.collectives) for each in passes)
    return Timing(parts, communication)
