"""Which file of a checkpoint holds which tensor, with dtype, shape and byte range: headers are read, data is not."""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hf_fsdp_tools.checkpoint.formats.dcp import METADATA, find_dcp_folder, model_part, parse_dcp
from hf_fsdp_tools.checkpoint.formats.pickled import locate_chunk, parse_pickled
from hf_fsdp_tools.checkpoint.formats.safetensors import MAX_HEADER_BYTES, parse_header, parse_json
from hf_fsdp_tools.checkpoint.formats.stored import (
    ChunkedTensor,
    QuantizedTensor,
    Stored,
    StoredTensor,
    TensorChunk,
    leaves_folder,
)
from hf_fsdp_tools.checkpoint.unfinished import named_in_config, refuse_incomplete, stamps
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.text import listed, listed_lines, quoted

__all__ = ["CheckpointIndex"]

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
ACCELERATE_PICKLED = "pytorch_model_fsdp.bin"
"""Written by Accelerate's `save_state` under FULL_STATE_DICT, in the model's own layout."""


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The tensors of a checkpoint by key: dtype, shape, file and byte range of each.

    Make one with `CheckpointIndex.open`, or, for a format of your own, from its tensors (`docs/extending.md`).
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

    _saved: Mapping[tuple[str, ...], ChunkedTensor] = field(default_factory=dict, repr=False)
    """All tensors of a DCP folder, by their path in the saved state dict; `of_model` picks the model's."""

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
    def _chunks(self) -> Mapping[str, tuple[TensorChunk, torch.dtype]]:
        chunked = [t for t in self.tensors.values() if isinstance(t, ChunkedTensor)]
        return {chunk.name: (chunk, t.dtype) for t in chunked for chunk in t.chunks}

    @cached_property
    def _located(self) -> dict[str, StoredTensor]:
        return {}

    def source_dtype(self, source: str) -> torch.dtype:
        """The stored dtype of a source: a tensor or a chunk of a tensor, by the name that pieces have for it."""
        return self._chunks[source][1] if source in self._chunks else self.tensors[source].dtype

    def stored_bytes(self, source: str) -> float:
        """Bytes in which one value of a source is stored, its part of the scales of a quantised tensor included."""
        tensor = None if source in self._chunks else self.tensors[source]
        if isinstance(tensor, QuantizedTensor):
            return tensor.num_bytes / max(1, math.prod(tensor.shape))
        return self.source_dtype(source).itemsize

    def source_file(self, source: str) -> Path:
        """The file of a source; nothing is read."""
        return self._chunks[source][0].file if source in self._chunks else self.tensors[source].file

    def source(self, source: str) -> StoredTensor | QuantizedTensor:
        """Where the bytes of a source lie, or which values and scales it is made of.

        The place of a chunk is looked up in its file when it is first asked for: a rank needs few chunks.

        Raises:
            CheckpointError: the chunk is not what the metadata says.
        """
        if source not in self._chunks:
            whole = self.tensors[source]
            assert not isinstance(whole, ChunkedTensor)
            return whole
        if source not in self._located:
            self._located[source] = locate_chunk(*self._chunks[source])
        return self._located[source]

    def refuse_changed(self) -> None:
        """Refuse files that another save replaced or wrote after their headers were read: values of both may be mixed.

        Raises:
            CheckpointError: names a file that changed.
        """
        for file, state in self._states.items():
            with watched(file):
                found = _state_of(file)
            if found != state:
                raise CheckpointError(
                    f"{file}: was replaced, written or removed while the checkpoint was read, by another save or "
                    "download as a rule. Load the checkpoint again when that is over."
                )

    def of_model(self, model_keys: Collection[str]) -> "CheckpointIndex":
        """An index of the tensors of one model, under the model's names; a DCP folder can hold more than a model."""
        if not self._saved:
            return self
        part = model_part(self._saved, model_keys)
        return replace(self, tensors=MappingProxyType(part), _saved={})

    @classmethod
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

        Of a hub checkpoint, the weight files are downloaded; ranks of one node share the cache, whose file locks make
        one rank download and the others wait. Of local files, only headers are read. No rank communicates.

        Args:
            path_or_repo: one of

                - a folder with `model.safetensors`, with an index file or with plain `*.safetensors`;
                - a folder of `torch.distributed.checkpoint` (`.metadata` and `*.distcp`), or one above it that
                  Accelerate's `save_state` or the Trainer wrote (`pytorch_model_fsdp_0` in it);
                - a folder with `pytorch_model.bin`, or its index and shards, or Accelerate's `pytorch_model_fsdp.bin`,
                  if `allow_pickle`;
                - one such file; or a hub name.

                Where a folder holds several of these, the first of this list is read.
            allow_pickle: read legacy `.bin` files too. They are pickles, read by torch's restricted unpickler, which
                builds tensors and runs no code of the file (`weights_only=True`).
            revision: branch, tag or commit on the hub.
            token: hub token; None uses the stored one.
            cache_dir: where downloads go; None is the hub library's own default.
            local_files_only: do not touch the network.
            subfolder: folder within the checkpoint.

        Raises:
            CheckpointError: the path is absent, holds no weights, or a file or header is damaged; the message names
                file and key, what was expected, what was found, and a cure.
        """
        name = fspath(path_or_repo)
        try:
            with watched(Path(name)):
                path = local_path(name)
                is_file = path is not None and path.is_file()
            commit = None
            if path is None:
                hub_kwargs = {"revision": revision, "token": token, "cache_dir": cache_dir}
                hub_kwargs |= {"local_files_only": local_files_only, "subfolder": subfolder}
                folder, commit = _fetch_weights(name, allow_pickle, hub_kwargs)
            elif is_file:
                if not allow_pickle:
                    _refuse_pickled([path])
                return cls._from_files(name, [path], None)
            else:
                folder = path / (subfolder or "")
            index = cls._from_folder(name, folder, allow_pickle)
            return replace(index, commit=commit)
        except OSError as error:
            raise CheckpointError(
                f"Cannot read checkpoint {name!r}: {error}. Check the path and its permissions."
            ) from error

    @classmethod
    def _from_folder(cls, name: str, folder: Path, allow_pickle: bool) -> "CheckpointIndex":
        """Index the checkpoint of a folder, of whatever kind; once more if a save has replaced it meanwhile."""
        before = stamps(folder, WEIGHTS, WEIGHTS_INDEX)
        try:
            return cls._from_folder_as_is(name, folder, allow_pickle)
        except (CheckpointError, OSError):
            if stamps(folder, WEIGHTS, WEIGHTS_INDEX) == before:
                raise
        return cls._from_folder_as_is(name, folder, allow_pickle)

    @classmethod
    def _from_folder_as_is(cls, name: str, folder: Path, allow_pickle: bool) -> "CheckpointIndex":
        with watched(folder):
            saved = None if _has_safetensors(folder) else find_dcp_folder(folder)
        if saved is not None:
            return cls._from_dcp(name, saved)
        named = named_in_config(folder)
        with watched(folder):
            files, listing = _weight_files(folder, named, allow_pickle)
        listed = _read_listing(listing) if listing else None
        files = list(listed.files.values()) if listed else files
        index = cls._from_files(name, files, listed)
        return replace(index, is_model_state=True) if files == [folder / ACCELERATE_PICKLED] else index

    @classmethod
    def _from_dcp(cls, name: str, folder: Path) -> "CheckpointIndex":
        """Index all tensors of a DCP folder; `of_model` picks the model's later."""
        found, num_bytes = parse_dcp(folder)
        tensors = MappingProxyType({tensor.key: tensor for _, tensor in found})
        return cls(name=name, tensors=tensors, header_bytes=num_bytes, is_model_state=True, _saved=dict(found))

    @classmethod
    def _from_files(cls, name: str, files: Iterable[Path], listed: "_Listing | None") -> "CheckpointIndex":
        """Read every header; check them against each other and against the index file; report all problems at once."""
        tensors: dict[str, StoredTensor] = {}
        problems: list[str] = []
        header_bytes = listed.num_bytes if listed else 0
        states: dict[Path, tuple[int, int]] = {}
        for file in files:
            try:
                states[file] = _state_of(file)
                found, num_bytes = parse_pickled(file) if _is_pickled(file) else parse_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            header_bytes += num_bytes
            for tensor in found:
                if (other := tensors.get(tensor.key)) is not None:
                    cure = "keep one of them."
                    if file.name.startswith("shard-"):  # torch's HuggingFaceStorageWriter(save_distributed=True)
                        cure = (
                            "these are parts of it. Join them once: torch's HuggingFaceStorageWriter has "
                            "enable_consolidation=True, and consolidate_safetensors_files for what is saved already."
                        )
                    problems.append(f"{file}: holds {tensor.key!r}, which {other.file.name} holds too; {cure}")
                tensors[tensor.key] = tensor
        if not problems and listed is not None:
            problems += [
                f"{listed.file}: names {key!r} in {file!r}, which does not hold it; the index does not belong to "
                "these files. Download or save all of them again."
                for key, file in listed.weight_map.items()
                if key not in tensors or tensors[key].file != listed.files[file]
            ]
        if problems:
            raise CheckpointError(_as_one_message(problems))
        return cls(name=name, tensors=MappingProxyType(tensors), header_bytes=header_bytes, _states=states)


