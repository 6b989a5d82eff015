"""Rounds end alike on all ranks, however their steps interleave: ranks are threads here, and wait for each other."""

import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_tools import RanksError
from hf_fsdp_tools.distributed import rounds
from tests.api import Box, Lookout, Rounds, rounds_of_thread, wait_for_all_ranks

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


def test_a_round_carries_values_as_they_are_and_no_code(two: list[Rounds], tmp_path: Path) -> None:
    """Whoever reaches the port of the store may set what ranks read."""
    box = Box(start=(0, 1), length=(2, 3))
    value = {"n": [1, 2.5, None, True, "a"], ("tie", 3): (box, [box]), 4: {}}
    assert together(*(lambda each=each: each.exchange(value, "saving") for each in two)) == [[value, value]] * 2

    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    strange = {"class": ["subprocess", "Popen", [["args", ["touch", str(tmp_path / "ran")]]]]}
    for content in (pickle.dumps(("saving", Code())), json.dumps(["saving", strange]).encode()):
        one, other = ranks_of(2)
        other._store.append("round.0/values", b"1 " + content + b"\n")
        other._store.add("round.0/count", 1)
        with pytest.raises((ValueError, RanksError)):
            one.exchange("a", "saving")
        assert not (tmp_path / "ran").exists()


def test_rank_0_which_may_end_the_store_with_itself_leaves_last(two: list[Rounds]) -> None:
    left = []

    def slow(own: Callable[..., bytes], key: str) -> bytes:
        if key.endswith("/outcome"):
            time.sleep(0.3)
            left.append("read")
        return own(key)

    def leave(rank: int) -> None:
        rounds_of_thread.set(two[rank])
        while rank == 0 and not two[0]._store.add("round.0/count", 0):
            time.sleep(0.001)
        wait_for_all_ranks()
        left.append(rank)

    two[1]._store = Store(two[1]._store, get=slow)
    together(partial(leave, 0), partial(leave, 1))
    assert left[0] == "read" and len(left) == 3


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


def beat_of(*places: list[str], count: int = 1, progress: int = 1) -> str:
    return json.dumps({"count": count, "progress": progress, "at": places, "for": ""})


@pytest.fixture
def lookout(two: list[Rounds]) -> Lookout:
    two[0]._store.append("round.0/values", "0 here\n")
    return Lookout(two[0]._store, "round.0", (0, 1), 0)


@pytest.mark.parametrize(
    ("place", "moves", "other"),
    [
        (["opening", "round.0/"], False, "opening"),  # another scope where this rank is in a round
        (["opening", "round.0.0"], True, "opening"),  # a round that this rank has left, or will not come to
        (["reading", "round.0/end"], True, "reading"),
        (["reading", "round.0.0"], False, ""),  # it may have left that round since it told
        (["reading", "round.0/"], True, ""),  # it works in a scope, and comes
    ],
)
def test_a_rank_that_never_meets_this_one_is_named(
    two: list[Rounds], lookout: Lookout, place: list[str], moves: bool, other: str
) -> None:
    expected = f"The ranks are in different calls: rank 0 is reading, rank 1 is {other}." if other else ""
    with two[0]._store.telling("reading", "round.0"):
        for look in range(4):
            two[1]._store.set("beat/1", beat_of(place, count=look * moves))
            problem = lookout.problem("reading", (600, 600))
    assert problem.startswith(expected) and bool(problem) == bool(expected), problem


def test_long_values_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses 8 MiB, with an error that says that its process has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    long = {"names": ["n" * 9 * 2**20]}
    both = [Rounds(dist.TCPStore("127.0.0.1", server.port), rank, (0, 1)) for rank in range(2)]
    assert together(*(lambda each=each: each.exchange(long, "saving") for each in both)) == [[long, long]] * 2
    before = server.num_keys()
    assert together(*(lambda each=each: each.exchange(each.rank, "saving") for each in both)) == [[0, 1]] * 2
    assert server.num_keys() < before - 36, "parts are deleted when all have read them"
