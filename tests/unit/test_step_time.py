"""A step in time: what hides what, what is waited for, and the figures that follow."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from benchmarks.foreseeing.published import read_rows
from hf_fsdp_tools import ConfigError, TrainingSetup, estimate_throughput
from hf_fsdp_tools.foresight.forecast import Forecast
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.throughput import Timing
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency, Group, group_of
from tests.api import (
    GPUS,
    Event,
    ThroughputEstimate,
    Work,
    compose,
    efficiency_of,
    gpu_named,
    step_of,
    step_time,
    throughput_of,
)

SETUP = TrainingSetup(num_processes=8, gpu="a100-80gb")
PERFECT = Efficiency(matmul=1, attention=1, memory=1, error=0.1, source="nothing lost")
COMPUTE, GATHER = 0.1, 0.05
"""Seconds of a unit's forward pass and of its all-gather."""
GATHER_BYTES = GATHER * 240e9 * 8 / 7


def matmul(unit: str, seconds: float = COMPUTE, phase: str = "forward") -> Work:
    return Work("matmul", seconds * 312e12, 0, unit, phase)  # type: ignore[arg-type]


def collective(operation: str, unit: str, phase: str, num_bytes: float, ranks: int, stream: str = "") -> Work:
    return Work(operation, 0, num_bytes, unit, phase, stream or operation, ranks=ranks)  # type: ignore[arg-type]


def two_units(num_bytes: float = GATHER_BYTES, ranks: int = 8) -> list[Event]:
    """Forward and backward of units a and b; b stays gathered, a is gathered again while b goes backward."""
    return [
        collective("all_gather", "a", "forward", num_bytes, ranks),
        matmul("a"),
        collective("all_gather", "b", "forward", num_bytes, ranks),
        matmul("b"),
        collective("all_gather", "a", "backward", num_bytes, ranks),
        matmul("b", 2 * COMPUTE, "backward"),
        collective("reduce_scatter", "b", "backward", num_bytes, ranks),
        matmul("a", 2 * COMPUTE, "backward"),
        collective("reduce_scatter", "a", "backward", num_bytes, ranks),
    ]


def timed(steps: Sequence[Event], setup: TrainingSetup = SETUP, **options: object) -> Timing:
    timing = step_time(steps, setup, **{"efficiency": PERFECT} | options)  # type: ignore[arg-type]
    assert sum(timing.parts.values()) == pytest.approx(timing.seconds)
    return timing


def test_prefetched_gathers_are_hidden_and_the_first_gather_and_the_last_reduction_are_not() -> None:
    timing = timed(two_units())
    assert timing.parts["matmul"] == pytest.approx(6 * COMPUTE)
    assert timing.parts["communication"] == pytest.approx(2 * GATHER, rel=0.01)
    assert timing.communication == pytest.approx(5 * GATHER, rel=0.01)


def test_a_slow_network_exposes_what_is_longer_than_the_computation_of_the_pass() -> None:
    slow = dataclasses.replace(SETUP, num_processes=16, network_gbit_s=600)
    timing = timed(two_units(1.5 * COMPUTE * 60e9 * 16 / 15, ranks=16), slow)
    # forward: 1.5 and then 1.5 beside 2 of computation; backward: 3 beside 4, and then 1.5
    assert timing.seconds == pytest.approx((1.5 + 2 + 4 + 1.5) * COMPUTE, rel=0.01)
    slower = timed(two_units(3 * COMPUTE * 60e9 * 16 / 15, ranks=16), slow)
    assert slower.seconds == pytest.approx((3 + 3 + 6 + 3) * COMPUTE, rel=0.01)
    assert slower.parts["communication"] == pytest.approx(9 * COMPUTE, rel=0.01)


def test_offload_waits_for_the_link_and_for_the_cpus() -> None:
    offload = dataclasses.replace(SETUP, offload_params=True)
    copied = Work("device_to_host", 0, 1.5 * COMPUTE * 32e9 * 0.8, "a", "forward", "reduce_scatter")
    clip = Work("memory", 0, 0.1 * 51e9 * 0.7, "a", "clip", "offload")
    timing = timed([matmul("a"), copied, clip], offload)
    assert timing.seconds == pytest.approx(1.5 * COMPUTE + 0.1, rel=0.01), "the copy runs during the matmul"
    assert timing.parts["offload"] == pytest.approx(0.5 * COMPUTE + 0.1, rel=0.01)