def _state_of(file: Path) -> tuple[int, int]:
    """What changes when a file is replaced or written; zeros where there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _as_one_message(problems: list[str]) -> str:
    """The text of all problems: a single one as it is, several as a list."""
    several = f"{len(problems)} problems with the checkpoint:\n{listed_lines(problems)}"
    return several if len(problems) > 1 else problems[0]


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """The content of an index file."""

    file: Path
    """The index file."""

    weight_map: Mapping[str, str]
    """Stored key to file name."""

    files: Mapping[str, Path]
    """File name to file."""

    num_bytes: int
    """Size of the index file."""


def _is_pickled(file: Path) -> bool:
    return file.suffix in (".bin", ".pt", ".pth")


def _refuse_pickled(files: Iterable[Path]) -> None:
    """Legacy files are read only when asked."""
    pickled = [file for file in files if _is_pickled(file)]
    if pickled:
        raise CheckpointError(
            f"{str(pickled[0].parent)!r} holds only pickled weights ({', '.join(f.name for f in pickled)}), which are "
            "read only when asked. Pass allow_pickle=True (torch's restricted unpickler then runs no code of the "
            "file), or convert the checkpoint to safetensors once: "
            f"AutoModelForCausalLM.from_pretrained({str(pickled[0].parent)!r}).save_pretrained(new_folder)"
        )


def _has_safetensors(folder: Path) -> bool:
    """Whether the folder holds safetensors of a model; files of an adapter do not count."""
    return any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors*"))


def _weight_files(folder: Path, named: str | None, allow_pickle: bool) -> tuple[list[Path], Path | None]:
    """The weight files of a folder, or the index file that names them; with the precedence of transformers."""
    if not folder.is_dir():
        raise CheckpointError(f"No such folder: {str(folder)!r}. Give a folder with {WEIGHTS}, or a hub name.")
    if named is not None:
        return ([], folder / named) if named.endswith(".json") else ([folder / named], None)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if (folder / WEIGHTS_INDEX).is_file():
        return [], folder / WEIGHTS_INDEX
    plain = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("adapter_")]
    if plain:
        refuse_incomplete(plain)
        return plain, None
    if not allow_pickle:
        _refuse_pickled(sorted(folder.glob("pytorch_model*.bin")))
    if (folder / PICKLED).is_file():
        return [folder / PICKLED], None
    if (folder / ACCELERATE_PICKLED).is_file():
        return [folder / ACCELERATE_PICKLED], None
    if (folder / PICKLED_INDEX).is_file():
        return [], folder / PICKLED_INDEX
    found = listed(sorted(f.name for f in folder.iterdir()), 10) or "nothing"
    cure = "Give the folder that save_pretrained wrote."
    if any(folder.glob("*.distcp")):
        cure = f"Its {METADATA} is missing: copy it too (its name is hidden), or save again; it is written last."
    if any(folder.glob("*.gguf")):
        cure = (
            "GGUF files hold blocks of many kinds under names of their own. Make a plain checkpoint once: "
            "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(new_folder)."
        )
    raise CheckpointError(
        f"No weights in {str(folder)!r}: expected {WEIGHTS}, {WEIGHTS_INDEX}, *.safetensors or {METADATA} (and, with "
        f"allow_pickle=True, {PICKLED}), found {found}. {cure}"
    )


def _read_listing(file: Path) -> _Listing:
    """Parse and check an index file; a name that leaves the folder or is not there is refused."""
    suffix = Path(file.name.removesuffix(".index.json")).suffix
    with watched(file):
        if (size := file.stat().st_size) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: is {size} bytes long; an index has at most {MAX_HEADER_BYTES}. Save it again."
            )
        text = file.read_bytes()
    content = parse_json(file, text)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{file}: expected a 'weight_map' from keys to file names, found {quoted(weight_map)}.")
    counts = Counter(weight_map.values())
    files = {name: file.parent / name for name in sorted(counts)}
    problems = []
    for name, place in files.items():
        with watched(place):
            is_there = not leaves_folder(name) and place.is_file()
        if leaves_folder(name) or not name.endswith(suffix):
            problems.append(
                f"{file}: names the file {quoted(name)}; expected a {suffix[1:]} file inside the folder. Where you "
                "trust its source, put the file there and name it so."
            )
        elif not is_there:
            problems.append(
                f"{file}: names {quoted(name)} for {counts[name]} tensors, which {_instead(place)}. "
                "Download or save it again."
            )
    if problems:
        raise CheckpointError(_as_one_message(problems))
    return _Listing(file=file, weight_map=weight_map, files=files, num_bytes=len(text))


def _instead(file: Path) -> str:
    """Why a file that should hold weights cannot, as the end of a sentence."""
    if file.is_symlink():
        return f"is a link that leads nowhere ({quoted(os.readlink(file))})"
    return "is no file" if file.exists() else "is not there"


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
    names = parse_json(file, file.read_bytes()).get("weight_map")
    return [file.name, *sorted({str(v) for v in names.values()} if isinstance(names, dict) else ())]
