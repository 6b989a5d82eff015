"""One value of every rank, exchanged through the key-value store of the default process group.

The store is the one over which PyTorch starts the group. It has connections of its own, so that a round needs no
backend that communicates between CPUs, is found by its name and not by its order among collectives, and can be nested.

    round   every rank sets its value, the last rank to arrive joins all values, and every rank reads what was joined
    scope   a block that all ranks enter; a rank that fails in a scope tells those that wait in a round within it
    beat    what a rank is doing and how far it has come, told every few seconds while it is in a round or a scope

The first ranks to arrive look at the beats of those that are missing: they warn of a rank that makes no progress, and
in the end give up for all ranks alike.
"""

import hashlib
import json
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_tools.distributed.beat import Beat, Place, conflict
from hf_fsdp_tools.distributed.passes import PassWatch, behind, of_ended, passes_run
from hf_fsdp_tools.errors import ConfigError, RanksError, frames_of_package
from hf_fsdp_tools.text import listed

__all__ = [
    "GIVE_UP_S",
    "Rounds",
    "Scope",
    "StoppedElsewhere",
    "patience",
    "patience_of_at_least",
]

GIVE_UP_S = 600.0
"""How long a rank that others wait for may make no progress: what NCCL's collectives wait by default, and more than a
file server takes to fail over (assumed)."""

_WARN_S = 30.0
"""From when on a rank without progress is named, and again after each doubling. (assumed)"""

_ABSENT_S = 10.0
"""The same for a rank that is in no call of this package at all. (assumed)"""

_LOST_S = 60.0
"""How long a rank that has beaten may be silent: its process was stopped, or its machine is gone. (assumed)"""

_POLL_S = (0.0002, 0.05)
"""Between two looks at the store: at first, and at most on up to 100 ranks. More ranks look less often."""

_POLLS_PER_S = 2000
"""How many looks of all ranks together the store is asked for in a second: a tenth of what one answers."""

_WATCHERS = 2
"""How many of the ranks that wait look at the others; if all did, the store would be asked N times for N ranks."""

_patience_s: ContextVar[float] = ContextVar("patience_s", default=GIVE_UP_S)


class StoppedElsewhere(Exception):
    """Another rank failed in a scope, so that nobody will complete the round in which this rank waits."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__(f"another rank failed while {scope.doing}")
        self.scope = scope


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """In this block, a rank that others wait for may make no progress for so long (10 minutes by default).

        with patience(3600):
            model = from_pretrained("org/model-on-a-slow-disk")

    Ranks that wait warn of one without progress after 30 s, of one that is in no call of this package after 10 s, and
    again after each doubling; then all raise the same `RanksError`. Bytes that a rank reads, writes or downloads are
    progress, so that long work that moves is waited for without end. A process that was stopped in a call, or whose
    machine is gone, is given up after 60 s; one that has ended, within seconds.

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
    return patience(max(seconds, _patience_s.get()))


@dataclass(frozen=True, eq=False)
class Scope:
    """A block that all ranks of some rounds have entered."""

    path: str
    """Names the scope in the store; the paths of rounds within it begin so."""

    doing: str
    """What the block does, for messages."""


