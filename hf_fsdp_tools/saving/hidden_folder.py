"""The hidden folder of a save: locked while the save runs, switched to by one rename, removed when it is over."""

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.modeling.pickles import parse_json_object
from hf_fsdp_tools.saving.durable import sync
from hf_fsdp_tools.saving.layout import Layout
from hf_fsdp_tools.stores import this_boot, try_lock
from hf_fsdp_tools.text import space_at

NEW = "beside"
"""Name of the folder of new files within the hidden folder."""

_FORMER, _NOW = "former", "now"

_UNABLE = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""What a file system answers that has no symbolic links."""


def switch(folder: Path, hidden: Path, names: Sequence[Path]) -> None:
    """Let each name in a folder mean what it is in `hidden/beside`, or nothing where it is not there.

    On a file system without symbolic links the names are changed one after another.
    """
    former, new = hidden / _FORMER, hidden / NEW
    former.mkdir()
    for name in names:
        keep(folder / name, former / name)
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if _point_now_at(hidden, _FORMER):
            for below in {*(path.parent for base in (former, new) for path in base.rglob("*")), former, new, hidden}:
                sync(below)
            for name in names:
                at = folder / name
                _link(os.path.relpath(hidden / _NOW / name, at.parent), at, hidden)
            _sync_parents(folder, names)
            _point_now_at(hidden, NEW)
            sync(hidden)
        else:
            sync(folder)
        _put(folder, new, names)
        _sync_parents(folder, names)
    except BaseException:
        with suppress(OSError):  # the error that led here is the one to show
            _point_now_at(hidden, _FORMER)
        for name in names:
            with suppress(OSError):
                _put(folder, former, [name])
        raise


def finish_interrupted(folder: Path, hidden: Path) -> None:
    """Let names that are still links into a hidden folder be the files that they mean, so that it can be removed."""
    if (hidden / _NOW).is_symlink() and (now := os.readlink(hidden / _NOW)) in (_FORMER, NEW):  # no stranger's link
        files = {path.relative_to(base) for base in (hidden / _FORMER, hidden / NEW) for path in base.rglob("*")}
        links = (name for name in sorted(files) if (folder / name).is_symlink())
        linked = [name for name in links if hidden.name in Path(os.readlink(folder / name)).parts]
        _put(folder, hidden / now, linked)
        _sync_parents(folder, linked)


def keep(file: Path, kept: Path) -> None:
    """Give a file, if it is there, a second name on the same file system; a copy where there are no hard links."""
    if not file.is_file():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():  # a relative one would lead elsewhere
        kept.symlink_to(file.resolve())
        return
    try:
        os.link(file, kept)
    except OSError:
        shutil.copy2(file, kept)
        sync(kept)


def _point_now_at(hidden: Path, to: str) -> bool:
    """Let `now` mean another folder, in one step; False where there are no symbolic links."""
    try:
        _link(to, hidden / _NOW, hidden)
    except OSError as error:
        if error.errno not in _UNABLE or (hidden / _NOW).is_symlink():
            raise
        return False
    return True


def _link(to: str, at: Path, hidden: Path) -> None:
    made = hidden / "link"
    made.unlink(missing_ok=True)
    made.symlink_to(to)
    os.replace(made, at)


def _put(folder: Path, source: Path, names: Iterable[Path]) -> None:
    """Move files to their names; a name of which there is no file goes."""
    for name in names:
        if os.path.lexists(source / name):
            os.replace(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _sync_parents(folder: Path, names: Iterable[Path]) -> None:
    for below in sorted({(folder / name).parent for name in names}):
        sync(below)


_HIDDEN = re.compile(r"\.save-[0-9a-f]{8}\.incomplete")
"""Hidden folders of saves, by the mark of each."""

_OWNER = "owner.json"

_FORGOTTEN_S = 3600.0
"""How long a save whose owner cannot be asked must not have written, to be taken for killed: six times as long as the
ranks of a save that makes no progress wait for each other. (assumed)"""

_APPEARS_S = 60.0
"""How long a new file of another machine may be unseen: NFS keeps what it knows of a folder (`acdirmax` of nfs(5))."""


class HiddenFolder:
    """A hidden folder in which a save makes its files, within the folder in which they are to appear.

    Every rank has one, of the mark of rank 0, which begins and ends it. From begin to end, rank 0 holds a lock
    (`flock`) on a file in it, which the system takes back when the process ends, however it ends. So a hidden folder
    whose lock is free was left by a killed save, and is removed by the next one. Where nobody can tell (the owner ran
    on another machine, and many file systems have locks within one machine only or none), it is removed an hour after
    its last change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(4)
        self._lock: int | None = None
        self._made: list[Path] = []

    @property
    def path(self) -> Path:
        """For weight files."""
        return self.folder / f".save-{self.mark}.incomplete"

    @property
    def new(self) -> Path:
        """For all other files, under the names that they will have in the folder."""
        return self.path / NEW

    def __enter__(self) -> "HiddenFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Make the folders, and remove what killed saves left there, so that its space is free."""
        with storage_errors("save to", self.folder):
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError(f"{str(self.folder)!r} is a file; give the name of a folder to save to.")
            absent = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            for path in (*reversed(absent), self.path, self.new):
                path.mkdir(exist_ok=path in absent)
                self._made.append(path)
            for path in absent:
                sync(path.parent)
            self._lock = _take_lock(self.path / _OWNER)
            now_s = (self.path / _OWNER).stat().st_mtime  # by the clock of the file system, as the others
            for path in self.folder.iterdir():
                if _HIDDEN.fullmatch(path.name) and path != self.path and not path.is_symlink():
                    _remove_if_killed(path, now_s)

    def create_files(self, layout: Layout) -> None:
        """Make every weight file with its header and its full length."""
        try:
            for name, size in layout.sizes.items():
                with open(self.path / name, "wb") as stream:
                    stream.write(layout.headers[name])
                    stream.flush()
                    _reserve(stream.fileno(), size)
        except OSError as error:
            raise CheckpointError(
                f"Cannot save to {str(self.folder)!r}{space_at(self.folder.parent)}: {error}. "
                f"{layout.num_bytes} bytes are to be written; check space and permissions, or give another folder."
            ) from None

    def check_visible(self, layout: Layout) -> None:
        """Refuse a folder in which this rank does not see the files that rank 0 made."""
        end_s = time.monotonic() + _APPEARS_S
        for name, expected in layout.sizes.items():
            path = self.path / name
            while (size := path.stat().st_size if path.exists() else None) != expected:
                fact = "absent" if size is None else f"{size} bytes long, expected {expected}"
                _wait_until(end_s, self.folder, f"{path.relative_to(self.folder)} is {fact}")

    def new_names(self) -> tuple[str, ...]:
        """Names that the files next to the weights will have in the folder."""
        return tuple(sorted(f.relative_to(self.new).as_posix() for f in self.new.rglob("*") if f.is_file()))

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


