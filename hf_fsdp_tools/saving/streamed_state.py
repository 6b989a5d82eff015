"""The files of a training state into a place that takes whole files: each rank puts its own, and rank 0 the manifest.

A state there is never replaced, so that nothing can damage it: each has a name of its own. What a save has left that
was cut off is known by a mark (`UNFINISHED`), and removed by the next save to that name.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.saving.manifest import MANIFEST, UNFINISHED, entry_of, manifest_text
from hf_fsdp_tools.saving.targets import Target
from hf_fsdp_tools.stores import STATE_FOLDER_PREFIXES
from hf_fsdp_tools.text import listed

T = TypeVar("T")


def take_name(target: Target, patterns: Collection[str]) -> None:
    """Mark a place as that of a state that is being saved; refuse one that holds a state. Every rank must call.

    `patterns` are of the files of a state; rank 0 removes those that a save has left that was cut off.
    """
    with agreed("saving the state", target.where):
        target.check()
        if rank_and_size()[0] == 0:
            there = target.files()
            left = _of_state(there, patterns)
            if MANIFEST in there or (left and UNFINISHED not in there):
                raise CheckpointError(
                    f"{target.where!r} holds a training state ({listed(sorted(left) or [MANIFEST], 3)}), and states in "
                    "stores are not replaced. Give each state a name of its own, as f'{run}/step-{step}'; or delete "
                    "that one."
                )
            target.put(UNFINISHED, b"{}\n")
            for name in left:
                target.remove(name)


def put_state(
    target: Target, own: Path, needed: Iterable[str], patterns: Collection[str], *, checksums: bool, doing: str
) -> tuple[dict[str, int], int]:
    """Put the files of each rank's own folder, then the manifest. Every rank must call.

    The sizes of all files by their paths, and the bytes that this rank has put. Where several ranks have
    a file (schedulers, with `save_on_each_node`), the first one's is put. Names, sizes and checksums are exchanged.
    """
    rank = rank_and_size()[0]
    mine: list[str] = []
    try:
        with agreed(doing, target.where), storage_errors("read", own):
            files = {file.relative_to(own).as_posix(): file for file in sorted(own.rglob("*")) if file.is_file()}
            entries = {n: (f.stat().st_size, entry_of(f, checksums=checksums)) for n, f in files.items()}
            of_ranks = all_ranks(entries, "sharing sizes and checksums")
            every = {name: entry for of_rank in reversed(of_ranks) for name, entry in of_rank.items()}
            mine = [name for name in files if not any(name in of_rank for of_rank in of_ranks[:rank])]
            listed_ones = sorted({*needed, *_of_state(every, patterns)}) if rank == 0 else []
            if gone := [name for name in listed_ones if name not in every]:
                raise CheckpointError(
                    f"No rank has written {listed(gone)} of the state for {target.where!r}. Save again."
                )
            for name in mine:
                target.put_file(name, files[name])
    except BaseException:
        for name in mine:
            with suppress(Exception):  # the mark says that nothing there counts, and the error that led here is shown
                target.remove(name)
        raise
    sizes = {name: size for name, (size, _) in every.items()}
    with agreed(doing, target.where):
        if rank == 0:
            _refuse_other_sizes(target, sizes)
            _put_last(target, manifest_text({name: every[name][1] for name in listed_ones}).encode())
    return sizes, sum(sizes[name] for name in mine)


def _of_state(files: Mapping[str, T], patterns: Iterable[str]) -> dict[str, T]:
    return {name: file for name, file in files.items() if any(fnmatch(name, pattern) for pattern in patterns)}


def _refuse_other_sizes(target: Target, sizes: dict[str, int]) -> None:
    """Refuse a place that does not hold what the ranks have put, as far as it is listed."""
    there = target.files()
    expected = {name: size for name, size in sizes.items() if "/" not in name or name.startswith(STATE_FOLDER_PREFIXES)}
    wrong = [name for name, size in expected.items() if there.get(name) != size]
    if wrong:
        raise CheckpointError(
            f"{target.where!r} does not hold what the ranks wrote: {listed(wrong, 3)}. It must be the same store for "
            "all ranks, and keep what is written there."
        )


def _put_last(target: Target, text: bytes) -> None:
    """Put the manifest, and take the mark away; a request that failed may have been done all the same."""
    try:
        target.put(MANIFEST, text)
    except CheckpointError:
        if MANIFEST not in target.files():
            raise
    with suppress(Exception):  # next to the manifest, the mark means nothing
        target.remove(UNFINISHED)
