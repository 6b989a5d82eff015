"""GPUs by the names that people and drivers write, and the time of collectives: bandwidth, shared networks."""

from dataclasses import replace

import pytest

from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Group, group_of
from tests.api import GPUS, gpu_named

BIG = 64e9


def all_gather(num_bytes: float, ranks: Group) -> float:
    return ranks.seconds("all_gather", num_bytes)


def group(axis: str = "shard", gpu: str = "a100-80gb", **fields: object) -> Group:
    setup = TrainingSetup(gpu=gpu, **fields)  # type: ignore[arg-type]
    return group_of(axis, setup, gpu_named(gpu))  # type: ignore[arg-type]


def test_a_large_tensor_passes_each_link_once_and_between_machines_the_network_bounds() -> None:
    for ranks in (2, 8):
        seconds = all_gather(BIG, group(num_processes=ranks))
        # NCCL counts on 240 of the 300 GB/s of an A100's NVLinks
        assert seconds == pytest.approx((ranks - 1) / ranks * BIG / 240e9, rel=1e-3)
        others = [group(num_processes=ranks).seconds(name, BIG) for name in ("reduce_scatter", "all_reduce")]  # type: ignore[arg-type]
        assert others == [seconds, 2 * seconds] and all_gather(BIG, group(num_processes=1)) == 0
    for network_gbit_s, bandwidth in ((800, 80e9), (16_000, 240e9)):
        seconds = all_gather(BIG, group(num_processes=64, network_gbit_s=network_gbit_s))
        assert seconds == pytest.approx(63 / 64 * BIG / bandwidth, rel=0.01)


def test_groups_lie_as_ranks_fill_machines() -> None:
    for replicas, is_inside, sharing in ((2, False, 8), (16, True, 4), (64, True, 1)):
        mesh = {"num_processes": 64, "dp_replicate_size": replicas, "network_gbit_s": 800}
        shard, replicate = group("shard", **mesh), group("replicate", **mesh)
        assert (shard.is_inside, replicate.is_inside) == (is_inside, False)
        assert replicate.network == 80e9 / sharing


# ---- GPUs ----


NAMES = {name: name for name in GPUS} | {
    "NVIDIA H100 80GB HBM3": "h100-80gb", "H100 PCIe": "h100-80gb-pcie", "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "a100 40 GB": "a100-40gb", "v100": "v100-32gb", "A10G": "a10g-24gb", "rtx4090": "rtx-4090",
    "AMD Instinct MI300X OAM": "mi300x", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
}  # fmt: skip


def test_a_gpu_is_found_by_any_usual_name_and_an_unknown_one_is_an_error_that_names_the_nearest_or_all() -> None:
    assert {name: gpu_named(name).name for name in NAMES} == NAMES
    by_hand = TrainingSetup(gpu=replace(GPUS["v100-32gb"], name="half")).gpu
    assert gpu_named(by_hand) is by_hand and f"{by_hand}" == "half"
    for name, named in (("h100-40gb", ["did you mean h100-"]), ("t4", GPUS), ("", GPUS)):
        with pytest.raises(ConfigError, match=f"^GPU {name!r} is not in the table") as error:
            gpu_named(name)
        assert all(known in str(error.value) for known in named)
