"""Ranks agree through the store of their group: failures, other calls, absent and lost ranks end all of them alike."""

import re
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")

from hf_fsdp_tools import CheckpointError, RanksError, rank_timeout
from hf_fsdp_tools.distributed import liveness, rounds
from tests._dist import run_cases, run_ranks
from tests.api import agreed, all_ranks


def same_error(kind, call):
    with pytest.raises(kind) as caught:
        call()
    messages = all_ranks(str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


def values_come_in_rank_order():
    for n in range(20):
        assert all_ranks((dist.get_rank(), n)) == [(rank, n) for rank in range(3)]
    if dist.get_rank() != 1:
        assert all_ranks(dist.get_rank(), ranks=(0, 2)) == [0, 2]


def a_failure_is_known_to_those_in_a_block_within():
    """Rank 0 fails between two exchanges of others: they wait for it in a round that it never enters."""

    def fail():
        with agreed("saving"):
            all_ranks("before")
            if dist.get_rank() == 0:
                raise CheckpointError("disk full")
            with agreed("saving the random states"):
                all_ranks("within")

    assert same_error(CheckpointError, fail) == "Saving failed on 1 of 3 ranks.\nrank 0: disk full"


def a_failure_ends_the_block_on_all_and_stays_what_it_is():
    with pytest.raises((CheckpointError, ZeroDivisionError)) as caught, agreed("reading"):
        _ = 1 / dist.get_rank()
    kinds = all_ranks(caught.type.__name__)
    assert kinds == ["ZeroDivisionError", "CheckpointError", "CheckpointError"]

    def fail():
        with agreed("opening"):
            if dist.get_rank() == 1:
                raise CheckpointError("damaged")

    assert same_error(CheckpointError, fail) == "Opening failed on 1 of 3 ranks.\nrank 1: damaged"


def stay_away_until(*keys):
    """In no call, until other ranks have set these keys of the store."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([*keys])


def say(key):
    dist.distributed_c10d._get_default_store().set(key, "")


def an_absent_rank_is_named_and_given_up():
    liveness._WARN_S = 0.5
    if dist.get_rank() == 2:
        stay_away_until("given up 0", "given up 1")
        with pytest.raises(RanksError, match="While saving the model: no progress"):
            all_ranks(1, "saving the model")  # too late
        return
    told = []

    def warn(text, **_):
        told.append(text)
        rounds._patience_s.set(0.1)  # it is over only when the rank has been warned of

    with patch.object(liveness, "warn", warn), pytest.raises(RanksError) as error:
        all_ranks(1, "saving the model")
    say(f"given up {dist.get_rank()}")
    expected = "rank 2 is in no call of hf_fsdp_tools; every rank must call"
    assert re.match(rf"While saving the model: no progress for \d+ s. {expected}", str(error.value))
    assert all(text.startswith("Still saving the model") and expected in text for text in told)
    rounds._patience_s.set(None)
    assert sorted(all_ranks(len(told), ranks=(0, 1))) == [0, 1], "one of them warns"


def a_lost_rank_is_waited_for_once_however_deep_the_blocks():
    """Ranks 0 and 1 give rank 2 up in the inner block, and do not wait for it again where the outer blocks end."""
    rank = dist.get_rank()
    with (
        rank_timeout(0.5),
        pytest.raises(RanksError, match="While reading a part"),
        agreed("loading"),
        agreed("reading"),
    ):
        if rank == 2:
            stay_away_until("left 0", "left 1")
        with agreed("reading a part"):
            pass
    say(f"left {rank}")
    assert all_ranks(rank) == [0, 1, 2]


CASES = (
    values_come_in_rank_order,
    a_failure_is_known_to_those_in_a_block_within,
    a_failure_ends_the_block_on_all_and_stays_what_it_is,
    a_lost_rank_is_waited_for_once_however_deep_the_blocks,
    an_absent_rank_is_named_and_given_up,
)


def agree():
    liveness._BEAT_S = 0.2
    run_cases(CASES)


def test_ranks_agree():
    run_ranks(agree, 3)
