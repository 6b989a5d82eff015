"""What is foreseen of a training's memory is what the training takes: each allocation of real ranks is counted."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.foreseeing.cases import SIZES, case_named
from benchmarks.foreseeing.memory import foreseen_on_cpus, measured_on_cpus, requested
from hf_fsdp_tools.foresight.events import Alloc, Work
from tests._dist import run_ranks

CASES = ("tied", "root only, checkpointing", "VLM, LLaVA")
SHARED = "shared rows"


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    """Of each rank, what each case takes."""
    return run_ranks(measure_all, 2)


def measure_all() -> dict[str, Any]:
    return {name: measured_on_cpus(name, "tiny") for name in (*CASES, SHARED)}


@pytest.mark.parametrize("name", CASES)
def test_complaint_19_the_peak_of_a_step_is_foreseen(real, name):
    held, peak = requested(foreseen_on_cpus(case_named(name), "tiny", 2))
    for rank in real:
        assert rank[name]["peak"] == pytest.approx(peak, rel=1e-3)
        assert rank[name]["held"] == pytest.approx(held, rel=1e-3)


def test_what_ranks_that_share_rows_take_is_foreseen(real):
    """gloo lets go of what they exchange some time later, so that the peak has some hidden states more."""
    step = foreseen_on_cpus(case_named(SHARED), "tiny", 2)
    taken = sum(event.num_bytes for event in step.events if isinstance(event, Alloc))
    for rank in real:
        assert sum(size for size, *_ in rank[SHARED]["events"] if size > 0) == pytest.approx(taken, rel=1e-2)
        assert 0 <= rank[SHARED]["peak"] - requested(step)[1] < 8 * 2 * 16 * 64 * 4


def test_what_ranks_that_share_rows_exchange_is_foreseen():
    """Queries and outputs of this rank's tokens, and keys and values of half as many heads, in both passes in bf16."""
    step, size = foreseen_on_cpus(case_named(SHARED), "tiny", 2), SIZES["tiny"]
    exchanged = [event for event in step.events if isinstance(event, Work) and event.operation == "all_to_all"]
    assert {(work.stream, work.ranks) for work in exchanged} == {("rows", 2)}
    of_head = 2 * size.batch_size * size.seq_len // 2 * size.head_dim
    each_way = of_head * 2 * (size.heads + size.key_heads)
    assert sum(work.num_bytes for work in exchanged) == 2 * size.layers * each_way
    assert len(exchanged) == 2 * 4 * size.layers


def test_memory_left_out_is_what_gloo_copies(real):
    """The gathered bytes twice for each all-gather, the input once for each reduce-scatter, and bytes of the norm."""
    for rank in real:
        sizes: Counter[str] = Counter()
        for collective, num_bytes in rank[CASES[0]]["collectives"]:
            sizes[collective.rpartition("_")[0]] += num_bytes
        gathered, reduced = sizes["all_gather"] + sizes["all_gather_into"], sizes["reduce_scatter"]
        assert gathered and reduced
        scratch = rank[CASES[0]]["scratch"]
        assert 0 < scratch.pop("aten::_chunk_cat") <= reduced, "of the CPU's kernel, gradients once"
        assert scratch.pop("c10d::_allgather_base_") == scratch.pop("gloo:all_gather") == gathered
        assert scratch.pop("c10d::_reduce_scatter_base_") == reduced
        assert sum(scratch.values()) < 1024
