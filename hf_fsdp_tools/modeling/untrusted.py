"""Guards for files beside the weights: nothing in them is trusted, and each kind of damage is one error."""

import json
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors, storage_errors
from hf_fsdp_tools.text import quoted

MAX_PARSED_BYTES = 100_000_000
"""Bytes of the largest file that is parsed: the largest header of a safetensors file."""

_MOST_NESTED = 50
"""Levels of YAML; a launch file has 2. (assumed)"""


def read_small(file: Path) -> bytes:
    """The bytes of a file that is parsed as a whole."""
    if (size := refuse_special(file)) > MAX_PARSED_BYTES:
        raise CheckpointError(f"{file}: is {size:,} bytes long, expected at most {MAX_PARSED_BYTES:,}. Save it again.")
    with watched(file), storage_errors("read", file):
        content = file.read_bytes()
    refuse_pointer(file, content)
    return content


def refuse_special(file: Path) -> int:
    """Refuse a file that is none on a disk: a pipe would wait for ever; return the size of others."""
    with watched(file), storage_errors("read", file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: is no regular file. Copy or save it again.")
    return status.st_size


def read_json_object(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file that must hold an object with unique keys."""
    return parse_json_object(file, read_small(file))


def parse_json_object(file: Path, text: bytes) -> dict[str, Any]:
    """A JSON object of a file, with unique keys."""
    with library_errors(f"{file}: is not valid JSON", "The file is damaged; download or save it again."):
        content = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {quoted(content)}. Download or save it again.")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {quoted(twice)} occurs twice")
    return entries


def load_yaml(text: str) -> Any:
    """The content of a YAML file without aliases: these, one in the other, make any amount of a few lines."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line} has the alias *{event.anchor}; write it out")
        if depth > _MOST_NESTED:
            raise yaml.YAMLError(f"line {line} is nested more than {_MOST_NESTED} deep")
    return yaml.safe_load(text)


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation settings of a folder; None where it has none."""
    file = folder / "generation_config.json"
    with watched(file):
        if not file.is_file():
            return None
    read_json_object(file)
    with library_errors(f"{file}: cannot be used", "Save it again, or remove it."):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def refuse_pointer(file: Path, beginning: bytes) -> None:
    """Refuse the pointer that a clone without git-lfs leaves in place of a file."""
    if len(beginning) > 1 and b"version https://git-lfs".startswith(beginning[:20]):
        raise CheckpointError(
            f"{file}: is a pointer of git-lfs, expected the file itself. "
            "Run `git lfs pull` in its folder, or download it."
        )
