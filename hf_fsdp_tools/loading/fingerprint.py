"""Compare what the ranks have opened: copies of one checkpoint on the disks of several nodes may differ."""

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, by_rank, rank_and_size
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, QuantizedTensor, Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT

_SAMPLES = 256
"""How many tensors are sampled: nearly all of an 8B model's 291. (assumed)"""

_SAMPLE_BYTES = 4096
"""Bytes of one sample: a page, which a read brings in anyway."""

_OF_ONE_LOAD = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config that say where it was found."""

_DOING = "comparing the checkpoint between nodes"


def refuse_other_contents(index: CheckpointIndex, *configs: Any) -> None:
    """Refuse a checkpoint of which ranks have opened different copies: other commits, a stale copy on one node's disk.

    Compared are the commit of a hub name; the configs; the headers of all weight files (name, dtype, shape, file and
    position of every tensor) with the sizes of the files; and, of local files, samples of their bytes. Files with equal
    names, sizes, inodes and times of modification on all ranks are one and the same file, on storage that the ranks
    share, and are not sampled. Otherwise one rank reads for each copy on each host: the last 4 KiB of each file, and
    of 256 tensors that are spread over all of them.

    What can be missed: copies with equal configs and headers whose bytes differ only outside of the samples, as one
    flipped bit does, or a few changed tensors of a checkpoint with many thousands.

    Args:
        index: as this rank has opened it.
        configs: of transformers, also None.

    Every rank of the default process group must call. The ranks exchange digests.

    Raises:
        CheckpointError: the copies differ, or a file cannot be read; the same on every rank. The message says which
            rank on which host has which.
    """
    rank, world_size = rank_and_size()
    if world_size == 1:
        return
    host, mine = socket.gethostname(), {}
    with agreed(_DOING):
        mine = {
            "commit": index.commit or "a local folder",
            "config": _digest(_plain(config) for config in configs),
            "header of the weight files": _digest(_header(index)),
        }
        places = _places(index) if index.commit is None else ""
    told = all_ranks((index.name, host, mine, places), _DOING)
    for what in mine:
        _compare(told[0][0], what, [(other, found[what]) for _, other, found, _ in told])
    if len({one for *_, one in told}) == 1:
        return
    copies = [(other, one) for _, other, _, one in told]
    with agreed(_DOING):
        sampled = _digest(_samples(index)) if copies.index(copies[rank]) == rank else None
    samples = all_ranks(sampled, _DOING)
    _compare(told[0][0], "content", [(copy[0], samples[copies.index(copy)] or "") for copy in copies])


def _compare(name: str, what: str, told: list[tuple[str, str]]) -> None:
    """Refuse what differs between ranks, which are told by their hosts and digests."""
    if len({found for _, found in told}) == 1:
        return
    raise CheckpointError(
        f"{name!r} is not the same on all nodes: its {what} is "
        f"{by_rank([f'{found} (host {host})' for host, found in told])}. Give one commit of a hub name as revision; "
        "or copy one folder to all nodes again, or give a folder on storage that all nodes share."
    )


def _digest(parts: Iterable[Any]) -> str:
    """The first 12 digits of the sha256 of data that JSON takes, or of bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()[:12]


def _plain(config: Any) -> Any:
    """A config as data, without what says where it was found."""
    data = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items() if key not in _OF_ONE_LOAD}
    return data if isinstance(data, (str, int, float, list, tuple, type(None))) else type(data).__name__


def _header(index: CheckpointIndex) -> Iterable[Any]:
    """Name, dtype, shape, file and position of every tensor, and the size of every file."""
    for key in sorted(index.tensors):
        tensor = index.tensors[key]
        yield [key, str(tensor.dtype), list(tensor.shape)]
        yield from ([file.name, *place] for file, *place in _ranges(tensor))
    for file in _files(index):
        with watched(file):
            yield [file.name, file.stat().st_size]


def _places(index: CheckpointIndex) -> str:
    """A digest that is equal for one and the same files, and in practice for no others."""
    found = []
    for file in _files(index):
        with watched(file):
            state = file.stat()
        found.append([file.name, state.st_size, state.st_mtime_ns, state.st_ino])
    return _digest(found)


def _samples(index: CheckpointIndex) -> Iterable[bytes]:
    """Bytes at the end of each file and of tensors that are spread over all of them; this rank reads."""
    ranges = sorted({place for tensor in index.tensors.values() for place in _ranges(tensor) if place[2]})
    step = max(1, -(-len(ranges) // _SAMPLES))
    starts: dict[Path, set[int]] = {file: set() for file in _files(index)}
    for file, offset, length in ranges[::step]:
        starts[file].add(max(offset, offset + length - _SAMPLE_BYTES))
    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool:
        for parts in pool.map(_read_samples, starts, starts.values()):
            yield from parts


def _read_samples(file: Path, starts: set[int]) -> list[bytes]:
    with watched(file), file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        last = max(0, os.fstat(opened.fileno()).st_size - _SAMPLE_BYTES)
        return [os.pread(opened.fileno(), _SAMPLE_BYTES, start) for start in sorted({*starts, last})]


def _ranges(tensor: Stored) -> list[tuple[Path, int, int]]:
    """File, position and length of each stored part of a tensor."""
    if isinstance(tensor, ChunkedTensor):
        return [(chunk.file, chunk.offset, chunk.length) for chunk in tensor.chunks]
    assert not isinstance(tensor, QuantizedTensor), "it is made of tensors of the files when these are matched"
    return [(tensor.file, tensor.offset, tensor.num_bytes)]


def _files(index: CheckpointIndex) -> list[Path]:
    """The files of all tensors, in the order of their names."""
    return sorted({file for tensor in index.tensors.values() for file, _, _ in _ranges(tensor)})
