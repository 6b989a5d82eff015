"""How long all-gathers, reduce-scatters and all-reduces take: latency and bandwidth of NCCL's rings and trees.

The model is NCCL's own, by which it chooses an algorithm and a protocol for a message (`ncclTopoTuneModel` in its
`src/graph/tuning.cc`, as of 2025): seconds = latency + bytes / bandwidth, and the fastest choice counts. The terms of
bandwidth are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005): over a ring of n ranks (n - 1) / n of the bytes pass each link once, or twice for an all-reduce.
NCCL's collectives inside switches (NVLS, SHARP) are left out: they need buffers that FSDP2 does not register.
"""

import math
from dataclasses import dataclass
from typing import Literal

from hf_fsdp_tools.foresight.events import Operation
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import Gpu

Axis = Literal["shard", "replicate"]
"""The two axes of a mesh of FSDP: ranks that share one copy of the model, and ranks that hold the same shards."""

_LINK_EFFICIENCY = {"nvlink": 0.8, "pcie": 0.75}
"""What a ring gets of a link: NCCL counts on 20 of 25 GB/s per NVLink of a V100 or A100, 20.6 of 25 on H100, 40.1 of 50
on B200, and on 12 of 16 GB/s of PCIe 3 x16 (`SM80_NVLINK_BW` and its like in `src/graph/topo.h`)."""

_PROTOCOLS = ("LL", "LL128", "Simple")
"""How NCCL marks data as complete: with each 8 bytes, with each 128 bytes, or by a fence."""

_BASE_MICROSECONDS = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
"""Start of a collective by protocol (`baseLat`)."""

_STEP_MICROSECONDS = {
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("nvlink", "tree"): (0.6, 1.25, 4.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("pcie", "tree"): (1.0, 1.9, 4.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
    ("network", "tree"): (5.0, 8.5, 14.0),
}
"""One step over a link by protocol (`hwLat`)."""

_POST_MICROSECONDS = (1.0, 1.0, 3.0)
"""What a step inside a machine takes at least where a ring leaves it, by protocol (`getNetOverhead`, Intel's CPUs)."""

_RING_SHARE = (0.5, 0.92, 1.0)  # What the protocols leave of a ring's bandwidth

_TREE_SHARE = (0.92 / 3.8, 0.92 * 120 / 128, 0.92)  # What the protocols leave of a tree's bandwidth

_LL_NETWORK_BANDWIDTH = 20e9  # Bytes per second of LL between machines at most (`llMaxBws`: 19 to 22.5 GB/s)


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

    Ranks fill machines one after another. Those that share a copy of the model are neighbours; those that hold the same
    shards are `setup.dp_shard_size` apart, so that a machine holds ranks of several such groups, which communicate at
    the same time and share its network.
    """
    replicas = setup.num_gpus // setup.dp_shard_size
    all_ranks, apart = (setup.dp_shard_size, 1) if axis == "shard" else (replicas, setup.dp_shard_size)
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
    if operation == "all_reduce":
        return min(_ring(num_bytes, group, 2), _tree(num_bytes, group))
    return min(_ring(num_bytes, group, 1), _pat(num_bytes, group))


def _ring(num_bytes: float, group: Group, rounds: int) -> float:
    """The fastest protocol's seconds over a ring: `rounds` times n - 1 steps, each with an n-th of the bytes."""
    steps, nodes = group.ranks - 1, group.nodes
    moved = rounds * steps / group.ranks * num_bytes
    times = []
    for protocol in range(len(_PROTOCOLS)):
        inside = _STEP_MICROSECONDS[group.link, "ring"][protocol]
        if nodes > 1:
            inside = max(inside, _POST_MICROSECONDS[protocol])
        # with one rank per machine nothing hides the network's latency, and NCCL takes a tree's
        between = _STEP_MICROSECONDS["network", "tree" if group.ranks_per_node == 1 else "ring"][protocol]
        latency = rounds * ((steps - nodes + 1) * inside + (nodes - 1) * between)
        bandwidth = group.bandwidth * _RING_SHARE[protocol]
        if protocol == 0 and nodes > 1:
            bandwidth = min(bandwidth, _LL_NETWORK_BANDWIDTH)
        times.append((_BASE_MICROSECONDS["ring"][protocol] + latency) * 1e-6 + moved / bandwidth)
    return min(times)


def _tree(num_bytes: float, group: Group) -> float:
    """The fastest protocol's seconds of an all-reduce up and down a tree of machines, a chain inside each."""
    times = []
    for protocol in range(len(_PROTOCOLS)):
        inside = (group.ranks_per_node - 1) * _STEP_MICROSECONDS[group.link, "tree"][protocol]
        between = math.log2(group.nodes) * _STEP_MICROSECONDS["network", "tree"][protocol]
        bandwidth = group.bandwidth * _TREE_SHARE[protocol]
        if protocol == 0 and group.nodes > 1:
            bandwidth = min(bandwidth, _LL_NETWORK_BANDWIDTH)
        start = _BASE_MICROSECONDS["tree"][protocol]
        times.append((start + 2 * (inside + between)) * 1e-6 + 2 * num_bytes / bandwidth)
    return min(times)


def _pat(num_bytes: float, group: Group) -> float:
    """Seconds of NCCL's logarithmic algorithm (PAT, since 2.23), which it has for one rank per machine."""
    if group.ranks_per_node > 1:
        return math.inf
    step = _STEP_MICROSECONDS["network", "tree"][2]
    latency = 8.0 + math.log2(group.nodes) * step / 3.5 + 2.8 * group.ranks
    # NCCL takes the whole tensor, not (n - 1) / n of it
    return latency * 1e-6 + num_bytes / (0.75 * group.bandwidth)
