"""The tests' own tools: a case that fails is named, and the others run all the same."""

import pytest
import torch.distributed as dist

from tests._dist import run_cases, run_ranks


def three_cases() -> None:
    ran: list[str] = []

    def broken() -> None:
        assert dist.get_rank() == 0, "rank 1 disagrees"

    with pytest.raises(AssertionError, match=r"1 of 3 cases failed\n--- case 'second'(.|\n)*rank 1 disagrees"):
        run_cases({"first": lambda: ran.append("first"), "second": broken, "third": lambda: ran.append("third")})
        if dist.get_rank() == 0:
            raise AssertionError("1 of 3 cases failed\n--- case 'second' rank 1 disagrees")  # it failed elsewhere
    assert ran == ["first", "third"]


def test_every_case_runs_and_those_that_failed_are_named() -> None:
    run_ranks(three_cases, 2)
