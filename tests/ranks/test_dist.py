"""The tests' own tools: a case that fails is named, and the others run all the same."""

import os
import time
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from hf_fsdp_tools import ConfigError, testing
from tests._dist import run_cases, run_ranks


def first(ran: list[str]) -> None:
    os.environ["FSDP_VERSION"] = "1"
    PartialState(cpu=True)
    ran.append("first")


def fails_on_rank_1(ran: list[str]) -> None:
    assert dist.get_rank() == 0, "rank 1 disagrees"


def last(ran: list[str]) -> int:
    assert "FSDP_VERSION" not in os.environ and not AcceleratorState._shared_state and not PartialState._shared_state
    return len(ran)


def run_some() -> str:
    ran: list[str] = []
    fails = pytest.raises(AssertionError) if dist.get_rank() == 1 else nullcontext()
    with fails as caught:
        run_cases([first, fails_on_rank_1], ran)
    assert run_cases({"alone": last, "again": last}, ran) == {"alone": 1, "again": 1}
    return str(caught and caught.value)


def test_every_case_runs_and_those_that_failed_are_named() -> None:
    alone, failed = run_ranks(run_some, 2)
    assert alone == "None" and "1 of 2 cases failed\n--- case 'fails on rank 1':\n" in failed and "disagrees" in failed


def stays_away() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["away"])
        testing._GRACE_S = 2 * testing.LIMIT_S
        pytest.fail("rank 0 fails")
    store.set("away", "")
    time.sleep(2 * testing.LIMIT_S)


def test_a_rank_that_does_not_come_back_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp_tools.testing._GRACE_S", 0.5)
    with pytest.raises(AssertionError) as caught:
        run_ranks(run_cases, 2, [stays_away, last])
    first, second = str(caught.value).split("--- rank 1 was killed")
    assert "1 of 2 cases failed\n--- case 'stays away':\n" in first and "rank 0 fails" in first
    assert "Another rank has not come back from it; no further case was begun" in first
    assert "in stays_away" in second, "where it is"


def test_ranks_on_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(ConfigError, match=f"this machine shows {testing.num_gpus()}($|.*MULTI_RANK_GPU_ENABLE=1)"):
        run_ranks(last, testing.num_gpus() + 1, [], device="cuda")
