"""How ranks know of each other: each tells the key-value store what it does, and those that wait read it.

    beat    the place and the progress of a rank, set every two seconds while it is in a call of this package, or in a
            forward pass that takes long
    pass    a forward pass of a sharded model gathers weights from all ranks of a group. Where some do not run it, the
            others wait inside a collective, which knows nobody; so beats have the number of passes

One thread asks the store, over the connection of the process group: with one more connection per rank, the store asks
the name server for each, and stands still for seconds (`TCPStore` of torch 2.11 to 2.15, 24 ranks and more on one
machine). Callers wait for the thread, not for the store: a call of torch never returns while the process that keeps the
store is stopped.
"""

import json
import os
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.storage import progress_made, waited_for
from hf_fsdp_tools.errors import frames_of_package
from hf_fsdp_tools.text import listed

Place = Sequence[str]
"""What a rank does, and the path of the round in which it does it; of a scope, with a slash at its end."""

SILENT_S = 60
"""Seconds for which a process may be stopped, and for which the store may not answer. (assumed)"""

_BEAT_S = 2.0
"""Between two beats, and before the first: most rounds are over by then."""

_QUIET_S = 5.0
"""After the beginning of a forward pass, its number is told: most steps are over by then. (assumed)"""

_WARN_S = 30.0
"""From when on a rank without progress is named, and again after each doubling. (assumed)"""

_MOST_S = 5.0
"""Seconds that count between two looks, which come every second: longer, the looking process was stopped. (assumed)"""

# ---- forward passes ----

_passes: dict[str, int] = {}
"""Passes that this rank has begun, by group of ranks."""

_latest: dict[str, Any] = {"since": 0.0, "of": ""}
"""When the latest pass began, and of which class of model."""


def group_of(ranks: Sequence[int]) -> str:
    """The name of a group of ranks whose passes are counted, from now on."""
    name = str(zlib.crc32(repr(list(ranks)).encode()))
    _passes.setdefault(name, 0)
    return name


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def begin_pass(
    module: torch.nn.Module, args: object, *, group: str, gathers: Callable[[torch.nn.Module], bool]
) -> None:
    """Count a pass that gathers weights: a forward pre-hook of the root of a sharded model. Nothing is communicated."""
    if gathers(module):
        _passes[group] += 1
        _latest.update(since=time.monotonic(), of=type(module).__name__)


# ---- this rank ----


