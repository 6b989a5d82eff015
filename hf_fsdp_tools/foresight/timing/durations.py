"""How long one kernel, copy or collective runs by itself: a roofline over the peaks of a GPU."""

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.collectives import Axis, Group, collective_seconds, group_of
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency
from hf_fsdp_tools.foresight.timing.hardware import Gpu

_KERNEL_SECONDS = 2e-6
"""A kernel at least, with the gap before it: what an empty one takes on a busy stream. (assumed)"""

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
