"""The list of a checkpoint's files, written last: with it, a checkpoint is complete, and what is damaged is known."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.loading.formats.stored import leaves_folder
from hf_fsdp_tools.modeling.pickles import read_json_object, refuse_special
from hf_fsdp_tools.saving.durable import sync, write_durably
from hf_fsdp_tools.stores import open_file
from hf_fsdp_tools.text import first_line, listed

MANIFEST = "checkpoint_manifest.json"
"""Name of the file in the checkpoint's folder."""

UNFINISHED = "unfinished_checkpoint.json"
"""Name of the file that a save to a store puts first and removes last: next to it, no manifest means that it was cut
off."""

_FORMAT = 1
_MOST = 200_000
"""Files that a checkpoint may have. (assumed)"""
_BLOCK_BYTES = 2**23
_KINDS = {"bytes": int, "sha256": str}
_CURE = "Where the checkpoint is known to be whole, delete this file; otherwise use another checkpoint."


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a complete checkpoint holds."""

    ranks: int
    """How many ranks saved it."""
    sizes: dict[str, int | None]
    """Bytes of each file, by its path in the folder; None for JSON files, which people edit: only absence counts."""
    sums: dict[str, str]
    """SHA-256 of files, as `sha256sum` prints it; empty unless it was asked for."""

    def damage(self, folder: Path) -> dict[str, str]:
        """What became of each file that is not as it was saved, by its path in the folder; contents are not read."""
        damage = {}
        for name, size in self.sizes.items():
            try:
                now = os.stat(folder / name).st_size
            except OSError as error:
                gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
                damage[name] = "is absent" if gone else f"cannot be read ({first_line(error)})"
                continue
            if size is not None and now != size:
                damage[name] = f"has {now:,} bytes, and had {size:,} when it was saved"
        return damage


def write_manifest(
    folder: Path, needed: Iterable[str], patterns: Iterable[str], *, checksums: bool = False
) -> dict[str, int | None]:
    """Declare a checkpoint complete: bring its files to disk, then write the list of them; their sizes.

    Every rank must call, after its last write. The ranks exchange names and sums.
    """
    rank, num_ranks = rank_and_size()
    with agreed("declaring the checkpoint complete", folder), storage_errors("save to", folder):
        names = all_ranks(_names(folder, needed, patterns) if rank == 0 else [], "sharing the list of files")[0]
        entries = {}
        for name in names[rank::num_ranks]:
            sync(folder / name)
            entries[name] = entry_of(folder / name, checksums=checksums)
        every = all_ranks(entries, "sharing sizes and checksums")
        files = {name: every[i % num_ranks][name] for i, name in enumerate(names)}
        if rank == 0:
            for below in sorted({(folder / name).parent for name in names}):
                sync(below)
            write_durably(folder / MANIFEST, manifest_text(files))
            sync(folder.parent)
    return {name: entry.get("bytes") for name, entry in files.items()}


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The content of a manifest, of the entries of files."""
    return json.dumps({"format": _FORMAT, "ranks": rank_and_size()[1], "files": files}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none. No rank communicates."""
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    try:
        text = read_json_object(file)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_CURE}") from None
    files, ranks = text.get("files"), text.get("ranks")
    if not isinstance(files, dict) or type(ranks) is not int or text.get("format") != _FORMAT or len(files) > _MOST:
        raise CheckpointError(f"{file}: is no list of at most {_MOST:,} files in format {_FORMAT}. {_CURE}")
    for name, entry in files.items():
        is_entry = isinstance(entry, dict) and all(type(entry[key]) is _KINDS.get(key) for key in entry)
        if leaves_folder(name) or not is_entry:
            raise CheckpointError(f"{file}: the entry of {name[:200]!r} is damaged. {_CURE}")
    return Manifest(
        ranks=ranks,
        sizes={name: entry.get("bytes") for name, entry in files.items()},
        sums={name: entry["sha256"] for name, entry in files.items() if "sha256" in entry},
    )


def check_sums(folder: Path, manifest: Manifest) -> None:
    """Read every file that has a checksum, each rank its part, and compare. Every rank must call."""
    rank, num_ranks = rank_and_size()
    with agreed("comparing checksums", folder), storage_errors("read", folder):
        names = sorted(manifest.sums)[rank::num_ranks]
        other = [repr(name) for name in names if _sum(folder / name) != manifest.sums[name]]
        if other:
            raise CheckpointError(
                f"{str(folder)!r} is not as it was saved: {listed(other)} have another checksum. Use another "
                "checkpoint, or copy it again."
            )


def _names(folder: Path, needed: Iterable[str], patterns: Iterable[str]) -> list[str]:
    required = sorted(set(needed))
    if gone := [repr(name) for name in required if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{str(folder)!r} was changed while it was saved: {listed(gone)} {'is' if len(gone) == 1 else 'are'} gone. "
            "It does not count as complete; older checkpoints are kept. Save again."
        )
    names = {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    return sorted({*required, *(name for name in names if name != MANIFEST and (folder / name).is_file())})


def entry_of(file: Path, *, checksums: bool) -> dict[str, Any]:
    """What a manifest says of a file."""
    if file.suffix == ".json":
        return {}
    # An open file shows its length where a network file system remembers an older one.
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
    return {"bytes": size} | ({"sha256": _sum(file)} if checksums else {})


def _sum(file: Path) -> str:
    digest = hashlib.sha256()
    refuse_special(file)
    with open_file(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
