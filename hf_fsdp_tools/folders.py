"""Locks that the system takes back when their process ends, and temporary folders that are known by them."""

import fcntl
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCKED_S = 60.0
"""Seconds after which a temporary folder is locked by the process that has made it. (assumed)"""


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed, in whatever way its process ends: True if that succeeded, False if another
    process holds the lock, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def this_boot() -> str:
    """What is the same for all processes that share the locks of one running system, and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's place for temporary files, locked until the block or this process ends. Those that
    killed processes have left are removed."""
    start = f"hf-fsdp-{zlib.crc32(this_boot().encode()):08x}-"
    for left in Path(tempfile.gettempdir()).glob(f"{start}*"):
        with suppress(OSError):  # another user's, or removed by another rank
            is_old = time.time() - left.lstat().st_mtime > _LOCKED_S
            descriptor = os.open(left, os.O_RDONLY)
            if is_old and try_lock(descriptor):
                shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix=start, ignore_cleanup_errors=True) as made:
        descriptor = os.open(made, os.O_RDONLY)
        try_lock(descriptor)
        try:
            yield Path(made)
        finally:
            os.close(descriptor)
