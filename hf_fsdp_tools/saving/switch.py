"""Several files of a folder replaced in one step, for every reader.

For a moment each of the names is a symbolic link through one further link, `now`:

    config.json   ->  .save-1b0f5e9a.incomplete/now/config.json       the same for each name that is to change
    now           ->  former                                          hard links of the files that are there
    now           ->  beside                                          the one rename that switches: the new files

Then each name gets its new file, or goes. At every moment each name means a file of the former state, or each a file of
the new one; a name that is absent from a state leads nowhere, which is what a reader sees of an absent file.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hf_fsdp_tools.loading.io.durable import sync

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
        if _lead(hidden, _FORMER):
            for below in {*(path.parent for base in (former, new) for path in base.rglob("*")), former, new, hidden}:
                sync(below)
            for name in names:
                at = folder / name
                _link(os.path.relpath(hidden / _NOW / name, at.parent), at, hidden)
            _sync_parents(folder, names)
            _lead(hidden, NEW)
            sync(hidden)
        else:
            sync(folder)
        _put(folder, new, names)
        _sync_parents(folder, names)
    except BaseException:
        with suppress(OSError):  # the error that led here is the one to show
            _lead(hidden, _FORMER)
        for name in names:
            with suppress(OSError):
                _put(folder, former, [name])
        raise


def settle(folder: Path, hidden: Path) -> None:
    """Let names that are still links into a hidden folder be the files that they mean, so that it can be removed."""
    if (hidden / _NOW).is_symlink():
        files = {path.relative_to(base) for base in (hidden / _FORMER, hidden / NEW) for path in base.rglob("*")}
        linked = [name for name in sorted(files) if _leads_into(folder / name, hidden)]
        _put(folder, hidden / os.readlink(hidden / _NOW), linked)
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


def _lead(hidden: Path, to: str) -> bool:
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


def _leads_into(path: Path, hidden: Path) -> bool:
    return path.is_symlink() and hidden.name in Path(os.readlink(path)).parts


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
