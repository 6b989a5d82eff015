"""Save a training state of an Accelerator or of a Trainer, now or in the background from copies."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_tools.background import in_background, wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, announced
from hf_fsdp_tools.errors import storage_errors, warn
from hf_fsdp_tools.loading.formats.dcp import METADATA
from hf_fsdp_tools.saving.held_dcp import BufferedWriter, ThreadedWriter, copy_held
from hf_fsdp_tools.saving.manifest import MANIFEST
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.save import BegunSave
from hf_fsdp_tools.saving.states import SAVING, StateFolder, StreamedState, remove_folder, state_place
from hf_fsdp_tools.saving.target import Target


class StateSave:
    """A state that is being saved. Parts may be left to write in the background."""

    def __init__(self, place: StateFolder | StreamedState, *, blocking: bool) -> None:
        """Where each rank writes to a folder of its own, parts are written at once, and what is put later is that."""
        self.place, self._writes_now = place, blocking or place.is_private
        self.needed: list[str] = []
        """Names of the files of which the state must have all, as rank 0 knows them."""
        self.after: Callable[[], None] = lambda: None
        """Run once the state is in its place: to delete old ones."""
        self.writes: list[Callable[[], int]] = []
        """Each writes a part from a copy, on every rank, and gives the bytes of this one."""
        self.held = ExitStack()
        """Given back once all is written, or nothing of it will be."""
        self.held.callback(place.discard)
        self.copied_bytes = 0

    @property
    def staging(self) -> Path:
        """The folder to which parts are written."""
        return self.place.new

    def add_model(self, begun: BegunSave) -> None:
        """Add a model that `begin_save` has copied."""

        def write() -> int:
            report = begun.finish()
            self.needed += report.files
            return report.bytes_written

        self.held.callback(begun.target.discard)
        self.writes.append(write)
        self.copied_bytes += begun.copied_bytes

    def write_dcp(self, values: Mapping[str, Any], folder: Path) -> None:
        """Write values as a DCP folder, or plan it and copy them. Every rank must call."""
        self.needed.append(f"{folder.relative_to(self.staging)}/{METADATA}")
        now = self._writes_now
        writer = ThreadedWriter(folder, sync_files=not self.place.is_private) if now else BufferedWriter(folder)
        save(dict(values), storage_writer=writer, planner=DefaultSavePlanner())
        if isinstance(writer, BufferedWriter):
            self.copied_bytes += copy_held(writer)
            self.writes.append(writer.write)

    def report(self, **values: Any) -> SaveReport:
        """The report of the state, before it is written if `values` do not say more."""
        return SaveReport(folder=self.place.where, copied_bytes=self.copied_bytes, **values)

    def finish(self, *, checksums: bool) -> SaveReport:
        """Write the parts that are left, and make the state that of its place. Every rank must call."""
        with self.held:
            num_bytes = sum(write() for write in self.writes)
            sizes, put_bytes = self.place.publish(self.needed, checksums=checksums)
            where = Path(self.place.where)
            with agreed("deleting old states", where), storage_errors("delete states older than", where):
                self.after()
                self.held.close()  # before any rank goes on
        total_bytes = sum(size or 0 for size in sizes.values())
        return self.report(files=tuple(sizes), total_bytes=total_bytes, bytes_written=num_bytes + put_bytes)


@contextmanager
def saving_state(target: Target, patterns: Sequence[str], *, blocking: bool, checksums: bool) -> Iterator[StateSave]:
    """Save a state: the block writes to `staging`, and adds what is written in the background.

    Where a place takes whole files, a state is never replaced, and gets in the background what ranks have written to
    their disks. `patterns` are of the files of a state. Every rank must call.
    """
    start_s = time.perf_counter()
    wait_for_saves()
    place = state_place(target, patterns)
    state = StateSave(place, blocking=blocking)
    try:
        place.begin()
        with announced(SAVING), storage_errors("save to", place.written_to):
            yield state
    except BaseException:
        state.held.close()
        raise
    if blocking:
        state.finish(checksums=checksums)
    else:
        in_background(lambda: state.finish(checksums=checksums), state.report(), start_s)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, its marks first, as a crash may come in between; warn where it cannot be deleted, for
    training need not end for that. Where it is a link, the link alone goes: somebody keeps the rest."""
    try:
        if not folder.is_symlink():
            (folder / MANIFEST).unlink(missing_ok=True)
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        remove_folder(folder)
    except OSError as error:
        warn(f"The old checkpoint {str(folder)!r} cannot be deleted: {error}. Delete it.")
