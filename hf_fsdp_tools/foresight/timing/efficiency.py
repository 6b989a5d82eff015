"""What training reaches of a GPU's peaks, and how long one kernel, copy or collective runs by itself: a roofline.

A collective takes the time of its bytes over the narrowest link of a ring, which (n - 1) / n of them pass once, or
twice for an all-reduce (Thakur et al. 2005, MPICH). NCCL's latencies and protocols show in no published training.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Axis, Operation, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import GPUS, Gpu, gpu_named, rows_of


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and the source of these numbers."""

    matmul: float
    attention: float
    memory: float  # Share of the peak bandwidth, by kernels that the GPU's memory bounds
    straggler: float = 0.0
    """The slowest of n GPUs is later than the mean by this times sqrt(2 ln n) (Cramér 1946, section 28.6)."""
    compiled_memory: float = 0.462  # Share of the traffic of elementwise kernels that is left under `torch.compile`
    error: float
    """What tokens per second of an optimised loop may be off. On A100 and H100 nine of ten trainings by publishers that
    were left out of the fit were within 13 %. Infinite where no published training of the GPU is known."""
    newest: float = 1.0
    """How many times as fast dense models train with the kernels of 2026 (torch 2.9 and later, Transformer Engine): on
    H100 and H200 the mean of 8 trainings by NeMo AutoModel, torchtitan and KempnerForge, 9/2025 to 4/2026."""
    newest_attention: float = 1.0
    """The same of torch's attention on long rows: on Hopper it takes cuDNN's kernels, 595 and 516 Tflop/s forward and
    backward, for 370 and 322 of FlashAttention 2 (arXiv 2407.08608, figures 5 and 6; head dimension 128)."""
    source: str

    def gain(self, seconds: float, attention: float) -> float:
        """How many times as fast a step of `seconds` is with the kernels of 2026; attention is torch's part of it."""
        attention, rest = attention / max(self.newest, self.newest_attention), (seconds - attention) / self.newest
        return seconds / (attention + rest)


_SHARES: dict[str, Efficiency] = {}
"""By name of the GPU: those of which published trainings are known (`efficiencies.csv`). GeForce GPUs run above the
clock of their data sheets, so that they reach most of the peak that these give for it."""
for _row in rows_of("efficiencies.csv"):
    _names, _source = _row.pop("gpus"), _row.pop("source")
    _shares = Efficiency(source=_source, **{name: float(value) for name, value in _row.items()})
    _SHARES |= dict.fromkeys(_names.split(), _shares)

NEWER_ATTENTION = 1.743
"""How much faster attention is with FlashAttention 2 and PyTorch 2.3 than in the software of 2023, of the shares."""


def efficiency_of(gpu: Gpu, *, has_experts: bool = False) -> Efficiency:
    """The efficiencies of a GPU in the software of 2024; without a published training those of one of its family, or of
    the A100, to compare settings, with an infinite `error`, as that of a mixture of experts on any GPU."""
    shares = _SHARES.get(gpu.name)
    if shares is None:
        near = next((name for name in _SHARES if GPUS[name].family == gpu.family), "a100-80gb")
        source = f"no published training on {gpu.title} is known; shares of the peaks are those of {GPUS[near].title}"
        shares = replace(_SHARES[near], error=math.inf, source=source)
    if has_experts:
        shares = replace(shares, error=math.inf, source="mixtures of experts were not compared with any real run")
    return replace(shares, attention=shares.attention * NEWER_ATTENTION)


_LINK_EFFICIENCY = {"nvlink": 0.8, "pcie": 0.75}
"""What a ring gets of a link: NCCL counts on 20 of 25 GB/s per NVLink of a V100 or A100, 20.6 of 25 on H100, 40.1 of 50
on B200, and on 12 of 16 GB/s of PCIe 3 x16 (`SM80_NVLINK_BW` and its like in `src/graph/topo.h`)."""
_NETWORK_EFFICIENCY = 0.8  # The same of the network between machines. (assumed)


class Group(NamedTuple):
    """The ranks of a collective and what joins them."""

    ranks: int
    ranks_per_node: int
    link: float  # Bytes per second that a ring gets of a GPU's link inside a machine, in one direction
    network: float  # Bytes per second that this group gets of a machine's network cards, in one direction

    @property
    def is_inside(self) -> bool:
        """Whether one machine has all its ranks."""
        return self.ranks <= self.ranks_per_node

    def seconds(self, operation: Operation, num_bytes: float) -> float:
        """Seconds until every rank has the result of a collective; 0 in a group of one."""
        if operation == "all_to_all":  # each rank sends each other its part, over the link or the network
            outside = max(self.ranks - self.ranks_per_node, 0) * self.ranks_per_node / self.network
            inside = (min(self.ranks_per_node, self.ranks) - 1) / self.link
            return num_bytes / self.ranks * max(inside, outside)
        bandwidth = self.link if self.is_inside else min(self.link, self.network)
        return (1 + (operation == "all_reduce")) * (self.ranks - 1) / self.ranks * num_bytes / bandwidth


