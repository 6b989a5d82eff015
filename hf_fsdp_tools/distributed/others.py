"""The ranks that a round waits for: which are late, lost, in another call or in a pass that waits for this one."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.beat import Place, conflict
from hf_fsdp_tools.distributed.passes import behind
from hf_fsdp_tools.errors import frames_of_package
from hf_fsdp_tools.text import listed

__all__ = ["Others", "different_calls", "processes_in_sight"]

_WARN_S = 30.0
"""From when on a rank without progress is named, and again after each doubling. (assumed)"""

_ABSENT_S = 10.0
"""The same for a rank that is in no call of this package at all. (assumed)"""

_LOST_S = 60.0
"""How long a rank that has beaten may be silent: its process was stopped, or its machine is gone. (assumed)"""


def different_calls(doing: Iterable[tuple[int, str]]) -> str:
    """What to say of ranks of which each does something else."""
    return (
        f"The ranks are in different calls: {listed((f'rank {rank} is {what}' for rank, what in doing), 8)}. Call the "
        "same functions in the same order on every rank."
    )


class Others:
    """What is known of the ranks that a round waits for."""

    def __init__(self, store: Any, prefix: str, path: str, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._prefix, self._path, self.ranks, self._rank = store, prefix, path, ranks, rank
        self._counts: dict[int, tuple[int, float]] = {}
        self._progress: dict[int, tuple[int, float]] = {}
        self._warn_s = {"absent": _ABSENT_S, "slow": _WARN_S}

    def problem(
        self, doing: str, own: list[Place], patience_s: float, is_elsewhere: Callable[[], object], *, is_first: bool
    ) -> str:
        """Why the round is given up; empty where it is not. The first rank that waits warns of what takes long.

        Args:
            doing: what the round is for.
            own: where this rank is.
            patience_s: how long a rank may make no progress.
            is_elsewhere: whether a rank is known to have failed, which takes ranks to different calls for a moment.
            is_first: whether this rank was the first to come.
        """
        missing = [rank for rank in self.ranks if not self._store.check([f"{self._path}/{rank}"])]
        missing = missing or list(self.ranks)  # all have come, and the last of them has not joined their values
        beats = {rank: self._beat_of(rank) for rank in missing}
        if lost := [text for rank, beat in beats.items() if (text := self._lost(rank, beat))]:
            return f"While {doing}: {listed(lost)}. The others stop."
        apart = next(filter(None, (self._apart(rank, own, beat) for rank, beat in beats.items())), "")
        if apart and not is_elsewhere():  # asked when the beats are read: who told them may have moved since
            return apart
        if alone := next(filter(None, map(self._in_a_pass, missing)), ""):
            return f"While {doing}: {alone}. All ranks stop."
        quiet = {rank: _since(self._progress, rank, beat["progress"] if beat else -1) for rank, beat in beats.items()}
        late = {rank: seconds for rank, seconds in quiet.items() if seconds > patience_s}
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
        if (state := self._state(rank)) in ("Z", "X"):
            return ended
        if state != "T" and (beat is None or not beat["doing"]):  # it beats in calls alone
            return ""
        silent_s = _since(self._counts, rank, beat["count"] if beat else 0)
        what = "is stopped (SIGSTOP)" if state == "T" else "gives no sign of life"
        return f"rank {rank} {what} for {silent_s:.0f} s" if silent_s > _LOST_S else ""

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's script or process is over, as far as can be seen from here."""
        return self._state(rank) in ("Z", "X")

    def _state(self, rank: int) -> str:
        """The state of a rank's process, as `_state_of`; "X" after its farewell, "" out of sight."""
        if self._store.check([f"{self._prefix}/ended/{rank}"]):
            return "X"
        if not self._store.check([key := f"{self._prefix}/who/{rank}"]):
            return ""
        sight, process = json.loads(self._store.get(key))
        return _state_of(process) if sight and sight == processes_in_sight() else ""

    def _apart(self, rank: int, own: list[Place], beat: dict[str, Any] | None) -> str:
        """Why a rank and this one never meet; empty if they may."""
        found = conflict(own, (beat or {}).get("at", ()))
        return different_calls(sorted(zip((self._rank, rank), found, strict=True))) if found else ""

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


def processes_in_sight() -> str:
    """What is the same for processes that see each other by their numbers; "" where nothing says so.

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