def estimate(
    steps: Sequence[Event], setup: TrainingSetup = SETUP, efficiency: Efficiency = PERFECT
) -> ThroughputEstimate:
    timing, repeated = step_time(steps, setup, efficiency=efficiency), matmul("b", 2 * COMPUTE).flops
    return ThroughputEstimate(
        name="two units",
        setup=setup,
        step_seconds=timing.seconds,
        tokens_per_step=4096,
        model_flops=6e13,
        hardware_flops=6e13 + repeated,
        parts=timing.parts,
        communication_seconds=timing.communication,
        error=efficiency.error,
        newest=efficiency.newest,
        source=efficiency.source,
    )


def test_figures_of_an_estimate_follow_from_its_step() -> None:
    steps = two_units()
    result = estimate(steps)
    seconds = result.step_seconds
    assert seconds == timed(steps).seconds
    assert result.tokens_per_second_per_gpu == 4096 / seconds
    assert result.range == pytest.approx((0.9 * 4096 / seconds, 1.1 * 4096 / seconds))
    assert result.mfu == pytest.approx(6e13 / seconds / 312e12)
    assert result.hfu == pytest.approx(result.mfu + 2 * COMPUTE / seconds), "one unit is computed again"
    assert result.hours(1e9) * 3600 == pytest.approx(1e9 / 8 * seconds / 4096)
    assert result.cost(1e9, 2.5) == pytest.approx(result.hours(1e9) * 8 * 2.5)
    values = json.loads(result.to_json())
    assert values["mfu"] == result.mfu and values["setup"]["num_processes"] == 8 and values["parts"] == result.parts


def test_a_gpu_without_a_published_training_has_no_tokens_per_second() -> None:
    known, unknown = (
        estimate(two_units(), dataclasses.replace(SETUP, gpu=name), efficiency_of(GPUS[name]))
        for name in ("a100-80gb", "mi355x")
    )
    assert known.range is not None and len(known.trainer_ranges) == 2
    (packed, padded), rate = known.trainer_ranges.values(), known.tokens_per_second_per_gpu
    assert padded[1] <= packed[0] < rate < packed[1] < known.range[1]
    for kind in ("packed rows", "padded rows"):
        assert f"with a Trainer, {kind}: " in str(known)
    assert not unknown.is_estimated and unknown.range is None and not unknown.trainer_ranges
    assert "tokens/s are not estimated: no published training on MI355X 288 GB is known" in str(unknown)
    assert "tokens/s per GPU" not in str(unknown) and "MFU" not in str(unknown)
    assert json.loads(unknown.to_json())["range"] is None
    mixture = estimate(two_units(), SETUP, efficiency_of(GPUS["a100-80gb"], has_experts=True))
    assert "tokens/s are not estimated: mixtures of experts were not compared with any real run" in str(mixture)
    of_pairs = estimate(two_units(), dataclasses.replace(SETUP, rows_per_example=2), efficiency_of(GPUS["a100-80gb"]))
    assert [*of_pairs.trainer_ranges] == ["padded rows"], "pairs are not packed"
    timed = estimate_throughput(CONFIG, num_processes=8, untimed="the pass of the reference", **FIELDS)
    assert timed.range is None and "a step also has the pass of the reference, which is not timed" in str(timed)


def test_flash_attention_2_has_no_kernels_for_blackwell() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=2**17)
    seconds = {
        (gpu, kernel): estimate_throughput(config, gpu=gpu, max_length=2**17, attn_implementation=kernel).parts[
            "attention"
        ]
        for gpu in ("h100-80gb", "b200-180gb")
        for kernel in ("sdpa", "flash_attention_2")
    }
    assert seconds["b200-180gb", "sdpa"] < seconds["h100-80gb", "sdpa"] / 2
    assert seconds["b200-180gb", "flash_attention_2"] == seconds["h100-80gb", "flash_attention_2"]


CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=6,
    num_attention_heads=16,
    vocab_size=32000,
    max_position_embeddings=4096,
)
FIELDS = {"gpu": "a100-80gb", "per_device_train_batch_size": 2, "max_length": 2048, "loss": "full"}


def forecast(**fields: object) -> Forecast:
    return step_of(CONFIG, TrainingSetup(**FIELDS | {"num_processes": 8} | fields))  # type: ignore[arg-type]


def estimated_by_name(**fields: object) -> ThroughputEstimate:
    return throughput_of(memory_of(forecast(**fields)))


def test_an_estimate_by_name_is_that_of_the_forecast() -> None:
    result = estimate_throughput(CONFIG, num_processes=8, **FIELDS)
    assert result == estimated_by_name()
    assert result.name == "LlamaForCausalLM with 533.8 M parameters"
    # PaLM, appendix B: 6 per parameter that is multiplied with, 12 x layers x width x length for attention
    multiplied = sum(2048 * width for width in (4 * 2048, 3 * 8192)) * 6 + 2048 * 32000
    per_token = 6 * multiplied + 12 * 6 * 2048 * 2048
    assert result.model_flops == pytest.approx(per_token * 2 * 2048, rel=1e-3)
    assert 0.2 < result.mfu == result.hfu < 0.9


@pytest.mark.parametrize("fields", [{"num_processes": 2}, {"num_processes": 1, "wrapping": "none"}])
def test_many_micro_steps_are_like_the_second(fields: dict[str, object]) -> None:
    # two GPUs at most, so that the optimizer, which runs once, counts
    many = forecast(gradient_accumulation_steps=5, **fields)
    result, trace = throughput_of(memory_of(many)), many.trace
    events = compose(trace, many.plan, many.setup).events
    efficiency = efficiency_of(gpu_named("a100-80gb"))
    one = dataclasses.replace(many.setup, gradient_accumulation_steps=1)  # so that nothing is repeated
    seconds = step_time(events, one, efficiency=efficiency).seconds
    seconds *= 1 + efficiency.straggler * math.sqrt(2 * math.log(many.setup.num_processes))
    assert result.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
    assert result.tokens_per_step == 5 * 2 * 2048
    assert result.hardware_flops == result.model_flops == 5 * trace.model_flops


# ---- as published ----


def test_a_published_training_runs_as_fast_as_estimated() -> None:
    (published,) = (each for each in read_rows("throughput") if each.name.startswith("mpt-1b a100-40gb x128"))
    estimated = throughput_of(published.estimate(), efficiency=published.efficiency).tokens_per_second_per_gpu
    assert estimated == pytest.approx(published.tokens_per_second, rel=0.08)


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


# ---- GPUs ----


NAMES = {name: name for name in GPUS} | {
    "NVIDIA H100 80GB HBM3": "h100-80gb", "H100 PCIe": "h100-80gb-pcie", "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "a100 40 GB": "a100-40gb", "v100": "v100-32gb", "Tesla T4": "t4-16gb", "A10G": "a10g-24gb", "rtx4090": "rtx-4090",
    "AMD Instinct MI300X OAM": "mi300x", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
}  # fmt: skip


def test_a_gpu_is_found_by_any_usual_name_and_an_unknown_one_is_an_error_that_names_the_nearest_or_all() -> None:
    assert {name: gpu_named(name).name for name in NAMES} == NAMES
    by_hand = TrainingSetup(gpu=replace(GPUS["a100-40gb"], name="half")).gpu
    assert gpu_named(by_hand) is by_hand and f"{by_hand}" == "half"
    for name, named in (("h100-40gb", ["did you mean h100-"]), ("tpu", GPUS), ("", GPUS)):
        with pytest.raises(ConfigError, match=f"^GPU {name!r} is not in the table") as error:
            gpu_named(name)
        assert all(known in str(error.value) for known in named)


def test_a_gpu_without_bf16_is_estimated_in_what_it_computes():
    for name in ("t4-16gb", "v100-16gb"):
        assert TrainingSetup(gpu=name, mixed_precision="fp16").mixed_precision == "fp16"
        with pytest.raises(ConfigError, match=f"^{name} does not compute in bf16; give mixed_precision fp16, or no"):
            TrainingSetup(gpu=name)
