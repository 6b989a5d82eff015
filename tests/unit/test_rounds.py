"""Rounds end alike on all ranks, however their steps interleave: ranks are threads here, and wait for each other."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from hf_fsdp_tools import CheckpointError, RanksError
from hf_fsdp_tools.distributed import liveness, rounds
from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.liveness import Lookout, StoreClient
from hf_fsdp_tools.distributed.rounds import Rounds, patience, using

HANG_S = 60  # how long a thread may wait for another: only a hang takes it


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LOOK_S", 0.0)


class Store:
    """A store of which some answers wait, or are not what they would be."""

    def __init__(self, store: Any, **instead: Callable[..., Any]) -> None:
        self._store, self._instead = store, instead

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._store, name)
        return (lambda *args: self._instead[name](own, *args)) if name in self._instead else own


def together(*works: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, all at the same time."""

    def outcome(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        begun = [pool.submit(copy_context().run, outcome, work) for work in works]
        return [one.result(HANG_S) for one in begun]


def ranks_of(size: int) -> list[Rounds]:
    store = dist.HashStore()
    return [Rounds(store, rank, tuple(range(size))) for rank in range(size)]


@pytest.fixture
def two() -> list[Rounds]:
    return ranks_of(2)


@pytest.mark.parametrize("last_is_first", [False, True])
def test_a_round_is_joined_or_given_up_and_never_both(
    last_is_first: bool, two: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank comes while the other, which has looked, gives up."""
    waits, joins, over = threading.Event(), threading.Event(), threading.Event()

    def give_up(*args: Any, **options: Any) -> str:
        waits.set()
        assert joins.wait(HANG_S)
        return "Nobody comes."

    def settle(own: Callable[..., bytes], key: str, expected: str, value: bytes) -> bytes:
        if last_is_first:
            told = own(key, expected, value)
            joins.set()
            return told
        joins.set()
        assert over.wait(HANG_S)
        return own(key, expected, value)

    def first() -> Any:
        try:
            return two[0].exchange("a", "saving")
        finally:
            over.set()

    def last() -> Any:
        assert waits.wait(HANG_S)
        return two[1].exchange("b", "saving")

    monkeypatch.setattr(Lookout, "problem", give_up)
    two[1]._store = Store(two[1]._store, compare_set=settle)
    found = together(first, last)
    if last_is_first:
        assert found == [["a", "b"]] * 2
    else:
        assert [str(one) for one in found] == ["Nobody comes."] * 2


def test_a_rank_that_has_failed_learns_that_another_is_lost(two: list[Rounds], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits where the block ends, and everybody knows of its failure; a rank that has ended does not come for it."""
    monkeypatch.setattr(liveness, "_state_of", lambda process: "X")
    with using(two[0]), pytest.raises(RanksError, match="While saving: rank 1 has ended") as caught, agreed("saving"):
        raise CheckpointError("disk full")
    assert caught.value.__notes__ == ["Before, this rank failed: CheckpointError('disk full')"], "not lost"


def test_a_process_of_another_machine_of_that_name_is_not_looked_for_here(
    two: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that are all called localhost, and containers of one machine on its network."""
    known = Lookout(two[0]._store, two[0]._prefix, "", (0, 1), 0)
    monkeypatch.setattr(liveness, "_state_of", lambda process: "X")
    assert known.has_ended(1) == (liveness.processes_in_sight() != "")
    monkeypatch.setattr(liveness, "processes_in_sight", lambda: "another")
    assert not known.has_ended(1)


def beat_of(*places: list[str], count: int = 1, progress: int = 1, **passes: int) -> str:
    beat = {"count": count, "progress": progress, "at": places, "for": "", "passes": passes, "of": "Llama"}
    return json.dumps(beat)


def test_ranks_wait_on_when_those_that_look_first_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 have come first and ended; rank 2 looks, and gives up for all."""
    three = ranks_of(4)
    for rank in (0, 1):
        three[rank]._store.set(f"{three[0]._prefix}.0/{rank}", rounds.pickle.dumps(("saving", rank)))
        three[rank]._store.add(f"{three[0]._prefix}.0/count", 1)
    monkeypatch.setattr(Lookout, "problem", lambda self, *args, **options: "Nobody comes.")
    with pytest.raises(RanksError, match="Nobody comes"):
        three[2].exchange(2, "saving")


# ---- who is waited for ----


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    yield clock


@pytest.fixture
def lookout(two: list[Rounds], clock: Clock) -> Lookout:
    """Rank 0 waits in the first round, and looks at rank 1."""
    two[0]._store.set(f"{two[0]._prefix}.0/0", "here")
    return Lookout(two[0]._store, two[0]._prefix, f"{two[0]._prefix}.0", (0, 1), 0)


def test_a_rank_that_moves_is_waited_for_and_one_that_does_not_is_given_up(
    two: list[Rounds], lookout: Lookout, clock: Clock
) -> None:
    for second in range(100):
        beat = beat_of(["reading", f"{two[0]._prefix}.0"], count=second, progress=min(second, 50))
        two[1]._store.set(f"{two[0]._prefix}/beat/1", beat)
        problem = lookout.problem("reading", (20.5, 20.5))
        assert bool(problem) == (second > 70), second
        clock.now += 1
    assert problem.startswith("While reading: no progress for 49 s. rank 1 is reading (49 s without progress)")


@pytest.mark.parametrize(
    ("place", "moves", "other"),
    [
        (["opening", "0.0/"], False, "opening"),  # another scope where this rank is in a round
        (["opening", "0.0.0"], True, "opening"),  # a round that this rank has left, or will not come to
        (["reading", "0.0/end"], True, "reading"),
        (["reading", "0.0.0"], False, ""),  # it may have left that round since it told
        (["reading", "0.0/"], True, ""),  # it works in a scope, and comes
    ],
)
def test_a_rank_that_never_meets_this_one_is_named(
    two: list[Rounds], lookout: Lookout, place: list[str], moves: bool, other: str
) -> None:
    place[1] = place[1].replace("0", two[0]._prefix, 1)
    expected = f"The ranks are in different calls: rank 0 is reading, rank 1 is {other}." if other else ""
    with two[0]._store.telling("reading", f"{two[0]._prefix}.0"):
        for look in range(4):
            two[1]._store.set(f"{two[0]._prefix}/beat/1", beat_of(place, count=look * moves))
            problem = lookout.problem("reading", (600, 600))
    assert problem.startswith(expected) and bool(problem) == bool(expected), problem


def test_a_rank_that_runs_a_forward_pass_alone_is_named(
    two: list[Rounds], lookout: Lookout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_passes", {"a": 3})
    two[1]._store.set(f"{two[0]._prefix}/beat/1", beat_of(a=3))
    assert lookout.problem("reading", (600, 600)) == ""
    two[1]._store.set(f"{two[0]._prefix}/beat/1", beat_of(a=4))
    said = "While reading: rank 1 waits in forward pass 4 of Llama for rank 0, which has run 3. A sharded model"
    assert lookout.problem("reading", (600, 600)).startswith(said)


@pytest.mark.parametrize(("seconds_each", "given_up_s"), [(1, 61), (70, None)])
def test_a_stopped_rank_is_given_up_by_who_has_looked_for_a_minute(
    lookout: Lookout, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds_each: int, given_up_s: int | None
) -> None:
    """A job that is stopped as a whole goes on at different moments: who looks after 70 s was stopped itself."""
    monkeypatch.setattr(liveness, "_state_of", lambda process: "T")
    for look in range(12 if given_up_s is None else 70):
        problem = lookout.problem("reading", (600, 600))
        assert bool(problem) == (given_up_s is not None and look >= given_up_s), (look, problem)
        clock.now += seconds_each
    assert not problem or problem.startswith("While reading: rank 1 is stopped (SIGSTOP) for ")


def test_a_rank_in_no_call_may_take_as_long_as_a_collective_and_one_that_is_silent_in_a_call_not(
    two: list[Rounds], lookout: Lookout, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 judges answers for an hour before it comes, and then holds the interpreter's lock."""
    store, prefix = two[0]._store, two[0]._prefix
    monkeypatch.setattr(liveness, "_state_of", lambda process: "R")
    monkeypatch.setattr(rounds, "timeout_of", lambda: timedelta(hours=2))

    def seconds_until_given_up(most: int) -> tuple[int, str]:
        for second in range(0, most, 5):
            if problem := lookout.problem("saving", rounds._limits_s()):
                return second, problem
            clock.now += 5
        return most, ""

    assert seconds_until_given_up(3600) == (3600, "")
    store.set(f"{prefix}/beat/1", beat_of(["saving", f"{prefix}.0"]))
    second, problem = seconds_until_given_up(3600)
    assert second == 605
    assert "rank 1 is saving (605 s without progress)" in problem
    store.set(f"{prefix}/beat/1", beat_of(count=2))
    assert seconds_until_given_up(7300)[0] == 7205
    with patience(20):
        assert rounds._limits_s() == (20, 20), "what the user asks for holds for both"


def client_of(store: Any, silent_s: float = 60) -> StoreClient:
    return StoreClient(store, "beat", silent_s)


def test_the_thread_of_a_group_that_is_over_ends_and_who_still_asks_is_answered() -> None:
    """It would hold the store, and with it the store's port."""
    one = client_of(dist.HashStore())
    one.set("a", "1")
    with one.telling("opening", "0"):
        one.stop()
        former = one._thread
        assert former is not None and one.get("a") == b"1" and one._thread is former, "not in a call"
    one.stop()
    former.join(HANG_S)
    assert not former.is_alive()
    assert one.get("a") == b"1" and one._thread is None


def test_a_rank_has_one_connection_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its process group: one more of each rank, all made at once, stops a large job for seconds."""
    monkeypatch.setattr(liveness, "_BEAT_S", 0.001)
    keeper = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    two = [Rounds(dist.TCPStore("127.0.0.1", keeper.port, None, False), rank, (0, 1)) for rank in range(2)]

    def connections() -> int:
        return sum(bool(each.raddr) and each.raddr.port == keeper.port for each in psutil.Process().net_connections())

    before = connections()
    with two[0].scope("saving"), two[1].scope("saving"):
        for rank, one in enumerate(two):
            while not keeper.check([f"{one._prefix}/beat/{rank}"]):
                time.sleep(0.01)
        assert together(*(lambda one=one: one.exchange(1, "saving") for one in two)) == [[1, 1]] * 2  # type: ignore[misc]
        assert connections() == before
    for one in two:
        one._store.stop()


def test_a_rank_tells_where_it_is_while_it_is_in_a_call_and_that_it_has_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "_BEAT_S", 0.001)
    store = dist.HashStore()
    one = client_of(store)

    def told() -> Any:
        return [place[0] for place in json.loads(store.get("beat"))["at"]] if store.check(["beat"]) else None

    end_s = time.monotonic() + HANG_S
    for doing in (["opening"], ["reading"]):
        with one.telling(doing[0], "0"):
            while told() != doing:
                assert time.monotonic() < end_s
        while told() != []:
            assert time.monotonic() < end_s
    count = json.loads(store.get("beat"))["count"]
    time.sleep(0.05)
    assert json.loads(store.get("beat"))["count"] == count, "it tells nothing more"
    one.stop()
