"""How ranks know of each other: in a call of this package each tells the key-value store every two seconds what it does
and how far it is, its beat, and those that wait read it.

One thread asks the store, over the connection of the process group: for one more connection per rank, the store asks
the name server, and stands still for seconds (`TCPStore` of torch 2.11 to 2.15, 24 ranks on one machine). Callers wait
for the thread, not for the store: a call of torch never returns while the process that keeps the store is stopped.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from hf_fsdp_tools.distributed.storage import progress_made, waited_for
from hf_fsdp_tools.errors import warn
from hf_fsdp_tools.folders import this_boot
from hf_fsdp_tools.text import listed

SILENT_S = 60
"""Seconds for which a process may be stopped, and for which the store may not answer. (assumed)"""

_BEAT_S = 2.0
"""Between two beats, and before the first: most rounds are over by then."""

_WARN_S = 30.0
"""From when on a rank without progress is named, and again after each doubling. (assumed)"""

_MOST_S = 5.0
"""Seconds that count between two looks, which come every second: longer, the looking process was stopped. (assumed)"""


class StoreClient:
    """One rank's way to the store, whose operations (`get`, `set`, …) are methods of this object."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._key = store, f"beat/{rank}"
        self.places: list[tuple[str, str]] = []
        """What the rank does, and the path of the round in which it does it; of a scope, with a slash at its end."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._count, self._has_told, self._is_silent = 0, False, False
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return partial(self._ask, operation)

    def _ask(self, operation: str, *args: Any) -> Any:
        """The store's answer."""
        call, answer = partial(getattr(self._store, operation), *args), Future[Any]()
        with self._lock:
            has_thread = self._has_thread()
            if has_thread and not self._is_silent:
                self._calls.put((answer, call))
        if not has_thread:
            return call()
        # Counted by its own steps: a job that was stopped as a whole goes on at different moments.
        for _ in range(0 if self._is_silent else SILENT_S):
            with suppress(TimeoutError):
                return answer.result(1.0)
        self._is_silent = True
        raise dist.DistStoreError(f"no answer for {SILENT_S} s")

    @contextmanager
    def telling(self, doing: str, path: str) -> Iterator[None]:
        """While this block runs, the rank does this, there (see `places`)."""
        self.places.append((doing, path))
        with self._lock:
            self._has_thread()
        try:
            yield
        finally:
            self.places.pop()

    def _has_thread(self) -> bool:
        """Whether there is a thread to ask, or one can be started: not where the interpreter ends, and not for the
        thread itself, which asks when garbage is collected there."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="store", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                return False
        return self._thread is not threading.current_thread()

    def _run(self) -> None:
        """Ask and tell, until the rank is in no call and all know so: the thread holds the store."""
        told_s = time.monotonic()
        while True:
            with suppress(Empty):
                answer, call = self._calls.get(timeout=max(0.0, told_s + _BEAT_S - time.monotonic()))
                try:
                    answer.set_result(call())
                except Exception as error:  # for the thread that asked
                    answer.set_exception(error)
                self._is_silent = False
            if time.monotonic() >= told_s + _BEAT_S:
                told_s = time.monotonic()
                with suppress(RuntimeError):  # the store is gone: whoever waits for it says so
                    self._tell()
            with self._lock:
                if not self.places and not self._has_told and self._calls.empty():
                    self._thread = None
                    return

    def _tell(self) -> None:
        """Tell the other ranks where this one is, or for the last time that it is in no call."""
        if self.places or self._has_told:
            self._count, self._has_told = self._count + 1, bool(self.places)
            beat = {"count": self._count, "at": list(self.places), "progress": progress_made(), "for": waited_for()}
            self._store.set(self._key, json.dumps(beat))


def different_calls(doing: Iterable[tuple[int, str]]) -> str:
    """An error for ranks of which each does something else."""
    return (
        f"The ranks are in different calls: {listed((f'rank {rank} is {text}' for rank, text in doing), 8)}. Call the "
        "same functions in the same order on every rank."
    )


class Lookout:
    """Looks at the ranks that a round waits for: which are late, lost, or in another call."""

    def __init__(self, store: StoreClient, path: str, ranks: Sequence[int], rank: int) -> None:
        self._store, self._path, self._ranks, self._rank = store, path, ranks, rank
        self._who: dict[int, tuple[str, int]] = {}
        """The machine and the process of each rank that has said it."""
        self._seen: dict[tuple[str, int], tuple[Any, float]] = {}
        self._waiting: dict[int, tuple[str, int]] = {}
        self._looked_s, self._clock_s, self._warn_s = time.monotonic(), 0.0, _WARN_S

    def problem(self, doing: str, limits_s: tuple[float, float], *, warns: bool = False) -> str:
        """Why the round is given up; empty where it is not. The limits are those of ranks in a call and in none."""
        now_s = time.monotonic()
        self._clock_s += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s
        came = self._told(f"{self._path}/values")
        missing = [rank for rank in self._ranks if rank not in came]
        missing = missing or list(self._ranks)  # all have come, and the last of them has not joined their values
        if not self._who.keys() >= set(missing):
            self._who = {rank: json.loads(text) for rank, text in self._told("who").items()}
        known = [rank for rank in missing if rank in self._who]
        beats: dict[int, dict[str, Any]] = {rank: {"count": 0, "at": []} for rank in missing}
        beats |= zip(known, map(json.loads, self._store.multi_get([f"beat/{rank}" for rank in known])), strict=True)
        ended = self._told("ended") if self._store.check(["ended"]) else {}
        if lost := [text for rank in missing if (text := self._lost(rank, rank in ended))]:
            return f"While {doing}: {listed(lost)}. The others stop."
        for rank, beat in beats.items():
            if reason := self._elsewhere(doing, rank, beat):
                return reason
        quiet = {rank: self._since("progress", rank, beat["at"] and beat["progress"]) for rank, beat in beats.items()}
        late = [rank for rank in missing if quiet[rank] > limits_s[not beats[rank]["at"]]]
        longest_s = max(quiet[rank] for rank in late or missing)
        states = listed((_state_text(rank, beats[rank], quiet[rank]) for rank in late or missing), 8)
        if late:
            return f"While {doing}: no progress for {longest_s:.0f} s. {states}. All ranks stop."
        if warns and longest_s > self._warn_s:
            self._warn_s = 2 * longest_s
            text = f"Still {doing}, {longest_s:.0f} s without progress. {states}."
            warn(text)
        return ""

    def _told(self, key: str) -> dict[int, bytes]:
        """What ranks have appended under a key."""
        lines = (line.partition(b" ") for line in self._store.get(key).splitlines())
        return {int(rank): text for rank, _, text in lines}

    def _lost(self, rank: int, is_over: bool) -> str:
        """Whether a rank's script or process is over or stopped, as far as can be seen from here."""
        sight, process = self._who.get(rank, ("", 0))
        state = "X" if is_over else _state_of(process) if sight and sight == processes_in_sight() else ""
        if state in ("Z", "X"):
            return f"rank {rank} has ended: it failed, and says why, or did not make this call, as every rank must"
        seconds = self._since("state", rank, state)
        return f"rank {rank} is stopped (SIGSTOP) for {seconds:.0f} s" if state == "T" and seconds > SILENT_S else ""

    def _elsewhere(self, doing: str, rank: int, beat: dict[str, Any]) -> str:
        """Why a rank and this one never meet: it does something else in the same place, or waits in another round."""
        theirs = {path.rstrip("/"): text for text, path in beat["at"]}
        for text, path in self._store.places:
            if (other := theirs.get(path.rstrip("/"), text)) != text:
                return different_calls(sorted([(self._rank, text), (rank, other)]))
        text, path = beat["at"][-1] if beat["at"] else ("", "/")
        if path.endswith("/") or path == self._path:
            return ""
        if self._waiting.get(rank, ("", 0))[0] != path:
            self._waiting[rank] = path, beat["count"]
        if beat["count"] < self._waiting[rank][1] + 2:  # it may have left the round since its beat
            return ""
        return different_calls(sorted([(self._rank, doing), (rank, text)]))

    def _since(self, kind: str, rank: int, value: Any) -> float:
        """Seconds of looks for which a rank's value of a kind has been the same."""
        if self._seen.get((kind, rank), (self, 0.0))[0] != value:
            self._seen[kind, rank] = (value, self._clock_s)
        return self._clock_s - self._seen[kind, rank][1]


def _state_text(rank: int, beat: dict[str, Any], quiet_s: float) -> str:
    if not beat["at"]:
        return (
            f"rank {rank} is in no call of hf_fsdp_tools; every rank must call, and run each forward pass of a sharded "
            "model (generate, evaluate), in which one rank alone waits for the others"
        )
    file = f", waits for {beat['for']}" if beat["for"] else ""
    return f"rank {rank} is {beat['at'][-1][0]} ({quiet_s:.0f} s without progress{file})"


def processes_in_sight() -> str:
    """A text that is the same for processes that see each other by their numbers, unlike the name of the host, which
    machines and containers share; "" where the system has none."""
    try:
        return f"{this_boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_of(process: int) -> str:
    """The state of a process here (proc(5)): "T" stopped, "Z" ended, "X" not there; "" where it is not shown."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is read
        return "X"
    except OSError:
        return ""
