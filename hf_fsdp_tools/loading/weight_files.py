"""Find the weight files of a folder, also one that a save is changing; nothing that a folder says is trusted."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import OF_GGUF
from hf_fsdp_tools.loading.formats.dcp import METADATA
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
    "model/*": "The weights may be in the folder 'model' inside, as NeMo AutoModel's are. Give that.",
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


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds safetensors of a model; files of an adapter do not count."""
    return any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors*"))


def weight_files(folder: Path, named: str | None, allow_pickle: bool) -> tuple[list[Path], Path | None]:
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
        _refuse_incomplete(plain)
        return plain, None
    of_accelerate = _one_of(sorted(folder.glob(ACCELERATE_PICKLED)))
    if not allow_pickle:
        refuse_pickled(sorted(folder.glob("pytorch_model*.bin")))
    if (folder / PICKLED).is_file():
        return [folder / PICKLED], None
    if of_accelerate is not None:
        return [of_accelerate], None
    if (folder / PICKLED_INDEX).is_file():
        return [], folder / PICKLED_INDEX
    cure = next((cure for pattern, cure in _CURES.items() if any(folder.glob(pattern))), _CURES["*"])
    names = listed(sorted(f.name for f in folder.iterdir()), 10) or "nothing"
    raise CheckpointError(
        f"No weights in {str(folder)!r}: expected {WEIGHTS}, {WEIGHTS_INDEX}, *.safetensors or {METADATA} (and, with "
        f"allow_pickle=True, {PICKLED}), found {names}. {cure}"
    )


def _one_of(files: list[Path]) -> Path | None:
    """The one file that Accelerate wrote of a model; None without any."""
    if parts := [file.name for file in files if "_rank" in file.stem]:
        raise CheckpointError(
            f"{str(files[0].parent)!r} holds the parts of {len(parts)} ranks ({listed(parts, 4)}; LOCAL_STATE_DICT, or "
            "use_dcp=False), which do not say what they are parts of. Load them in a run that is set up like the "
            "one that saved them (accelerator.load_state), and save it with SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    if len(files) > 1:
        names = listed(file.name for file in files)
        raise CheckpointError(f"{str(files[0].parent)!r} holds several models: {names}. Give the path of one file.")
    return next(iter(files), None)


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


def stamp(file: Path) -> tuple[int, int]:
    """Inode and time of modification of a file, which change when it is replaced or written, or the version of one in a
    store; zeros without a file."""
    with watched(file):
        if (there := stored_object(file)) is not None:
            return there.version_now()
        try:
            status = file.stat()
        except OSError:
            return 0, 0
    return status.st_ino, status.st_mtime_ns


def read_settled(folder: Path, read: Callable[[], T]) -> T:
    """The result of reading a folder; it is read once more where a save has replaced the checkpoint meanwhile."""

    def stamps() -> list[tuple[int, int]]:
        return [stamp(folder / name) for name in (WEIGHTS, WEIGHTS_INDEX, METADATA, CONFIG)]

    before = stamps()
    try:
        result = read()
    except (CheckpointError, OSError):
        if stamps() == before:
            raise
    else:
        if stamps() == before:
            return result
    return read()


def named_in_config(folder: Path) -> str | None:
    """The weight file or index that `config.json` names (`transformers_weights`), as transformers follows it."""
    file = folder / CONFIG
    try:
        named = read_json_object(file).get("transformers_weights") if file.is_file() else None
    except CheckpointError:
        return None  # whoever loads the config says so
    if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
        return None
    if leaves_folder(named):
        raise CheckpointError(f"{file}: transformers_weights is {quoted(named)}; expected a file inside the folder.")
    return named


def _refuse_incomplete(files: list[Path]) -> None:
    """Refuse shards without an index of which some are missing: their save, or their download, was cut off."""
    shards = [shard for file in files if (shard := _SHARD.fullmatch(file.name))]
    for (stem, count), there in Counter((shard["stem"], shard["count"]) for shard in shards).items():
        if there != int(count):
            raise CheckpointError(
                f"{str(files[0].parent)!r} holds {there} of {int(count)} files {stem}-*-of-{count}.safetensors and no "
                "index: it is being saved, or was not saved or copied whole. Save or copy it again."
            )
