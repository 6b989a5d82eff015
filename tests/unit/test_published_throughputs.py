"""Published throughputs are foreseen as `benchmarks/results/foresight_throughput.md` says."""

import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.foreseeing.fit import START, efficiency_from
from benchmarks.foreseeing.published import Row, read_rows, recomputed_events, teraflops
from hf_fsdp_tools.foresight.events import Event, Mark, Work
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.efficiency import efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

RESULTS = Path(__file__).parents[2] / "benchmarks/results/foresight_throughput.md"


def row(start: str, **setup: object) -> Row:
    (one,) = (
        each
        for each in read_rows("throughput")
        if each.name.startswith(start) and all(getattr(each.setup, name) == value for name, value in setup.items())
    )
    return one


@pytest.mark.parametrize(
    "published",
    [row("mpt-1b a100-40gb x128"), row("llama2-7b h100-80gb x96", compile=True)],
    ids=lambda each: each.name,
)
def test_published_trainings_run_as_fast_as_foreseen(published: Row) -> None:
    foreseen = throughput_of(published.foresee(), era=published.entry["era"]).tokens_per_second_per_gpu
    assert foreseen == pytest.approx(published.tokens_per_second, rel=0.08)


def test_the_committed_efficiencies_are_those_of_the_table_of_results() -> None:
    text = RESULTS.read_text()
    fitted = {name: float(re.findall(rf"\| {re.escape(name)} \| ([\d.]+) \|", text)[0]) for name in START}
    for published in read_rows("throughput"):
        if published.setup.gpu[:4] not in ("a100", "h100"):
            continue
        fit, kept = (
            efficiency_from(fitted, published),
            efficiency_of(gpu_named(published.setup.gpu), published.entry["era"]),
        )
        for name in ("matmul", "matmul_half", "attention", "memory", "straggler"):
            assert getattr(kept, name) == pytest.approx(getattr(fit, name), rel=0.01), name
        if published.setup.compile:
            assert kept.compiled_memory == pytest.approx(fit.compiled_memory, rel=0.01)


def test_teraflops_are_counted_as_published() -> None:
    first = row("gpt-175b a100-40gb")
    assert first.tokens_per_second is not None
    assert teraflops("gpt-175b", first.tokens_per_second, 512) == pytest.approx(159)


def again(operation: str, unit: str) -> Work:
    return Work(operation, 1.0, 1.0, unit, "backward", again=True)  # type: ignore[arg-type]


def left(events: Iterable[Event], rule: object) -> list[Event]:
    return list(recomputed_events(events, rule))  # type: ignore[arg-type]


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
