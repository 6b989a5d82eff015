"""Published throughputs are foreseen as `benchmarks/results/foresight_throughput.md` says."""

import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from torch import nn

from benchmarks.foreseeing.fit import START, efficiency_from
from benchmarks.foreseeing.offloading import offload_checkpoints
from benchmarks.foreseeing.peers import accelerate_bytes, deepspeed_bytes
from benchmarks.foreseeing.rows import Row, read_rows, teraflops
from benchmarks.foreseeing.throughput import forecast_of, recomputed_events
from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Mark, Work
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.efficiency import efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.foresight.tracing.trace import Trace

RESULTS = Path(__file__).parents[2] / "benchmarks/results/foresight_throughput.md"


def row(start: str, **setup: object) -> Row:
    (found,) = (
        each
        for each in read_rows()
        if each.name.startswith(start) and all(getattr(each.setup, name) == value for name, value in setup.items())
    )
    return found


@pytest.mark.parametrize(
    "published",
    [row("mpt-1b a100-40gb x128"), row("llama2-7b h100-80gb x96", compile=True)],
    ids=lambda each: each.name,
)
def test_published_trainings_run_as_fast_as_foreseen(published: Row) -> None:
    memory = memory_of(forecast_of(published, published.setup))
    foreseen = throughput_of(memory, era=published.era).tokens_per_second_per_gpu
    assert foreseen == pytest.approx(published.tokens_per_second, rel=0.08)


def test_the_committed_efficiencies_are_those_of_the_table_of_results() -> None:
    text = RESULTS.read_text()
    fitted = {name: float(re.findall(rf"\| {re.escape(name)} \| ([\d.]+) \|", text)[0]) for name in START}
    for published in read_rows():
        if published.setup.gpu[:4] not in ("a100", "h100"):
            continue
        told, kept = efficiency_from(fitted, published), efficiency_of(gpu_named(published.setup.gpu), published.era)
        for name in ("matmul", "matmul_half", "attention", "memory", "straggler"):
            assert getattr(kept, name) == pytest.approx(getattr(told, name), rel=0.01), name
        if published.setup.compile:
            assert kept.compiled_memory == pytest.approx(told.compiled_memory, rel=0.01)


def test_the_published_rows_are_of_many_regimes() -> None:
    rows = read_rows()
    assert len(rows) > 250 and sum(each.is_held_out for each in rows) > 100
    assert len({each.publisher for each in rows}) >= 7
    assert {each.setup.seq_len for each in rows} >= {512, 8192, 65536}
    first = row("gpt-175b a100-40gb")
    assert teraflops("gpt-175b", first.tokens_per_second, 512) == pytest.approx(159)


def again(operation: str, unit: str) -> Work:
    return Work(operation, 1.0, 1.0, unit, "backward", again=True)  # type: ignore[arg-type]


def left(events: Iterable[Event], rule: object) -> list[Event]:
    return [event for _, event in recomputed_events(enumerate(events), rule)]  # type: ignore[arg-type]


def test_of_checkpointed_blocks_a_share_is_computed_again() -> None:
    events = [again("matmul", f"h.{number}") for number in range(8) for _ in range(2)]
    every = [event.unit for event in left(events, Fraction(1, 2)) if isinstance(event, Work)]
    assert len(every) == 8 and len(set(every)) == 4
    assert len(left(events, Fraction(3, 4))) == 12
    assert left(events, Fraction(1)) == events


def test_of_selected_operations_every_other_matmul_is_computed_again() -> None:
    block: list[Event] = [Mark("before_forward", "h.0", True)]
    block += [again(operation, "h.0") for operation in ("memory", "matmul", "matmul", "attention", "matmul", "matmul")]
    kept = [event.operation for event in left(block * 2, "selective-op") if isinstance(event, Work)]
    assert kept == ["memory", "matmul", "matmul"] * 2


def test_checkpoints_in_host_memory_are_on_the_gpu_only_around_their_block() -> None:
    events: tuple[Event, ...] = (
        Alloc(1, 64, "activations", ""),
        Mark("before_forward", "h.0"),
        Alloc(2, 64, "activations", "h.0"),
        Mark("after_forward", "h.0"),
        Mark("before_backward", "h.0"),
        Free(2),
        Mark("after_backward", "h.0"),
        Free(1),
    )
    trace = Trace(events=events, parameters=(), buffer_bytes=0, model_flops=1.0, tokens=1)
    changed = offload_checkpoints(trace, 64).events
    places = {repr(event): at for at, event in enumerate(changed)}
    assert places[repr(Free(1))] == 5, "given back after the block's forward pass"
    assert changed[4] == Work("device_to_host", 0.0, 64, "", "forward")
    assert changed[7] == Alloc(3, 64, "activations", "") and changed[8].operation == "host_to_device"  # type: ignore[union-attr]
    assert changed[-1] == Free(3) and len(changed) == len(events) + 4


def test_peers_estimates_follow_their_formulas() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64, bias=False))
    setup = TrainingSetup(num_gpus=8)
    params = 1000 * 64 + 64 * 64
    assert deepspeed_bytes(model, setup) == 4 * 64_000 + 18 * params // 8
    assert deepspeed_bytes(model, replace(setup, offload=True)) == 4 * 64_000
    assert accelerate_bytes(model, setup) == accelerate_bytes(model, replace(setup, num_gpus=64)) == 8 * params
    assert accelerate_bytes(model, replace(setup, precision="fp32")) == 16 * params
