"""One value of every rank, exchanged through the key-value store of the default process group.

The store is the one over which PyTorch starts the group. It has connections of its own, so that a round needs no
backend that communicates between CPUs, is found by its name and not by its order among collectives, and can be nested.

    round   every rank sets its value, the last rank to arrive joins all values, and every rank reads what was joined,
            or why the round was given up: the store keeps whichever comes first
    scope   a block that all ranks enter; a rank that fails in a scope tells those that wait in a round within it

The first ranks to arrive look at those that are missing (`liveness`): they warn of a rank that makes no progress, and
in the end give up for all ranks alike.
"""

import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_fsdp_tools.distributed.cpu_backend import timeout_of
from hf_fsdp_tools.distributed.liveness import (
    SILENT_S,
    Lookout,
    StoreClient,
    different_calls,
    processes_in_sight,
)
from hf_fsdp_tools.errors import ConfigError, RanksError

GIVE_UP_S = 600.0
"""How long a rank that others wait for may make no progress: what NCCL's collectives wait by default, and more than a
file server takes to fail over (assumed)."""

_LOOK_S = 1.0
"""Between two looks of the first two ranks that wait at the others; later ones look less often, in case those two have
ended."""

_POLL_S = (0.0002, 0.05)
"""Between two looks at the store: at first, and at most on up to 100 ranks. More ranks look less often."""

_POLLS_PER_S = 2000
"""How many looks of all ranks together the store is asked for in a second: a tenth of what one answers."""

_READ_S = 30.0
"""How long rank 0 waits for ranks that have to read an outcome: a busy machine may let a process wait. (assumed)"""

_patience_s: ContextVar[float | None] = ContextVar("patience_s", default=None)


class StoppedElsewhere(Exception):
    """Another rank failed in a scope, so that nobody will complete the round in which this rank waits."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__(f"another rank failed while {scope.doing}")
        self.scope = scope


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """In this block, a rank that others wait for may make no progress for so long.

    By default, it is 10 minutes within a call of this package, and outside of one as long as a collective would wait
    (`ddp_timeout`), but 10 minutes at least: a rank may do something of its own before it comes. Ranks that wait warn
    of one without progress after 30 s, and again after each doubling; then all raise the same `RanksError`. Bytes that
    a rank reads, writes or downloads are progress, so that long work that moves is waited for without end. Given up
    after 60 s are a process that is stopped on the machine of one that waits, and a store that does not answer; within
    seconds, a rank that has ended. Time in which the waiting rank is stopped itself does not count.

    A rank that stops inside a collective of the process group (a forward pass, gradients, weights that are broadcast or
    gathered) is given up by the group's own timeout (`InitProcessGroupKwargs(timeout=…)`, `ddp_timeout`).

    Args:
        seconds: the same on every rank.

    Raises:
        ConfigError: it is no number above 0.

    Example:
        >>> with patience(3600):
        ...     model = from_pretrained("checkpoint", load_kwargs={"progress": False})
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"patience is {seconds!r}; it must be a number of seconds above 0.")
    token = _patience_s.set(seconds)
    try:
        yield
    finally:
        _patience_s.reset(token)


def patience_of_at_least(seconds: float) -> AbstractContextManager[None]:
    """As `patience`, unless more patience was asked for already."""
    return patience(max(seconds, _patience_s.get() or GIVE_UP_S))


def _limits_s() -> tuple[float, float]:
    """How long a rank may make no progress in a call of this package, and how long it may be in none."""
    if (seconds := _patience_s.get()) is not None:
        return seconds, seconds
    return GIVE_UP_S, max(GIVE_UP_S, timeout_of().total_seconds())


@dataclass(eq=False)
class Scope:
    """A block that all ranks of some rounds have entered."""

    path: str
    """Names the scope in the store; the paths of rounds within it begin so."""

    doing: str
    """What the block does, for messages."""

    count: int = 0
    """Rounds and scopes so far within it."""

    def next_path(self) -> str:
        """The path of the next round or scope within it."""
        self.count += 1
        return f"{self.path}.{self.count - 1}"