def group_of(axis: Axis, setup: TrainingSetup, gpu: Gpu) -> Group:
    """The group of a rank along an axis of the mesh. Ranks that share layers are neighbours, and groups of these share
    rows or experts; several groups of ranks that lie apart are in one machine and share its network."""
    ranks, apart = {
        "shard": (setup.dp_shard_size, setup.tp_size),
        "expert_shard": (setup.expert_shard_size, setup.ep_size),
        "replicate": (setup.num_processes // setup.gpus_per_copy, setup.gpus_per_copy),
        "all": (setup.num_processes, 1),
        "cp": (setup.cp_size, setup.tp_size),
        "tp": (setup.tp_size, 1),
        "ep": (setup.ep_size, 1),
    }[axis]
    in_node = min(setup.gpus_per_node, setup.num_processes)
    ranks_per_node = max(1, min(ranks, in_node // apart))
    link = gpu.link_bandwidth * _LINK_EFFICIENCY[gpu.link] if setup.link_gb_s is None else setup.link_gb_s * 1e9
    network = node_network(setup, gpu) * _NETWORK_EFFICIENCY / max(1, in_node // ranks_per_node)
    return Group(ranks, ranks_per_node, link, network)


def node_network(setup: TrainingSetup, gpu: Gpu) -> float:
    """Bytes per second of all network cards of one machine, in one direction."""
    gbit_s = setup.network_gbit_s
    return (gbit_s if gbit_s is not None else gpu.network_gbit_s * setup.gpus_per_node) * 1e9 / 8


_KERNEL_SECONDS = 2e-6  # A kernel at least, with the gap before it. (assumed)
_HOST_COPY = 0.8  # Share of the link to the host that copies of pinned memory reach: 25 of 32 GB/s on PCIe 4. (assumed)
_HOST_MEMORY = 0.7
"""Share of the host's memory bandwidth that an optimizer on its CPUs reaches. (assumed; ZeRO-Offload, arXiv 2101.06840,
table 4: 127 GB/s of the 256 of a DGX-2's node)"""


class Durations:
    """Seconds of each `Work` of a training. FlashAttention 2 has no kernels for Blackwell: those for earlier GPUs run
    there, at the rate that they have on an H100 (a training of prime-rl on B200, in no fit, was met to 2.5 %)."""

    def __init__(self, setup: TrainingSetup, gpu: Gpu, efficiency: Efficiency) -> None:
        self._setup, self._gpu, self._efficiency = setup, gpu, efficiency
        self._group_of = cache(lambda axis: group_of(axis, setup, gpu))

    def seconds(self, work: Work) -> float:
        """Seconds of a kernel, copy or collective that has the GPU, its memory and the links for itself."""
        operation, num_bytes, gpu = work.operation, work.num_bytes, self._gpu
        if operation in COLLECTIVES:
            return self.group(work).seconds(operation, num_bytes)
        if operation in COPIES:
            return num_bytes / (gpu.host_bandwidth * _HOST_COPY)
        if work.stream == "offload":
            return num_bytes / (gpu.host_memory_bandwidth * _HOST_MEMORY)
        shares = self._efficiency
        is_of_model = work.stream == "compute" and work.phase not in ("clip", "optimizer")  # which a compiler fuses
        num_bytes *= shares.compiled_memory if operation == "memory" and self._setup.compile and is_of_model else 1
        rate = gpu.peak(work.dtype_bytes, self._setup.mixed_precision)
        rate *= shares.attention if operation == "attention" else shares.matmul
        if operation == "attention" and gpu.family == "b200" and self._setup.attn_implementation == "flash_attention_2":
            before = gpu_named("h100-80gb")
            rate = min(
                rate, before.peak(work.dtype_bytes, self._setup.mixed_precision) * efficiency_of(before).attention
            )
        return max(_KERNEL_SECONDS, work.flops / rate, num_bytes / (gpu.memory_bandwidth * shares.memory))

    def group(self, work: Work) -> Group:
        """Who takes part in a collective."""
        return self._group_of(work.axis)._replace(ranks=work.ranks)
