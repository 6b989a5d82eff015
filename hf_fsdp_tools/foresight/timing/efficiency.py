"""What training reaches of a GPU's peaks, and how long one kernel, copy or collective runs by itself: a roofline."""

import math
from dataclasses import dataclass, replace

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.collectives import Axis, Group, collective_seconds, group_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, Gpu


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and the source of these numbers."""

    matmul: float  # Of the peak flop/s, by a large matmul
    matmul_half: float = 0.0
    """The smallest dimension at which a matmul reaches half of that: share x size / (size + this)."""
    attention: float
    memory: float  # Of the peak bandwidth, by kernels that the GPU's memory bounds
    network: float = 0.8
    straggler: float = 0.0
    """How much the time of a step differs between GPUs: the slowest of n is later than the mean by this times
    sqrt(2 ln n), the expected maximum of n normal deviates."""
    compiled_memory: float = 0.35  # Share of the traffic of elementwise kernels that is left under `torch.compile`
    error: float
    """What tokens per second of a tuned loop may be off, as a share. On A100 and H100 nine of ten trainings by
    publishers that were left out of the fit were within 13 %, and about three of four by others within 20 %. Infinite
    where no published training of the GPU is known."""
    source: str


_SOURCE = "fitted on published trainings (benchmarks/results/foresight_throughput.md)"

_A100 = Efficiency(
    matmul=0.778,
    matmul_half=78,
    attention=0.331,
    memory=0.690,
    straggler=0.0207,
    compiled_memory=0.466,
    error=0.2,
    source=f"{_SOURCE}: 80 on A100",
)
_H100 = Efficiency(
    matmul=0.684,
    matmul_half=268,
    attention=0.200,
    memory=0.690,
    straggler=0.0414,
    compiled_memory=0.466,
    error=0.2,
    source=f"{_SOURCE}: 51 on H100",
)

_OTHERS = "benchmarks/results/foresight_published.md"

_SHARES = {
    "a100-40gb": _A100,
    "a100-80gb": _A100,
    "h100-80gb": _H100,
    "h100-96gb": _H100,
    "h200-141gb": replace(_H100, source=f"{_H100.source}; 4 trainings on H200 ran 8 to 19 % slower"),
    "b200-180gb": replace(
        _A100,
        matmul=0.6,
        error=0.3,
        source=f"set from 2 trainings by torchtitan ({_OTHERS}); B200 with a power limit reached half",
    ),
    "mi300x": replace(
        _A100,
        matmul=0.3,
        attention=0.15,
        memory=0.45,
        error=0.4,
        source=f"set from 1 training by torchao, early 2025 ({_OTHERS})",
    ),
    "rtx-3090": replace(
        _A100,
        matmul=0.93,
        attention=0.42,
        memory=0.75,
        error=0.2,
        source=f"set from 3 trainings by Answer.AI, 2024 ({_OTHERS}); with few lanes of PCIe give link_gb_s",
    ),
    "rtx-4090": replace(
        _A100,
        matmul=0.97,
        attention=0.5,
        memory=0.8,
        error=0.15,
        source=f"set from 7 trainings by Answer.AI and torchtune, 2024 ({_OTHERS})",
    ),
}
"""By name of the GPU: those of which published trainings are known. GeForce GPUs run above the clock of their data
sheets, so that they reach most of the peak that these give for it."""

NEWER_ATTENTION = 1.648
"""How much faster attention is in the software of 2024 (FSDP2 with FlashAttention 2, PyTorch 2.3 and later) than in
that of 2023, of which the shares are; fitted like the others."""


def efficiency_of(gpu: Gpu) -> Efficiency:
    """The efficiencies of a GPU in the software of 2024.

    A GPU of which no published training is known gets the shares of one of its family, or else those of the A100. They
    serve to compare settings; its `error` is infinite.
    """
    shares = _SHARES.get(gpu.name)
    if shares is None:
        near = next((name for name in _SHARES if GPUS[name].family == gpu.family), "a100-80gb")
        source = f"those of {GPUS[near].title}, for want of any published training on {gpu.title}"
        shares = replace(_SHARES[near], error=math.inf, source=source)
    return replace(shares, attention=shares.attention * NEWER_ATTENTION)


_KERNEL_SECONDS = 2e-6  # A kernel at least, with the gap before it. (assumed)

_HOST_COPY = 0.8
"""Share of the link to the host that copies of pinned memory reach: 25 of 32 GB/s on PCIe 4. (assumed)"""

_HOST_MEMORY = 0.7
"""Share of the host's memory bandwidth that an optimizer on its CPUs reaches. (assumed; ZeRO-Offload, arXiv 2101.06840,
table 4: 0.22 s per billion parameters, that is 127 GB/s of the 256 of a DGX-2's node for 28 bytes per parameter)"""

_COLLECTIVE_TRAFFIC = {"all_gather": 2.0, "reduce_scatter": 3.0, "all_reduce": 5.0}
"""How often the bytes of a collective pass the GPU's own memory in a ring: what is received is written, what is sent is
read, and what is summed is read once more."""


class Durations:
    """Seconds of each `Work` of a training."""

    def __init__(self, setup: TrainingSetup, gpu: Gpu, efficiency: Efficiency) -> None:
        self._efficiency = efficiency
        self._peaks = {size: gpu.peak(size, setup.precision) for size in (1, 2, 4, 8)}
        self._memory = gpu.memory_bandwidth * efficiency.memory
        self._host_link = gpu.host_bandwidth * _HOST_COPY
        self._host_memory = gpu.host_memory_bandwidth * _HOST_MEMORY
        self._traffic = efficiency.compiled_memory if setup.compile else 1.0
        self._setup, self._gpu = setup, gpu
        self._groups: dict[tuple[Axis, int], Group] = {}

    def seconds(self, work: Work) -> float:
        """Seconds of a kernel, copy or collective that has the GPU, its memory and the links for itself."""
        operation, num_bytes = work.operation, work.num_bytes
        if operation in COLLECTIVES:
            return collective_seconds(operation, num_bytes, self.group(work))
        if operation in COPIES:
            return num_bytes / self._host_link
        if work.stream == "offload":
            return num_bytes / self._host_memory
        if operation == "memory":
            # compile fuses what the model computes and the optimizer; FSDP's copies stay as they are
            traffic = self._traffic if work.phase in ("forward", "loss", "backward") and work.stream == "compute" else 1
            return max(_KERNEL_SECONDS, num_bytes * traffic / self._memory)
        if operation == "attention":
            rate = self._peaks[work.dtype_bytes] * self._efficiency.attention
        else:
            half = self._efficiency.matmul_half
            rate = self._peaks[work.dtype_bytes] * self._efficiency.matmul
            rate *= work.size / (work.size + half) if work.size else 1.0
        return max(_KERNEL_SECONDS, work.flops / rate, num_bytes / self._memory)

    def memory_share(self, work: Work, seconds: float) -> float:
        """The share of the GPU's memory bandwidth that a collective takes while it runs."""
        return work.num_bytes * _COLLECTIVE_TRAFFIC[work.operation] / self._memory / seconds if seconds else 0.0

    def group(self, work: Work) -> Group:
        """Who takes part in a collective. FSDP2 reduces over replicas on a stream of its own."""
        axis: Axis = "replicate" if work.stream == "all_reduce" else "shard"
        key = axis, work.ranks
        if key not in self._groups:
            self._groups[key] = group_of(axis, self._setup, self._gpu, self._efficiency.network, work.ranks)
        return self._groups[key]
