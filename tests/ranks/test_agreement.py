"""Ranks agree through the store of their group: failures, other calls, absent and lost ranks end all of them alike."""

import re
import tempfile
import threading
import time
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")

from hf_fsdp_tools import CheckpointError, ConfigError, RanksError
from hf_fsdp_tools.distributed import beat, rounds
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, shared_rng_state, shared_seed
from hf_fsdp_tools.distributed.current import rounds_of
from hf_fsdp_tools.distributed.rounds import patience
from hf_fsdp_tools.distributed.watch import watched
from tests._dist import run_cases, run_ranks


def same_error(kind, call):
    """The message of the error that the call raises on every rank, the same on all and soon."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begin < 20
    messages = all_ranks(str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


def values_come_in_rank_order():
    for n in range(20):
        assert all_ranks((dist.get_rank(), n)) == [(rank, n) for rank in range(3)]


def a_failure_ends_the_block_on_all():
    def fail():
        with agreed("opening"):
            if dist.get_rank() == 1:
                raise CheckpointError("damaged")

    assert same_error(CheckpointError, fail) == "Opening failed on 1 of 3 ranks.\nrank 1: damaged"


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


def a_failure_within_is_the_failure_of_the_whole():
    def fail():
        with agreed("saving"), agreed("saving the scheduler"):
            if dist.get_rank() == 2:
                raise CheckpointError("disk full")

    assert "rank 2: disk full" in same_error(CheckpointError, fail)
    assert all_ranks(1) == [1, 1, 1]


def other_errors_stay_what_they_are():
    with pytest.raises((CheckpointError, ZeroDivisionError)) as caught, agreed("reading"):
        _ = 1 / dist.get_rank()
    kinds = all_ranks(caught.type.__name__)
    assert kinds == ["ZeroDivisionError", "CheckpointError", "CheckpointError"]


def different_calls_are_named():
    doing = "saving 'a'" if dist.get_rank() == 0 else "opening 'b'"
    message = same_error(RanksError, lambda: all_ranks(1, doing))
    assert message.startswith("The ranks are in different calls: rank 0 is saving 'a', rank 1 is opening 'b'")


def some_ranks_exchange_among_themselves():
    if dist.get_rank() != 1:
        assert all_ranks(dist.get_rank(), ranks=(0, 2)) == [0, 2]


def an_absent_rank_is_named_and_given_up():
    rounds._ABSENT_S = 0.5
    if dist.get_rank() == 2:
        time.sleep(6)  # in no call
    else:
        with warnings.catch_warnings(record=True) as caught, patience(2), pytest.raises(RanksError) as error:
            warnings.simplefilter("always")
            all_ranks(1, "saving the model")
        expected = "rank 2 is in no call of hf_fsdp_tools; every rank must call"
        assert re.match(f"While saving the model: no progress for [23] s. {expected}", str(error.value))
        told = [str(warning.message) for warning in caught if "Still saving the model" in str(warning.message)]
        assert all(expected in text for text in told)
        assert sum(all_ranks(len(told), ranks=(0, 1))) > 0
    if dist.get_rank() == 2:
        with pytest.raises(RanksError, match="While saving the model: no progress"):
            all_ranks(1, "saving the model")  # too late


def a_rank_that_moves_is_waited_for():
    with patience(2):
        if dist.get_rank() == 0:
            with agreed("reading"):
                for _ in range(35):
                    with watched("a file"):
                        time.sleep(0.1)
        else:
            with agreed("reading"):
                pass


def a_rank_whose_library_reads_and_writes_is_waited_for():
    """A download of a library, of which no part is watched, is progress too."""
    with patience(2), agreed("downloading"):
        if dist.get_rank() == 0:
            with tempfile.TemporaryFile() as file:
                for _ in range(35):
                    file.write(bytes(2**21))
                    file.seek(0)
                    time.sleep(0.1)


def a_lost_rank_is_waited_for_once_however_deep_the_blocks():
    """Ranks 0 and 1 give rank 2 up in the inner block, and do not wait for it again where the outer blocks end."""
    rounds._ABSENT_S = 0.5
    begin = time.monotonic()
    with patience(2), pytest.raises(RanksError, match="While reading a part"), agreed("loading"), agreed("reading"):
        if dist.get_rank() == 2:
            time.sleep(5)
        with agreed("reading a part"):
            pass
    assert time.monotonic() - begin < 12
    assert all_ranks(dist.get_rank()) == [0, 1, 2]


def all_ranks_raise_the_same_kind_of_error():
    """Also where rank 0 sees that the outer block failed before it sees that the inner block has ended."""

    class SlowStore:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            return getattr(self._store, name)

        def check(self, keys):
            found = self._store.check(keys)
            if keys[0].endswith("joined"):
                time.sleep(1)
            return found

    def fail():
        with agreed("checking"), agreed("checking a part"):
            if dist.get_rank() > 0:
                time.sleep(0.5)
                raise ConfigError("no such policy")

    told = "Checking a part failed on 2 of 3 ranks.\nrank 1, 2: no such policy"
    assert same_error(ConfigError, fail) == told
    slow = SlowStore(rounds_of()._store) if dist.get_rank() == 0 else rounds_of()._store
    with patch.object(rounds_of(), "_store", slow):
        assert same_error(ConfigError, fail) == told


def a_group_that_is_started_again_begins_anew():
    all_ranks("of the first life")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    assert all_ranks(rank) == [0, 1, 2]


def a_group_that_is_over_leaves_its_store():
    """Its port is free for the next group of this process."""
    kept = [thread.name for thread in threading.enumerate() if thread.name == "beat"]
    assert kept == ["beat"], "one thread, of the group that runs"


CASES = (
    values_come_in_rank_order,
    a_failure_ends_the_block_on_all,
    a_failure_is_known_to_those_in_a_block_within,
    a_failure_within_is_the_failure_of_the_whole,
    other_errors_stay_what_they_are,
    different_calls_are_named,
    some_ranks_exchange_among_themselves,
    a_rank_that_moves_is_waited_for,
    a_rank_whose_library_reads_and_writes_is_waited_for,
    a_lost_rank_is_waited_for_once_however_deep_the_blocks,
    all_ranks_raise_the_same_kind_of_error,
)


def agree():
    beat._BEAT_S = 0.2
    run_cases({case.__name__: case for case in CASES})
    a_group_that_is_started_again_begins_anew()
    a_group_that_is_over_leaves_its_store()


def test_ranks_agree():
    run_ranks(agree, 3)


def be_absent():
    beat._BEAT_S = 0.2
    an_absent_rank_is_named_and_given_up()


def test_a_call_by_some_ranks_alone_is_named():
    run_ranks(be_absent, 3)


def test_any_rank_of_a_fake_group_draws_from_its_own_random_state():
    dist.init_process_group("fake", rank=3, world_size=8)
    try:
        seeds = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            seeds.append(shared_seed(None))
        assert seeds[0] != seeds[1]
        assert torch.equal(shared_rng_state(), torch.get_rng_state())
        assert shared_seed(5) == 5
    finally:
        dist.destroy_process_group()
