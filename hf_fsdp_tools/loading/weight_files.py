"""What a folder holds, looked at once, also where a save is changing it; nothing that it says is trusted."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import filter as matching
from pathlib import Path
from typing import TypeVar

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.hub import OF_GGUF
from hf_fsdp_tools.loading.formats.dcp import METADATA, MODEL_FOLDERS
from hf_fsdp_tools.loading.formats.stored import leaves_folder
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.stores import stored_object
from hf_fsdp_tools.text import listed, listed_lines, quoted

T = TypeVar("T")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
ACCELERATE_PICKLED = "pytorch_model_fsdp*.bin"
"""Written by Accelerate's `save_state` under FULL_STATE_DICT, in the model's own layout; `…_1.bin` is a second model's.
Under LOCAL_STATE_DICT, or with `use_dcp=False`, `…_rank0.bin` is the part of one rank."""

_SHARD = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.safetensors")
"""What transformers and huggingface_hub name the files of one checkpoint."""


_CURES = {
    "*.distcp": f"Its {METADATA} is missing: copy it too (its name is hidden), or save again; it is written last.",
    "*.gguf": OF_GGUF,
    "model_world_size_*_rank_*.pt": "verl wrote these shards. Merge them once: "
    "python -m verl.model_merger merge --backend fsdp --local_dir FOLDER --target_dir OUT.",
    "zero_to_fp32.py": "DeepSpeed wrote this state. Make a checkpoint of it once, and copy config.json there: "
    "python zero_to_fp32.py . OUT --safe_serialization.",
    "*.ckpt": "Lightning wrote these files. Give the path of one, and allow_pickle=True.",
    "model/": "The weights may be in the folder 'model' inside, as NeMo AutoModel's are. Give that.",
    "*": "Give the folder that save_pretrained wrote.",
}
"""What to do with a folder that holds such files, and no weights that can be read; the first that fits."""


def is_pickled(file: Path) -> bool:
    """Whether a weight file is one of `torch.save`, by its name."""
    return file.suffix in (".bin", ".pt", ".pth", ".ckpt")


def refuse_pickled(files: Iterable[Path]) -> None:
    """Legacy files are read only when asked."""
    if pickled := [file for file in files if is_pickled(file)]:
        raise CheckpointError(
            f"{str(pickled[0].parent)!r} holds only pickled weights ({', '.join(f.name for f in pickled)}), which are "
            "read only when asked. Pass allow_pickle=True (torch's restricted unpickler then runs no code of the "
            "file), or convert the checkpoint to safetensors once: "
            f"AutoModelForCausalLM.from_pretrained({str(pickled[0].parent)!r}).save_pretrained(new_folder)"
        )


class Contents:
    """What a folder holds: its files and what they are of, by one look at its list of names; of a file, that file."""

    def __init__(self, path: Path) -> None:
        """List a folder. Where nothing is, nothing is held."""
        self.path = path
        """The folder, or the file."""
        self.names: list[str] = []
        """The names of files and, with a slash at their end, of folders, in order."""
        with storage_errors("read", path), watched(path):
            self.is_file = path.is_file()
            self.stamps = stamps(path / name for name in (WEIGHTS, WEIGHTS_INDEX, METADATA, CONFIG))
            """What changes where a save replaces the checkpoint, as it was before the folder was listed."""
            if path.is_dir():
                with os.scandir(path) as entries:
                    self.names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)

    def has(self, name: str) -> bool:
        """Whether it has a file of this name, which is no link to nothing."""
        return name in self.names and (self.path / name).is_file()

    def like(self, pattern: str) -> list[Path]:
        """Its files with such names, in order."""
        return [self.path / name for name in matching(self.names, pattern)]

    @property
    def kind(self) -> str:
        """What it is: "model" (or a training state), "adapter" (or nothing), or "model and adapter".

        Axolotl writes the config of the base next to an adapter, and Accelerate an adapter's values next to PEFT's.
        """
        has_values = bool(self.like("adapter_model.*"))
        if self.has(CONFIG):
            is_model = self.has_safetensors or self.has(PICKLED) or self.has(PICKLED_INDEX)
            return ("model and adapter" if is_model else "adapter") if has_values else "model"
        is_state = METADATA in self.names or self.like(MODEL_FOLDERS) or self.like(ACCELERATE_PICKLED)
        return "model" if is_state and not has_values else "adapter"

    @property
    def has_safetensors(self) -> bool:
        """Whether it holds safetensors of a model; files of an adapter do not count."""
        return any(not file.name.startswith("adapter_") for file in self.like("*.safetensors*"))

    def dcp(self) -> "Contents | None":
        """The DCP folder of a model: itself, or the one inside it that Accelerate or the Trainer wrote; None without
        one."""
        if self.has_safetensors or self.has(METADATA):
            return None if self.has_safetensors else self
        below = [Contents(self.path / name) for name in matching(self.names, f"{MODEL_FOLDERS}/")]
        below = [folder for folder in below if folder.has(METADATA)]
        self._refuse_several([folder.path.name for folder in below], "folders")
        return below[0] if below else None

    def weights(self, *, allow_pickle: bool) -> tuple[list[Path], Path | None]:
        """The weight files, or the index file that names them; with the precedence of transformers."""
        name = self._named_in_config() or next((each for each in (WEIGHTS, WEIGHTS_INDEX) if self.has(each)), None)
        plain = [file for file in self.like("*.safetensors") if not file.name.startswith("adapter_")]
        if name is None and plain:
            _refuse_incomplete(plain)
            return plain, None
        if name is None:
            of_accelerate = self._of_accelerate()
            if not allow_pickle:
                refuse_pickled([self.path] if self.is_file else self.like("pytorch_model*.bin"))
            pickled = (PICKLED, *of_accelerate, PICKLED_INDEX)
            name = "" if self.is_file else next((each for each in pickled if self.has(each)), None)
        if name is not None:
            file = self.path / name
            return ([], file) if name.endswith(".json") else ([file], None)
        if not self.path.is_dir():
            raise CheckpointError(f"No such folder: {str(self.path)!r}. Give a folder with {WEIGHTS}, or a hub name.")
        cure = next((cure for pattern, cure in _CURES.items() if self.like(pattern)), _CURES["*"])
        raise CheckpointError(
            f"No weights in {str(self.path)!r}: expected {WEIGHTS}, {WEIGHTS_INDEX}, *.safetensors or {METADATA} (and, "
            f"with allow_pickle=True, {PICKLED}), found {listed(self.names, 10) or 'nothing'}. {cure}"
        )

    def _of_accelerate(self) -> list[str]:
        """The one file that Accelerate wrote of a model, if any."""
        names = matching(self.names, ACCELERATE_PICKLED)
        if parts := [name for name in names if "_rank" in name]:
            raise CheckpointError(
                f"{str(self.path)!r} holds the parts of {len(parts)} ranks ({listed(parts, 4)}; LOCAL_STATE_DICT, or "
                "use_dcp=False), which do not say what they are parts of. Load them in a run that is set up like the "
                "one that saved them (accelerator.load_state), and save it with SHARDED_STATE_DICT or FULL_STATE_DICT."
            )
        self._refuse_several(names, "files")
        return names

    def _refuse_several(self, names: list[str], what: str) -> None:
        if len(names) > 1:
            fact = f"{str(self.path)!r} holds several models: {listed(names)}"
            raise CheckpointError(f"{fact}. Give the path of one of these {what}.")

    def _named_in_config(self) -> str | None:
        """The weight file or index that `config.json` names (`transformers_weights`), as transformers follows it."""
        named = None
        with suppress(CheckpointError):  # whoever loads the config says so
            named = read_json_object(self.path / CONFIG).get("transformers_weights") if self.has(CONFIG) else None
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            return None
        if leaves_folder(named):
            fact = f"{self.path / CONFIG}: transformers_weights is {quoted(named)}"
            raise CheckpointError(f"{fact}; expected a file inside the folder.")
        return named

    def settled(self, read: Callable[["Contents"], T], *more: Path) -> T:
        """The result of reading it; it is listed and read once more where a save has replaced the checkpoint, or one of
        `more` files, meanwhile."""
        before = self.stamps | stamps(more)
        try:
            result = read(self)
        except (CheckpointError, OSError):
            if stamps(before) == before:
                raise
        else:
            if stamps(before) == before:
                return result
        return read(Contents(self.path))


def read_listing(listing: Path) -> dict[str, Path]:
    """The file of each stored key by an index file; a name that leaves the folder or is not there is refused."""
    suffix = Path(listing.name.removesuffix(".index.json")).suffix
    weight_map = read_json_object(listing).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{listing}: expected a 'weight_map' from keys to file names, found {quoted(weight_map)}. Save it again."
        )
    problems = []
    for name, count in sorted(Counter(weight_map.values()).items()):
        file = listing.parent / name
        if leaves_folder(name) or not name.endswith(suffix):
            problems.append(
                f"{listing}: names the file {quoted(name)}; expected a {suffix[1:]} file inside the folder. Where you "
                "trust its source, put the file there and name it so."
            )
            continue
        with watched(file):
            if not file.is_file():
                link = f" (a link to {quoted(os.readlink(file))})" if file.is_symlink() else ""
                fact = f"{listing}: names {quoted(name)}{link} for {count} tensors, which is not there"
                problems.append(f"{fact}. Download or save it again.")
    if problems:
        raise CheckpointError(as_one_message(problems))
    return {key: listing.parent / name for key, name in weight_map.items()}


def as_one_message(problems: list[str]) -> str:
    """The text of all problems: a single one as it is, several as a list."""
    several = f"{len(problems)} problems with the checkpoint:\n{listed_lines(problems)}"
    return several if len(problems) > 1 else problems[0]


def stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Inode and time of modification of each file, which change when it is replaced or written, or the version of one
    in a store; zeros without a file."""
    found = {}
    for file in files:
        with watched(file):
            if (there := stored_object(file)) is not None:
                found[file] = there.version_now()
                continue
            try:
                status = file.stat()
                found[file] = status.st_ino, status.st_mtime_ns
            except OSError:
                found[file] = 0, 0
    return found


def _refuse_incomplete(files: list[Path]) -> None:
    """Refuse shards without an index of which some are missing: their save, or their download, was cut off."""
    shards = [shard for file in files if (shard := _SHARD.fullmatch(file.name))]
    for (stem, count), there in Counter((shard["stem"], shard["count"]) for shard in shards).items():
        if there != int(count):
            raise CheckpointError(
                f"{str(files[0].parent)!r} holds {there} of {int(count)} files {stem}-*-of-{count}.safetensors and no "
                "index: it is being saved, or was not saved or copied whole. Save or copy it again."
            )
