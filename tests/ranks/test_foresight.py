"""What is estimated of a training's memory is what the training takes: each allocation of real ranks is counted."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from benchmarks.foreseeing.cases import SIZES, case_named
from benchmarks.foreseeing.memory import estimated_on_cpus, measured_on_cpus, requested
from tests._dist import run_ranks
from tests.api import Alloc, Work, build

CASES = ("tied", "VLM, LLaVA")
RECOMPUTED = "checkpointing, every 3rd block offloaded, products kept"
SHARED = "shared rows"
DIVIDED = ("shared layers", "shared experts")
STAYING, SHARED_STAYING = "FP8 that stays", "shared FP8 that stays"
FEW_LAYERS = replace(SIZES["tiny"], layers=2)


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return run_ranks(measure_all, 2, [*CASES, RECOMPUTED, SHARED, *DIVIDED, STAYING, SHARED_STAYING])


@pytest.fixture(autouse=True)
def of_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", FEW_LAYERS)


def measure_all(names: Iterable[str]) -> dict[str, Any]:
    SIZES["tiny"] = FEW_LAYERS  # of this process, which is a rank
    return {name: measured_on_cpus(name, "tiny") for name in names}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_estimated(real, name):
    held, peak = requested(estimated_on_cpus(case_named(name), "tiny", 2))
    for found in (rank[name] for rank in real):
        assert found["peak"] == pytest.approx(peak, rel=1e-3)
        assert found["held"] == pytest.approx(held, rel=1e-3)


def test_a_frozen_base_on_one_rank_is_used_where_it_lies():
    case = case_named("LoRA")
    (found,) = run_ranks(measure_all, 1, [case.name])
    step = estimated_on_cpus(case, "tiny", 1)
    held, peak = requested(step)
    assert (found["LoRA"]["held"], found["LoRA"]["peak"]) == (
        pytest.approx(held, rel=1e-3),
        pytest.approx(peak, rel=1e-3),
    )
    model, _ = build(case.config(SIZES["tiny"]), case.sized("tiny", 1))
    adapters = sum(2 * each.numel() for each in model.parameters() if each.requires_grad)
    casts = [each for each in step.events if isinstance(each, Alloc) and each.kind == "gathered parameters"]
    assert sum(each.num_bytes for each in casts) == adapters, "one copy in bf16 of each adapter, and none of the base"


def test_what_blocks_keep_that_are_computed_again_is_estimated(real, name=RECOMPUTED):
    """On CPUs inputs lie on the host twice, and checkpointing keeps the generator's state for each block."""
    step = estimated_on_cpus(case_named(name), "tiny", 2)
    held, peak = requested(step)
    state = torch.get_rng_state().nbytes
    for found in (rank[name] for rank in real):
        changes = [size for size, *_ in found["events"] if abs(size) != state]
        assert max(accumulate(changes, initial=found["held"])) == pytest.approx(peak, abs=600)
        assert found["held"] == pytest.approx(held, rel=1e-3)


def test_what_weights_that_stay_quantised_take_is_estimated(real, name=STAYING):
    """The peak, which stands where a weight is dequantised, all that a step takes, with the scratch of the rules, and
    what is gathered.

    On CPUs checkpointing keeps the generator's state for each block in the memory that is counted; that is left out. A
    thread of gloo may let go of what it has sent some time later: less than the smallest weight that is dequantised.
    """
    step = estimated_on_cpus(case_named(name), "tiny", 2)
    held, peak = requested(step)
    taken = sum(event.num_bytes for event in step.events if isinstance(event, Alloc))
    state = torch.get_rng_state().nbytes
    for found in (rank[name] for rank in real):
        events = found["events"]
        states = {address for size, address in events if size == state}
        assert len([size for size, _ in events if size == state]) == 2 * SIZES["tiny"].layers
        changes = [size for size, address in events if abs(size) != state or address not in states]
        late = max(accumulate(changes, initial=found["held"])) - peak
        assert -1e-3 * peak < late < 5e-3 * peak
        assert sum(size for size in changes if size > 0) == pytest.approx(taken, rel=3e-2)
        assert -1e-3 * held < found["held"] - held < 5e-3 * peak
        works = [event for event in step.events if isinstance(event, Work) and event.operation == "all_gather"]
        sent = [num_bytes for kind, num_bytes in found["collectives"] if kind.startswith("all_gather")]
        assert sent == [work.num_bytes for work in works]


def test_what_ranks_take_that_share_weights_as_stored_is_estimated(real, name=SHARED_STAYING):
    held, peak = requested(estimated_on_cpus(case_named(name), "tiny", 2))
    for found in (rank[name] for rank in real):
        assert found["held"] == pytest.approx(held, rel=2e-2)
        assert found["peak"] == pytest.approx(peak, rel=5e-2)


def test_what_ranks_that_share_rows_take_is_estimated(real):
    """gloo lets go of what they exchange some time later, so that the peak has some hidden states more."""
    step = estimated_on_cpus(case_named(SHARED), "tiny", 2)
    taken = sum(event.num_bytes for event in step.events if isinstance(event, Alloc))
    for rank in real:
        assert sum(size for size, *_ in rank[SHARED]["events"] if size > 0) == pytest.approx(taken, rel=3e-2)
        assert 0 <= rank[SHARED]["peak"] - requested(step)[1] < 8 * 2 * 16 * 64 * 4


@pytest.mark.parametrize("name", DIVIDED)
def test_what_ranks_that_share_layers_or_experts_take_is_estimated(real, name):
    """But for indices of tokens, and what autograd's DTensors hold a moment longer."""
    step = estimated_on_cpus(case_named(name), "tiny", 2)
    for rank in real:
        assert rank[name]["held"] == pytest.approx(requested(step)[0], rel=5e-2)
        assert rank[name]["peak"] == pytest.approx(requested(step)[1], rel=2e-2)
