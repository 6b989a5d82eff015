"""Save a training state of an Accelerator or of a Trainer, now or in the background from copies."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.background import in_background, wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, announced
from hf_fsdp_tools.errors import storage_errors
from hf_fsdp_tools.fsdp1.flat_shards import plain_view
from hf_fsdp_tools.integrations.replacement import Replacement
from hf_fsdp_tools.saving.held_dcp import HeldWriter, copy_held
from hf_fsdp_tools.saving.manifest import read_manifest, write_manifest
from hf_fsdp_tools.saving.report import SaveReport
from hf_fsdp_tools.saving.save import BegunSave


class StateSave:
    """A state that is being saved, in a hidden folder; parts of it may be left to write in the background."""

    def __init__(self, folder: Path, files: Sequence[str], *, blocking: bool) -> None:
        self.folder, self.files, self.blocking = folder, files, blocking
        self.place = Replacement(folder, files)
        self.needed: list[str] = []
        """Names of the files of which the state must have all, as rank 0 knows them."""
        self.after: Callable[[], None] = lambda: None
        """Run on rank 0 once the state is in its place: to delete old ones."""
        self.writes: list[Callable[[], int]] = []
        """Each writes a part from a copy, on every rank, and gives the bytes of this one."""
        self.held = ExitStack()
        """Given back once all is written, or nothing of it will be."""
        self.copied_bytes = 0
        self.held.callback(self.place.end)

    @property
    def staging(self) -> Path:
        """The folder to write to."""
        return self.place.staging

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
        writer = FileSystemWriter(folder) if self.blocking else HeldWriter(folder)
        save(dict(values), storage_writer=writer, planner=DefaultSavePlanner())
        if isinstance(writer, HeldWriter):
            copies = copy_held(writer)
            self.held.callback(copies.give_back)
            self.writes.append(writer.write)
            self.copied_bytes += copies.num_bytes

    def report(self, **values: Any) -> SaveReport:
        """The report of the state, before it is written if `values` do not say more."""
        return SaveReport(folder=str(self.folder), copied_bytes=self.copied_bytes, **values)

    def finish(self, doing: str, *, checksums: bool) -> SaveReport:
        """Write the parts that are left, declare the state complete and put it into its place. Every rank must call."""
        with self.held:
            bytes_written = sum(write() for write in self.writes)
            with agreed(doing, self.folder), storage_errors("save to", self.folder):
                write_manifest(self.staging, self.needed, self.files, checksums=checksums)
            self.place.take_place()
            with agreed("deleting old states", self.folder), storage_errors("save to", self.folder):
                self.after()
        with agreed("reading the manifest", self.folder):
            manifest = read_manifest(self.folder)
            sizes = manifest.sizes if manifest is not None else {}
        total_bytes = sum(size or 0 for size in sizes.values())
        return self.report(files=tuple(sizes), total_bytes=total_bytes, bytes_written=bytes_written)


@contextmanager
def saving_state(folder: Path, files: Sequence[str], *, blocking: bool, checksums: bool) -> Iterator[StateSave]:
    """Save a state: the block writes to `staging`, and adds what is written in the background.

    Until all is written, an older state in the folder stays as it is. `files` are patterns of the files of a state, for
    its manifest; others in the folder are a user's own. Every rank must call.
    """
    start_s, doing = time.perf_counter(), "saving (what was saved before is still there)"
    wait_for_saves()
    state = StateSave(folder, files, blocking=blocking)
    try:
        state.place.begin()
        with announced(doing), storage_errors("save to", folder):
            yield state
    except BaseException:
        state.held.close()
        raise
    if blocking:
        state.finish(doing, checksums=checksums)
    else:
        in_background(lambda: state.finish(doing, checksums=checksums), state.report(), start_s)


def saveable(model: nn.Module) -> nn.Module:
    """The model that `save_pretrained` takes: inside `torch.compile`'s wrapper, and FSDP1 as its plain view."""
    model = getattr(model, "_orig_mod", model)
    return plain_view(model) if FullyShardedDataParallel.fsdp_modules(model) else model
