"""The files of a training state into a place that takes whole files: each rank puts its own, and rank 0 the manifest.

A state there is never replaced, so that nothing can damage it: each has a name of its own. What a save has left that
was cut off is known by a mark (`UNFINISHED`), and removed by the next save to that name.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import gettempdir

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.saving.manifest import MANIFEST, SAVING, UNFINISHED, entry_of, manifest_text
from hf_fsdp_tools.saving.target import WholeFiles
from hf_fsdp_tools.text import listed


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
