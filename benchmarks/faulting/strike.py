"""What befalls a rank just before the n-th thing that it does to files, or after a while."""

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Fault", "Strike", "strike_after", "watch_files"]

Fault = Literal["killed rank", "disk full", "removed folder"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_CALLS = ["write", "writev", "pwrite", "pwritev", "fsync", "ftruncate"]
"""System calls on an open file that Python announces by no audit event."""

_TAKES_SPACE = ("open", "write", "writev", "pwrite", "pwritev", "ftruncate")
"""File events that fail where a disk is full; of folders, which ranks make although they are there, none."""


@dataclass(frozen=True)
class Strike:
    """What befalls which rank, before which of its file events."""

    rank: int
    event: int
    fault: Fault = "killed rank"

    def befall(self, seen: int, what: str, root: Path) -> None:
        """Do it, if this is the event: kill this process, or remove a folder. A full disk stays full.

        Args:
            seen: events of this process so far, this one included.
            what: the event.
            root: the folder that is saved to.

        Raises:
            OSError: the disk is full.
        """
        if seen == self.event:
            root.with_name(f"{root.name}.event").write_text(what)
            if self.fault == "killed rank":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "removed folder":
                shutil.rmtree(root / "out", ignore_errors=True)
        if seen >= self.event and self.fault == "disk full" and what.split()[0] in _TAKES_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def watch_files(root: Path, happened: Callable[[str], None]) -> None:
    """Call `happened` before each thing that this process does to a file under `root`, as long as it lives.

    Seen are opening to write, renaming, removing and making, and Python's calls on open files; not what libraries in
    C++ do by themselves.
    """

    def tell(what: str, path: Any) -> None:
        if _under(root, path):
            happened(f"{what} {os.path.relpath(path, root)}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and (args[2] or 0) & _WRITING:
            tell("open", os.fsdecode(args[0]))
        elif event in _CHANGES and isinstance(args[0], str | bytes | os.PathLike):
            tell(event.removeprefix("os."), _whole(args))

    sys.addaudithook(hook)
    for name in _CALLS:
        setattr(os, name, _telling(getattr(os, name), name, tell))


def strike_after(seconds: float, signal: int, before: Callable[[], None]) -> None:
    """Send this process a signal after a while, whatever it is doing then."""

    def strike() -> None:
        before()
        os.kill(os.getpid(), signal)

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()


def _telling(call: Callable[..., Any], name: str, tell: Callable[[str, Any], None]) -> Callable[..., Any]:
    def told(descriptor: int, *args: Any) -> Any:
        tell(name, _path_of(descriptor))
        return call(descriptor, *args)

    return told


def _whole(args: tuple[Any, ...]) -> str:
    """The path of an event, which may be relative to an open folder (`shutil.rmtree`)."""
    path, folder = os.fsdecode(args[0]), args[-1]
    relative = isinstance(folder, int) and folder >= 0 and not os.path.isabs(path)
    return os.path.join(_path_of(folder), path) if relative else os.path.abspath(path)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _under(root: Path, path: str) -> bool:
    return path.startswith(f"{root}{os.sep}") or path == str(root)
