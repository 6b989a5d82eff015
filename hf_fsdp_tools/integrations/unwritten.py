"""Training states that are written in the background: what is left to write, and how each state is then complete."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from hf_fsdp_tools.background import in_background
from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.saving.held_dcp import HeldWriter, copy_held
from hf_fsdp_tools.saving.manifest import read_manifest
from hf_fsdp_tools.saving.report import SaveReport
from hf_fsdp_tools.saving.save import BegunSave


class Unwritten:
    """The parts of a state that are written from copies, in the order in which they were added."""

    def __init__(self) -> None:
        self.writes: list[Callable[[], int]] = []
        """Each writes a part, on every rank, and gives the bytes of this one."""
        self.held = ExitStack()
        """What is given back once all is written, or nothing of it will be."""
        self.weights: list[str] = []
        """Names of the models' files, once they are written."""
        self.copied_bytes = 0

    def add_model(self, begun: BegunSave) -> None:
        """Add a model that `begin_save` has copied."""

        def write() -> int:
            report = begun.finish()
            self.weights += report.files
            return report.bytes_written

        self.held.callback(begun.drop)
        self.writes.append(write)
        self.copied_bytes += begun.report.copied_bytes

    def known(self, folder: Path) -> SaveReport:
        """The report of a state before it is written."""
        return SaveReport(
            folder=str(folder),
            files=(),
            total_bytes=0,
            bytes_written=0,
            gathered_bytes=0,
            write_calls=0,
            seconds=0.0,
            copied_bytes=self.copied_bytes,
        )

    def add_dcp(self, writer: HeldWriter) -> None:
        """Add a DCP folder that is planned, and copy its values. Every rank must call."""
        copies = copy_held(writer)
        self.held.callback(copies.give_back)
        self.writes.append(writer.write)
        self.copied_bytes += copies.num_bytes


def finish_state(
    folder: Path, unwritten: Unwritten, complete: Callable[[], None], *, blocking: bool, start_s: float
) -> None:
    """Write what is left of a state, then let `complete` declare it complete: now, or in the background.

    Every rank must call.
    """
    finish = partial(_finish, folder, unwritten, complete)
    if blocking:
        finish()
    else:
        in_background(finish, unwritten.known(folder), start_s)


def _finish(folder: Path, unwritten: Unwritten, complete: Callable[[], None]) -> SaveReport:
    with unwritten.held:
        num_bytes = sum(write() for write in unwritten.writes)
        complete()
    with agreed("reading the manifest", folder):
        manifest = read_manifest(folder)
        sizes = manifest.sizes if manifest is not None else {}
    total_bytes = sum(size or 0 for size in sizes.values())
    return replace(unwritten.known(folder), files=tuple(sizes), total_bytes=total_bytes, bytes_written=num_bytes)
