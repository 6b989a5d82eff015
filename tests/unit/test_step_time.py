"""A step in time: what overlaps, what waits, what is exposed, and the figures that follow."""

import dataclasses
import json

import pytest

from hf_fsdp_tools.foresight.events import Event, Record, Wait, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import ThroughputEstimate, straggling
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS
from hf_fsdp_tools.foresight.timing.simulation import Timing, simulate

SETUP = TrainingSetup(num_gpus=8, gpu="a100-80gb")
PERFECT = Efficiency(matmul=1, attention=1, memory=1, network=1, error=0.1, source="nothing lost")
COMPUTE, GATHER = 0.1, 0.05
"""Seconds of a unit's forward pass and of its all-gather."""
GATHER_BYTES = GATHER * 240e9 * 8 / 7


def matmul(unit: str, seconds: float = COMPUTE, phase: str = "forward") -> Work:
    return Work("matmul", seconds * 312e12, 0, unit, phase)  # type: ignore[arg-type]


class Steps(list[Event]):
    def gather(self, unit: str, number: int, num_bytes: float = GATHER_BYTES) -> None:
        self.append(Work("all_gather", 0, num_bytes, unit, "forward", "all_gather", ranks=8))
        self.append(Record(number, "all_gather"))

    def reduce(self, unit: str, number: int, num_bytes: float = GATHER_BYTES) -> None:
        self += [Record(number + 100, "compute"), Wait(number + 100, "reduce_scatter")]
        self.append(Work("reduce_scatter", 0, num_bytes, unit, "backward", "reduce_scatter", ranks=8))
        self.append(Record(number, "reduce_scatter"))


def two_units(num_bytes: float = GATHER_BYTES) -> Steps:
    """Forward and backward of units a and b; b stays gathered, a is gathered again while b goes backward."""
    steps = Steps()
    for number, unit in enumerate("ab"):
        steps.gather(unit, number, num_bytes)
        steps += [Wait(number, "compute"), matmul(unit)]
    steps.gather("a", 2, num_bytes)
    steps.append(matmul("b", 2 * COMPUTE, "backward"))
    steps.reduce("b", 3, num_bytes)
    steps += [Wait(2, "compute"), matmul("a", 2 * COMPUTE, "backward")]
    steps.reduce("a", 4, num_bytes)
    steps.append(Wait(4, "compute"))
    return steps


def spans(steps: Steps, setup: TrainingSetup = SETUP) -> dict[tuple[str, str, str], tuple[float, float]]:
    works = [event for event in steps if isinstance(event, Work)]
    times = simulate(steps, setup, efficiency=PERFECT).spans
    return {(work.unit, work.phase, work.operation): span for work, span in zip(works, times, strict=True)}


def test_prefetched_gathers_are_hidden_and_the_first_gather_and_the_last_reduction_are_not() -> None:
    steps = two_units()
    timing = simulate(steps, SETUP, efficiency=PERFECT)
    assert timing.seconds == pytest.approx(6 * COMPUTE + 2 * GATHER, rel=0.01)
    assert timing.parts["communication"] == pytest.approx(2 * GATHER, rel=0.01)
    assert timing.communication == pytest.approx(5 * GATHER, rel=0.01)
    assert timing.parts["matmul"] == pytest.approx(6 * COMPUTE, rel=0.01)
    assert sum(timing.parts.values()) == pytest.approx(timing.seconds)


def test_a_slow_network_exposes_what_is_longer_than_the_computation_over_it() -> None:
    slow = dataclasses.replace(SETUP, num_gpus=16, network_gbit_s=480)
    gather = 3 * COMPUTE
    steps = two_units(gather * 60e9 * 16 / 15)
    steps = Steps(dataclasses.replace(one, ranks=16) if getattr(one, "ranks", 1) > 1 else one for one in steps)
    timing = simulate(steps, slow, efficiency=PERFECT)
    # gathers of a, b and a again follow one another; b's reduction is behind them, the last one behind a's backward
    assert timing.seconds == pytest.approx(5 * gather + 1e-3, rel=0.01)
    assert timing.parts["communication"] == pytest.approx(5 * gather - 6 * COMPUTE, rel=0.01)


