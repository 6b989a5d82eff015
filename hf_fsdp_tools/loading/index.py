"""Which file of a checkpoint holds which tensor, with dtype, shape and byte range: headers are read, data is not."""

import hashlib
import json
import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hf_fsdp_tools.distributed.agreement import by_rank, compare_at_end, rank_and_size
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.loading.formats.dcp import SavedPath, is_wrapped, model_part, parse_dcp, peft_part
from hf_fsdp_tools.loading.formats.pickled import locate_chunk, parse_pickled
from hf_fsdp_tools.loading.formats.safetensors import join_parts, parse_header
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, QuantizedTensor, Stored, StoredTensor
from hf_fsdp_tools.loading.weight_files import (
    ACCELERATE_PICKLED,
    PICKLED,
    PICKLED_INDEX,
    WEIGHTS,
    WEIGHTS_INDEX,
    Contents,
    as_one_message,
    is_pickled,
    read_listing,
    stamps,
)
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.stores import name_of, pinned

_OF_ONE_LOAD = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config that say where it was found."""


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The tensors of a checkpoint by key: dtype, shape, file and byte range of each.

    Make one with `CheckpointIndex.open`, or, for a format of your own, from its tensors (`docs/extending.md`).

    Example:
        >>> index = CheckpointIndex.open("checkpoint")
        >>> index.tensors["lm_head.weight"].shape, index.dtype
        ((131, 48), torch.float32)
    """

    name: str
    """The folder, file or hub name that was opened, for messages."""
    tensors: Mapping[str, Stored]
    """Every tensor of every file, by its stored key."""
    header_bytes: int
    """Bytes read to make this index: headers and index file."""
    is_model_state: bool = False
    """Whether keys and tensors have the model's own layout (a DCP folder), so that nothing is converted."""
    commit: str | None = None
    """The commit that was fetched or found in the cache; None for a local path."""
    _saved: Mapping[SavedPath, StoredTensor | ChunkedTensor] = field(default_factory=dict, repr=False)
    """All tensors of a training state, by their path in the saved state dict; `of_model` picks the model's."""
    _states: Mapping[Path, tuple[int, int]] = field(default_factory=dict, repr=False)
    """Inode and time of modification of each file before its header was read."""

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor, to which `dtype="auto"` falls back; None if there is none."""
        return next(
            (t.dtype for t in self.tensors.values() if t.dtype.is_floating_point and t.dtype.itemsize > 1), None
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the whole checkpoint."""
        return sum(t.num_bytes for t in self.tensors.values())

    @cached_property
    def contents(self) -> dict[str, str]:
        """What copies of it have alike: its commit, and a digest of headers and sizes of its files."""
        return {
            "commit": self.commit or "a local folder",
            "header of the weight files": _digest(_headers(self.tensors)),
        }

    @cached_property
    def _chunks(self) -> dict[str, StoredTensor]:
        chunked = [t for t in self.tensors.values() if isinstance(t, ChunkedTensor)]
        return {chunk.key: chunk for t in chunked for chunk in t.parts}

    def _stored(self, source: str) -> Stored:
        return self._chunks.get(source) or self.tensors[source]

    def source_dtype(self, source: str, floats: torch.dtype | None = None) -> torch.dtype:
        """The stored dtype of a source: a tensor or a chunk of a tensor, by the name that pieces have for it; if it is
        stored in another dtype than it passes for, the dtype of the `floats` that it becomes, where that is given."""
        tensor = self._stored(source)
        is_as_it_passes = all(part.dtype == tensor.dtype for part in tensor.parts)
        return tensor.dtype if floats is None or is_as_it_passes else floats

    def stored_bytes(self, source: str) -> float:
        """Bytes in which one value of a source is stored, its part of the scales of a quantised tensor included."""
        tensor = self._stored(source)
        return float(tensor.num_bytes / max(1, math.prod(tensor.shape)))

    def source(self, source: str) -> StoredTensor | QuantizedTensor:
        """Where the bytes of a source lie (of a chunk, looked up now: a rank needs few), or its values and scales."""
        tensor = self._stored(source)
        assert not isinstance(tensor, ChunkedTensor)
        if isinstance(tensor, StoredTensor) and tensor.is_archive:
            tensor = self._chunks[source] = locate_chunk(tensor)
        return tensor

    def refuse_changed(self) -> None:
        """Refuse files that another save replaced or wrote after their headers were read; values may be mixed."""
        now = stamps(self._states)
        if changed := [file for file, state in self._states.items() if now[file] != state]:
            raise CheckpointError(
                f"{name_of(changed[0])}: was replaced, written or removed while the checkpoint was read, by another "
                "save or download as a rule. Load the checkpoint again when that is over."
            )

    def of_model(self, model_keys: Collection[str]) -> "CheckpointIndex":
        """An index of the tensors of one model, under the model's names; a training state can hold more."""
        return self._with(model_part(self._saved, model_keys, self.name)) if self._saved else self

    def _with(self, tensors: Mapping[str, StoredTensor | ChunkedTensor]) -> "CheckpointIndex":
        """This checkpoint with other tensors, by the names that models have for them."""
        named = {key: replace(t, key=key) if isinstance(t, StoredTensor) else t for key, t in tensors.items()}
        return replace(self, tensors=MappingProxyType(named), _saved={})

    def split_adapter(
        self, marks: Callable[[], tuple[str, ...]]
    ) -> "tuple[CheckpointIndex | None, CheckpointIndex | None]":
        """The base and the adapter in the state of a `PeftModel` (None: not saved); of others, itself and None."""
        split = peft_part(self._saved, marks)
        if split is None:
            return self, None
        base, adapter = split
        rest = replace(self, tensors=MappingProxyType({t.key: t for t in base.values()}), _saved=base)
        return (rest if base else None), self._with(adapter)

    @classmethod
    @pinned()
    def open(
        cls,
        path_or_repo: str | PathLike[str],
        *,
        allow_pickle: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike[str] | None = None,
        local_files_only: bool = False,
        subfolder: str | None = None,
    ) -> "CheckpointIndex":
        """Index a local folder, a single weight file, or a hub name.

        Of a hub checkpoint, the weight files are downloaded, once for all ranks of a node, which share the cache. Of
        local files, only headers are read. No rank communicates.

        Args:
            path_or_repo: one such file, a hub name, or a folder with the first of

                - `model.safetensors`, an index file or plain `*.safetensors`, also such as hold parts of tensors
                  (`shard-*.safetensors` of torch's `HuggingFaceStorageWriter`);
                - a checkpoint of `torch.distributed.checkpoint` (`.metadata` and `*.distcp`), also one folder below, as
                  Accelerate's `save_state` and the Trainer write it (`pytorch_model_fsdp_0`);
                - if `allow_pickle`, `pytorch_model.bin`, Accelerate's `pytorch_model_fsdp.bin`, or an index and shards.
            allow_pickle: read legacy `.bin` files too. They are pickles, read by torch's restricted unpickler, which
                builds tensors and runs no code of the file (`weights_only=True`).
            revision: branch, tag or commit on the hub.
            token: hub token; None uses the stored one.
            cache_dir: where downloads go; None is the hub library's own default.
            local_files_only: do not touch the network.
            subfolder: folder within the checkpoint.

        Raises:
            CheckpointError: the path is absent, holds no weights, or a file or header is damaged.
        """
        name, commit = fspath(path_or_repo), None
        with watched(Path(name)):
            path = local_path(name)
        if path is None:
            hub_kwargs = {"revision": revision, "token": token, "cache_dir": cache_dir, "subfolder": subfolder}
            path, commit = _fetch_weights(name, allow_pickle, hub_kwargs | {"local_files_only": local_files_only})
        elif subfolder:
            path = path / subfolder
        index = Contents(path).settled(partial(cls.of, name=name, allow_pickle=allow_pickle))
        return replace(index, commit=commit)

    @classmethod
    def of(cls, contents: Contents, *, name: str, allow_pickle: bool) -> "CheckpointIndex":
        """Index the checkpoint of a folder, of whatever kind."""
        with storage_errors("read", contents.path):
            if (saved := contents.dcp()) is None:
                return cls._of_files(name, *contents.weights(allow_pickle=allow_pickle))
            states = stamps(saved.like("*.distcp"))
            stored, num_bytes = parse_dcp(saved.path)
        tensors = MappingProxyType({tensor.key: tensor for _, tensor in stored})
        own: dict[str, Any] = {"header_bytes": num_bytes, "_saved": dict(stored), "_states": states}
        return cls(name=name, tensors=tensors, is_model_state=True, **own)  # `of_model` picks the model's tensors later

    @classmethod
    def _of_files(cls, name: str, files: Iterable[Path], listing: Path | None) -> "CheckpointIndex":
        """Read every header; check them against each other and against the index file; report all problems at once."""
        parts: dict[str, list[StoredTensor]] = {}
        tensors: dict[str, StoredTensor | ChunkedTensor] = {}
        keys: dict[SavedPath, str] = {}
        problems: list[str] = []
        weight_map = read_listing(listing) if listing else {}
        header_bytes = listing.stat().st_size if listing else 0
        states = stamps(files or sorted(set(weight_map.values())))
        for file in states:
            try:
                stored, num_bytes = parse_pickled(file) if is_pickled(file) else parse_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            header_bytes += num_bytes
            for path, tensor in stored:
                keys[path] = tensor.key
                parts.setdefault(tensor.key, []).append(tensor)
        for key, several in parts.items():
            try:
                tensors[key] = join_parts(key, several)
            except CheckpointError as error:
                problems.append(str(error))
        if not problems:
            problems += [
                f"{listing}: names {key!r} in {file.name!r}, which does not hold it; the index does not belong to "
                "these files. Download or save all of them again."
                for key, file in weight_map.items()
                if key not in tensors or tensors[key].file != file
            ]
        if problems:
            raise CheckpointError(as_one_message(problems))
        is_pickled_state = any(fnmatch(file.name, ACCELERATE_PICKLED) for file in states)
        is_model_state = is_pickled_state or any(len(path) > 1 for path in keys)
        return cls(
            name=name,
            tensors=MappingProxyType(tensors),
            header_bytes=header_bytes,
            is_model_state=is_model_state,
            _saved={path: tensors[key] for path, key in keys.items()} if is_model_state or is_wrapped(tensors) else {},
            _states=states,
        )


