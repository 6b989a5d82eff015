"""Save a training state of an Accelerator or of a Trainer, now or in the background from copies."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_tools.background import in_background, wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, announced, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors, warn
from hf_fsdp_tools.loading.formats.dcp import METADATA
from hf_fsdp_tools.saving.durable import exchange, sync
from hf_fsdp_tools.saving.held_dcp import BufferedWriter, ThreadedWriter, copy_held
from hf_fsdp_tools.saving.manifest import MANIFEST, read_manifest, write_manifest
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.save import BegunSave
from hf_fsdp_tools.saving.streamed_state import put_state, take_name
from hf_fsdp_tools.saving.targets import Target
from hf_fsdp_tools.stores import temporary_folder, try_lock


class StateSave:
    """A state that is being saved to a staging folder, which takes the place of a folder once every rank has written.

    Until then an older folder stays as it is; then one call of the system exchanges the two (two renames where there is
    no such call). A user's own files in it are kept. Parts may be left to write in the background.
    """

    def __init__(self, folder: Path, files: Sequence[str], *, blocking: bool = True) -> None:
        self.folder, self.files, self.blocking = folder.parent.resolve() / folder.name, files, blocking
        self.staging = _hidden(self.folder) / (folder.name or "root")
        """Written to between `begin` and `take_place`."""
        self.needed: list[str] = []
        """Names of the files of which the state must have all, as rank 0 knows them."""
        self.after: Callable[[], None] = lambda: None
        """Run once the state is in its place: to delete old ones."""
        self.writes: list[Callable[[], int]] = []
        """Each writes a part from a copy, on every rank, and gives the bytes of this one."""
        self.held = ExitStack()
        """Given back once all is written, or nothing of it will be; the lock by which other jobs keep away, too."""
        self.copied_bytes = 0

    def begin(self) -> None:
        """Make the staging folder. Every rank must call, and see the same file system."""
        folder = self.folder
        with agreed("saving the state", folder), storage_errors("save to", folder):
            if folder.is_mount():
                raise CheckpointError(f"{str(folder)!r} is a mount point, and stays. Save to a folder in it.")
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{str(folder)!r} is a file; give the name of a folder to save to.")
            if rank_and_size()[0] == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                self.held.enter_context(_only_job(folder))
                _clear(folder, self.files)
                self.staging.mkdir(parents=True)
        with agreed("opening a folder", self.staging):
            if not self.staging.is_dir():
                raise CheckpointError(f"{str(self.staging)!r} is absent. Save to a file system that all ranks share.")

    def take_place(self) -> None:
        """Switch. Every rank must call, after its last write."""
        with agreed("finishing the save", self.folder):
            if rank_and_size()[0] == 0:
                _take_place(self.staging, self.folder, self.files)

    def add_model(self, begun: BegunSave) -> None:
        """Add a model that `begin_save` has copied."""

        def write() -> int:
            report = begun.finish()
            self.needed += report.files
            return report.bytes_written

        self.held.callback(begun.drop)
        self.writes.append(write)
        self.copied_bytes += begun.report.copied_bytes

    def write_dcp(self, values: Mapping[str, Any], folder: Path) -> None:
        """Write values as a DCP folder, or plan it and copy them. Every rank must call."""
        self.needed.append(f"{folder.relative_to(self.staging)}/{METADATA}")
        writer = ThreadedWriter(folder) if self.blocking else BufferedWriter(folder)
        save(dict(values), storage_writer=writer, planner=DefaultSavePlanner())
        if isinstance(writer, BufferedWriter):
            self.copied_bytes += copy_held(writer)
            self.writes.append(writer.write)

    def report(self, **values: Any) -> SaveReport:
        """The report of the state, before it is written if `values` do not say more."""
        return SaveReport(folder=str(self.folder), copied_bytes=self.copied_bytes, **values)

    def finish(self, doing: str, *, checksums: bool) -> SaveReport:
        """Write the parts that are left, declare the state complete and put it into its place. Every rank must call."""
        with self.held:
            bytes_written = sum(write() for write in self.writes)
            with agreed(doing, self.folder), storage_errors("save to", self.folder):
                write_manifest(self.staging, self.needed, self.files, checksums=checksums)
            self.take_place()
            with agreed("deleting old states", self.folder), storage_errors("delete states older than", self.folder):
                self.after()
        with agreed("reading the manifest", self.folder):
            manifest = read_manifest(self.folder)
            sizes = manifest.sizes if manifest is not None else {}
        total_bytes = sum(size or 0 for size in sizes.values())
        return self.report(files=tuple(sizes), total_bytes=total_bytes, bytes_written=bytes_written)


class StreamedStateSave(StateSave):
    """A state that is saved where whole files are taken: each rank writes to a private folder, and puts its files
    there."""

    def __init__(self, target: Target, files: Sequence[str]) -> None:
        super().__init__(Path("state"), files)
        self.target = target

    def begin(self) -> None:
        """Make the private folder, in the system's place for temporary files. Every rank must call."""
        take_name(self.target, self.files)
        with agreed("making a folder for the state", self.target.where), storage_errors("write to", Path(gettempdir())):
            self.staging = self.held.enter_context(temporary_folder())

    def write_dcp(self, values: Mapping[str, Any], folder: Path) -> None:
        """Write this rank's part of a DCP folder, rank 0 the metadata too. Every rank must call."""
        self.needed.append(f"{folder.relative_to(self.staging)}/{METADATA}")
        save(dict(values), storage_writer=ThreadedWriter(folder, sync_files=False), planner=DefaultSavePlanner())

    def report(self, **values: Any) -> SaveReport:
        """The report of the state."""
        return SaveReport(folder=self.target.where, **values)

    def finish(self, doing: str, *, checksums: bool) -> SaveReport:
        """Put all files, and declare the state complete. Every rank must call."""
        with self.held:
            sizes, num_bytes = put_state(
                self.target, self.staging, self.needed, self.files, checksums=checksums, doing=doing
            )
        return self.report(files=tuple(sorted(sizes)), total_bytes=sum(sizes.values()), bytes_written=num_bytes)


