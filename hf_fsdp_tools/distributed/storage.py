"""Warn of storage that does not answer, with file, position and seconds: a system call that hangs cannot be ended."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id

from hf_fsdp_tools.errors import warn

_WARN_S = 30.0
"""Seconds after which a call is warned of; each further warning comes after twice the time. (assumed)"""

_POLL_S = 1.0
"""Seconds between two checks of the calls under way. (assumed)"""


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    file: Path
    position: int
    since_s: float


_under_way: set[_Call] = set()
_done = 0
_lock = threading.Lock()
_watcher = threading.Thread()


@contextmanager
def watched(file: Path, position: int = 0) -> Iterator[None]:
    """Warn of a block that waits for a file for 30 s or more; for any thread, and inside another such block."""
    global _done, _watcher
    call = _Call(file, position, time.monotonic())
    with _lock:
        _under_way.add(call)
        if not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, name="watch over storage", daemon=True)
            with suppress(RuntimeError):  # the interpreter is ending, and begins no thread any more
                _watcher.start()
    try:
        yield
    finally:
        with _lock:
            _under_way.remove(call)
            _done += 1


def progress_made() -> int:
    """A number that moves while this process reads, writes or downloads; to be asked by one and the same thread.

    It counts watched blocks that are over and, on Linux, each MiB that was read or written by any thread but the
    calling one and a `TCPStore` that serves other ranks.
    """
    moved = 0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            if int(task.name) != get_native_id() and not (task / "comm").read_text().startswith("pt_tcpstore"):
                counts = dict(line.split(": ") for line in (task / "io").read_text().splitlines())
                moved += int(counts["rchar"]) + int(counts["wchar"])
    return _done + moved // 2**20


def waited_for() -> str:
    """What this process has been waiting for longest, for messages; empty for nothing."""
    with _lock:
        oldest = min(_under_way, key=lambda call: call.since_s, default=None)
    return "" if oldest is None else f"{oldest.file} at byte {oldest.position:,}"


def _watch() -> None:
    """Warn of the call that has been under way for longest, for as long as there are calls."""
    global _watcher
    warn_s = _WARN_S
    while True:
        time.sleep(_POLL_S)
        with _lock:
            if not _under_way:
                _watcher = threading.Thread()  # the next call starts a new one
                return
            oldest = min(_under_way, key=lambda call: call.since_s)
        waited_s = time.monotonic() - oldest.since_s
        if waited_s < _WARN_S:
            warn_s = _WARN_S
        elif waited_s >= warn_s:
            warn_s = 2 * waited_s
            warn(
                f"{oldest.file}: no answer at byte {oldest.position:,} for {waited_s:.0f} s; still waiting. Check the "
                "storage, the network and the mount."
            )
