"""One value of every rank, exchanged through the key-value store of the default process group.

The store is the one over which PyTorch starts the group. It has connections of its own, so that a round needs no
backend that communicates between CPUs, is found by its name and not by its order among collectives, and can be nested.

    round   every rank sets its value, the last rank to arrive joins all values, and every rank reads what was joined,
            or why the round was given up: the store keeps whichever comes first
    scope   a block that all ranks enter; a rank that fails in a scope tells those that wait in a round within it
    beat    what a rank is doing and how far it has come, told every few seconds while it is in a round or a scope

The first ranks to arrive look at the beats of those that are missing: they warn of a rank that makes no progress, and
in the end give up for all ranks alike.
"""

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hf_fsdp_tools.distributed.client import SILENT_S, StoreClient
from hf_fsdp_tools.distributed.cpu_backend import timeout_of
from hf_fsdp_tools.distributed.others import Others, different_calls, processes_in_sight
from hf_fsdp_tools.distributed.passes import PassWatch, of_ended, passes_run
from hf_fsdp_tools.errors import ConfigError, RanksError

GIVE_UP_S = 600.0
"""How long a rank that others wait for may make no progress: what NCCL's collectives wait by default, and more than a
file server takes to fail over (assumed)."""

_LOOK_S = 1.0
"""Between two looks at the other ranks, and before the first: most rounds are over by then."""

_POLL_S = (0.0002, 0.05)
"""Between two looks at the store: at first, and at most on up to 100 ranks. More ranks look less often."""

_POLLS_PER_S = 2000
"""How many looks of all ranks together the store is asked for in a second: a tenth of what one answers."""

_READ_S = 30.0
"""How long rank 0 waits for ranks that have to read an outcome: a busy machine may let a process wait. (assumed)"""

_WATCHERS = 2
"""How many of the ranks that wait look at the others; if all did, the store would be asked N times for N ranks."""

_patience_s: ContextVar[float | None] = ContextVar("patience_s", default=None)


class StoppedElsewhere(Exception):
    """Another rank failed in a scope, so that nobody will complete the round in which this rank waits."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__(f"another rank failed while {scope.doing}")
        self.scope = scope


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """In this block, a rank that others wait for may make no progress for so long.

        with patience(3600):
            model = from_pretrained("org/model-on-a-slow-disk")

    By default, it is 10 minutes within a call of this package, and outside of one as long as a collective would wait
    (`ddp_timeout`), but 10 minutes at least: a rank may do something of its own before it comes. Ranks that wait warn
    of one without progress after 30 s, of one that is in no call after 10 s, and again after each doubling; then all
    raise the same `RanksError`. Bytes that a rank reads, writes or downloads are progress, so that long work that moves
    is waited for without end. Given up after 60 s are a process that is stopped on the machine of one that waits, and a
    store that does not answer, as that of a process that is stopped; within seconds, a rank that has ended. Time in
    which the waiting rank is stopped itself does not count.

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
    if (asked := _patience_s.get()) is not None:
        return asked, asked
    return GIVE_UP_S, max(GIVE_UP_S, timeout_of().total_seconds())


