"""The folder of a training state: made in a hidden folder next to it, of which the whole then takes its place."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.folders import try_lock
from hf_fsdp_tools.loading.io.durable import exchange, sync
from hf_fsdp_tools.saving.manifest import SAVING, write_manifest


class StateFolder:
    """A state in a staging folder, which takes the place of a folder once every rank has written.

    Until then an older folder stays as it is; then one call of the system exchanges the two (two renames where there is
    no such call). A user's own files in it are kept. Every rank must call each.
    """

    is_private = False
    """Whether each rank has a `new` of its own."""

    def __init__(self, folder: Path, patterns: Sequence[str]) -> None:
        """`patterns` are those of the files of a state."""
        self.folder, self._patterns = folder.parent.resolve() / folder.name, patterns
        self.where, self.written_to = str(self.folder), self.folder
        self.new = _hidden(self.folder) / (folder.name or "root")
        """Written to between `begin` and `publish`."""
        self._held = ExitStack()
        """The lock by which other jobs keep away, on rank 0."""

    def begin(self) -> None:
        """Make the staging folder, which all ranks must see."""
        folder = self.folder
        with agreed("saving the state", folder), storage_errors("save to", folder):
            if folder.is_mount():
                raise CheckpointError(f"{str(folder)!r} is a mount point, and stays. Save to a folder in it.")
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{str(folder)!r} is a file; give the name of a folder to save to.")
            if rank_and_size()[0] == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                self._held.enter_context(_only_job(folder))
                _clear(folder, self._patterns)
                self.new.mkdir(parents=True)
        with agreed("opening a folder", self.new):
            if not self.new.is_dir():
                raise CheckpointError(f"{str(self.new)!r} is absent. Save to a file system that all ranks share.")

    def publish(self, needed: Iterable[str], *, checksums: bool = False) -> tuple[dict[str, int | None], int]:
        """Declare the state complete and put it into its place; the sizes of its files, and the bytes that this rank
        has put, which are none."""
        with agreed(SAVING, self.folder), storage_errors("save to", self.folder):
            sizes = write_manifest(self.new, needed, self._patterns, checksums=checksums)
        with agreed("finishing the save", self.folder):
            if rank_and_size()[0] == 0:
                _take_place(self.new, self.folder, self._patterns)
        return sizes, 0

    def discard(self) -> None:
        """Let others save there."""
        self._held.close()


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name or 'root'}.incomplete")


def former_of(folder: Path) -> Path:
    """The path of an older state between two renames that replace it, where the system cannot exchange folders."""
    return folder.with_name(f".{folder.name}.former")


@contextmanager
def _only_job(folder: Path) -> Iterator[None]:
    """Refuse to save while another job saves to the same folder; file systems without locks let it pass."""
    file = folder.with_name(f".{folder.name}.lock")
    with open(file, "a") as stream:
        locked = try_lock(stream.fileno())
        is_removed = not file.exists() or not os.path.samestat(file.stat(), os.fstat(stream.fileno()))
        if locked is False or (locked and is_removed):  # the other job has just ended, and removed the file
            raise CheckpointError(
                f"Another job is saving to {str(folder)!r}. Stop one of the two, or give each a folder of its own."
            )
        try:
            yield
        finally:
            with suppress(OSError):  # a lock that is left locks nothing, and the state is saved
                file.unlink(missing_ok=True)


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Delete what killed saves have left in a folder of states; not what another job is writing. For one rank."""
    for end in (".incomplete", ".lock"):
        for path in parent.glob(f".{pattern}{end}"):
            state = path.with_name(path.name[1:].removesuffix(end))
            with suppress(CheckpointError), _only_job(state):  # another job's is none of ours
                shutil.rmtree(_hidden(state), ignore_errors=True)


def _clear(folder: Path, files: Sequence[str]) -> None:
    """Put away what a save that was killed has left next to the folder."""
    former, hidden = former_of(folder), _hidden(folder)
    if os.path.lexists(former) and not os.path.lexists(folder):
        former.rename(folder)
    if os.path.lexists(former):
        _bring_own_files(former, folder, files)
        remove_folder(former)
    if os.path.lexists(hidden):
        remove_folder(hidden)


def _take_place(staging: Path, folder: Path, files: Sequence[str]) -> None:
    """Put the new folder into the place of the old one, then delete the old one."""
    former = former_of(folder)
    try:
        if os.path.lexists(folder):
            _bring_own_files(folder, staging, files)
            if not exchange(staging, folder):
                folder.rename(former)
                try:
                    staging.rename(folder)
                except OSError:
                    former.rename(folder)
                    raise
        else:
            staging.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"Cannot finish {str(folder)!r}: {error}. What was saved there before is still there."
        ) from None
    try:
        sync(folder.parent)
        remove_folder(former)
        shutil.rmtree(staging.parent)
    except OSError as error:
        raise CheckpointError(
            f"{str(folder)!r} is saved, but the former state cannot be deleted: {error}. Delete {str(former)!r} and "
            f"{str(staging.parent)!r}."
        ) from None


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it is there; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _bring_own_files(source: Path, target: Path, files: Iterable[str]) -> None:
    """Let a user's own files also be in the new folder, so that they are in one of the two at any moment."""
    if source.is_symlink():  # they are where it leads
        return
    of_a_state = {path.relative_to(source).parts[0] for pattern in files for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.name in of_a_state or os.path.lexists(target / path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, target / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name; a copy where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
