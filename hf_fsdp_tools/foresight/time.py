"""How long a step takes: tokens per second, use of the peak, communication that nothing hides, cost."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_fsdp_tools.foresight.durations import COLLECTIVES, Durations
from hf_fsdp_tools.foresight.efficiency import LATEST_ERA, Efficiency, efficiency_of
from hf_fsdp_tools.foresight.events import Event, Work
from hf_fsdp_tools.foresight.hardware import Gpu, gpu_named
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.simulation import run

__all__ = ["ThroughputEstimate", "Timing", "chrome_trace", "simulate", "straggling", "throughput"]


@dataclass(frozen=True)
class Timing:
    """When the work of a step runs on one rank."""

    seconds: float
    """From the first event to the end of the last."""
    spans: tuple[tuple[float, float], ...]
    """Start and end in seconds of each `Work`, in the order of the list of events."""
    parts: dict[str, float]
    """What the compute stream does in these seconds: `matmul`, `attention`, `memory` (kernels that the GPU's memory
    bounds), `communication` (nothing, while a collective runs: exposed), `offload` (nothing, while bytes move between
    GPU and host, or the optimizer runs on the CPU), `host` (nothing else either: the host issues too slowly)."""
    communication: float
    """Seconds of all collectives, hidden or exposed."""

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation hides."""
        return self.parts["communication"]


def simulate(
    events: Sequence[Event],
    setup: TrainingSetup,
    *,
    efficiency: Efficiency | None = None,
    stalls: Mapping[int, float] | None = None,
) -> Timing:
    """The timing of a list of events (`Step.events`) on the setup's GPUs and links.

    Args:
        events: of one rank, as the host issues them; only `Work`, `Record` and `Wait` take part.
        setup: gives GPU, machines, network, mesh, precision, compile.
        efficiency: what is reached of the GPU's peaks; None takes what is known of it in the latest software.
        stalls: by index of an event: before it the host waits for the GPU and then for so many seconds, as when the
            allocator gives memory back to the driver.

    Raises:
        ConfigError: the GPU is unknown.
    """
    gpu = gpu_named(setup.gpu)
    durations = Durations(setup, gpu, efficiency or efficiency_of(gpu))
    spent = run(events, durations, compiled=setup.compile, stalls=stalls)
    parts = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    communication = on_host = 0.0
    spans = []
    for index, event in enumerate(events):
        if not isinstance(event, Work):
            continue
        start, end = span = spent.spans[index]
        spans.append(span)
        if event.operation in COLLECTIVES:
            communication += end - start
        elif event.stream == "offload":
            on_host += end - start
        elif event.stream == "compute" and event.operation in parts:
            parts[event.operation] += end - start
    parts["communication"] = spent.exposed
    parts["offload"] = spent.exposed_copies + min(on_host, spent.host_bound)
    parts["host"] = spent.host_bound - min(on_host, spent.host_bound)
    return Timing(spent.seconds, tuple(spans), parts, communication)


