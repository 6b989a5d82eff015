"""What training reaches of a GPU's peaks, and how long one kernel, copy or collective runs by itself: a roofline.

A collective runs over a ring, as NCCL counts it (`ncclTopoTuneModel` in its `src/graph/tuning.cc`, as of 2025): seconds
= latency + bytes / bandwidth, where (n - 1) / n of the bytes pass each link once, or twice for an all-reduce (Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). NCCL's trees, and its
protocol for small tensors, are left out: no published training shows them.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Axis, Operation, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
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


_SOURCE = "fitted on published trainings (benchmarks/results/foresight_fit.md)"

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

_FEW_LANES = "; with few lanes of PCIe give link_gb_s"


def _set_from(trainings: str, remark: str = "", **shares: float) -> Efficiency:
    source = f"set from {trainings} (benchmarks/results/foresight_published.md){remark}"
    return replace(_A100, source=source, **shares)


_SHARES = {
    "a100-40gb": _A100,
    "a100-80gb": _A100,
    "h100-80gb": _H100,
    "h100-96gb": _H100,
    "h200-141gb": replace(_H100, source=f"{_H100.source}; 4 trainings on H200 ran 8 to 19 % slower"),
    "b200-180gb": _set_from(
        "2 trainings by torchtitan", "; B200 with a power limit reached half", matmul=0.6, error=0.3
    ),
    "mi300x": _set_from("1 training by torchao, early 2025", matmul=0.3, attention=0.15, memory=0.45, error=0.4),
    "rtx-3090": _set_from(
        "3 trainings by Answer.AI, 2024", _FEW_LANES, matmul=0.93, attention=0.42, memory=0.75, error=0.2
    ),
    "rtx-4090": _set_from(
        "7 trainings by Answer.AI and torchtune, 2024", matmul=0.97, attention=0.5, memory=0.8, error=0.15
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


# ---- collectives ----

_LINK_EFFICIENCY = {"nvlink": 0.8, "pcie": 0.75}
"""What a ring gets of a link: NCCL counts on 20 of 25 GB/s per NVLink of a V100 or A100, 20.6 of 25 on H100, 40.1 of 50
on B200, and on 12 of 16 GB/s of PCIe 3 x16 (`SM80_NVLINK_BW` and its like in `src/graph/topo.h`)."""

_PROTOCOLS = (
    (8.4e-6, {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}, 1.0),
    (14e-6, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}, 0.92),
)
"""Start of a collective, one step of a ring over a link, and what is left of a ring's bandwidth, by which NCCL chooses
its protocol (`baseLat`, `hwLat`): Simple for large tensors, LL128 for smaller ones and for many ranks."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective, where they are, and what they share."""

    ranks: int
    ranks_per_node: int
    link: Literal["nvlink", "pcie"]
    link_bandwidth: float  # Bytes per second that a ring gets of a GPU's link inside a machine, in one direction
    network_bandwidth: float  # Bytes per second that this group gets of a machine's network cards, in one direction

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the narrowest link of a ring."""
        return self.link_bandwidth if self.nodes == 1 else min(self.link_bandwidth, self.network_bandwidth)


def group_of(
    axis: Axis, setup: TrainingSetup, gpu: Gpu, network_efficiency: float = 1.0, ranks: int | None = None
) -> Group:
    """The group of a rank along an axis of the mesh.

    Ranks fill machines one after another: those that share layers are neighbours, and groups of these share rows or
    experts. Those that hold the same shards are `setup.gpus_per_copy` apart, so that a machine holds ranks of several
    such groups, which communicate at the same time and share its network.
    """
    replicas = setup.num_gpus // setup.gpus_per_copy
    sizes = {
        "shard": (setup.dp_shard_size, setup.tp_size),
        "expert_shard": (setup.expert_shard_size, setup.ep_size),
        "replicate": (replicas, setup.gpus_per_copy),
        "all": (setup.num_gpus, 1),
        "rows": (setup.cp_size, setup.tp_size),
        "layers": (setup.tp_size, 1),
        "experts": (setup.ep_size, 1),
    }
    all_ranks, apart = sizes[axis]
    ranks = all_ranks if ranks is None else ranks
    in_node = min(setup.gpus_per_node, setup.num_gpus)
    ranks_per_node = max(1, min(ranks, in_node // apart))
    sharing = max(1, in_node // ranks_per_node)
    usual = gpu.link_bandwidth * _LINK_EFFICIENCY[gpu.link]
    return Group(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        link=gpu.link,
        link_bandwidth=usual if setup.link_gb_s is None else setup.link_gb_s * 1e9,
        network_bandwidth=node_network(setup, gpu) * network_efficiency / sharing,
    )


def node_network(setup: TrainingSetup, gpu: Gpu) -> float:
    """Bytes per second of all network cards of one machine, in one direction."""
    gbit_s = setup.network_gbit_s
    return (gbit_s if gbit_s is not None else gpu.network_gbit_s * setup.gpus_per_node) * 1e9 / 8


def collective_seconds(operation: Operation, num_bytes: float, group: Group) -> float:
    """Seconds until every rank of the group has the result of a collective; 0 in a group of one."""
    if group.ranks <= 1:
        return 0.0
    if operation == "all_to_all":
        return _direct(num_bytes, group)
    rounds, steps, between = 2 if operation == "all_reduce" else 1, group.ranks - 1, group.nodes - 1
    seconds = steps / group.ranks * num_bytes / group.bandwidth
    return min(
        start + rounds * ((steps - between) * step[group.link] + between * step["network"] + seconds / share)
        for start, step, share in _PROTOCOLS
    )


def _direct(num_bytes: float, group: Group) -> float:
    """Seconds in which every rank sends each other rank its part by itself: inside a machine over its own link, to
    others over the network, which the ranks of the machine share."""
    inside, outside = group.ranks_per_node - 1, max(group.ranks - group.ranks_per_node, 0)
    part = num_bytes / group.ranks
    seconds = max(inside * part / group.link_bandwidth, outside * part * group.ranks_per_node / group.network_bandwidth)
    start, step, _ = _PROTOCOLS[0]
    return start + step["network" if outside else group.link] + seconds


# ---- one kernel, copy or collective ----

_KERNEL_SECONDS = 2e-6  # A kernel at least, with the gap before it. (assumed)

_HOST_COPY = 0.8  # Share of the link to the host that copies of pinned memory reach: 25 of 32 GB/s on PCIe 4. (assumed)

_HOST_MEMORY = 0.7
"""Share of the host's memory bandwidth that an optimizer on its CPUs reaches. (assumed; ZeRO-Offload, arXiv 2101.06840,
table 4: 0.22 s per billion parameters, that is 127 GB/s of the 256 of a DGX-2's node for 28 bytes per parameter)"""

_COLLECTIVE_TRAFFIC = {"all_gather": 2.0, "reduce_scatter": 3.0, "all_reduce": 5.0, "all_to_all": 2.0}
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

    def traffic_seconds(self, work: Work) -> float:
        """Seconds in which the GPU's memory moves what passes it in a collective."""
        return work.num_bytes * _COLLECTIVE_TRAFFIC[work.operation] / self._memory

    def group(self, work: Work) -> Group:
        """Who takes part in a collective."""
        return group_of(work.axis, self._setup, self._gpu, self._efficiency.network, work.ranks)