class Rounds:
    """The rounds of some ranks, each of which makes one of these; for one thread.

    Args:
        store: of the process group, or a connection to it.
        rank: this one.
        ranks: all that take part, in the order of their values.
        name: of rounds beside those of the main thread.
        home: kept alive: rank 0's own store of the group may be the one that all others are connected to.
    """

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...], *, name: str = "", home: Any = None) -> None:
        self._store, self.rank, self.ranks, self._home = store, rank, ranks, home
        name += hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16]
        # A group that is started again over the same store must not find the keys of its former life.
        life = (store.add(f"hf_fsdp_tools/{name}/lives", 1) - 1) // len(ranks)
        self._prefix = f"hf_fsdp_tools/{name}/{life}"
        self._scopes: list[Scope] = []
        self._counts = [0]  # rounds and scopes so far, in the whole and in each open scope
        self._former: str | None = None
        self._beat = Beat(store, f"{self._prefix}/beat/{rank}")
        self._passes = PassWatch(store, self._prefix, rank, ranks)
        store.set(f"{self._prefix}/who/{rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def goodbye(self) -> Callable[[], None]:
        """A function that tells those that wait for this rank that its group or its script is over."""
        store, key = self._store, f"{self._prefix}/ended/{self.rank}"

        def say() -> None:
            self._beat.stop()
            self._passes.stop()
            usual = store.timeout
            store.set_timeout(timedelta(seconds=5))  # a file store whose folder is gone would try for five minutes
            with suppress(RuntimeError):  # the store is gone: nobody waits
                store.set(key, passes_run())
                self.wait_for_readers()
            store.set_timeout(usual)

        return say

    def watch_passes(self) -> None:
        """Name ranks of which a forward pass of a sharded model waits for others; see `PassWatch`."""
        self._passes.start()

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
            with self._beat.telling(doing, f"{scope.path}/"):
                yield scope
        finally:
            self._scopes.pop()
            self._counts.pop()

    def fail(self, scope: Scope) -> None:
        """Tell those that wait in a round within the scope that this rank failed in it."""
        with _store_errors():
            self._store.set(f"{scope.path}/failed", b"")

    def give_up(self, scope: Scope, problem: str) -> None:
        """Tell those that come to the end of the scope later that nobody waits for them there, and why."""
        with suppress(RuntimeError):  # the store is gone, as they will see
            self._store.set(f"{scope.path}/end/gave up", problem)

    def exchange(self, value: Any, doing: str, *, ends: Scope | None = None) -> list[Any]:
        """Every rank's value, in the order of the ranks. All must call; values are pickled.

        Args:
            value: of this rank.
            doing: what the round is for; it must be the same on all ranks, or they are in different calls.
            ends: the scope that this round ends, to which also a rank comes that failed in it.

        Raises:
            RanksError: a rank does not come, is lost, or is in another call; the same on every rank that waits.
            StoppedElsewhere: another rank failed in a scope around this round.
        """
        path = f"{ends.path}/end" if ends is not None else self._next_path()
        around = [scope for scope in self._scopes if scope is not ends]
        with _store_errors(), self._beat.telling(doing, path):
            self._store.set(f"{path}/{self.rank}", pickle.dumps((doing, value)))
            place = self._store.add(f"{path}/count", 1)
            self._refuse_given_up(path)
            if place == len(self.ranks):
                joined = _join(self._store.multi_get([f"{path}/{rank}" for rank in self.ranks]))
                self._refuse_given_up(path)
                self._store.set(f"{path}/joined", joined)
                if self._former is not None:  # all ranks have read it, or they would not have come here
                    for key in ("count", "joined"):
                        self._store.delete_key(f"{self._former}/{key}")
            else:
                self._wait(path, place, doing, around)
            said = _split(self._store.get(f"{path}/joined"))
            with suppress(dist.DistError):  # rank 0 sees that all have read, and may end the store with itself
                self._store.delete_key(f"{path}/{self.rank}")
        self._former = path
        if len({other for other, _ in said}) > 1:
            raise RanksError(_different_calls(zip(self.ranks, (other for other, _ in said), strict=True)))
        return [value for _, value in said]

    def wait_for_readers(self) -> None:
        """On rank 0, return once every rank has read the last round, or after 5 s.

        Rank 0 keeps the store unless a launcher does: if it ended at once, the others would not learn that all came.
        """
        unread = [f"{self._former}/{rank}" for rank in self.ranks] if self.rank == 0 and self._former else []
        end_s = time.monotonic() + 5
        while (unread := [key for key in unread if self._store.check([key])]) and time.monotonic() < end_s:
            time.sleep(_POLL_S[1] / 10)

    def _refuse_given_up(self, path: str) -> None:
        if self._store.check([f"{path}/gave up"]):
            raise RanksError(self._store.get(f"{path}/gave up").decode())

    def _next_path(self) -> str:
        number = self._counts[-1]
        self._counts[-1] += 1
        return f"{self._scopes[-1].path if self._scopes else self._prefix}.{number}"

    def _wait(self, path: str, place: int, doing: str, around: list[Scope]) -> None:
        """Return when the round is joined."""
        since_s, pause_s, looked_s = time.monotonic(), _POLL_S[0], time.monotonic()
        others = _Others(self._store, self._prefix, path, self.ranks, self.rank)
        while not self._store.check([f"{path}/joined"]):
            failed = [scope for scope in around if self._store.check([f"{scope.path}/failed"])]
            if failed and not self._store.check([f"{path}/joined"]):  # or the other rank failed after this round
                raise StoppedElsewhere(failed[0])
            now_s = time.monotonic()
            if now_s - looked_s > 1:
                looked_s = now_s
                self._refuse_given_up(path)
                if place <= _WATCHERS and (problem := others.problem(doing, self._beat.places, is_first=place == 1)):
                    meanwhile = [f"{path}/joined", *(f"{scope.path}/failed" for scope in self._scopes)]
                    if any(self._store.check([key]) for key in meanwhile):
                        continue  # which is why one rank is elsewhere
                    self._store.set(f"{path}/gave up", problem)
                    raise RanksError(problem)
                if now_s - since_s > 4 * max(_patience_s.get(), _LOST_S):  # who should have looked is gone, too
                    raise RanksError(f"While {doing}: the other ranks have not come, and those that look are gone.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(_POLL_S[1], len(self.ranks) / _POLLS_PER_S))


def _different_calls(doing: Iterable[tuple[int, str]]) -> str:
    return (
        f"The ranks are in different calls: {listed((f'rank {rank} is {what}' for rank, what in doing), 8)}. Call the "
        "same functions in the same order on every rank."
    )


def _join(told: list[bytes]) -> bytes:
    """The values of all ranks as one; equal values, as most rounds have, are kept once."""
    distinct = list(dict.fromkeys(told))
    places = {value: place for place, value in enumerate(distinct)}
    return pickle.dumps((distinct, [places[value] for value in told]))


def _split(joined: bytes) -> list[Any]:
    """The values that `_join` joined; each rank's is an object of its own."""
    distinct, places = pickle.loads(joined)
    return [pickle.loads(distinct[place]) for place in places]


class _Others:
    """What is known of the ranks that a round waits for."""

    def __init__(self, store: Any, prefix: str, path: str, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._prefix, self._path, self.ranks, self._rank = store, prefix, path, ranks, rank
        self._counts: dict[int, tuple[int, float]] = {}
        self._progress: dict[int, tuple[int, float]] = {}
        self._warn_s = {"absent": _ABSENT_S, "slow": _WARN_S}

    def problem(self, doing: str, own: list[Place], *, is_first: bool) -> str:
        """Why the round is given up; empty where it is not. The first rank that waits warns of what takes long."""
        missing = [rank for rank in self.ranks if not self._store.check([f"{self._path}/{rank}"])]
        missing = missing or list(self.ranks)  # all have come, and the last of them has not joined their values
        beats = {rank: self._beat_of(rank) for rank in missing}
        if lost := [text for rank, beat in beats.items() if (text := self._lost(rank, beat))]:
            return f"While {doing}: {listed(lost)}. The others stop."
        if apart := next(filter(None, (self._apart(rank, own, beat) for rank, beat in beats.items())), ""):
            return apart
        if alone := next(filter(None, map(self._in_a_pass, missing)), ""):
            return f"While {doing}: {alone}. All ranks stop."
        quiet = {rank: _since(self._progress, rank, beat["progress"] if beat else -1) for rank, beat in beats.items()}
        late = {rank: seconds for rank, seconds in quiet.items() if seconds > _patience_s.get()}
        told = listed((self._told(rank, beats[rank], quiet[rank]) for rank in late or missing), 8)
        if late:
            return f"While {doing}: no progress for {max(late.values()):.0f} s. {told}. All ranks stop."
        absent = [rank for rank in missing if not (beats[rank] or {}).get("doing")]
        for kind, ranks in (("absent", absent), ("slow", missing)):
            longest_s = max((quiet[rank] for rank in ranks), default=0.0)
            if is_first and longest_s > self._warn_s[kind]:
                self._warn_s[kind] = 2 * longest_s
                text = f"Still {doing}, {longest_s:.0f} s without progress. {told}."
                warnings.warn(text, stacklevel=frames_of_package())
                break
        return ""

    def _beat_of(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/beat/{rank}"
        beat: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return beat

    def _lost(self, rank: int, beat: dict[str, Any] | None) -> str:
        ended = f"rank {rank} has ended: it failed, and says why, or did not make this call, which every rank must make"
        if self._store.check([f"{self._prefix}/ended/{rank}"]):
            return ended
        state = ""
        if self._store.check([key := f"{self._prefix}/who/{rank}"]):
            host, process = json.loads(self._store.get(key))
            state = _state_of(process) if host == socket.gethostname() else ""
            if state in ("Z", "X"):
                return ended
        if state != "T" and (beat is None or not beat["doing"]):  # it beats in calls alone
            return ""
        silent_s = _since(self._counts, rank, beat["count"] if beat else 0)
        what = "is stopped (SIGSTOP)" if state == "T" else "gives no sign of life"
        return f"rank {rank} {what} for {silent_s:.0f} s" if silent_s > _LOST_S else ""

    def _apart(self, rank: int, own: list[Place], beat: dict[str, Any] | None) -> str:
        """Why a rank and this one never meet; empty if they may."""
        found = conflict(own, (beat or {}).get("at", ()))
        return _different_calls(sorted(zip((self._rank, rank), found, strict=True))) if found else ""

    def _in_a_pass(self, rank: int) -> str:
        """Why a rank waits for this one for ever, in a forward pass; empty if it does not. The rank is told."""
        key = f"{self._prefix}/passes/{rank}"
        why = behind(self._store.get(key), rank, self._rank) if self._store.check([key]) else ""
        if why:
            self._store.set(f"{self._prefix}/alone/{rank}", why)
        return why

    def _told(self, rank: int, beat: dict[str, Any] | None, quiet_s: float) -> str:
        if beat is None or not beat["doing"]:
            return f"rank {rank} is in no call of hf_fsdp_tools; every rank must call"
        waits = f", waits for {beat['for']}" if beat["for"] else ""
        return f"rank {rank} is {beat['doing'][-1]} ({quiet_s:.0f} s without progress{waits})"


def _since(seen: dict[int, tuple[int, float]], rank: int, value: int) -> float:
    """Seconds for which a rank's value has been the same."""
    now_s = time.monotonic()
    if seen.get(rank, (None, 0.0))[0] != value:
        seen[rank] = (value, now_s)
    return now_s - seen[rank][1]


def _state_of(process: int) -> str:
    """The state of a process here (proc(5)): "T" stopped, "Z" ended, "X" not there; "" without such files."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X" if Path("/proc/self/stat").exists() else ""


@contextmanager
def _store_errors() -> Iterator[None]:
    """The store's errors with what they mean."""
    try:
        yield
    except dist.DistError as error:
        raise RanksError(
            f"The key-value store of the process group does not answer ({error}): the process that keeps it has ended, "
            "as a rule rank 0 or the launcher. Look at its output."
        ) from error