def test_a_wait_holds_a_stream_until_the_recorded_work_has_ended() -> None:
    steps = two_units()
    named = spans(steps)
    assert named["b", "backward", "reduce_scatter"][0] >= named["b", "backward", "matmul"][1]
    assert named["a", "backward", "matmul"][0] >= named["b", "backward", "matmul"][1]
    without = Steps(event for event in steps if not isinstance(event, Wait))
    free = spans(without)
    assert free["b", "backward", "reduce_scatter"][0] < free["b", "backward", "matmul"][0]


def test_collectives_of_one_communicator_run_in_the_order_of_their_launch() -> None:
    steps = Steps([matmul("a")])
    steps.reduce("a", 1)
    steps.gather("b", 2)
    named = spans(steps)
    assert named["b", "forward", "all_gather"][0] == named["a", "backward", "reduce_scatter"][1] > COMPUTE


def test_replicas_are_reduced_over_the_network_while_shards_use_the_links_inside() -> None:
    mesh = dataclasses.replace(SETUP, num_gpus=16, dp_replicate_size=2)
    steps = Steps([Work("all_reduce", 0, 1e9, "a", "backward", "all_reduce", ranks=2, axis="replicate")])
    steps.gather("b", 1)
    apart = spans(steps, mesh)
    assert apart["b", "forward", "all_gather"][0] < 1e-3 < apart["a", "backward", "all_reduce"][1]
    # over 8 machines both use the network
    wide = dataclasses.replace(mesh, num_gpus=64)
    steps = Steps(dataclasses.replace(one, ranks=32) if getattr(one, "ranks", 1) == 8 else one for one in steps)
    together = spans(steps, wide)
    assert together["b", "forward", "all_gather"][0] == together["a", "backward", "all_reduce"][1]


def test_what_slows_kernels_in_a_row_is_spread_over_them() -> None:
    copy = Work("memory", 0, COMPUTE * 2039e9, "c", "forward", "copy_in")
    first, second = simulate([copy, matmul("a"), matmul("b", 3 * COMPUTE)], SETUP, efficiency=PERFECT).spans[1:]
    assert first == pytest.approx((0, 1.25 * COMPUTE), abs=1e-3)
    assert second == pytest.approx((1.25 * COMPUTE, 5 * COMPUTE), abs=1e-3)


def test_collectives_slow_what_memory_bounds_and_no_matmuls() -> None:
    steps = Steps()
    steps.gather("b", 1, 100 * GATHER_BYTES)
    elementwise = Work("memory", 0, 0.1 * 2039e9, "a", "forward")
    # a gather at 240 GB/s times 8/7 writes and reads each byte once
    for work, seconds in ((elementwise, 0.1 / (1 - 2 * 240 * 8 / 7 / 2039)), (matmul("a"), COMPUTE)):
        start, end = spans(Steps([*steps, work]))["a", "forward", work.operation]
        assert end - start == pytest.approx(seconds, rel=0.01)


def test_small_kernels_wait_for_the_host_and_less_in_the_backward_pass() -> None:
    def step(setup: TrainingSetup = SETUP, **changed: object) -> Timing:
        work = dataclasses.replace(Work("memory", 0, 1e4, "a", "forward"), **changed)  # type: ignore[arg-type]
        return simulate([work] * 1000, setup, efficiency=PERFECT)

    forward, backward, again = step(), step(phase="backward"), step(phase="backward", again=True)
    assert forward.parts["host"] > forward.parts["memory"]
    assert 5e-3 < backward.seconds < forward.seconds == again.seconds < 0.02, "5 to 20 µs per operator"
    assert step(dataclasses.replace(SETUP, compile=True)).seconds < forward.seconds / 2


def test_compile_saves_traffic_of_elementwise_kernels_and_leaves_matmuls_and_copies_of_shards() -> None:
    compiled = dataclasses.replace(SETUP, compile=True)
    elementwise = Work("memory", 0, 2039e9, "a", "forward")
    copy = dataclasses.replace(elementwise, stream="copy_in")
    times = [simulate([work], compiled, efficiency=PERFECT).seconds for work in (elementwise, copy, matmul("a", 1))]
    assert times == pytest.approx([PERFECT.compiled_memory, 1, 1], abs=1e-3)


