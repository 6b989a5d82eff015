"""The hidden folder in which a save makes its files: locked while the save runs, removed when it has ended or died."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.text import first_line

__all__ = ["Draft", "save_errors", "sync_files", "sync_folder"]

_HIDDEN = re.compile(r"\.save-[0-9a-f]{8}\.incomplete")
"""Hidden folders of saves, by the mark of each."""

_FORGOTTEN_S = 3600.0
"""How long a save whose owner cannot be asked must not have written, to be taken for killed: six times as long as the
ranks of a save that makes no progress wait for each other. (assumed)"""


class Draft:
    """A hidden folder in which a save makes its files, within the folder in which they are to appear.

    Every rank has one; rank 0 begins and ends it. From begin to end, rank 0 holds a lock (`flock`) on a file in it,
    which the system takes back when the process ends, however it ends. So a hidden folder whose lock is free was left
    by a killed save, and is removed by the next one. Where nobody can tell (the owner ran on another machine, and many
    file systems have locks within one machine only or none), it is removed an hour after its last change.

    Args:
        folder: to save to.
        mark: 8 hexadecimal digits, drawn for this save; the same on every rank.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        self.path = folder / f".save-{mark}.incomplete"
        """For weight files."""
        self.beside = self.path / "beside"
        """For all other files, under the names that they will have in the folder."""
        self._lock: int | None = None
        self._made: list[Path] = []

    def begin(self) -> None:
        """Make the folders, and remove what killed saves left there, so that its space is free.

        Raises:
            CheckpointError: another job is saving to the folder, or it cannot be written.
        """
        with save_errors(self.folder):
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError(f"{str(self.folder)!r} is a file; give the name of a folder to save to.")
            new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            for path in (*reversed(new), self.path, self.beside):
                path.mkdir(exist_ok=path in new)
                self._made.append(path)
            for path in new:
                sync_folder(path.parent)
            self._lock = _take_lock(self.path / "owner.json")
            now_s = (self.path / "owner.json").stat().st_mtime  # by the clock of the file system, as the others
            for path in self.folder.iterdir():
                if _HIDDEN.fullmatch(path.name) and path != self.path:
                    _remove_if_killed(path, now_s)

    def end(self) -> None:
        """Remove the hidden folder, and what else `begin` made if nothing was saved there. Raises no `OSError`."""
        if self.path in self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for path in reversed(self._made):
            with suppress(OSError):  # there is something in it, or it is gone
                path.rmdir()
        self._made.clear()


def _take_lock(file: Path) -> int:
    """A descriptor of a new file that is locked until the descriptor is closed, if the file system has locks."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with suppress(OSError):  # no locks here: whoever asks finds a free one, or none, and looks at the time
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    owner = {"host": socket.gethostname(), "boot": _boot(), "process": os.getpid(), "since": time.strftime("%F %T")}
    os.write(descriptor, json.dumps(owner).encode())  # after the lock: what has no owner may be just about to lock
    return descriptor


def _remove_if_killed(path: Path, now_s: float) -> None:
    """Remove the hidden folder of a save that was killed; refuse to go on beside a save that runs."""
    owner: dict[str, Any] = {}
    is_free = None
    with suppress(OSError):  # it ended meanwhile, is another user's, or there are no locks
        descriptor = os.open(path / "owner.json", os.O_RDWR | os.O_CLOEXEC)
        try:
            with suppress(ValueError):
                owner = json.loads(os.read(descriptor, 10_000))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        finally:
            os.close(descriptor)
    if is_free is False:
        raise CheckpointError(
            f"Another job is saving to {str(path.parent)!r}: process {owner.get('process')} on {owner.get('host')}, "
            f"since {owner.get('since')}. Give each job a folder of its own. If that job has ended, remove {path.name} "
            "there."
        )
    if not (is_free and owner.get("boot") == _boot()):
        try:
            changed_s = max(change.lstat().st_mtime for change in (path, *path.rglob("*")))
        except OSError:  # it changes just now
            return
        if now_s - changed_s < _FORGOTTEN_S:
            return
    shutil.rmtree(path, ignore_errors=True)


def _boot() -> str:
    """What is the same for all processes that share the locks of one running system, and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def save_errors(folder: Path, doing: str = "save to") -> Iterator[None]:
    """Turn what the system and libraries raise while they write into `CheckpointError`, with the folder and a cure."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot {doing} {str(folder)!r}: {error}. Check space and permissions, or give another folder."
        ) from error
    except Exception as error:  # safetensors, tokenizers, PEFT: each has errors of its own for a full disk
        raise CheckpointError(
            f"Cannot {doing} {str(folder)!r}: {type(error).__name__}: {first_line(error)}. What was saved there before "
            "is unchanged; check space and permissions, and the values that are saved."
        ) from error


# ---- what a power failure leaves ----


def sync_files(files: Iterable[Path]) -> None:
    """Wait until the bytes that this process wrote to some files are on the disk.

    Raises:
        OSError: they cannot be written, for want of space for example.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with watched(file):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can do so."""
    try:
        sync_files([folder])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
