"""Read the `.metadata` of a `torch.distributed.checkpoint` (DCP) folder: its tensors and chunks; nothing is trusted.

Each chunk is one `torch.save` archive inside a `.distcp` file, from which any rank reads what its shards need.
"""

import gc
import io
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors, storage_errors
from hf_fsdp_tools.loading.formats.stored import ChunkedTensor, StoredTensor, check_cover, leaves_folder
from hf_fsdp_tools.modeling.module_tree import ADAPTED, WRAPPED, plain_name
from hf_fsdp_tools.modeling.pickles import load_pickled, read_small, refuse_endless
from hf_fsdp_tools.stores import at_hand
from hf_fsdp_tools.text import listed, listed_lines, quoted

SavedPath = tuple[str, ...]
"""Where a tensor lies in a saved state dict: keys from the outermost dict to the tensor's own."""

_DDP = "module."
"""How names begin in DDP and DataParallel."""

_PEFT, _PEFT_TUNER = "base_model.", "base_model.model."
"""How names begin in a `PeftModel`: of any method, and of those that put wrappers into the model (PEFT 0.21)."""

_PROMPTS = ("prompt_encoder.", "prompt_embeddings")
"""How names of prompt methods begin that lie outside the base (PEFT 0.21)."""

_VALUE_HEAD = ("pretrained_model.", "v_head.")
"""How names begin in TRL's classes with a value head (0.7 to 0.23; source: trl/models/modeling_value_head.py)."""

_DEEPEST_PREFIX = 6
"""Modules around the model that are looked through. (assumed)"""

_TITAN = "tok_embeddings.weight"
"""A name in torchtitan's and Meta's own layout of models, which transformers' models do not have."""

_Tensor = TypeVar("_Tensor")


def is_wrapped(names: Collection[str]) -> bool:
    """Whether names of a file show that a model was saved with a wrapper around it, so that they are not its own."""
    outer = (_DDP, _PEFT, *_PROMPTS, *_VALUE_HEAD)
    inside = any(not set(WRAPPED).isdisjoint(name.split(".")) for name in names)
    return inside or (bool(names) and all(name.startswith(outer) for name in names))


def model_part(tensors: Mapping[SavedPath, _Tensor], model_keys: Collection[str], where: str) -> dict[str, _Tensor]:
    """The tensors of the model among all saved tensors, by their names in the model.

    The model is the part of the saved state dict with most names in common with `model_keys`, whatever is around it.
    """
    suffixes = {suffix for key in model_keys for suffix in _suffixes(key)}
    votes = Counter(path[:-1] for path in tensors if not suffixes.isdisjoint(_suffixes(_of_module(path[-1]))))
    if not votes or (any(path[-1] == _TITAN for path in tensors) and _TITAN not in suffixes):
        raise _other_names(where, tensors, model_keys)
    part = _chosen(votes, where)
    unwrapped = {_unwrapped(path[-1]): tensor for path, tensor in tensors.items() if path[:-1] == part}
    peft = _peft_names(unwrapped)
    named = unwrapped if peft is None else {peft[0].get(name, name): t for name, t in unwrapped.items()}
    prefix = _prefix(named, model_keys)
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def _chosen(votes: Counter[SavedPath], where: str) -> SavedPath:
    """The part of a saved state dict that is the model: of parts that are alike, the one that is called so."""
    most = [part for part, count in votes.items() if count == max(votes.values())]
    best = [part for part in most if part[-1:] == ("model",)] or most
    shortest = [part for part in best if len(part) == min(map(len, best))]
    if len(shortest) > 1:
        names = listed(quoted(".".join(part)) for part in shortest)
        raise CheckpointError(
            f"{where!r} holds {len(shortest)} parts that fit the model equally well: {names}, and none is called "
            "'model'. Save the one to load alone, or call it so."
        )
    return shortest[0]


def _prefix(names: Collection[str], model_keys: Collection[str]) -> str:
    """What modules around the model put before its names; "" where the names as they are fit best."""
    known = set(model_keys)
    votes = Counter({"": sum(name in known for name in names)})
    for name in names:
        parts = name.split(".")
        for i in range(1, min(len(parts), _DEEPEST_PREFIX)):
            if ".".join(parts[i:]) in known:
                votes[".".join(parts[:i]) + "."] += 1
    best = max(votes, key=lambda prefix: (votes[prefix], -len(prefix)))
    stripped = {name.removeprefix(best) for name in names}
    return best if len(stripped) == len(names) else ""