@contextmanager
def saving_state(
    folder: Path | Target, files: Sequence[str], *, blocking: bool, checksums: bool
) -> Iterator[StateSave]:
    """Save a state: the block writes to `staging`, and adds what is written in the background.

    Where a place takes whole files, a state is never replaced, and gets in the background what ranks have written to
    their disks. `files` are patterns of the files of a state. Every rank must call.
    """
    state: StateSave
    start_s, doing = time.perf_counter(), "saving (what was saved before is still there)"
    wait_for_saves()
    if isinstance(folder, Path):
        state, written_to = StateSave(folder, files, blocking=blocking), folder
    else:
        state, written_to = StreamedStateSave(folder, files), Path(gettempdir())
    try:
        state.begin()
        with announced(doing), storage_errors("save to", written_to):
            yield state
    except BaseException:
        state.held.close()
        raise
    if blocking:
        state.finish(doing, checksums=checksums)
    else:
        in_background(lambda: state.finish(doing, checksums=checksums), state.report(), start_s)


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
        _remove(former)
    if os.path.lexists(hidden):
        _remove(hidden)


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
        _remove(former)
        shutil.rmtree(staging.parent)
    except OSError as error:
        raise CheckpointError(
            f"{str(folder)!r} is saved, but the former state cannot be deleted: {error}. Delete {str(former)!r} and "
            f"{str(staging.parent)!r}."
        ) from None


def _remove(folder: Path) -> None:
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


# ---- old checkpoints ----


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, its marks first, as a crash may come in between; warn where it cannot be deleted, for
    training need not end for that. Where it is a link, the link alone goes: somebody keeps the rest."""
    try:
        if not folder.is_symlink():
            (folder / MANIFEST).unlink(missing_ok=True)
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        _remove(folder)
    except OSError as error:
        warn(f"The old checkpoint {str(folder)!r} cannot be deleted: {error}. Delete it.")
