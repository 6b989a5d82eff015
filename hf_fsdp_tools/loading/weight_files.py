"""Find the weight files of a folder, or the index file that names them; nothing that a folder says is trusted."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.dcp import METADATA
from hf_fsdp_tools.loading.formats.safetensors import MAX_HEADER_BYTES, parse_json
from hf_fsdp_tools.loading.formats.stored import leaves_folder
from hf_fsdp_tools.loading.unfinished import refuse_incomplete
from hf_fsdp_tools.text import listed, listed_lines, quoted

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
ACCELERATE_PICKLED = "pytorch_model_fsdp*.bin"
"""Written by Accelerate's `save_state` under FULL_STATE_DICT, in the model's own layout; `…_1.bin` is a second model's.
Under LOCAL_STATE_DICT, or with `use_dcp=False`, `…_rank0.bin` is the part of one rank."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of an index file."""

    file: Path
    """The index file."""

    weight_map: Mapping[str, str]
    """Stored key to file name."""

    files: Mapping[str, Path]
    """File name to file."""

    num_bytes: int
    """Size of the index file."""


def is_pickled(file: Path) -> bool:
    """Whether a weight file is one of `torch.save`, by its name."""
    return file.suffix in (".bin", ".pt", ".pth")


def refuse_pickled(files: Iterable[Path]) -> None:
    """Legacy files are read only when asked."""
    pickled = [file for file in files if is_pickled(file)]
    if pickled:
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
        refuse_incomplete(plain)
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


def read_listing(file: Path) -> Listing:
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
        raise CheckpointError(as_one_message(problems))
    return Listing(file=file, weight_map=weight_map, files=files, num_bytes=len(text))


def _instead(file: Path) -> str:
    """Why a file that should hold weights cannot, as the end of a sentence."""
    if file.is_symlink():
        return f"is a link that leads nowhere ({quoted(os.readlink(file))})"
    return "is no file" if file.exists() else "is not there"


def as_one_message(problems: list[str]) -> str:
    """The text of all problems: a single one as it is, several as a list."""
    several = f"{len(problems)} problems with the checkpoint:\n{listed_lines(problems)}"
    return several if len(problems) > 1 else problems[0]
