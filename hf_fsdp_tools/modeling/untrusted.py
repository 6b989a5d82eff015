"""What files beside the weights say, or one error that names the file: nothing in them is trusted."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError
from hf_fsdp_tools.text import first_lines, quoted

__all__ = [
    "load_generation_config",
    "read_json_object",
    "refuse_compressed",
    "understood",
]

_MAX_BYTES = 100_000_000
"""Bytes of the largest file that is parsed: what the header of a safetensors file may have."""


@contextmanager
def understood(what: str, cure: str, kind: type[FSDPToolsError] = CheckpointError) -> Iterator[None]:
    """Turn whatever a library raises over the content of a file into one error of this package.

    transformers, PEFT and torch check little of what a file says, and fail anywhere and with any error where it is
    wrong. So a block holds calls of these libraries alone, and no code of this package, whose mistakes must show.
    Exhausted memory, and errors that this package raised already, pass unchanged.

    Args:
        what: begins the message: "The configuration of 'folder' cannot be used".
        cure: ends the message, as a sentence.
        kind: of the error.

    Raises:
        CheckpointError: the block raised; or another `kind`.
        ConfigError: the block needs a package that is not installed.
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
    """The content of a JSON file that must hold an object.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, is too large, or holds something else.
    """
    with watched(file):
        try:
            if (size := file.stat().st_size) > _MAX_BYTES:
                raise CheckpointError(
                    f"{file}: is {size:,} bytes long, expected at most {_MAX_BYTES:,}. Save it again."
                )
            text = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}. Check the path and its permissions.") from None
    with understood(f"{file}: is not JSON", "Copy or save it again."):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {quoted(content)}. Copy or save it again.")
    return content


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation settings of a folder; None where it has none.

    Raises:
        CheckpointError: they are damaged.
    """
    file = folder / "generation_config.json"
    with watched(file):
        if not file.is_file():
            return None
    read_json_object(file)
    with understood(f"{file}: cannot be used", "Save it again, or remove it."):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def refuse_compressed(file: Path, records: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse compressed records of a `torch.save` archive: a few kB of them can become any number of GB when read.

    Raises:
        CheckpointError: names the first one; `torch.save` writes none.
    """
    for record in records:
        is_stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
        if not is_stored:
            raise CheckpointError(
                f"{file}: {quoted(record.filename)} is compressed ({record.file_size:,} bytes in "
                f"{record.compress_size:,}), expected an uncompressed record of the archive, as torch.save writes it. "
                "Where you trust its source, save it again: torch.save(torch.load(file, weights_only=True), file)."
            )
