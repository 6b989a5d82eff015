"""The ranks that a round waits for: which are late, lost, in another call or in a pass that waits for this one."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.client import SILENT_S, Place, conflict
from hf_fsdp_tools.distributed.passes import behind
from hf_fsdp_tools.errors import frames_of_package
from hf_fsdp_tools.text import listed

_WARN_S = 30.0
"""From when on a rank without progress is named, and again after each doubling. (assumed)"""

_ABSENT_S = 10.0
"""The same for a rank that is in no call of this package at all. (assumed)"""

_MOST_S = 5.0
"""Seconds that count between two looks, which come every second: longer, the looking process was stopped. (assumed)"""

_OLD_S = 10.0
"""From when on it is said how old the last that a rank told is: five times as long as until it tells again."""


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
        self._seen: dict[tuple[str, int], tuple[Any, float]] = {}
        self._looked_s, self._clock_s = time.monotonic(), 0.0
        self._warn_s = {"absent": _ABSENT_S, "slow": _WARN_S}

    def problem(
        self,
        doing: str,
        own: list[Place],
        limits_s: tuple[float, float],
        is_elsewhere: Callable[[], object],
        *,
        is_first: bool,
    ) -> str:
        """Why the round is given up; empty where it is not. The first rank that waits warns of what takes long."""
        now_s = time.monotonic()
        self._clock_s += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s
        missing = [rank for rank in self.ranks if not self._store.check([f"{self._path}/{rank}"])]
        missing = missing or list(self.ranks)  # all have come, and the last of them has not joined their values
        beats = {rank: self._beat_of(rank) for rank in missing}
        if lost := [text for rank in missing if (text := self._lost(rank))]:
            return f"While {doing}: {listed(lost)}. The others stop."
        apart = next(filter(None, (self._apart(rank, own, beat) for rank, beat in beats.items())), "")
        if apart and not is_elsewhere():  # asked when the beats are read: who told them may have moved since
            return apart
        if alone := next(filter(None, map(self._in_a_pass, missing)), ""):
            return f"While {doing}: {alone}. All ranks stop."
        absent = [rank for rank, beat in beats.items() if not (beat or {}).get("doing")]
        quiet = {
            rank: self._since("progress", rank, None if rank in absent or beat is None else beat["progress"])
            for rank, beat in beats.items()
        }
        late = {rank: seconds for rank, seconds in quiet.items() if seconds > limits_s[rank in absent]}
        told = listed((self._told(rank, beats[rank], quiet[rank]) for rank in late or missing), 8)
        if late:
            return f"While {doing}: no progress for {max(late.values()):.0f} s. {told}. All ranks stop."
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

    def _lost(self, rank: int) -> str:
        state = self._state(rank)
        if state in ("Z", "X"):
            said = "it failed, and says why, or did not make this call, which every rank must make"
            return f"rank {rank} has ended: {said}"
        seconds = self._since("state", rank, state)
        return f"rank {rank} is stopped (SIGSTOP) for {seconds:.0f} s" if state == "T" and seconds > SILENT_S else ""

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
        old_s = self._since("beat", rank, beat["count"])
        said = f"told {old_s:.0f} s ago that it is" if old_s > _OLD_S else "is"
        return f"rank {rank} {said} {beat['doing'][-1]} ({quiet_s:.0f} s without progress{waits})"

    def _since(self, kind: str, rank: int, value: Any) -> float:
        """Seconds of looks for which a rank's value of a kind has been the same."""
        if self._seen.get((kind, rank), (self, 0.0))[0] != value:
            self._seen[kind, rank] = (value, self._clock_s)
        return self._clock_s - self._seen[kind, rank][1]


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
