"""The tests' own tools: a case that fails is named, and the others run all the same."""

import os
import time
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from tests import _dist
from tests._dist import run_cases, run_ranks


def first(ran: list[str]) -> None:
    os.environ["FSDP_VERSION"] = "1"
    PartialState(cpu=True)
    ran.append("first")


def fails_on_rank_1(ran: list[str]) -> None:
    assert dist.get_rank() == 0, "rank 1 disagrees"


def sees_nothing_raised(ran: list[str]) -> None:
    with pytest.raises(ValueError):
        ran.append("nothing raised")


def last(ran: list[str]) -> int:
    assert "FSDP_VERSION" not in os.environ and not AcceleratorState._shared_state and not PartialState._shared_state
    return len(ran)


def run_some() -> str:
    ran: list[str] = []
    with pytest.raises(AssertionError) as caught:
        run_cases([first, sees_nothing_raised, fails_on_rank_1], ran)
    assert run_cases({"alone": last, "again": last}, ran) == {"alone": 2, "again": 2}
    assert ran == ["first", "nothing raised"], "every case ran once"
    return str(caught.value)


def test_every_case_runs_and_those_that_failed_are_named() -> None:
    for rank, message in enumerate(run_ranks(run_some, 2)):
        assert message.startswith(f"{1 + rank} of 3 cases failed\n--- case 'sees nothing raised':\n")
        assert "DID NOT RAISE" in message
        assert ("--- case 'fails on rank 1':\n" in message and "rank 1 disagrees" in message) == (rank == 1)


def stays_away() -> None:
    """Rank 0 fails once rank 1 is away, and soon gives it up."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["away"])
        _dist._GRACE_S = 2 * _dist.LIMIT_S
        pytest.fail("rank 0 fails")
    store.set("away", "")
    time.sleep(2 * _dist.LIMIT_S)


def test_a_rank_that_does_not_come_back_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests._dist._GRACE_S", 0.5)
    with pytest.raises(AssertionError) as caught:
        run_ranks(run_cases, 2, [stays_away, last])
    first, second = str(caught.value).split("--- rank 1 was killed")
    assert "1 of 2 cases failed\n--- case 'stays away':\n" in first and "rank 0 fails" in first
    assert "Another rank has not come back from it; no further case was begun" in first
    assert "in stays_away" in second, "where it is"


class _SeenWhenUnpickled:
    """Becomes the rank that the environment of the process that unpickles it says."""

    def __reduce__(self) -> Any:
        return os.getenv, ("RANK",)


def _same(value: Any) -> Any:
    return value


def test_a_rank_imports_what_it_runs_once_its_environment_is_set() -> None:
    # What a test's module imports may look for GPUs (bitsandbytes does), and PyTorch counts them once.
    assert run_ranks(_same, 2, _SeenWhenUnpickled()) == ["0", "1"]