def test_offload_waits_for_the_link_and_for_the_cpus() -> None:
    offload = dataclasses.replace(SETUP, offload=True)
    copied = Work("device_to_host", 0, 0.1 * 32e9 * 0.8, "a", "backward", "reduce_scatter")
    adam = Work("memory", 0, 0.1 * 51e9 * 0.7, "a", "optimizer", "offload")
    steps = [matmul("a"), copied, Record(1, "reduce_scatter"), Wait(1, "host"), adam, matmul("b")]
    timing = simulate(steps, offload, efficiency=PERFECT)
    assert timing.seconds == pytest.approx(0.3, rel=0.01), "the copy runs beside a's matmul, Adam waits for it"
    assert timing.parts["offload"] == pytest.approx(0.1, rel=0.01)
    assert sum(timing.parts.values()) == pytest.approx(timing.seconds)
    assert timing.spans[2] == pytest.approx((0.1, 0.2), abs=1e-3)


def test_a_stall_empties_the_gpu_first() -> None:
    steps = [matmul("a"), matmul("b")]
    timing = simulate(steps, SETUP, efficiency=PERFECT, stalls={1: 0.5})
    assert timing.seconds == pytest.approx(2 * COMPUTE + 0.5, abs=1e-4)
    assert timing.spans[1][0] == pytest.approx(COMPUTE + 0.5, abs=1e-4)
    assert timing.parts["allocator"] == 0.5 and timing.parts["host"] < 1e-4


def test_a_matmul_reaches_half_of_its_share_at_the_half_size() -> None:
    half = dataclasses.replace(PERFECT, matmul_half=512)
    for size, seconds in ((512, 2 * COMPUTE), (2**20, COMPUTE)):
        timing = simulate([dataclasses.replace(matmul("a"), size=size)], SETUP, efficiency=half)
        assert timing.seconds == pytest.approx(seconds, rel=0.01)


def estimate(steps: Steps, setup: TrainingSetup = SETUP, efficiency: Efficiency = PERFECT) -> ThroughputEstimate:
    timing, repeated = simulate(steps, setup, efficiency=efficiency), matmul("b", 2 * COMPUTE).flops
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
        source=efficiency.source,
    )


def test_figures_of_an_estimate_follow_from_its_step() -> None:
    steps = two_units()
    result = estimate(steps)
    seconds = result.step_seconds
    assert seconds == simulate(steps, SETUP, efficiency=PERFECT).seconds
    assert result.tokens_per_second_per_gpu == 4096 / seconds
    assert result.range == pytest.approx((0.9 * 4096 / seconds, 1.1 * 4096 / seconds))
    assert result.mfu == pytest.approx(6e13 / seconds / 312e12)
    assert result.hfu == pytest.approx(result.mfu + 2 * COMPUTE / seconds), "one unit is computed again"
    assert result.hours(1e9) * 3600 == pytest.approx(1e9 / 8 * seconds / 4096)
    assert result.cost(1e9, 2.5) == pytest.approx(result.hours(1e9) * 8 * 2.5)
    values = json.loads(result.to_json())
    assert values["mfu"] == result.mfu and values["setup"]["num_gpus"] == 8 and values["parts"] == result.parts


def test_all_wait_for_the_slowest_of_many_gpus() -> None:
    uneven = dataclasses.replace(PERFECT, straggler=0.03)
    shares = [straggling(dataclasses.replace(SETUP, num_gpus=count), uneven) for count in (1, 8, 64, 512)]
    assert shares[0] == 0 and shares == sorted(shares) and 0.06 < shares[1] < shares[3] < 0.12


def test_a_gpu_without_a_published_training_has_no_tokens_per_second() -> None:
    known, unknown = (
        estimate(two_units(), dataclasses.replace(SETUP, gpu=name), efficiency_of(GPUS[name]))
        for name in ("a100-80gb", "mi355x")
    )
    assert known.range is not None and known.trainer_range is not None
    assert known.trainer_range[0] < known.trainer_range[1] < known.range[1]
    assert "tokens/s per GPU" in str(known) and "with a Trainer would be" in str(known)
    assert not unknown.is_foreseen and unknown.range is unknown.trainer_range is None
    assert "tokens/s are not foreseen: no published training on MI355X 288 GB is known" in str(unknown)
    assert "tokens/s per GPU" not in str(unknown) and "MFU" not in str(unknown)
    assert json.loads(unknown.to_json())["range"] is None