class Rounds:
    """The rounds of some ranks, each of which makes one of these; for one thread."""

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...], *, name: str = "") -> None:
        self.rank, self.ranks = rank, ranks
        silent_s = GIVE_UP_S if name else SILENT_S
        name += hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16]
        with _store_errors():
            # A group that is started again over the same store must not find the keys of its former life.
            life = (store.add(f"hf_fsdp_tools/{name}/lives", 1) - 1) // len(ranks)
            self._prefix = f"hf_fsdp_tools/{name}/{life}"
            store.set(f"{self._prefix}/who/{rank}", json.dumps([processes_in_sight(), os.getpid()]))
        self._scopes = [Scope(self._prefix, "")]  # the first one holds all others, and nobody fails in it
        self._left: list[str] = []  # the last round to which all ranks have come, and those that were given up since
        self._store = StoreClient(store, f"{self._prefix}/beat/{rank}", silent_s)

    def leave(self) -> None:
        """Tell those that wait for this rank that its group or its script is over, and part from the store."""
        store = self._store.store
        usual = store.timeout
        store.set_timeout(timedelta(seconds=5))  # a file store whose folder is gone would try for five minutes
        with suppress(RuntimeError):  # the store is gone: nobody waits
            self._store.set(f"{self._prefix}/ended/{self.rank}", b"")
            self.wait_for_readers()
        store.set_timeout(usual)
        self._store.stop()

    @contextmanager
    def scope(self, doing: str) -> Iterator[Scope]:
        """A block that every rank enters; rounds within it are apart from those without."""
        scope = Scope(self._scopes[-1].next_path(), doing)
        self._scopes.append(scope)
        try:
            with self._store.telling(doing, f"{scope.path}/"):
                yield scope
        finally:
            self._scopes.pop()

    def fail(self, scope: Scope) -> None:
        """Tell those that wait in a round within the scope that this rank failed in it."""
        with _store_errors():
            self._store.set(f"{scope.path}/failed", b"")

    def give_up(self, scope: Scope, error: RanksError) -> RanksError:
        """Tell those that come to the scope's end later why nobody waits there; the error of the first rank to tell."""
        self._left.append(f"{scope.path}/end")
        with suppress(RuntimeError):  # the store is gone, as they will see
            reason, _ = pickle.loads(self._store.compare_set(f"{scope.path}/end/outcome", "", _outcome([], str(error))))
            return error if reason == str(error) else RanksError(reason)
        return error

    def exchange(self, value: Any, doing: str, *, ends: Scope | None = None) -> list[Any]:
        """Every rank's value, in the order of the ranks. All must call; values are pickled."""
        path = f"{ends.path}/end" if ends is not None else self._scopes[-1].next_path()
        around = [scope for scope in self._scopes[1:] if scope is not ends]
        with _store_errors(), self._store.telling(doing, path):
            self._store.set(f"{path}/{self.rank}", pickle.dumps((doing, value)))
            place = self._store.add(f"{path}/count", 1)
            if place == len(self.ranks):
                values = self._store.multi_get([f"{path}/{rank}" for rank in self.ranks])
                outcome = self._store.compare_set(f"{path}/outcome", "", _outcome(values))
                for former in self._left:  # all ranks have read them, or they would not have come here
                    for key in ("count", "outcome"):
                        self._store.delete_key(f"{former}/{key}")
            else:
                self._wait(path, place, doing, around)
                outcome = self._store.get(f"{path}/outcome")
            problem, values = pickle.loads(outcome)
            with suppress(dist.DistError):  # rank 0 sees that all have read, and may end the store with itself
                if problem:  # the value stays: whoever comes last waits for the values of all
                    self._store.set(f"{path}/{self.rank}/left", b"")
                else:
                    self._store.delete_key(f"{path}/{self.rank}")
        if problem:
            self._left.append(path)
            raise RanksError(problem)
        self._left = [path]
        answers = [pickle.loads(value) for value in values]
        if len({text for text, _ in answers}) > 1:
            raise RanksError(different_calls(zip(self.ranks, (text for text, _ in answers), strict=True)))
        return [value for _, value in answers]

    def wait_for_readers(self) -> None:
        """On rank 0, return once every rank that came to the last rounds has read what became of them, or has ended."""
        if self.rank != 0:  # rank 0 keeps the store, unless a launcher does, and must not end with it too early
            return
        lookout = Lookout(self._store, self._prefix, "", self.ranks, self.rank)
        end_s = time.monotonic() + _READ_S

        def is_unread(path: str, rank: int) -> bool:
            is_there = self._store.check([f"{path}/{rank}"]) and not self._store.check([f"{path}/{rank}/left"])
            return is_there and not lookout.has_ended(rank)

        with suppress(RuntimeError):  # the store is gone: nobody can read
            while any(is_unread(path, rank) for path in self._left for rank in self.ranks[1:]):
                if time.monotonic() > end_s:
                    break
                time.sleep(_POLL_S[1] / 10)

    def _failed(self, scopes: list[Scope]) -> Scope | None:
        """The first of some scopes in which a rank has failed."""
        return next((scope for scope in scopes if self._store.check([f"{scope.path}/failed"])), None)

    def _wait(self, path: str, place: int, doing: str, around: list[Scope]) -> None:
        """Return when the round is joined or given up."""
        pause_s, looked_s, look_s = _POLL_S[0], time.monotonic(), _LOOK_S * max(1.0, place**2 / 4)
        lookout = Lookout(self._store, self._prefix, path, self.ranks, self.rank)
        while not self._store.check([f"{path}/outcome"]):
            failed = self._failed(around)
            if failed and not self._store.check([f"{path}/outcome"]):  # or the other rank failed after this round
                raise StoppedElsewhere(failed)
            if time.monotonic() - looked_s > look_s:
                looked_s = time.monotonic()
                if problem := lookout.problem(doing, _limits_s(), warns=place == 1):
                    if not self._failed(around):
                        self._store.compare_set(f"{path}/outcome", "", _outcome([], problem))
                    continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(_POLL_S[1], len(self.ranks) / _POLLS_PER_S))