def _fetch_weights(name: str, allow_pickle: bool, hub_kwargs: dict[str, Any]) -> tuple[Path, str]:
    """(local folder, commit) of a hub checkpoint: fetches its index, then exactly the files that the index names."""
    folder, pinned = fetch(name, WEIGHTS, WEIGHTS_INDEX, **hub_kwargs)
    more = partial(fetch, name, **(hub_kwargs | pinned))
    if not (folder / WEIGHTS).is_file():
        more(*_names_listed(folder / WEIGHTS_INDEX) or ["*.safetensors"])
        if allow_pickle and not any(folder.glob("*.safetensors")):
            more(PICKLED, PICKLED_INDEX)
            if shards := _names_listed(folder / PICKLED_INDEX):
                more(*shards)
    return folder, pinned["revision"]


def _names_listed(file: Path) -> list[str]:
    """The names of an index file and of its weight files, unchecked; empty without an index file."""
    if not file.is_file():
        return []
    names = read_json_object(file).get("weight_map")
    return [file.name, *sorted({str(v) for v in names.values()} if isinstance(names, dict) else ())]


# ---- comparing copies ----


def refuse_other_contents(index: CheckpointIndex, *configs: Any) -> None:
    """Refuse a checkpoint of which ranks have opened different copies: other commits, a stale copy on one node's disk.

    Every rank of the default process group must call. The ranks exchange commit and digests of headers and configs, in
    `agreed_steps` where that ends; values are not read.
    """
    if rank_and_size()[1] > 1:
        own = index.contents | {"config": _digest(_plain(config) for config in configs)}
        said = index.name, socket.gethostname(), own
        compare_at_end(said, _refuse_others, "comparing the checkpoint between nodes")


def _refuse_others(opened: list[tuple[str, str, dict[str, str]]]) -> None:
    """Refuse what differs between ranks; of each, name, host and what it compares are known."""
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


def _headers(tensors: Mapping[str, Stored]) -> Iterator[Any]:
    """Yield name, dtype, shape, file and position of every tensor, and the size of every file."""
    files: set[Path] = set()
    for key, tensor in sorted(tensors.items()):
        yield [key, str(tensor.dtype), list(tensor.shape)]
        for part in tensor.parts:
            files.add(part.file)
            yield [part.file.name, part.offset, part.num_bytes]
    for file in sorted(files):
        with watched(file):
            yield [file.name, file.stat().st_size]
