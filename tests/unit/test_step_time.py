"""A step in time: what hides what, what is waited for, and the figures that follow."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from hf_fsdp_tools import TrainingSetup
from hf_fsdp_tools.foresight.throughput import Timing
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency
from tests.api import GPUS, Event, ThroughputEstimate, Work, efficiency_of, step_time

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


def test_replicas_use_the_network_while_shards_use_the_links_inside() -> None:
    def both(num_processes: int, ranks: int) -> Timing:
        mesh = dataclasses.replace(SETUP, num_processes=num_processes, dp_replicate_size=2)
        reduced = Work("all_reduce", 0, 1e9, "a", "backward", "all_reduce", ranks=2, axis="replicate")
        gathered = collective("all_gather", "b", "backward", GATHER_BYTES, ranks)
        return timed([reduced, gathered, collective("reduce_scatter", "b", "backward", 1e3, ranks)], mesh)

    apart, together = both(16, 8), both(64, 32)
    assert apart.seconds == pytest.approx(max(GATHER, apart.communication - GATHER), rel=0.02)
    assert together.seconds == pytest.approx(together.communication), "over 8 machines both use the network"


def test_offload_waits_for_the_link_and_for_the_cpus() -> None:
    offload = dataclasses.replace(SETUP, offload_params=True)
    copied = Work("device_to_host", 0, 1.5 * COMPUTE * 32e9 * 0.8, "a", "forward", "reduce_scatter")
    clip = Work("memory", 0, 0.1 * 51e9 * 0.7, "a", "clip", "offload")
    timing = timed([matmul("a"), copied, clip], offload)
    assert timing.seconds == pytest.approx(1.5 * COMPUTE + 0.1, rel=0.01), "the copy runs during the matmul"
    assert timing.parts["offload"] == pytest.approx(0.5 * COMPUTE + 0.1, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "max_grad_norm", "passes"),
    [("adamw", 1.0, "forward"), ("adamw", None, "backward"), ("adamw_8bit", 1.0, None)],
)
def test_a_step_on_the_cpu_takes_what_the_pass_leaves_during_which_it_runs(
    optimizer: str, max_grad_norm: float | None, passes: str | None
) -> None:
    offload = dataclasses.replace(SETUP, offload_params=True, optimizer=optimizer, max_grad_norm=max_grad_norm)
    forward, backward = matmul("a"), matmul("a", 2 * COMPUTE, "backward")
    adam = Work("memory", 0, 2.5 * COMPUTE * 51e9 * 0.7, "a", "optimizer", "offload")
    hidden = {"forward": COMPUTE, "backward": 2 * COMPUTE, None: 0}[passes]
    timing = timed([forward, backward, adam], offload)
    assert timing.parts["offload"] == pytest.approx(2.5 * COMPUTE - hidden, rel=0.01)


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
