"""Published throughputs are foreseen as `benchmarks/results/foresight_throughput.md` says."""

import re
from pathlib import Path

import pytest

from benchmarks.foreseeing.fit import START, efficiency_from
from benchmarks.foreseeing.published import Row, read_rows
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
