"""The time of collectives: none for one rank, bandwidth for large tensors, latency for small ones, shared networks."""

from functools import partial

import pytest

from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.collectives import Group, collective_seconds, group_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

BIG, SMALL = 64e9, 1e3

all_gather, reduce_scatter, all_reduce = (
    partial(collective_seconds, operation) for operation in ("all_gather", "reduce_scatter", "all_reduce")
)


def group(axis: str = "shard", gpu: str = "a100-80gb", **fields: object) -> Group:
    setup = TrainingSetup(gpu=gpu, **fields)  # type: ignore[arg-type]
    return group_of(axis, setup, gpu_named(gpu))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_large_tensor_passes_each_link_once_but_for_the_own_part(ranks: int) -> None:
    seconds = all_gather(BIG, group(num_gpus=ranks))
    # NCCL counts on 240 of the 300 GB/s of an A100's NVLinks
    assert seconds == pytest.approx((ranks - 1) / ranks * BIG / 240e9, rel=1e-3)
    assert reduce_scatter(BIG, group(num_gpus=ranks)) == seconds and all_gather(BIG, group(num_gpus=1)) == 0
    assert all_reduce(BIG, group(num_gpus=ranks)) == pytest.approx(2 * seconds, rel=1e-3)


def test_between_machines_the_network_bounds_and_inside_the_link() -> None:
    seconds = all_gather(BIG, group(num_gpus=64, network_gbit_s=800))
    assert seconds == pytest.approx(63 / 64 * BIG / 100e9, rel=0.01)
    fast = all_gather(BIG, group(num_gpus=64, network_gbit_s=16_000))
    assert fast == pytest.approx(63 / 64 * BIG / 240e9, rel=0.01)


def test_small_tensors_cost_steps_and_no_bandwidth() -> None:
    times = [all_gather(SMALL, group(num_gpus=ranks)) for ranks in (2, 8, 16, 128, 1024)]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert times[0] == pytest.approx(7.2e-6, rel=0.01), "6.6 µs and one step of 0.6 µs"
    assert times[-1] > 1e-3, "a ring of 1,024 ranks has 1,023 steps"
    assert all_gather(2 * SMALL, group(num_gpus=128)) == pytest.approx(times[3], rel=0.01)


def test_a_small_all_reduce_over_many_machines_takes_a_tree() -> None:
    many = group(num_gpus=1024)
    assert all_reduce(SMALL, many) < all_gather(SMALL, many) / 5
    assert all_reduce(SMALL, group(num_gpus=2048)) - all_reduce(SMALL, many) < 30e-6


def test_one_rank_per_machine_has_a_logarithmic_gather() -> None:
    alone = group(num_gpus=64, gpus_per_node=1, network_gbit_s=200)
    assert alone.ranks_per_node == 1
    assert all_gather(SMALL, alone) < 64 * 4e-6
    assert all_gather(BIG, alone) == pytest.approx(63 / 64 * BIG / 25e9, rel=0.01), "large ones keep the ring"


@pytest.mark.parametrize(
    ("replicas", "shard_nodes", "replica_nodes", "replica_sharing"), [(2, 4, 2, 8), (16, 1, 8, 4), (64, 1, 8, 1)]
)
def test_groups_lie_as_ranks_fill_machines(
    replicas: int, shard_nodes: int, replica_nodes: int, replica_sharing: int
) -> None:
    mesh = {"num_gpus": 64, "dp_replicate_size": replicas, "network_gbit_s": 800}
    shard, replicate = group("shard", **mesh), group("replicate", **mesh)
    assert (shard.nodes, replicate.nodes) == (shard_nodes, replica_nodes)
    assert replicate.network_bandwidth == 100e9 / replica_sharing