def _other_names(where: str, paths: Iterable[SavedPath], model_keys: Collection[str]) -> CheckpointError:
    names = [".".join(path) for path in paths]
    cure = "Use the config of the model that was saved; of an own naming, rename the tensors to the model's names once."
    if any(path.endswith(_TITAN) for path in names):
        cure = (
            "These are torchtitan's own names. Convert it once by torchtitan's scripts/checkpoint_conversion/"
            "convert_to_hf.py, or let torchtitan save it so (last_save_in_hf=True)."
        )
    fact = f"holds {len(names)} tensors, as {quoted(min(names))}" if names else "holds no tensors"
    return CheckpointError(
        f"{where!r}: {fact}, which are not named as the model's are, as {quoted(min(model_keys, default=''))}. {cure}"
    )


def _suffixes(key: str) -> Iterator[str]:
    """Yield a dotted name without its first 0, 1, … parts; not the last part alone, which many modules share."""
    parts = key.split(".")
    return (".".join(parts[i:]) for i in range(max(1, len(parts) - 1)))


def _unwrapped(name: str) -> str:
    """A name without what torch's wrappers put into it; DDP's prefix stays unless a `PeftModel` is in it."""
    plain = plain_name(name)
    return plain.removeprefix(_DDP) if plain.startswith(_DDP + _PEFT) else plain


def _of_module(name: str) -> str:
    """A name without what torch's wrappers put into it, and in a `PeftModel` PEFT's."""
    name = _unwrapped(name)
    return plain_name(name, adapters=True) if name.startswith(_PEFT) else name


# ---- PEFT ----


def peft_part(
    tensors: Mapping[SavedPath, _Tensor], marks: Callable[[], tuple[str, ...]]
) -> tuple[dict[SavedPath, _Tensor], dict[str, _Tensor]] | None:
    """The base and the adapter in the saved state of a `PeftModel`; None for any other state."""
    votes = Counter(path[:-1] for path in tensors if _unwrapped(path[-1]).startswith((_PEFT, *_PROMPTS)))
    if not votes:
        return None
    part = max(votes, key=lambda p: (votes[p], -len(p)))
    names = {_unwrapped(path[-1]): path for path in tensors if path[:-1] == part}
    sorted_names = _peft_names(names, marks())
    assert sorted_names is not None
    base, adapter, holds_base = sorted_names
    if not holds_base:
        return {}, {name: tensors[path] for name, path in names.items()}
    return {names[name]: tensors[names[name]] for name in base}, {name: tensors[names[name]] for name in adapter}


def _peft_names(names: Collection[str], marks: tuple[str, ...] = ()) -> tuple[dict[str, str], set[str], bool] | None:
    """The base's names in a saved `PeftModel`, as saved and as the base alone has them; the adapter's, as saved; and
    whether all of the base was saved. None for any other model.

    PEFT keeps an adapted module as `base_layer` or `original_module` next to what it adds. So where a name goes on
    otherwise than into these, it is the adapter's. A state of an adapter alone has names without a base next to them,
    or with a bias of it that is trained.
    """
    if not any(name.startswith((_PEFT, *_PROMPTS)) for name in names):
        return None
    split = {name: name.split(".") for name in names}
    homes = {tuple(p[:i]) for p in split.values() for i, part in enumerate(p) if part in ADAPTED}
    prompts = not homes and any(name.startswith(_PROMPTS) for name in names)
    prefix = _PEFT if prompts else _PEFT_TUNER
    base: dict[str, str] = {}
    unadapted: list[str] = []
    for name, parts in split.items():
        depth = max((i for i in range(1, len(parts)) if tuple(parts[:i]) in homes), default=None)
        if name.startswith(prefix) and (depth is None or parts[depth] in ADAPTED):
            base[name] = plain_name(name, adapters=True).removeprefix(prefix)
            if depth is None:
                unadapted.append(name)
    alone = [name for name in unadapted if any(part.startswith(marks) for part in split[name])] if marks else []
    weights = any(parts[-1] != "bias" for parts in split.values() if not set(parts).isdisjoint(ADAPTED))
    holds_base = bool(weights or prompts) and bool(unadapted) and not alone
    return base, split.keys() - base.keys(), holds_base


METADATA = ".metadata"
"""Name of DCP's metadata file."""

_MOST_METADATA_BYTES = 10**9
"""Bytes of that file, which has about 140 for each chunk. (assumed)"""

