"""Files that a crash cannot tear: on disk before they are seen, and replaced in one step."""

import ctypes
import errno
import os
from pathlib import Path

from hf_fsdp_tools.distributed.storage import watched

_AT_FDCWD = -100
"""A relative path is meant from the current folder; source: Linux, fcntl.h."""

_RENAME_EXCHANGE = 2
"""Source: Linux, fs.h."""

_UNABLE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES}
"""What a system or a file system answers that cannot exchange names, or sync folders."""


UNCHANGED = "Earlier saves there are unchanged; check space, permissions and the values that are saved."
"""The cure where a library cannot write."""


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of names, are on disk, where the file system has such a call."""
    try:
        with watched(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that readers see the former file or the whole new one, after a crash too."""
    temporary = path.with_name(f".{path.name}.incomplete")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def exchange(first: Path, second: Path) -> bool:
    """Exchange what two names of one file system mean, in one step; False, and nothing done, where that is
    impossible.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
