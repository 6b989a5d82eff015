"""What files beside the weights say, or one error that names the file: nothing in them is trusted."""

import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError
from hf_fsdp_tools.text import first_lines, quoted

MAX_PARSED_BYTES = 100_000_000
"""Bytes of the largest file that is parsed: what the header of a safetensors file may have."""

_MOST_NESTED = 50
"""Levels of YAML; a launch file has 2. (assumed)"""


@contextmanager
def understood(what: str, cure: str, kind: type[FSDPToolsError] = CheckpointError) -> Iterator[None]:
    """Turn whatever a library raises over the content of a file into one error of this package.

    transformers, PEFT and torch check little of what a file says, and fail anywhere and with any error where it is
    wrong. So a block holds calls of these libraries alone, and no code of this package, whose mistakes must show.
    Exhausted memory, and errors that this package raised already, pass unchanged.
    """
    try:
        yield
    except (FSDPToolsError, MemoryError):
        raise
    except ImportError as error:
        raise ConfigError(f"{what}: {first_lines(error)}. Install what is missing.") from None
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {first_lines(error)}. {cure}") from error


def read_json_object(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file that must hold an object."""
    with watched(file):
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever
                raise CheckpointError(f"{file}: is no regular file. Copy or save it again.")
            if status.st_size > MAX_PARSED_BYTES:
                raise CheckpointError(
                    f"{file}: is {status.st_size:,} bytes long, expected at most {MAX_PARSED_BYTES:,}. Save it again."
                )
            text = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}. Check the path and its permissions.") from None
    with understood(f"{file}: is not JSON", "Copy or save it again."):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {quoted(content)}. Copy or save it again.")
    return content


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
    with understood(f"{file}: cannot be used", "Save it again, or remove it."):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def refuse_pointer(file: Path, beginning: bytes) -> None:
    """Refuse the pointer that a clone without git-lfs leaves in place of a file."""
    if len(beginning) > 1 and b"version https://git-lfs".startswith(beginning):
        raise CheckpointError(
            f"{file}: is a pointer of git-lfs, expected the file itself. "
            "Run `git lfs pull` in its folder, or download it."
        )