def check_shared(folder: Path) -> None:
    """Make a folder for later saves, and refuse one that rank 0 cannot write to or that some rank does not share.

    Every rank must call; rank 0 makes an empty file there and removes it.
    """
    is_first = rank_and_size()[0] == 0
    probe = folder / f".seen-by-all-{secrets.token_hex(4)}"
    try:
        with agreed("making the folder", folder), storage_errors("save to", folder):
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
            made = folder / all_ranks(probe.name, "making the folder")[0]
            end_s = time.monotonic() + _APPEARS_S
            while not made.exists():
                _wait_until(end_s, folder, "a file that rank 0 made is absent")
    finally:
        if is_first:
            with suppress(OSError):  # on this rank alone: an empty file stays, and the first save says what is wrong
                probe.unlink()


def _wait_until(end_s: float, folder: Path, fact: str) -> None:
    """Wait for a moment, as file systems of a network show late what others did; refuse the folder at the end."""
    if time.monotonic() > end_s:
        raise CheckpointError(
            f"{str(folder)!r} is not the same folder on this rank as on rank 0: {fact}. Save to a file system that all "
            "ranks share."
        )
    time.sleep(0.1)


# ---- files ----


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its length; where the file system can, also its blocks, so that a full disk shows before any work."""
    os.ftruncate(descriptor, size)
    code = _fallocate(descriptor, size)
    if code not in (0, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, size: int) -> int:
    """Reserve the blocks of a file by the system call `fallocate`; the number of its error, 0 without one.

    `os.posix_fallocate` is not that call alone: on file systems without it (FUSE, NFS before 4.2, mounts of object
    stores) the C library writes a byte into every block instead, 34 million writes for 140 GB.
    """
    if sys.platform != "linux" or not size:
        return 0
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    while fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


# ---- owners ----


def _take_lock(file: Path) -> int:
    """A descriptor of a new file that is locked until the descriptor is closed, if the file system has locks."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try_lock(descriptor)  # where there are no locks, the next save looks at the time
    owner = {"host": socket.gethostname(), "boot": this_boot(), "process": os.getpid(), "since": time.strftime("%F %T")}
    os.write(descriptor, json.dumps(owner).encode())  # after the lock: what has no owner may be just about to lock
    return descriptor


def _remove_if_killed(path: Path, now_s: float) -> None:
    """Remove the hidden folder of a save that was killed; refuse to go on next to a save that runs."""
    owner: dict[str, Any] = {}
    is_free = None
    # The save may have ended meanwhile, or be another user's, and there may be no locks.
    with suppress(OSError), open(path / _OWNER, "r+b") as file:
        with suppress(CheckpointError):
            owner = parse_json_object(path / _OWNER, file.read(10_000))
        is_free = try_lock(file.fileno())
    if is_free is False:
        raise CheckpointError(
            f"Another job is saving to {str(path.parent)!r}: process {owner.get('process')} on {owner.get('host')}, "
            f"since {owner.get('since')}. Give each job a folder of its own. If that job has ended, remove {path.name} "
            "there."
        )
    if not (is_free and owner.get("boot") == this_boot()):
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
        finish_interrupted(path.parent, path)
    except OSError:  # what lies in it is still needed
        return
    with suppress(OSError):
        for below in path.iterdir():
            if below.is_dir() and not below.is_symlink():
                shutil.rmtree(below, ignore_errors=True)
            elif below.name != _OWNER:
                below.unlink()
    shutil.rmtree(path, ignore_errors=True)
