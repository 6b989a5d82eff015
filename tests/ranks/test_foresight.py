"""What is foreseen of a training's memory is what the training takes: each allocation of real ranks is counted."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.foreseeing.cases import case_named
from benchmarks.foreseeing.memory import foreseen_on_cpus, measured_on_cpus, requested
from tests._dist import run_ranks

CASES = ("tied", "root only, checkpointing", "VLM, LLaVA", "shared rows")


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    """Of each rank, what each case takes."""
    return run_ranks(measure_all, 2)


def measure_all() -> dict[str, Any]:
    return {name: measured_on_cpus(name, "tiny") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_complaint_19_the_peak_of_a_step_is_foreseen(real, name):
    held, peak = requested(foreseen_on_cpus(case_named(name), "tiny", 2))
    # gloo lets go of what ranks that share rows exchange some time later: here one to three hidden states of 8 KiB
    late = 2e-2 if name == "shared rows" else 1e-3
    for rank in real:
        assert rank[name]["peak"] == pytest.approx(peak, rel=late)
        assert rank[name]["held"] == pytest.approx(held, rel=late)


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
