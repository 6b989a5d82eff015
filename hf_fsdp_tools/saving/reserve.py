"""Files that are made at their full length before anything is written to them, and seen by every rank."""

import ctypes
import errno
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.saving.layout import Layout

_APPEARS_S = 60.0
"""How long a new file of another machine may be unseen: NFS keeps what it knows of a folder (`acdirmax` of nfs(5))."""


def create_files(layout: Layout, folder: Path) -> None:
    """Make every file with its header and its full length."""
    try:
        for file, size in layout.files.items():
            with open(layout.path(file), "wb") as stream:
                stream.write(layout.headers[file])
                stream.flush()
                _reserve(stream.fileno(), size)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save to {str(folder)!r}: {error}. {layout.num_bytes} bytes are to be written there; check "
            "space and permissions, or give another folder."
        ) from None


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


def check_visible(layout: Layout, folder: Path) -> None:
    """Refuse a folder in which this rank does not see the files that rank 0 made."""
    for file, size in layout.files.items():
        path = layout.path(file)
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise CheckpointError(
                f"{str(folder)!r} is not the same folder on this rank as on rank 0: {path.relative_to(folder)} is "
                f"{'absent' if found is None else f'{found} bytes long'}, expected {size} bytes. Save to a file system "
                "that all ranks share."
            )


def check_shared(folder: Path) -> None:
    """Make a folder for later saves, and refuse one that rank 0 cannot write to or that some rank does not share.

    Every rank must call; rank 0 makes an empty file there and removes it.
    """
    is_first = rank_and_size()[0] == 0
    probe = folder / all_ranks(f".seen-by-all-{secrets.token_hex(4)}", "beginning to look at the folder")[0]
    with agreed("making the folder", folder), storage_errors("save to", folder):
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    try:
        with agreed("looking for the folder of rank 0", folder):
            end_s = time.monotonic() + _APPEARS_S
            while not probe.exists():
                if time.monotonic() > end_s:
                    raise CheckpointError(
                        f"{str(folder)!r} is not the same folder on this rank as on rank 0: a file that rank 0 made "
                        "is absent. Save to a file system that all ranks share."
                    )
                time.sleep(0.1)
    finally:
        if is_first:
            with suppress(OSError):  # on this rank alone: an empty file stays, and the first save says what is wrong
                probe.unlink()
