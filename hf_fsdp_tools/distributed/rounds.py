"""One value of every rank, exchanged through the key-value store of the default process group.

The store has connections of its own, so that a round needs no backend that communicates between CPUs, is found by its
name and not by its order among collectives, and can be nested.

    round   every rank appends its value, the last rank to arrive joins all values, and every rank reads what was
            joined, or why the round was given up: the store keeps whichever comes first
    scope   a block that all ranks enter; a rank that fails in a scope tells those that wait in a round within it

The first ranks to arrive look at those that are missing (`liveness`), and give up for all ranks alike.
"""

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_fsdp_tools.distributed.cpu_backend import store_of_its_own, timeout_of
from hf_fsdp_tools.distributed.liveness import Lookout, StoreClient, different_calls, processes_in_sight
from hf_fsdp_tools.errors import ConfigError, RanksError

GIVE_UP_S = 600.0
"""How long a rank that others wait for may make no progress: what NCCL's collectives wait by default, and more than a
file server takes to fail over (assumed)."""

_LOOK_S = 1.0
"""Between two looks of the first two ranks that wait at the others; later ones look less often, should those end."""

_POLL_S = (0.0002, 0.05)
"""Between two looks at the store: at first, and at most on up to 100 ranks. More ranks look less often."""

_POLLS_PER_S = 2000
"""How many looks of all ranks together the store is asked for in a second: a tenth of what one answers."""

_PART_BYTES = 2**18
"""Longer texts are set in parts under their digest, equal ones once: a store refuses values above 8 MiB."""

_READ_S = 10.0
"""How long rank 0 waits for ranks that have to read an outcome: a busy machine may let a process wait. (assumed)"""

_patience_s: ContextVar[float | None] = ContextVar("patience_s", default=None)


class StoppedElsewhere(Exception):
    """Another rank failed in a scope, so that nobody will complete the round in which this rank waits."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__(f"another rank failed while {scope.doing}")
        self.scope = scope


@contextmanager
def rank_timeout(seconds: float) -> Iterator[None]:
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
        >>> with rank_timeout(3600):
        ...     model = from_pretrained("checkpoint", load_kwargs={"progress": False})
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"rank_timeout is {seconds!r}; it must be a number of seconds above 0.")
    token = _patience_s.set(seconds)
    try:
        yield
    finally:
        _patience_s.reset(token)


def patience_for_collectives() -> AbstractContextManager[None]:
    """`rank_timeout` as of a collective of the process group, unless more was asked for already."""
    return rank_timeout(max(timeout_of().total_seconds(), _patience_s.get() or GIVE_UP_S))


def _limits_s() -> tuple[float, float]:
    """How long a rank may make no progress in a call of this package, and how long it may be in none."""
    if (seconds := _patience_s.get()) is not None:
        return seconds, seconds
    return GIVE_UP_S, max(GIVE_UP_S, timeout_of().total_seconds())


@dataclass(eq=False)
class Scope:
    """A block that all ranks of some rounds have entered; `count` rounds and scopes have begun within it."""

    path: str
    doing: str = ""
    count: int = 0

    def next_path(self) -> str:
        """The path in the store of the next round or scope within it."""
        self.count += 1
        return f"{self.path}.{self.count - 1}"


class Rounds:
    """The rounds of some ranks, each of which makes one of these; for one thread."""

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...], *, name: str = "") -> None:
        self.rank, self.ranks = rank, ranks
        with _store_errors():
            own: Any = store_of_its_own(store, f"rounds{name}/{zlib.crc32(repr(ranks).encode())}", len(ranks))
            own.set(f"beat/{rank}", json.dumps({"count": 0, "at": []}))
            own.append("who", f"{rank} {json.dumps([processes_in_sight(), os.getpid()])}\n")
        self._scopes = [Scope("round")]  # holds all others, and nobody fails in it
        self._former: list[str] = []  # keys of the last round, if all ranks have come to it
        self._parts: list[str] = []  # those of long texts in this round
        self._store = StoreClient(own, rank)

    def leave(self) -> None:
        """Tell those that wait for this rank that its group or its script is over."""
        with suppress(RuntimeError):  # the store is gone: nobody waits
            self._store.append("ended", f"{self.rank}\n")
        self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """On rank 0, which may end the store with itself, return once all have read what they last came for."""
        end_s = time.monotonic() + _READ_S
        with suppress(RuntimeError):  # the store is gone
            while self.rank == 0 and self._former and self._store.add(self._former[0], 0) < len(self.ranks):
                if time.monotonic() > end_s:
                    return
                time.sleep(_POLL_S[1] / 10)

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
        with suppress(RuntimeError):  # the store is gone, as they will see
            outcome = self._store.compare_set(f"{scope.path}/end/outcome", "", _outcome([], str(error)))
            reason = self._loaded(outcome)[0]
            return error if reason == str(error) else RanksError(reason)
        return error

    def exchange(self, value: Any, doing: str, *, ends: Scope | None = None) -> list[Any]:
        """Every rank's value, in the order of the ranks. All must call, with values of `_as_json`."""
        path = f"{ends.path}/end" if ends is not None else self._scopes[-1].next_path()
        around = [scope for scope in self._scopes[1:] if scope is not ends]
        (former, self._former), self._parts = (self._former, []), []
        with _store_errors(), self._store.telling(doing, path):
            text = self._put(path, json.dumps([doing, _as_json(value)]))
            self._store.append(f"{path}/values", f"{self.rank} {text}\n")
            place = self._store.add(f"{path}/count", 1)
            if place == len(self.ranks):
                of_rank = dict(line.split(" ", 1) for line in self._store.get(f"{path}/values").decode().splitlines())
                outcome = self._put(path, _outcome([of_rank[str(rank)] for rank in self.ranks]))
                outcome = self._store.compare_set(f"{path}/outcome", "", outcome)
                for key in former:  # all have read it, or would not have come here
                    self._store.delete_key(key)
            else:
                self._wait(path, place, doing, around)
                outcome = self._store.get(f"{path}/outcome")
            problem, texts, of_ranks = self._loaded(outcome)
            if problem:  # the values stay: whoever comes last waits for those of all
                raise RanksError(problem)
            each = [self._loaded(text) for text in texts]
            with suppress(dist.DistError):  # rank 0 has ended, and with it the store
                self._store.add(f"{path}/read", 1)
        self._former = [*(f"{path}/{name}" for name in ("read", "values", "count", "outcome")), *self._parts]
        answers = [each[i] for i in of_ranks]
        if len({text for text, _ in answers}) > 1:
            raise RanksError(different_calls(zip(self.ranks, (text for text, _ in answers), strict=True)))
        return [value for _, value in answers]

    def _put(self, path: str, text: str) -> str:
        """What stands for a text in the store: itself, or where its parts are."""
        if len(text) <= _PART_BYTES:
            return text
        name = f"{path}/{sha256(text.encode()).hexdigest()}"
        parts = {f"{name}/{i}": text[i : i + _PART_BYTES] for i in range(0, len(text), _PART_BYTES)}
        if not self._store.check(list(parts)):  # another rank has the same
            for key, part in parts.items():
                self._store.set(key, part)
        return json.dumps({"parts": list(parts)})

    def _loaded(self, text: bytes | str) -> Any:
        """The content of a text that `_put` gave."""
        content = json.loads(text, object_hook=_from_json)
        if not isinstance(content, tuple):  # as all other content
            return content
        self._parts += content
        return self._loaded(b"".join(self._store.multi_get(list(content))))

    def _wait(self, path: str, place: int, doing: str, around: list[Scope]) -> None:
        """Return when the round is joined or given up."""

        def failed() -> Scope | None:
            return next((scope for scope in around if self._store.check([f"{scope.path}/failed"])), None)

        pause_s, looked_s, look_s = _POLL_S[0], time.monotonic(), _LOOK_S * max(1.0, place**2 / 4)
        lookout = Lookout(self._store, path, self.ranks, self.rank)
        while not self._store.check([f"{path}/outcome"]):
            if (scope := failed()) and not self._store.check([f"{path}/outcome"]):  # or it failed after this round
                raise StoppedElsewhere(scope)
            if time.monotonic() - looked_s > look_s:
                looked_s = time.monotonic()
                problem = lookout.problem(doing, _limits_s(), warns=place == 1)
                if problem and not failed():
                    self._store.compare_set(f"{path}/outcome", "", _outcome([], problem))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(_POLL_S[1], len(self.ranks) / _POLLS_PER_S))