MODEL_FOLDERS = "pytorch_model_fsdp_*"
"""DCP folders of models inside a folder that Accelerate's `save_state` or the Trainer wrote."""


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Let Python's garbage collector wait: looking at all that is read takes it longer than the reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collecting_later()
def parse_dcp(folder: Path) -> tuple[list[tuple[SavedPath, ChunkedTensor]], int]:
    """The tensors of a DCP folder, each with its path in the saved state dict; and the bytes of the metadata."""
    metadata, num_bytes = _read_metadata(folder / METADATA)
    return _complete_tensors(folder / METADATA, metadata), num_bytes


def _complete_tensors(file: Path, metadata: dcp.Metadata) -> list[tuple[SavedPath, ChunkedTensor]]:
    """As `_tensors`; refuses those of which the files lack a part."""
    problems: list[str] = []
    file_sizes: dict[Path, int] = {}
    with library_errors(f"{file}: is not as DCP writes it", "Save it again."):
        tensors = list(_tensors(file, metadata))
    for _, tensor in tensors:
        try:
            for chunk in tensor.parts:
                _check_range(chunk, file_sizes)
            check_cover(file, tensor.key, tensor.shape, [chunk.box for chunk in tensor.parts])
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(listed_lines(problems, 3, head=""))  # a file that is gone is a problem of each tensor
    return tensors


Shapes = Mapping[str, tuple[int, ...] | None]
"""The keys of a DCP folder, with the shapes of tensors."""

_checked: dict[Path, tuple[dict[Path, tuple[int, ...]], Shapes]] = {}
"""What `check_dcp` found in folders, and the files in which it looked, as they were then."""


def check_dcp(folder: Path, *, complete: bool = False) -> Shapes:
    """Refuse a DCP folder that would run code when torch reads it; return its keys, with the shapes of tensors.

    torch unpickles the metadata, and every value that is no tensor, without restriction (2.13:
    `FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`). Call it before torch does; all values are read,
    once while the files stay as they are. `complete` refuses tensors of which the files lack a part, too.
    """
    files, shapes = _checked.pop(folder, ({}, {}))
    if complete or not files or any(_stamp(file) != stamp for file, stamp in files.items()):
        files, shapes = _check(folder, complete)
    _checked[folder] = files, shapes
    return shapes


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes when a file is written."""
    with watched(file), storage_errors("read", file):
        status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@_collecting_later()
def _check(folder: Path, complete: bool) -> tuple[dict[Path, tuple[int, ...]], Shapes]:
    file = folder / METADATA
    files = {file: _stamp(file)}
    metadata, _ = _read_metadata(file)
    if complete:
        _complete_tensors(file, metadata)
    with library_errors(f"{file}: is not as DCP writes it", "Save it again."):
        for index, place in metadata.storage_data.items():
            _place(file, index, place)
        entries = metadata.state_dict_metadata.items()
        values = {key: _Index(key) for key, kind in entries if isinstance(kind, dcp.BytesStorageMetadata)}
        places = {key: _place(file, index, metadata.storage_data.get(index)) for key, index in values.items()}
        shapes = {key: _sizes(e.size) if isinstance(e, dcp.TensorStorageMetadata) else None for key, e in entries}
    with at_hand((folder / name, offset, offset + length) for name, offset, length in places.values()):
        files |= {path: _stamp(path) for path in {folder / name for name, _, _ in places.values()}}
        for key, (name, offset, length) in places.items():
            try:
                load_pickled(folder / name, offset, length)
            except CheckpointError as error:
                raise CheckpointError(f"{quoted(key)}: {error}") from None
    return files, shapes


# ---- the metadata file ----


class _Fixed(type):
    """The type of classes that no pickle can change: pickle's BUILD sets attributes of whatever it is given."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would set {name} of the class {cls.__name__}")


class _Index(dcp.MetadataIndex, metaclass=_Fixed):
    """DCP's key of a chunk or a value."""

    def __hash__(self) -> int:  # an index in an index could take for ever
        if type(self.fqn) is not str or type(self.offset) not in (torch.Size, type(None)):
            raise TypeError(f"{quoted(self.fqn)}, {quoted(self.offset)} name no tensor")
        return hash((self.fqn, self.offset))


class _Properties(dcp.TensorProperties, metaclass=_Fixed):
    """DCP's properties of a tensor."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


_RECORDS: dict[tuple[str, str], type] = {
    **{(dcp.__name__, name): _Fixed(name, (getattr(dcp, name),), {}) for name in dcp.__all__},
    (dcp.__name__, "MetadataIndex"): _Index,
    (dcp.__name__, "TensorProperties"): _Properties,
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): int,
    (_StorageInfo.__module__, "_StorageInfo"): _Fixed("_StorageInfo", (_StorageInfo,), {}),
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): torch.Size,
}
"""What stands for the records of DCP's metadata, by module and name: nothing that the process uses otherwise."""

