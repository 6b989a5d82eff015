"""How long a step takes on its streams, and what the compute stream waits for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_fsdp_tools.foresight.events import COLLECTIVES, Event, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.durations import Durations
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.foresight.timing.simulation import run


@dataclass(frozen=True)
class Timing:
    """When the work of a step runs on one rank."""

    seconds: float
    """From the first event to the end of the last."""
    spans: tuple[tuple[float, float], ...]
    """Start and end in seconds of each `Work`, in the order of the list of events."""
    parts: dict[str, float]
    """What the compute stream does in these seconds: `matmul`, `attention`, `memory` (kernels that the GPU's memory
    bounds), or it has nothing to do: `communication` (while a collective runs: exposed), `offload` (while bytes move
    between GPU and host, or the optimizer runs on the CPU), `allocator` (the stalls), `host` (launches are late)."""
    communication: float
    """Seconds of all collectives, hidden or exposed."""


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
    stalled = sum((stalls or {}).values())
    on_host = min(on_host, spent.host_bound - stalled)
    parts["communication"] = spent.exposed
    parts["offload"] = spent.exposed_copies + on_host
    parts["allocator"] = stalled
    parts["host"] = spent.host_bound - stalled - on_host
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
