"""The place of a training state: a folder that is replaced as a whole, or what takes whole files and keeps what it has.

A folder is made in a hidden one next to it, and takes its place. In a place that takes whole files each rank puts its
own, and rank 0 the manifest: nothing can damage a state there, as each has a name of its own. What a save has left that
was cut off is known by a mark (`UNFINISHED`), and removed by the next save to that name.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import gettempdir

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.folders import try_lock
from hf_fsdp_tools.saving.durable import exchange, sync
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.manifest import MANIFEST, UNFINISHED, entry_of, manifest_text, write_manifest
from hf_fsdp_tools.saving.target import Target, WholeFiles
from hf_fsdp_tools.text import listed

SAVING = "saving (what was saved before is still there)"
"""What ranks that save a training state are doing, for messages."""


def state_place(target: Target, patterns: Sequence[str]) -> "StateFolder | StreamedState":
    """The place of a state whose files have names of these `patterns`."""
    if isinstance(target, Folder):
        return StateFolder(target.folder, patterns)
    assert isinstance(target, WholeFiles)
    return StreamedState(target, patterns)


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


class StreamedState:
    """A state of which each rank writes its part to a private folder, in the system's place for temporary files, and
    puts it from there. Every rank must call each."""

    is_private = True

    def __init__(self, target: WholeFiles, patterns: Sequence[str]) -> None:
        """`patterns` are those of the files of a state."""
        self.where, self._target, self._patterns = target.where, target, patterns
        self.written_to, self.discard = Path(gettempdir()), target.discard

    @property
    def new(self) -> Path:
        """The private folder, after `begin`."""
        return self._target.new

    def begin(self) -> None:
        """Mark the place as that of a state that is being saved; refuse one that holds a state.

        Rank 0 removes what a save has left that was cut off.
        """
        target = self._target
        with agreed("saving the state", self.where):
            target.begin()
            if rank_and_size()[0] == 0:
                there = target.files()
                left = self._of_state(there)
                if MANIFEST in there or (left and UNFINISHED not in there):
                    raise CheckpointError(
                        f"{self.where!r} holds a training state ({listed(left or [MANIFEST], 3)}), and states "
                        "in stores are not replaced. Give each state a name of its own, as f'{run}/step-{step}'; or "
                        "delete that one."
                    )
                target.put(UNFINISHED, b"{}\n")
                for name in left:
                    target.remove(name)

    def publish(self, needed: Iterable[str], *, checksums: bool = False) -> tuple[dict[str, int | None], int]:
        """Put the files of each rank's own folder, then the manifest; the sizes of all files by their paths, and the
        bytes that this rank has put.

        Where several ranks have a file (schedulers, with `save_on_each_node`), the first one's is put. Names, sizes and
        checksums are exchanged.
        """
        rank, own, target = rank_and_size()[0], self.new, self._target
        with agreed(SAVING, self.where), storage_errors("read", own):
            files = {file.relative_to(own).as_posix(): file for file in sorted(own.rglob("*")) if file.is_file()}
            entries = {n: (f.stat().st_size, entry_of(f, checksums=checksums)) for n, f in files.items()}
            of_ranks = all_ranks(entries, "sharing sizes and checksums")
            every = {name: entry for of_rank in reversed(of_ranks) for name, entry in sorted(of_rank.items())}
            mine = [name for name in files if not any(name in of_rank for of_rank in of_ranks[:rank])]
            if rank == 0:
                named = sorted({*needed, *self._of_state(every)})
                if gone := [name for name in named if name not in every]:
                    raise CheckpointError(
                        f"No rank has written {listed(gone)} of the state for {self.where!r}. Save again."
                    )
                text = manifest_text({name: every[name][1] for name in named})
                (target.new / MANIFEST).write_text(text, "utf-8")
            for name in mine:
                target.copy(name, files[name])
        sizes = {name: every[name][0] for name in sorted(every)}
        with agreed(SAVING, self.where):
            target.publish(MANIFEST, sizes)
            if rank == 0:
                with suppress(Exception):  # next to the manifest, the mark means nothing
                    target.remove(UNFINISHED)
        return {**sizes}, sum(sizes[name] for name in mine)

    def _of_state(self, files: Iterable[str]) -> list[str]:
        return sorted(name for name in files if any(fnmatch(name, pattern) for pattern in self._patterns))


# ---- one folder in place of another ----


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
