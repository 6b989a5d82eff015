"""Compare what the ranks have opened: copies of one checkpoint on the disks of several nodes may differ."""

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import by_rank, compare_at_end, rank_and_size
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, QuantizedTensor, Stored
from hf_fsdp_tools.loading.index import CheckpointIndex

_OF_ONE_LOAD = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config that say where it was found."""


def fingerprint(index: CheckpointIndex, *configs: Any) -> dict[str, str]:
    """Commit, digest of configs, and digest of the headers of all weight files with the sizes of the files.

    Copies of equal fingerprints differ at most in values: no data is read.
    """
    known: dict[str, Any] = vars(index)  # an index does not change: its headers are digested once
    if "_header_digest" not in known:
        known["_header_digest"] = _digest(_header(index))
    return {
        "commit": index.commit or "a local folder",
        "config": _digest(_plain(config) for config in configs),
        "header of the weight files": known["_header_digest"],
    }


def refuse_other_contents(index: CheckpointIndex, *configs: Any) -> None:
    """Refuse a checkpoint of which ranks have opened different copies: other commits, a stale copy on one node's disk.

    Every rank of the default process group must call. The ranks exchange the fingerprints of what each has opened, in
    `agreed_steps` where that ends.

    Raises:
        CheckpointError: the copies differ, or a file cannot be read; the same on every rank. The message says which
            rank on which host has which.
    """
    if rank_and_size()[1] > 1:
        own = (index.name, socket.gethostname(), fingerprint(index, *configs))
        compare_at_end(own, _refuse_others, "comparing the checkpoint between nodes")


def _refuse_others(opened: list[tuple[str, str, dict[str, str]]]) -> None:
    """Refuse what differs between ranks, of each of which name, host and fingerprint are known."""
    name, _, first = opened[0]
    for part in first:
        if len({own[part] for _, _, own in opened}) > 1:
            each = [f"{own[part]} (host {host})" for _, host, own in opened]
            raise CheckpointError(
                f"{name!r} is not the same on all nodes: its {part} is {by_rank(each)}. Give one commit of a hub name "
                "as revision; or copy one folder to all nodes again, or give a folder on storage that all nodes share."
            )


def _digest(parts: Iterable[Any]) -> str:
    """The first 12 digits of the sha256 of data that JSON takes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()[:12]


def _plain(config: Any) -> Any:
    """A config as data, without what says where it was found."""
    data = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items() if key not in _OF_ONE_LOAD}
    return data if isinstance(data, (str, int, float, list, tuple, type(None))) else type(data).__name__


def _header(index: CheckpointIndex) -> Iterable[Any]:
    """Name, dtype, shape, file and position of every tensor, and the size of every file."""
    files: set[Path] = set()
    for key in sorted(index.tensors):
        tensor = index.tensors[key]
        yield [key, str(tensor.dtype), list(tensor.shape)]
        for file, *place in _ranges(tensor):
            files.add(file)
            yield [file.name, *place]
    for file in sorted(files):
        with watched(file):
            yield [file.name, file.stat().st_size]


def _ranges(tensor: Stored) -> list[tuple[Path, int, int]]:
    """File, position and length of each stored part of a tensor."""
    if isinstance(tensor, ChunkedTensor):
        parts = [chunk.stored for chunk in tensor.chunks]
    elif isinstance(tensor, QuantizedTensor):
        parts = [tensor.values, *(scales.stored for scales in tensor.scales.values())]
    else:
        parts = [tensor]
    return [(part.file, part.offset, part.num_bytes) for part in parts]