@dataclass(frozen=True, eq=False)
class Scope:
    """A block that all ranks of some rounds have entered."""

    path: str
    """Names the scope in the store; the paths of rounds within it begin so."""

    doing: str
    """What the block does, for messages."""


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
        self._scopes: list[Scope] = []
        self._counts = [0]  # rounds and scopes so far, in the whole and in each open scope
        self._left: list[str] = []  # the last round to which all ranks have come, and those that were given up since
        passes = PassWatch(self._prefix, rank, ranks)
        self._store = StoreClient(store, f"{self._prefix}/beat/{rank}", passes.look, silent_s)

    def goodbye(self) -> Callable[[], None]:
        """A function that tells those that wait for this rank that its group or its script is over."""
        client, store, key = self._store, self._store.store, f"{self._prefix}/ended/{self.rank}"

        def say() -> None:
            usual = store.timeout
            store.set_timeout(timedelta(seconds=5))  # a file store whose folder is gone would try for five minutes
            with suppress(RuntimeError):  # the store is gone: nobody waits
                client.set(key, passes_run())
                self.wait_for_readers()
            store.set_timeout(usual)
            self.stop()

        return say

    def stop(self) -> None:
        """Part from the store when no call is under way: its group is over."""
        self._store.stop()

    def watch_passes(self) -> None:
        """Name ranks of which a forward pass of a sharded model waits for others; see `PassWatch`."""
        self._store.watch()

    def explain(self, error: BaseException) -> None:
        """Add to the error of a forward pass which ranks have ended without it, if any."""
        with suppress(RuntimeError):  # the store is gone, too
            if said := of_ended(self._store, self._prefix, self.ranks):
                error.add_note(said)

    @contextmanager
    def scope(self, doing: str) -> Iterator[Scope]:
        """A block that every rank enters; rounds within it are apart from those without."""
        scope = Scope(self._next_path(), doing)
        self._scopes.append(scope)
        self._counts.append(0)
        try:
            with self._store.telling(doing, f"{scope.path}/"):
                yield scope
        finally:
            self._scopes.pop()
            self._counts.pop()

    def fail(self, scope: Scope) -> None:
        """Tell those that wait in a round within the scope that this rank failed in it."""
        with _store_errors():
            self._store.set(f"{scope.path}/failed", b"")

    def give_up(self, scope: Scope, error: RanksError) -> RanksError:
        """Tell those that come to the end of the scope later that nobody waits for them there, and why; the error of
        the rank that was the first to tell."""
        self._left.append(f"{scope.path}/end")
        with suppress(RuntimeError):  # the store is gone, as they will see
            said = pickle.loads(self._store.compare_set(f"{scope.path}/end/outcome", "", _given_up(str(error))))[0]
            return error if said == str(error) else RanksError(said)
        return error

    def exchange(self, value: Any, doing: str, *, ends: Scope | None = None) -> list[Any]:
        """Every rank's value, in the order of the ranks. All must call; values are pickled."""
        path = f"{ends.path}/end" if ends is not None else self._next_path()
        around = [scope for scope in self._scopes if scope is not ends]
        at = path if ends is None else f"{path}/{self._counts[-1]}"
        with _store_errors(), self._store.telling(doing, at):
            self._store.set(f"{path}/{self.rank}", pickle.dumps((doing, value)))
            place = self._store.add(f"{path}/count", 1)
            if place == len(self.ranks):
                joined = _join(self._store.multi_get([f"{path}/{rank}" for rank in self.ranks]))
                outcome = self._store.compare_set(f"{path}/outcome", "", joined)
                for former in self._left:  # all ranks have read them, or they would not have come here
                    for key in ("count", "outcome"):
                        self._store.delete_key(f"{former}/{key}")
            else:
                self._wait(path, place, doing, around)
                outcome = self._store.get(f"{path}/outcome")
            problem, said = _split(outcome)
            with suppress(dist.DistError):  # rank 0 sees that all have read, and may end the store with itself
                if problem:  # the value stays: whoever comes last waits for the values of all
                    self._store.set(f"{path}/{self.rank}/left", b"")
                else:
                    self._store.delete_key(f"{path}/{self.rank}")
        if problem:
            self._left.append(path)
            raise RanksError(problem)
        self._left = [path]
        if len({other for other, _ in said}) > 1:
            raise RanksError(different_calls(zip(self.ranks, (other for other, _ in said), strict=True)))
        return [value for _, value in said]

    def wait_for_readers(self) -> None:
        """On rank 0, return once every rank that came to the last rounds has read what became of them, or has ended.

        Rank 0 keeps the store unless a launcher does: if it ended at once, the others would learn neither that all came
        nor why a round was given up.
        """
        unread = [(path, rank) for path in self._left for rank in self.ranks if self.rank == 0 and rank > 0]
        others = Others(self._store, self._prefix, "", self.ranks, self.rank)
        end_s = time.monotonic() + _READ_S
        with suppress(RuntimeError):  # the store is gone: nobody can read
            while unread := [one for one in unread if self._is_still_to_read(*one) and not others.has_ended(one[1])]:
                if time.monotonic() > end_s:
                    break
                time.sleep(_POLL_S[1] / 10)

    def _is_still_to_read(self, path: str, rank: int) -> bool:
        """Whether a rank has come to a round and not left it."""
        return self._store.check([f"{path}/{rank}"]) and not self._store.check([f"{path}/{rank}/left"])

    def _failed(self, scopes: Iterable[Scope]) -> Scope | None:
        """The first of some scopes in which a rank has failed."""
        return next((scope for scope in scopes if self._store.check([f"{scope.path}/failed"])), None)

    def _next_path(self) -> str:
        number = self._counts[-1]
        self._counts[-1] += 1
        return f"{self._scopes[-1].path if self._scopes else self._prefix}.{number}"

    def _wait(self, path: str, place: int, doing: str, around: list[Scope]) -> None:
        """Return when the round is joined or given up."""
        since_s, pause_s, looked_s = time.monotonic(), _POLL_S[0], time.monotonic()
        others = Others(self._store, self._prefix, path, self.ranks, self.rank)
        while not self._store.check([f"{path}/outcome"]):
            failed = self._failed(around)
            if failed and not self._store.check([f"{path}/outcome"]):  # or the other rank failed after this round
                raise StoppedElsewhere(failed)
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                limits_s = _limits_s()
                # After so long those that look may be gone: two more look.
                watchers = _WATCHERS * (1 + (now_s - since_s) // (4 * max(limits_s)))
                is_elsewhere = partial(self._failed, self._scopes)
                look = partial(others.problem, doing, self._store.places, limits_s, is_elsewhere)
                if place <= watchers and (problem := look(is_first=place == 1)):
                    if not self._failed(around):
                        self._store.compare_set(f"{path}/outcome", "", _given_up(problem))
                    continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(_POLL_S[1], len(self.ranks) / _POLLS_PER_S))


def _join(told: list[bytes]) -> bytes:
    """The values of all ranks as one. Equal values, as most rounds have, are kept once, and cost no byte per rank."""
    distinct = list(dict.fromkeys(told))
    places = {value: place for place, value in enumerate(distinct)}
    every = [places[value] for value in told] if len(distinct) > 1 else range(len(told))
    return pickle.dumps(("", distinct, every))


def _given_up(problem: str) -> bytes:
    """The outcome of a round whose values are not joined, in place of what `_join` gives."""
    return pickle.dumps((problem, [], []))


def _split(outcome: bytes) -> tuple[str, list[Any]]:
    """Why the round was given up, or else the values that `_join` joined; each rank's is an object of its own."""
    problem, distinct, places = pickle.loads(outcome)
    return problem, [pickle.loads(distinct[place if len(distinct) > 1 else 0]) for place in places]


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