def _outcome(values: list[str], problem: str = "") -> str:
    """The outcome of a round: why it was given up, or the values. Equal ones, as most rounds have, are there once."""
    places = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return json.dumps([problem, list(places), [places[value] for value in values]])


def _as_json(value: Any) -> Any:
    """Texts, numbers, lists, tuples, mappings and data classes of this package as JSON, in which no code can hide."""
    if is_dataclass(value) and not isinstance(value, type):
        content = [[each.name, _as_json(getattr(value, each.name))] for each in fields(value)]
        return {"class": [type(value).__module__, type(value).__qualname__, content]}
    if isinstance(value, dict):
        return {"dict": [[_as_json(key), _as_json(each)] for key, each in value.items()]}
    if isinstance(value, tuple | list):
        content = [_as_json(each) for each in value]
        return {"tuple": content} if isinstance(value, tuple) else content
    return value


def _from_json(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind != "class":
        return {"tuple": tuple, "dict": dict, "parts": tuple}[kind](content)
    module, name, content = content
    made, package = getattr(sys.modules.get(module), name, None), __package__.partition(".")[0]
    if not (module.startswith(f"{package}.") and isinstance(made, type) and is_dataclass(made)):
        raise RanksError(f"The key-value store holds a value of {name!r}, which no rank has sent. Look who reaches it.")
    return made(**dict(content))


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

rounds_of_thread: ContextVar[Rounds | None] = ContextVar("rounds_of_thread", default=None)
"""What a thread next to the main one has set, so that `agreed` and all that builds on it use these rounds there."""

_made: WeakKeyDictionary[Any, dict[tuple[int, ...] | str, Rounds]] = WeakKeyDictionary()


def rounds_of(ranks: Sequence[int] | None = None) -> Rounds | None:
    """The rounds of all ranks of the default process group, or of some; those of the thread where it has its own.

    None where there is nobody to talk to: without a group, in a group of one, under the "fake" backend.
    """
    if (apart := rounds_of_thread.get()) is not None:
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


def rounds_apart() -> Rounds | None:
    """Rounds of all ranks for a thread next to the main one, which may go on when the group is over; None as above."""
    if (rounds := rounds_of()) is None:
        return None
    of_group = _made[dist.group.WORLD]
    if "apart" not in of_group:
        of_group["apart"] = Rounds(_get_default_store(), rounds.rank, rounds.ranks, name=" apart")
    return of_group["apart"]
