"""The hidden folder in which a save makes its files: locked while the save runs, removed when it has ended or died."""

import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.loading.io.durable import sync, try_lock
from hf_fsdp_tools.saving.switch import NEW, settle

_HIDDEN = re.compile(r"\.save-[0-9a-f]{8}\.incomplete")
"""Hidden folders of saves, by the mark of each."""

_OWNER = "owner.json"

_FORGOTTEN_S = 3600.0
"""How long a save whose owner cannot be asked must not have written, to be taken for killed: six times as long as the
ranks of a save that makes no progress wait for each other. (assumed)"""


class Draft:
    """A hidden folder in which a save makes its files, within the folder in which they are to appear.

    Every rank has one; rank 0 begins and ends it. From begin to end, rank 0 holds a lock (`flock`) on a file in it,
    which the system takes back when the process ends, however it ends. So a hidden folder whose lock is free was left
    by a killed save, and is removed by the next one. Where nobody can tell (the owner ran on another machine, and many
    file systems have locks within one machine only or none), it is removed an hour after its last change.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        self.path = folder / f".save-{mark}.incomplete"
        """For weight files."""
        self.beside = self.path / NEW
        """For all other files, under the names that they will have in the folder."""
        self._lock: int | None = None
        self._made: list[Path] = []

    def begin(self) -> None:
        """Make the folders, and remove what killed saves left there, so that its space is free."""
        with storage_errors("save to", self.folder):
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError(f"{str(self.folder)!r} is a file; give the name of a folder to save to.")
            new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            for path in (*reversed(new), self.path, self.beside):
                path.mkdir(exist_ok=path in new)
                self._made.append(path)
            for path in new:
                sync(path.parent)
            self._lock = _take_lock(self.path / _OWNER)
            now_s = (self.path / _OWNER).stat().st_mtime  # by the clock of the file system, as the others
            for path in self.folder.iterdir():
                if _HIDDEN.fullmatch(path.name) and path != self.path:
                    _remove_if_killed(path, now_s)

    def names_beside(self) -> tuple[str, ...]:
        """Names that the files beside the weights will have in the folder."""
        return tuple(sorted(f.relative_to(self.beside).as_posix() for f in self.beside.rglob("*") if f.is_file()))

    def end(self) -> None:
        """Remove the hidden folder, and what else `begin` made if nothing was saved there. Raises no `OSError`."""
        if self.path in self._made:
            _remove(self.path)
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
    try_lock(descriptor)  # where there are no locks, whoever asks looks at the time
    owner = {"host": socket.gethostname(), "boot": _boot(), "process": os.getpid(), "since": time.strftime("%F %T")}
    os.write(descriptor, json.dumps(owner).encode())  # after the lock: what has no owner may be just about to lock
    return descriptor


def _remove_if_killed(path: Path, now_s: float) -> None:
    """Remove the hidden folder of a save that was killed; refuse to go on beside a save that runs."""
    owner: dict[str, Any] = {}
    is_free = None
    with suppress(OSError):  # it ended meanwhile, is another user's, or there are no locks
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        try:
            with suppress(ValueError):
                owner = json.loads(os.read(descriptor, 10_000))
            is_free = try_lock(descriptor)
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
    _remove(path)


def _remove(path: Path) -> None:
    """Remove a hidden folder to which nothing leads, its owner's file last: a process that ends meanwhile leaves who it
    was."""
    try:
        settle(path.parent, path)
    except OSError:  # what lies in it is still needed
        return
    with suppress(OSError):
        for below in path.iterdir():
            if below.is_dir() and not below.is_symlink():
                shutil.rmtree(below, ignore_errors=True)
            elif below.name != _OWNER:
                below.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _boot() -> str:
    """What is the same for all processes that share the locks of one running system, and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
