"""A folder to save to: files are made in a hidden folder within it, synced, and switched to by one rename.

The hidden folder is locked while the save runs, so that whatever fails or is killed leaves the checkpoint that is there
as it is. Then, on rank 0:

    1. shards get names that no save before had: nothing that opens the folder looks at them yet
    2. one rename switches all else (`switch`): the index or `model.safetensors`, config, tokenizer; and what would be
       opened in place of them goes
    3. the former weight files are removed

Every file is synced before it is renamed, and the folder before and after the switch, so that a machine that goes down
leaves the former or the new checkpoint.
"""

import ctypes
import errno
import filecmp
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors, warn
from hf_fsdp_tools.folders import this_boot, try_lock
from hf_fsdp_tools.loading.weight_files import WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.modeling.pickles import parse_json_object
from hf_fsdp_tools.saving.durable import sync
from hf_fsdp_tools.saving.layout import Layout
from hf_fsdp_tools.saving.target import Target
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG, ADAPTER_FILES
from hf_fsdp_tools.text import listed, space_at

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


class Folder(Target):
    """A folder, to whose files all ranks write at once, in a hidden folder in it.

    Every rank has one, of the mark of rank 0, which begins and ends it. From begin to end, rank 0 holds a lock
    (`flock`) on a file in the hidden folder, which the system takes back when the process ends, however it ends. So a
    hidden folder whose lock is free was left by a killed save, and is removed by the next one. Where nobody can tell
    (the owner ran on another machine, and many file systems have locks within one machine only or none), it is removed
    an hour after its last change.
    """

    shows_all_at_once = True

    def __init__(self, folder: Path, whole: "Folder | None" = None) -> None:
        """With `whole`, a folder in that one, whose files appear with those of the whole."""
        self.folder, self.where, self._whole = folder, str(folder), whole
        self.mark = secrets.token_hex(4)
        self._lock: int | None = None
        self._made: list[Path] = []
        self._parts: list[tuple[Folder, str, str]] = []
        """What is to be published: a folder, the file that leads to others, and a stranger."""

    @classmethod
    def at(cls, place: str) -> Self:
        """Any name is a folder's."""
        return cls(Path(place.removeprefix("file://")))

    @property
    def path(self) -> Path:
        """For weight files."""
        if self._whole is not None:
            return self._whole.path / "parts" / self.folder.relative_to(self._whole.folder)
        return self.folder / f".save-{self.mark}.incomplete"

    def files(self) -> Mapping[str, int]:
        """Those directly in it."""
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        return {path.name: path.stat().st_size for path in there if path.is_file()}

    def read(self, name: str) -> bytes | None:
        """As the system reads it."""
        return (self.folder / name).read_bytes() if (self.folder / name).is_file() else None

    def remove(self, name: str) -> None:
        """If it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def begin(self, stranger: str = "") -> None:
        """Make the folders, and remove what killed saves left there, so that its space is free; on rank 0."""
        if rank_and_size()[0] != 0:
            return
        with storage_errors("save to", self.folder):
            if self._whole is not None:
                self.new = self._whole.new / self.folder.relative_to(self._whole.folder)
                for path in (self.path, self.new):
                    path.mkdir(parents=True, exist_ok=True)
                return
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError(f"{str(self.folder)!r} is a file; give the name of a folder to save to.")
            self.new = self.path / NEW
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

    def prepare(self, layout: Layout) -> None:
        """Make every weight file with its header and its full length; refuse a folder in which a rank does not see
        these."""
        if rank_and_size()[0] == 0:
            try:
                for name, size in layout.sizes.items():
                    with open(self.path / name, "wb") as stream:
                        stream.write(layout.headers[name])
                        stream.flush()
                        _reserve(stream.fileno(), size)
            except OSError as error:
                raise CheckpointError(
                    f"Cannot save to {str(self.folder)!r}{space_at(self.folder.parent)}: {error}. {layout.num_bytes} "
                    "bytes are to be written; check space and permissions, or give another folder."
                ) from None
        super().prepare(layout)
        end_s = time.monotonic() + _APPEARS_S
        for name, expected in layout.sizes.items():
            path = self.path / name
            while (found := path.stat().st_size if path.exists() else None) != expected:
                fact = "absent" if found is None else f"{found} bytes long, expected {expected}"
                _wait_until(end_s, self.folder, f"{path.relative_to(self.folder)} is {fact}")

    def publish(self, last: str, sizes: Mapping[str, int], stranger: str = "") -> None:
        """Switch to all files at once. Those that would be opened in place of what is saved, or with it, go or are
        renamed, with a warning. What is in a part of a `whole` appears with that."""
        if rank_and_size()[0] != 0:
            return
        parts = (self if self._whole is None else self._whole)._parts
        parts.append((self, last, stranger))
        if self._whole is None:
            with storage_errors("finish", self.folder):
                renamed = self._switch(parts)
            if renamed:
                warn(
                    f"{str(self.folder)!r} had another kind of model, whose {listed(renamed)} would be opened with "
                    "what is saved there now. Renamed to *.former."
                )
            for part, last, _ in parts:
                if last in (WEIGHTS, WEIGHTS_INDEX):
                    part._remove_weights({*part.weights.values(), last})
            self.discard()

    def _switch(self, parts: "Iterable[tuple[Folder, str, str]]") -> list[str]:
        """Show shards, then switch to all else; the names of files that were renamed."""
        shards, gone, renamed, lasts = dict[Path, Path](), list[Path](), list[tuple[Folder, str]](), list[Path]()
        for part, last, stranger in parts:
            at = part.folder.relative_to(self.folder)
            if last == WEIGHTS:
                os.replace(part.path / last, part.new / last)
            elif last == WEIGHTS_INDEX:
                shards |= {part.path / file: part.folder / name for file, name in part.weights.items()}
            if last in (WEIGHTS, WEIGHTS_INDEX):
                gone += [at / n for n in (WEIGHTS, WEIGHTS_INDEX) if n != last and os.path.lexists(part.folder / n)]
            if stranger:
                names = (stranger, *(ADAPTER_FILES if stranger == ADAPTER_CONFIG else ()))
                renamed += [(part, name) for name in names if (part.folder / name).is_file()]
            lasts += [at / last] if last else []
        changed = self._changed(lasts)
        for part, name in renamed:
            at = part.folder.relative_to(self.folder)
            keep(part.folder / name, part.new / f"{name}.former")
            gone += [at / f"{name}.former", at / name]
        try:
            for file, to in shards.items():
                to.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, to)
            for folder in {self.folder, *(to.parent for to in shards.values())}:
                sync(folder)
            switch(self.folder, self.path, [*changed, *gone, *lasts])
        except BaseException:
            for to in shards.values():
                with suppress(OSError):  # the error that led here is the one to show
                    to.unlink(missing_ok=True)
            raise
        return [name for _, name in renamed]

    def _changed(self, lasts: Collection[Path]) -> list[Path]:
        """The new files that are not there, or differ, without the last ones; all are synced.

        safetensors makes files that their owner alone can read, whatever the umask says.
        """
        readable, changed = self.path.stat().st_mode & 0o666, []
        for name in map(Path, self.new_names()):
            file, other = self.new / name, self.folder / name
            file.chmod(file.stat().st_mode & 0o7777 | readable)
            sync(file)
            if name not in lasts and not (other.is_file() and filecmp.cmp(file, other, shallow=False)):
                changed.append(name)
        return changed

    def discard(self) -> None:
        """Remove the hidden folder, and what else `begin` made if nothing was saved there."""
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
