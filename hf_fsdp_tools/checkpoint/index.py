"""Which file of a checkpoint holds which tensor, with dtype, shape and byte range: headers are read, data is not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import torch

from hf_fsdp_tools.errors import CheckpointError

from .header import StoredTensor, parse_header, parse_json, shortened

__all__ = ["CheckpointIndex"]

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_LEGACY = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The tensors of a safetensors checkpoint, by key. Make one with ``CheckpointIndex.open``."""

    name: str
    """The folder, file or hub name that was opened, for messages."""

    tensors: Mapping[str, StoredTensor]
    """Every tensor of every file, by its stored key."""

    header_bytes: int
    """Bytes read to make this index: headers and index file."""

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor: what ``dtype="auto"`` falls back to. None without any."""
        return next(
            (t.dtype for t in self.tensors.values() if t.dtype.is_floating_point and t.dtype.itemsize > 1), None
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the whole checkpoint."""
        return sum(t.num_bytes for t in self.tensors.values())

    @classmethod
    def open(
        cls,
        path_or_repo: str | PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike[str] | None = None,
        local_files_only: bool = False,
        subfolder: str | None = None,
    ) -> "CheckpointIndex":
        """Index a local folder, a single safetensors file, or a hub name.

        A hub checkpoint is downloaded first (only its safetensors files; ranks of one node share the cache, whose file
        locks make one of them download and the others wait). Otherwise only headers are read. No rank talks to another.

        Args:
            path_or_repo: Folder with ``model.safetensors``, with an index file or with plain ``*.safetensors``; or one
                such file; or a hub name.
            revision: Branch, tag or commit on the hub.
            token: Hub token; None uses the stored one.
            cache_dir: Where downloads go; None is the hub library's own default.
            local_files_only: Do not touch the network.
            subfolder: Folder within the checkpoint.

        Raises:
            CheckpointError: Nothing there, no weights in it, or any file or header damaged; the message has file, key,
                what was expected, what was found, and a cure.
        """
        name = fspath(path_or_repo)
        path = Path(name).expanduser()
        try:
            if path.is_file():
                return cls._from_files(name, [path], None)
            if not path.is_dir():
                path = _download(name, path, revision, token, cache_dir, local_files_only, subfolder)
            folder = path / subfolder if subfolder else path
            files, listed = _weight_files(folder)
            return cls._from_files(name, files, listed)
        except OSError as error:
            raise CheckpointError(
                f"Cannot read checkpoint {name!r}: {error}. Check the path and its permissions."
            ) from error

    @classmethod
    def _from_files(cls, name: str, files: Iterable[Path], listed: "_Listing | None") -> "CheckpointIndex":
        """Read every header; check them against each other and against the index file; report all problems at once."""
        tensors: dict[str, StoredTensor] = {}
        problems: list[str] = []
        header_bytes = listed.num_bytes if listed else 0
        for file in files:
            try:
                found, num_bytes = parse_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            header_bytes += num_bytes
            for tensor in found:
                if (other := tensors.get(tensor.key)) is not None:
                    problems.append(
                        f"{tensor.key!r} is in two files, {other.file.name} and {file.name}; keep one of them."
                    )
                tensors[tensor.key] = tensor
        if not problems and listed is not None:
            problems += [
                f"{listed.file}: names {key!r} in {file!r}, which does not hold it; the index does not belong to "
                "these files."
                for key, file in listed.weight_map.items()
                if key not in tensors or tensors[key].file != listed.file.parent / file
            ]
        if problems:
            raise CheckpointError(_joined(problems))
        return cls(name=name, tensors=MappingProxyType(tensors), header_bytes=header_bytes)


def _joined(problems: list[str], limit: int = 10) -> str:
    """One problem as it is; several as a list."""
    if len(problems) == 1:
        return problems[0]
    more = [f"… and {len(problems) - limit} more"] if len(problems) > limit else []
    return f"{len(problems)} problems with the checkpoint:\n" + "\n".join(f"- {p}" for p in problems[:limit] + more)


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """What an index file says."""

    file: Path
    """The index file."""

    weight_map: Mapping[str, str]
    """Stored key to file name."""

    num_bytes: int
    """Size of the index file."""


def _weight_files(folder: Path) -> tuple[list[Path], _Listing | None]:
    """The safetensors files of a folder, and its index if the files come from one; same precedence as transformers."""
    if not folder.is_dir():
        raise CheckpointError(f"No such folder: {str(folder)!r}. Give a folder with {WEIGHTS}, or a hub name.")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if (folder / WEIGHTS_INDEX).is_file():
        listing = _read_listing(folder / WEIGHTS_INDEX)
        return [folder / name for name in sorted(set(listing.weight_map.values()))], listing
    plain = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("adapter_")]
    if plain:
        return plain, None
    if any((folder / name).exists() for name in _LEGACY):
        raise CheckpointError(
            f"{str(folder)!r} holds only pickled weights "
            f"({', '.join(n for n in _LEGACY if (folder / n).exists())}); shards are "
            "read from safetensors. Convert it once: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(new_folder)"
        )
    found = ", ".join(sorted(f.name for f in folder.iterdir())[:10]) or "nothing"
    raise CheckpointError(
        f"No weights in {str(folder)!r}: expected {WEIGHTS}, {WEIGHTS_INDEX} or *.safetensors, found {found}. "
        "Give the folder that save_pretrained wrote."
    )


def _read_listing(file: Path) -> _Listing:
    """Parse and check an index file; a name that leaves the folder or is not there is refused."""
    text = file.read_bytes()
    content = parse_json(file, text)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{file}: expected a 'weight_map' from keys to file names, found {shortened(weight_map)}."
        )
    problems = []
    for name in sorted(set(weight_map.values())):
        path = PurePosixPath(name)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\\" in name
            or "\0" in name
            or not name.endswith(".safetensors")
        ):
            problems.append(f"{file}: names the file {name!r}; expected a safetensors file inside the folder.")
        elif not (file.parent / name).is_file():
            count = sum(v == name for v in weight_map.values())
            problems.append(
                f"{file}: names {name!r} for {count} tensors, which is not there. Download or save it again."
            )
    if problems:
        raise CheckpointError(_joined(problems))
    return _Listing(file=file, weight_map=weight_map, num_bytes=len(text))


def _download(
    name: str,
    path: Path,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | PathLike[str] | None,
    local_files_only: bool,
    subfolder: str | None,
) -> Path:
    """The local snapshot of a hub checkpoint: its index, then exactly the files that the index names."""
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name or not name:
        raise CheckpointError(
            f"No such folder: {name!r}. Give a folder with {WEIGHTS}, or a hub name such as 'org/model'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    prefix = f"{subfolder}/" if subfolder else ""

    def fetch(*patterns: str) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else fspath(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=[prefix + pattern for pattern in patterns],
            )
        )

    try:
        snapshot = fetch(WEIGHTS, WEIGHTS_INDEX)
        folder = snapshot / prefix
        if not (folder / WEIGHTS).is_file():
            if (folder / WEIGHTS_INDEX).is_file():
                names = parse_json(folder / WEIGHTS_INDEX, (folder / WEIGHTS_INDEX).read_bytes()).get("weight_map")
                fetch(WEIGHTS_INDEX, *sorted({str(v) for v in names.values()} if isinstance(names, dict) else ()))
            else:
                fetch("*.safetensors")
        return snapshot
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"No checkpoint {name!r}{where}: it is not a local folder, and the hub did not give it "
            f"({type(error).__name__}: {reason}). Check the name, the revision, the token and the network, or download it "
            "first and give the folder."
        ) from error
