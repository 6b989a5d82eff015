"""The table of GPUs: names as people and drivers write them, figures that fit together, a source for each."""

from dataclasses import replace

import pytest

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.collectives import group_of, node_network
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named


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


@pytest.mark.parametrize("name", ["h100-40gb", "h10", "t4", "nvidia", ""])
def test_an_unknown_gpu_is_an_error_that_names_the_nearest_or_all(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        gpu_named(name)
    message = str(error.value)
    assert message.startswith(f"GPU {name!r} is not in the table")
    assert "did you mean h100-" in message if name == "h100-40gb" else all(known in message for known in GPUS)


def test_a_gpu_is_described_by_hand() -> None:
    half = replace(GPUS["a100-40gb"], name="a100-half", memory_bytes=20 * 2**30)
    setup = TrainingSetup(gpu=half)
    assert gpu_named(setup.gpu) is half and f"{setup.gpu}" == "a100-half"


def test_the_rate_follows_from_the_dtype() -> None:
    h100, v100 = GPUS["h100-80gb"], GPUS["v100-16gb"]
    assert h100.peak(4) == 67e12 < h100.peak(2) == h100.peak(2, "fp16") < h100.peak(1)
    assert v100.peak(2, "fp16") == 125e12
    assert v100.peak(2, "bf16") == v100.peak(4) == 15.7e12, "a V100 has no matrix units for bf16"


def test_the_network_is_that_of_all_cards_of_a_machine() -> None:
    h100 = GPUS["h100-80gb"]
    assert node_network(TrainingSetup(num_gpus=16), h100) == 8 * 50e9
    assert node_network(TrainingSetup(num_gpus=16, gpus_per_node=4), h100) == 4 * 50e9
    assert node_network(TrainingSetup(num_gpus=16, network_gbit_s=100), h100) == 12.5e9


def test_links_inside_a_machine_can_be_given() -> None:
    usual, slow = (group_of("shard", TrainingSetup(num_gpus=2, link_gb_s=gb), GPUS["rtx-3090"]) for gb in (None, 2.5))
    assert usual.bandwidth == 12e9 and slow.bandwidth == 2.5e9
    with pytest.raises(ConfigError, match=r"link_gb_s is 0; give GB/s above 0, or leave it out\."):
        TrainingSetup(link_gb_s=0)