def _outcome(values: list[bytes], problem: str = "") -> bytes:
    """The outcome of a round: why it was given up, or the values. Equal ones, as most rounds have, are pickled once."""
    distinct = {value: value for value in values}
    return pickle.dumps((problem, [distinct[value] for value in values]))


@contextmanager
def _store_errors() -> Iterator[None]:
    """The store's errors with what they mean."""
    try:
        yield
    except dist.DistError as error:
        raise RanksError(
            f"The key-value store of the process group does not answer ({error}): the process that keeps it has ended "
            "or is stopped, as a rule rank 0 or the launcher. Look at it and its output."
        ) from error


# ---- the rounds of a thread ----

_of_thread: ContextVar[Rounds | None] = ContextVar("_of_thread", default=None)

_made: WeakKeyDictionary[Any, dict[tuple[int, ...] | str, Rounds]] = WeakKeyDictionary()


def rounds_of(ranks: Sequence[int] | None = None) -> Rounds | None:
    """The rounds of all ranks of the default process group, or of some; in a thread with `rounds_apart`, those.

    None where there is nobody to talk to: without a group, in a group of one, under the "fake" backend.
    """
    if (apart := _of_thread.get()) is not None:
        assert ranks is None or tuple(ranks) == apart.ranks, "rounds of a thread are rounds of all ranks"
        return apart
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
    if len(members) == 1:
        return None
    of_group = _made.setdefault(dist.group.WORLD, {})
    if members not in of_group:
        of_group[members] = Rounds(_get_default_store(), dist.get_rank(), members)
        leave = finalize(dist.group.WORLD, of_group[members].leave)
        Finalize(None, leave, exitpriority=0)  # processes of `multiprocessing` run no other functions at their end
    return of_group[members]


def rounds_of_thread() -> Rounds | None:
    """The rounds that this thread is `using`; None in the main thread."""
    return _of_thread.get()


def rounds_apart() -> Rounds | None:
    """Rounds of all ranks for one thread beside the main one, which may go on when the group is over; None as above.

    All ranks must use them for the same things in the same order.
    """
    if rounds_of() is None:
        return None
    of_group, ranks = _made[dist.group.WORLD], tuple(range(dist.get_world_size()))
    if "apart" not in of_group:
        of_group["apart"] = Rounds(_get_default_store(), dist.get_rank(), ranks, name="apart")
        finalize(dist.group.WORLD, of_group["apart"]._store.stop)
    return of_group["apart"]


@contextmanager
def using(rounds: Rounds | None) -> Iterator[None]:
    """In this block of this thread, `agreed` and all that builds on it use these rounds; None changes nothing."""
    token = _of_thread.set(rounds)
    try:
        yield
    finally:
        _of_thread.reset(token)