def chrome_trace(events: Sequence[Event], timing: Timing) -> dict[str, Any]:
    """A step as a trace for `chrome://tracing` and Perfetto: a row per stream; write it as JSON."""
    works = [event for event in events if isinstance(event, Work)]
    return {
        "traceEvents": [
            {
                "name": f"{work.operation} {work.unit or '(root)'}",
                "cat": work.phase,
                "ph": "X",
                "pid": 0,
                "tid": work.stream,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            }
            for work, (start, end) in zip(works, timing.spans, strict=True)
        ]
    }


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate:
    """How fast a training runs, and where its time goes. Seconds are those of one optimizer step."""

    name: str
    """The model."""
    gpu: str
    """Name in the table of GPUs."""
    num_gpus: int
    """Of the whole training."""
    gpus_per_node: int
    """That share a machine."""
    network_gbit_s: float
    """Of one machine."""
    era: str
    """Software whose efficiencies were taken."""
    step_seconds: float
    """Of the slowest GPU, for which all wait."""
    tokens_per_step: int
    """Of one GPU, over all its micro-steps."""
    model_flops: float
    """Of one GPU and step: all matmuls and attention, forward and backward, each counted once."""
    hardware_flops: float
    """The same with what activation checkpointing computes again."""
    peak_flops: float
    """Of one GPU per second in the precision of the training."""
    parts: dict[str, float]
    """What the GPU does in `step_seconds`, as in `Timing.parts`, and `slowest GPU`: waiting for it."""
    communication_seconds: float
    """Of all collectives, hidden or not."""
    error: float
    """Mean relative error of the estimates where the efficiencies were not fitted."""
    source: str
    """What the efficiencies were fitted on."""

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """`tokens_per_step / step_seconds`."""
        return self.tokens_per_step / self.step_seconds

    @property
    def range(self) -> tuple[float, float]:
        """Tokens per second and GPU, less and plus the mean error."""
        value = self.tokens_per_second_per_gpu
        return value * (1 - self.error), value * (1 + self.error)

    @property
    def tflops_per_gpu(self) -> float:
        """Model Tflop/s per GPU: `model_flops / step_seconds / 1e12`."""
        return self.model_flops / self.step_seconds / 1e12

    @property
    def mfu(self) -> float:
        """Model flops utilisation, from 0 to 1: `model_flops / (step_seconds * peak_flops)`."""
        return self.model_flops / (self.step_seconds * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware flops utilisation, from 0 to 1: `hardware_flops / (step_seconds * peak_flops)`."""
        return self.hardware_flops / (self.step_seconds * self.peak_flops)

    @property
    def exposed_seconds(self) -> float:
        """Communication that no computation hides."""
        return self.parts["communication"]

    def hours(self, tokens: float) -> float:
        """Hours in which all GPUs together see so many tokens."""
        return tokens / (self.tokens_per_second_per_gpu * self.num_gpus) / 3600

    def cost(self, tokens: float, price_per_gpu_hour: float) -> float:
        """What so many tokens cost, in the currency of the price.

        Args:
            tokens: of the whole training.
            price_per_gpu_hour: of one GPU for one hour.
        """
        return self.hours(tokens) * self.num_gpus * price_per_gpu_hour

    def to_json(self) -> str:
        """All fields and what follows from them."""
        low, high = self.range
        derived = {
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "range": [low, high],
            "tflops_per_gpu": self.tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "exposed_seconds": self.exposed_seconds,
        }
        return json.dumps(dataclasses.asdict(self) | derived, indent=2)

    def __str__(self) -> str:
        low, high = self.range
        gpu = gpu_named(self.gpu)
        nodes = math.ceil(self.num_gpus / self.gpus_per_node)
        where = f", {nodes} machines of {self.gpus_per_node}, {self.network_gbit_s:,.0f} Gbit/s" if nodes > 1 else ""
        lines = [
            f"{self.name} on {self.num_gpus:,} x {gpu.title}{where}",
            f"  {self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f})"
            f", {self.tokens_per_second_per_gpu * self.num_gpus:,.0f} in all",
            f"  {self.tflops_per_gpu:,.0f} Tflop/s per GPU, MFU {self.mfu:.1%}"
            + (f", HFU {self.hfu:.1%} with recomputation" if self.hardware_flops > 1.001 * self.model_flops else ""),
            f"  {_show_seconds(self.step_seconds)} per step of {self.tokens_per_step:,} tokens per GPU, of which:",
        ]
        for part, seconds in self.parts.items():
            if seconds >= 0.0005 * self.step_seconds:
                lines.append(f"    {_PARTS[part]:<34}{_show_seconds(seconds):>10} {seconds / self.step_seconds:>7.1%}")
        hidden = self.communication_seconds - self.exposed_seconds
        if self.communication_seconds:
            share = max(0.0, hidden / self.communication_seconds)
            lines.append(f"  {_show_seconds(self.communication_seconds)} of communication, {share:.0%} of it hidden")
        lines.append(f"  Efficiencies: {self.source}; software of {self.era}.")
        return "\n".join(lines)


_PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "kernels bound by memory",
    "communication": "waiting for communication",
    "offload": "waiting for the CPU and its link",
    "host": "waiting for launches",
    "slowest GPU": "waiting for the slowest GPU",
}


def _show_seconds(seconds: float) -> str:
    """0.0123 as "12.3 ms"."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def throughput(
    events: Sequence[Event],
    setup: TrainingSetup,
    *,
    name: str,
    tokens: int,
    model_flops: float,
    era: str = LATEST_ERA,
    efficiency: Efficiency | None = None,
    stalls: Mapping[int, float] | None = None,
) -> ThroughputEstimate:
    """The throughput of a step.

    Args:
        events: of one optimizer step (`Step.events`).
        setup: of the training.
        name: of the model, for texts.
        tokens: of one GPU and micro-step.
        model_flops: of one GPU and micro-step, forward and backward without recomputation (`Trace.model_flops`).
        era: of software, as in `efficiency.ERAS`.
        efficiency: instead of the known one of GPU and era.
        stalls: as in `simulate`.

    Raises:
        ConfigError: GPU or era is unknown.
    """
    gpu = gpu_named(setup.gpu)
    efficiency = efficiency or efficiency_of(gpu, era)
    timing = simulate(events, setup, efficiency=efficiency, stalls=stalls)
    late = straggling(setup, efficiency) * timing.seconds
    steps = setup.gradient_accumulation_steps
    return ThroughputEstimate(
        name=name,
        gpu=gpu.name,
        num_gpus=setup.num_gpus,
        gpus_per_node=setup.gpus_per_node,
        network_gbit_s=gpu.node_network(setup) * 8 / 1e9,
        era=era,
        step_seconds=timing.seconds + late,
        tokens_per_step=tokens * steps,
        model_flops=model_flops * steps,
        hardware_flops=sum(event.flops for event in events if isinstance(event, Work)),
        peak_flops=_peak(gpu, setup),
        parts=timing.parts | {"slowest GPU": late},
        communication_seconds=timing.communication,
        error=efficiency.error,
        source=efficiency.source,
    )


def straggling(setup: TrainingSetup, efficiency: Efficiency) -> float:
    """How much later the slowest of all GPUs is than the mean, as a share of the step: the expected maximum of n normal
    deviates, about sqrt(2 ln n) (Cramér 1946, section 28.6), times how much one GPU differs."""
    return efficiency.straggler * math.sqrt(2 * math.log(setup.num_gpus)) if setup.num_gpus > 1 else 0.0


def _peak(gpu: Gpu, setup: TrainingSetup) -> float:
    return gpu.peak(4 if setup.precision == "fp32" else 2, setup.precision)
