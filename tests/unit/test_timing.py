"""GPUs by the names that people and drivers write, and the time of collectives: bandwidth, latency, shared networks."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Group, collective_seconds, group_of, node_network
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named

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
    for network_gbit_s, bandwidth in ((800, 100e9), (16_000, 240e9)):
        seconds = all_gather(BIG, group(num_gpus=64, network_gbit_s=network_gbit_s))
        assert seconds == pytest.approx(63 / 64 * BIG / bandwidth, rel=0.01)


def test_small_tensors_cost_steps_and_no_bandwidth() -> None:
    times = [all_gather(SMALL, group(num_gpus=ranks)) for ranks in (2, 8, 16, 128, 1024)]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert times[0] == pytest.approx(8.4e-6 + 3.4e-6, rel=0.01), "a start and one step"
    assert times[-1] > 1e-3, "a ring of 1,024 ranks has 1,023 steps"
    assert all_gather(2 * SMALL, group(num_gpus=128)) == pytest.approx(times[3], rel=0.01)
    assert times[2] - times[1] > 8 * 1.9e-6 + 2e-6, "a step between machines takes longer"


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


# ---- GPUs ----


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, name) for name in GPUS),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("a100 40 GB", "a100-40gb"),
        ("v100", "v100-32gb"),
        ("A10G", "a10g-24gb"),
        ("rtx4090", "rtx-4090"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_found_by_any_usual_name(name: str, key: str) -> None:
    assert gpu_named(name) is GPUS[key]
    by_hand = TrainingSetup(gpu=replace(GPUS[key], name="half")).gpu
    assert gpu_named(by_hand) is by_hand and f"{by_hand}" == "half"


@pytest.mark.parametrize(("name", "named"), [("h100-40gb", ["did you mean h100-"]), ("t4", GPUS), ("", GPUS)])
def test_an_unknown_gpu_is_an_error_that_names_the_nearest_or_all(name: str, named: Iterable[str]) -> None:
    with pytest.raises(ConfigError, match=f"^GPU {name!r} is not in the table") as error:
        gpu_named(name)
    assert all(known in str(error.value) for known in named)


def test_the_rate_follows_from_the_dtype() -> None:
    h100, v100 = GPUS["h100-80gb"], GPUS["v100-16gb"]
    assert h100.peak(4) == 67e12 < h100.peak(2) == h100.peak(2, "fp16") < h100.peak(1)
    assert v100.peak(2, "fp16") == 125e12
    assert v100.peak(2, "bf16") == v100.peak(4) == 15.7e12, "a V100 has no matrix units for bf16"


def test_the_network_is_that_of_all_cards_of_a_machine_and_links_inside_can_be_given() -> None:
    for fields, bandwidth in (({}, 8 * 50e9), ({"gpus_per_node": 4}, 4 * 50e9), ({"network_gbit_s": 100}, 12.5e9)):
        assert node_network(TrainingSetup(num_gpus=16, **fields), GPUS["h100-80gb"]) == bandwidth  # type: ignore[arg-type]
    usual, slow = (group_of("shard", TrainingSetup(num_gpus=2, link_gb_s=gb), GPUS["rtx-3090"]) for gb in (None, 2.5))
    assert usual.bandwidth == 12e9 and slow.bandwidth == 2.5e9
    with pytest.raises(ConfigError, match=r"link_gb_s is 0; give GB/s above 0, or leave it out\."):
        TrainingSetup(link_gb_s=0)
