"""What lies beside the weights of a checkpoint and is copied with them: tokenizer, chat template, processor."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hf_fsdp_tools.hub import fetch, local_path

_TOKENIZER = (
    "added_tokens.json",
    "additional_chat_templates/*",
    "chat_template*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "*.tiktoken",
    "tokenizer*",
    "vocab.*",
)
"""Files of tokenizers, with what `save_pretrained` of transformers writes (5.23) and older ones wrote."""

_PROCESSOR = ("*processor_config.json",)
"""Files of processors of images, sound and video, and of processors around a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class FilesBeside:
    """The files of a tokenizer and of a processor, to be saved beside other weights."""

    homes: Mapping[str, Mapping[str, Any]]
    """Folders, files in them, or hub names, with what fetches from there; all files of a kind come from the first that
    has any."""

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Copy them, as a tokenizer would save itself."""
        homes = [home for name, hub_kwargs in self.homes.items() if (home := _folder(name, hub_kwargs)) is not None]
        for patterns in (_TOKENIZER, _PROCESSOR):
            for home in homes:
                if files := sorted(_matching(home, patterns)):
                    for file in files:
                        target = Path(folder) / file.relative_to(home)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, target)
                    break


def _folder(name: str, hub_kwargs: Mapping[str, Any]) -> Path | None:
    """The local folder of a name, into which files were fetched if it is on the hub; None without a name."""
    if not name:
        return None
    path = local_path(name)
    if path is None:
        return fetch(name, *_TOKENIZER, *_PROCESSOR, **hub_kwargs)[0]
    return path.parent if path.is_file() else path / (hub_kwargs.get("subfolder") or "")


def _matching(folder: Path, patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
