"""The file of a proof: what a run, and the manifest of its states, take from it."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.pickles import read_json_object


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a proof's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_proof(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A file of `hf-fsdp prove --output` in which all agrees.

    Raises:
        ConfigError: there is no such file, it was changed, or the layout was not proved.
    """
    cure = "Write it with `hf-fsdp prove NAME --output FILE`."
    try:
        content = dict(read_json_object(Path(path)))
    except CheckpointError as error:
        raise ConfigError(f"The proof cannot be read: {error} {cure}") from None
    given = content.pop("sha256", None)
    if given != checksum(content):
        raise ConfigError(f"The proof {path} is not as it was written: its content has another checksum. {cure}")
    if not content["is_proved"]:
        raise ConfigError(f"{path} says that this layout differs from one process. Leave proof out, or the layout.")
    return {**content, "sha256": given}


def check_proved(proof: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse a run on other axes, or with another version of FSDP, than a proof is of; degrees may be larger."""
    layout = proof["layout"]
    other = [name for name, size in sizes.items() if name == "fsdp_version" and size != layout[name]]
    other += [
        name for name, size in sizes.items() if name != "fsdp_version" and (size > 1) != (layout.get(name, 1) > 1)
    ]
    if other:
        said = ", ".join(f"{name} {layout.get(name, 1)} (here {sizes[name]})" for name in other)
        raise ConfigError(f"The proof is of another layout: {said}. Prove this one, or leave proof out.")
