"""A step in time: each pass takes as long as the slowest of those who work at it, and what all wait for besides.

In a pass (forward, backward, the optimizer) the GPU computes while the host issues the next kernels, collectives run on
streams of their own and bytes go to the host and back; FSDP2 prefetches far enough that the slowest of these hides the
others. Waited for are the first gather of a forward pass and the last reduction of a backward pass, collectives between
layers, copies of one GPU and an optimizer on the CPU.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Event, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Durations, Efficiency, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

_HOST_SECONDS = 15e-6
"""Host time of an operator that a model's Python calls, with its kernel's launch. (assumed: 0.5 ms for the forward pass
of a decoder layer of transformers, which has 30 to 40)"""
_AUTOGRAD_SECONDS = 7e-6  # The same where autograd's C++ calls it, in the backward pass. (assumed)
_HOST_COLLECTIVE_SECONDS = 150e-6  # A collective with FSDP2's Python around it. (assumed)
_COMPILED_HOST = 0.3  # Share that is left under `torch.compile`, which launches fused kernels. (assumed)

_PASSES = {"loss": "forward", "clip": "optimizer"}
_PARTS = ("matmul", "attention", "memory", "communication", "offload", "allocator", "host")


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
    parts = {part: sum(row[part] for row in rows) for part in _PARTS}
    communication = sum(each.alone["communication"] + sum(s for _, s in each.collectives) for each in passes)
    return Timing(parts, communication)
