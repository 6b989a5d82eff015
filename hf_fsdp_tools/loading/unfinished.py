"""Folders that a save is changing, or was changing when it was killed, as a reader finds them."""

import re
from collections.abc import Iterable
from pathlib import Path

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.safetensors import MAX_HEADER_BYTES, parse_json
from hf_fsdp_tools.loading.formats.stored import leaves_folder
from hf_fsdp_tools.text import quoted

CONFIG = "config.json"

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
"""What transformers and huggingface_hub name the files of one checkpoint."""


def stamps(folder: Path, *names: str) -> list[tuple[int, int] | None]:
    """What changes when a save replaces the checkpoint of a folder, whose weights are opened by these names."""
    found: list[tuple[int, int] | None] = []
    with watched(folder):
        for name in (*names, CONFIG):
            try:
                status = (folder / name).stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_mtime_ns))
    return found


def named_in_config(folder: Path) -> str | None:
    """The weight file or index that `config.json` names (`transformers_weights`), as transformers follows it; None
    where it names none.
    """
    file = folder / CONFIG
    with watched(file):
        if not file.is_file() or file.stat().st_size > MAX_HEADER_BYTES:
            return None
        text = file.read_bytes()
    try:
        named = parse_json(file, text).get("transformers_weights")
    except CheckpointError:
        return None  # whoever loads the config says so
    if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
        return None
    if leaves_folder(named):
        raise CheckpointError(f"{file}: transformers_weights is {quoted(named)}; expected a file inside the folder.")
    return named


def refuse_incomplete(files: Iterable[Path]) -> None:
    """Refuse shards without an index of which some are missing: their save, or their download, was cut off."""
    shards = [(file, found) for file in files if (found := _SHARD.fullmatch(file.name))]
    for file, found in shards:
        stem, count = found["stem"], found["count"]
        there = {other["number"] for _, other in shards if (other["stem"], other["count"]) == (stem, count)}
        if len(there) != int(count):
            raise CheckpointError(
                f"{str(file.parent)!r} holds {len(there)} of {int(count)} files {stem}-*-of-{count}.safetensors and no "
                "index: it is being saved, or was not saved or copied whole. Save or copy it again."
            )