_Path = _Fixed("_Path", (PurePosixPath,), {})


class _Unpickler(pickle.Unpickler):
    """Builds the records that DCP writes, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few classes of DCP's metadata; any other name would run code that the file chooses."""
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return _Path
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that DCP writes")


def _read_metadata(file: Path) -> tuple[dcp.Metadata, int]:
    """The metadata, of whose parts any may have another type than DCP gives them; and its bytes."""
    text = read_small(file, _MOST_METADATA_BYTES)
    cure = "Save it again, or give the folder of a Hugging Face checkpoint."
    with library_errors(f"{file}: cannot be read as the metadata of torch.distributed.checkpoint", cure):
        refuse_endless(text)
        metadata = _Unpickler(io.BytesIO(text)).load()
        if not isinstance(metadata, dcp.Metadata) or not all(type(key) is str for key in metadata.state_dict_metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}, expected metadata of named tensors")
    return metadata, len(text)


def _tensors(file: Path, metadata: dcp.Metadata) -> Iterator[tuple[SavedPath, ChunkedTensor]]:
    """Yield each tensor with its path in the saved state dict; fails where a part is not as DCP writes it."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            continue
        path, dtype, shape = paths.get(key, (key,)), entry.properties.dtype, _sizes(entry.size)
        if not isinstance(path, (list, tuple)) or not all(type(part) in (str, int) for part in path):
            raise TypeError(f"the path of {quoted(key)} is {quoted(path)}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of {key!r} is {quoted(dtype)}")
        chunks = []
        for saved in entry.chunks:
            box = Box(start=_sizes(saved.offsets, len(shape)), length=_sizes(saved.sizes, len(shape)))
            if not box.numel:
                continue
            index = _Index(key, saved.offsets)
            place, offset, length = _place(file, index, metadata.storage_data.get(index))
            ranges = ", ".join(f"{s}:{s + n}" for s, n in zip(box.start, box.length, strict=True))
            name = f"{key}[{ranges}]" if shape else key
            lies: dict[str, Any] = {"file": file.parent / place, "offset": offset, "num_bytes": length}
            chunks.append(
                StoredTensor(key=name, dtype=dtype, shape=box.length, start=box.start, is_archive=True, **lies)
            )
        tensor = ChunkedTensor(key=key, file=file, dtype=dtype, shape=shape, parts=tuple(chunks))
        yield tuple(str(part) for part in path), tensor


def _place(file: Path, index: dcp.MetadataIndex, place: Any) -> tuple[str, int, int]:
    """File name, position and length of a value or a chunk, by its record."""
    if place is None:
        raise ValueError(f"{index.fqn!r} lies nowhere")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{index.fqn!r} is stored through a stream transform, through which no part can be read")
    name, offset, length = place.relative_path, place.offset, place.length
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:  # quick, for there are millions
        raise TypeError(f"{quoted((offset, length))} are no sizes")
    if type(name) is not str:
        raise TypeError(f"the file of {index.fqn!r} is {quoted(name)}")
    if leaves_folder(name):
        raise CheckpointError(f"{file}: names {quoted(name)}, expected a file of the folder. Save it again.")
    return name, offset, length


def _sizes(sizes: Any, count: int | None = None) -> tuple[int, ...]:
    """A tuple of sizes, refused if it holds anything else than integers from 0 on, or not so many."""
    if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{quoted(sizes)} are no sizes")
    if count not in (None, len(sizes)):
        raise ValueError(f"{quoted(sizes)} are not {count} sizes")
    return tuple(sizes)


def _check_range(chunk: StoredTensor, file_sizes: dict[Path, int]) -> None:
    """Refuse a chunk that is not inside its file; sizes of files are looked up once."""
    if chunk.file not in file_sizes:
        with watched(chunk.file):
            file_sizes[chunk.file] = chunk.file.stat().st_size if chunk.file.is_file() else -1
    size = file_sizes[chunk.file]
    if chunk.offset + chunk.num_bytes > size:
        fact = "is not there" if size < 0 else f"is {size} bytes long"
        raise CheckpointError(
            f"{chunk.file}: {fact}, but {chunk.key!r} is at bytes {chunk.offset} to {chunk.offset + chunk.num_bytes}. "
            "The checkpoint is not complete: copy or save it again."
        )