class StoreClient:
    """One rank's way to the store, whose operations (`get`, `set`, …) are methods of this object."""

    def __init__(self, store: Any, key: str, silent_s: float = SILENT_S) -> None:
        self.store, self._key, self._silent_s = store, key, silent_s
        self.places: list[Place] = []
        """Where the rank is: in a scope, within it in another, and in a round."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._unanswered: Future[Any] | None = None
        self._count, self._told_places, self._told_passes = 0, False, dict[str, int]()
        self._is_over = False
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._begin()

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return partial(self._ask, operation)

    def _ask(self, operation: str, *args: Any) -> Any:
        """The store's answer."""
        call, answer = partial(getattr(self.store, operation), *args), Future[Any]()
        is_silent = self._unanswered is not None and not self._unanswered.done()
        with self._lock:
            # The thread itself asks when garbage is collected there.
            has_thread = self._begin() and self._thread is not threading.current_thread()
            if has_thread and not is_silent:
                self._calls.put((answer, call))
        if not has_thread:
            return call()
        # Counted by its own steps: a job that was stopped as a whole goes on at different moments.
        for _ in range(0 if is_silent else max(1, round(self._silent_s))):
            with suppress(TimeoutError):
                return answer.result(1.0)
        self._unanswered = self._unanswered if is_silent else answer
        raise dist.DistStoreError(f"no answer for {self._silent_s:.0f} s")

    @contextmanager
    def telling(self, doing: str, path: str) -> Iterator[None]:
        """While this block runs, the rank does this, there (see `Place`)."""
        self.places.append((doing, path))
        try:
            yield
        finally:
            self.places.pop()

    def stop(self) -> None:
        """End the thread, which holds the store of a group that is over, when no call is under way."""
        with self._lock:
            self._is_over = True
            self._calls.put((Future(), bool))

    def _begin(self) -> bool:
        """Start the thread; False where none can be started, as the group is over or the interpreter is ending."""
        if self._thread is None or not self._thread.is_alive():
            if self._is_over:
                return False
            self._thread = threading.Thread(target=self._run, name="store", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                return False
        return True

    def _run(self) -> None:
        told_s = time.monotonic()
        while True:
            with suppress(Empty):
                answer, call = self._calls.get(timeout=max(0.0, told_s + _BEAT_S - time.monotonic()))
                try:
                    answer.set_result(call())
                except Exception as error:  # for the thread that asked
                    answer.set_exception(error)
            if time.monotonic() >= told_s + _BEAT_S:
                told_s = time.monotonic()
                with suppress(RuntimeError):  # the store is gone: whoever waits for it says so
                    self._tell()
            with self._lock:
                if self._is_over and not self.places and self._calls.empty():
                    self._thread = None
                    return

    def _tell(self) -> None:
        """Tell the other ranks where this one is, or for the last time that it is in no call."""
        quiet_s = time.monotonic() - _latest["since"]
        is_in_long_pass = quiet_s >= _QUIET_S and _passes != self._told_passes
        if self.places or self._told_places or is_in_long_pass:
            self._count += 1
            self._told_places, self._told_passes = bool(self.places), dict(_passes)
            beat = {"count": self._count, "at": list(self.places), "progress": progress_made(), "for": waited_for()}
            beat |= {"passes": self._told_passes, "of": _latest["of"]}
            self.store.set(self._key, json.dumps(beat))


# ---- the other ranks ----


def different_calls(doing: Iterable[tuple[int, str]]) -> str:
    """An error for ranks of which each does something else."""
    return (
        f"The ranks are in different calls: {listed((f'rank {rank} is {text}' for rank, text in doing), 8)}. Call the "
        "same functions in the same order on every rank."
    )


class Lookout:
    """Looks at the ranks that a round waits for: which are late, lost, or in another call or pass."""

    def __init__(self, store: StoreClient, prefix: str, path: str, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._prefix, self._path, self.ranks, self._rank = store, prefix, path, ranks, rank
        self._seen: dict[tuple[str, int], tuple[Any, float]] = {}
        self._waiting: dict[int, tuple[str, int]] = {}
        self._looked_s, self._clock_s, self._warn_s = time.monotonic(), 0.0, _WARN_S

    def problem(self, doing: str, limits_s: tuple[float, float], *, warns: bool = False) -> str:
        """Why the round is given up, with `limits_s` as of `_limits_s`; empty where it is not."""
        now_s = time.monotonic()
        self._clock_s += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s
        missing = [rank for rank in self.ranks if not self._store.check([f"{self._path}/{rank}"])]
        missing = missing or list(self.ranks)  # all have come, and the last of them has not joined their values
        beats = {rank: self._beat_of(rank) for rank in missing}
        if lost := [text for rank in missing if (text := self._lost(rank))]:
            return f"While {doing}: {listed(lost)}. The others stop."
        for rank, beat in beats.items():
            if reason := self._elsewhere(doing, rank, beat) or self._alone_in_a_pass(doing, rank, beat):
                return reason
        quiet = {rank: self._since("progress", rank, beat["at"] and beat["progress"]) for rank, beat in beats.items()}
        late = [rank for rank in missing if quiet[rank] > limits_s[not beats[rank]["at"]]]
        longest_s = max(quiet[rank] for rank in late or missing)
        if not late and not (warns and longest_s > self._warn_s):
            return ""
        states = listed((self._state_text(rank, beats[rank], quiet[rank]) for rank in late or missing), 8)
        if late:
            return f"While {doing}: no progress for {longest_s:.0f} s. {states}. All ranks stop."
        self._warn_s = 2 * longest_s
        warnings.warn(f"Still {doing}, {longest_s:.0f} s without progress. {states}.", stacklevel=frames_of_package())
        return ""

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's script or process is over, as far as can be seen from here."""
        return self._process_state(rank) in ("Z", "X")

    def _beat_of(self, rank: int) -> dict[str, Any]:
        key = f"{self._prefix}/beat/{rank}"
        no_beat = {"count": 0, "at": [], "passes": {}}
        return json.loads(self._store.get(key)) if self._store.check([key]) else no_beat

    def _lost(self, rank: int) -> str:
        if (state := self._process_state(rank)) in ("Z", "X"):
            return f"rank {rank} has ended: it failed, and says why, or did not make this call, as every rank must"
        seconds = self._since("state", rank, state)
        return f"rank {rank} is stopped (SIGSTOP) for {seconds:.0f} s" if state == "T" and seconds > SILENT_S else ""

    def _process_state(self, rank: int) -> str:
        """The state of a rank's process, as `_state_of`; "X" after its farewell, "" out of sight."""
        if self._store.check([f"{self._prefix}/ended/{rank}"]):
            return "X"
        if not self._store.check([key := f"{self._prefix}/who/{rank}"]):
            return ""
        sight, process = json.loads(self._store.get(key))
        return _state_of(process) if sight and sight == processes_in_sight() else ""

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

    def _alone_in_a_pass(self, doing: str, rank: int, beat: dict[str, Any]) -> str:
        """Why a rank waits for this one for ever, in a forward pass; empty if it does not."""
        for group, number in beat["passes"].items():
            if (own := _passes.get(group, number)) < number:
                return (
                    f"While {doing}: rank {rank} waits in forward pass {number} of {beat['of']} for rank {self._rank}, "
                    f"which has run {own}. A sharded model gathers its weights from all ranks: call it, generate and "
                    "evaluate on every rank, equally often. All ranks stop."
                )
        return ""

    def _state_text(self, rank: int, beat: dict[str, Any], quiet_s: float) -> str:
        if not beat["at"]:
            return f"rank {rank} is in no call of hf_fsdp_tools; every rank must call"
        file = f", waits for {beat['for']}" if beat["for"] else ""
        return f"rank {rank} is {beat['at'][-1][0]} ({quiet_s:.0f} s without progress{file})"

    def _since(self, kind: str, rank: int, value: Any) -> float:
        """Seconds of looks for which a rank's value of a kind has been the same."""
        if self._seen.get((kind, rank), (self, 0.0))[0] != value:
            self._seen[kind, rank] = (value, self._clock_s)
        return self._clock_s - self._seen[kind, rank][1]


def processes_in_sight() -> str:
    """A text that is the same for processes that see each other by their numbers; "" where the system has none.

    Not the name of the host: machines share one, and so do containers on one machine that use its network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_of(process: int) -> str:
    """The state of a process here (proc(5)): "T" stopped, "Z" ended, "X" not there; "" where it is not shown."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is read
        return "X" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
