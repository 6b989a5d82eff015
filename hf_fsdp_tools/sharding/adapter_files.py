"""The files of a PEFT adapter, checked before PEFT reads them: nothing in them is trusted."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.modeling.untrusted import read_json_object, refuse_compressed, understood
from hf_fsdp_tools.text import quoted

__all__ = ["ADAPTER_CONFIG", "open_adapter", "open_adapter_config", "read_adapter_config", "refuse_endless_patterns"]

ADAPTER_CONFIG = "adapter_config.json"

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""In the order in which PEFT looks for them."""

_PATTERNS = (
    "alpha_pattern",
    "exclude_modules",
    "layers_pattern",
    "modules_to_save",
    "rank_pattern",
    "target_modules",
    "target_parameters",
)
"""Entries of `adapter_config.json` that PEFT (0.21) matches as regular expressions; of dictionaries, the keys."""

_COPY = "Copy or download the adapter again."


def open_adapter(peft: Any, name: str, module_names: Sequence[str], hub_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The local folder of an adapter, and PEFT's config of it; one on the hub is fetched.

    All of its files are read, so that whatever is wrong with them shows here, where the ranks exchange errors, and not
    when PEFT reads them again.

    Args:
        peft: the module.
        name: hub name or folder.
        module_names: of the model that the adapter is for.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    No rank communicates.

    Raises:
        CheckpointError: there is no such adapter, or its files are damaged.
    """
    subfolder = hub_kwargs.get("subfolder") or ""
    path = local_path(name)
    folder = fetch(name, "adapter_*", **hub_kwargs)[0] if path is None else path / subfolder
    config = open_adapter_config(peft, folder, module_names)
    if config is None:
        raise CheckpointError(
            f"No adapter_config.json in {name!r}{f', folder {subfolder!r}' if subfolder else ''}. Give a folder that "
            "save_pretrained wrote for an adapter, or a hub name."
        )
    _check_weights(peft, folder)
    return str(folder), config


def open_adapter_config(peft: Any, folder: Path, module_names: Sequence[str]) -> Any:
    """PEFT's config of the adapter in a folder; None where it has none. No rank communicates.

    Args:
        peft: the module.
        folder: with `adapter_config.json`.
        module_names: of the model that the adapter is for.

    Raises:
        CheckpointError: it is damaged.
    """
    written = read_adapter_config(folder)
    if written is None:
        return None
    file = folder / ADAPTER_CONFIG
    refuse_endless_patterns(file, _patterns(written), module_names)
    with understood(f"{file}: cannot be used by PEFT", _COPY):
        return peft.PeftConfig.from_pretrained(str(folder))


def read_adapter_config(folder: Path) -> Mapping[str, Any] | None:
    """The `adapter_config.json` of a folder, with base and revision as texts; None where it has none.

    Raises:
        CheckpointError: it is damaged, or PEFT would import a module that it names.
    """
    file = folder / ADAPTER_CONFIG
    with watched(file):
        if not file.is_file():
            return None
    written = read_json_object(file)
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(written.get(key), (str, type(None))):
            raise CheckpointError(
                f"{file}: {key} is {quoted(written[key])}, expected a name. Copy the adapter again, or write it there."
            )
    if written.get("megatron_core") not in (None, "megatron.core"):  # PEFT imports what is written there
        raise CheckpointError(
            f"{file}: megatron_core is {quoted(written['megatron_core'])}, expected 'megatron.core'. {_COPY}"
        )
    return written


def _check_weights(peft: Any, folder: Path) -> None:
    """Read the weights of an adapter as PEFT does, and forget them."""
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"No weights in {str(folder)!r}: expected {' or '.join(_WEIGHTS)}. {_COPY}")
    with watched(weights), understood(f"{weights}: cannot be read as the weights of an adapter", _COPY):
        if zipfile.is_zipfile(weights):
            with zipfile.ZipFile(weights) as archive:
                refuse_compressed(weights, archive.infolist())
        peft.load_peft_weights(str(folder), device="cpu")


def _patterns(written: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what PEFT takes for regular expressions in an adapter's config."""
    for key in _PATTERNS:
        value = written.get(key)
        yield from value if isinstance(value, (list, dict)) else [value]


_MATCHING_S = 20.0
"""How long a process may match patterns with the names of a model, which takes milliseconds. (assumed)"""

_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name)
        re.match(rf"(^|.*\\.)({pattern})($|\\..*)", name)
"""


def refuse_endless_patterns(file: Path, patterns: Iterable[Any], names: Iterable[str]) -> None:
    """Refuse regular expressions of a file that take endless time with some name, as `(a+)+b` does with `aaa…`.

    Nothing ends such a match within a process, so a process of its own matches them first, for 20 s at most; none is
    started for plain names. It runs Python's `re` alone, and nothing of the file.

    Raises:
        CheckpointError: they take longer, or are no regular expressions.
    """
    repeating = [p for p in patterns if isinstance(p, str) and any(sign in p for sign in "*+{")]
    if not repeating:
        return
    shown = quoted(repeating[0] if len(repeating) == 1 else repeating)
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([repeating, list(names)]).encode(),
            timeout=_MATCHING_S,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"{file}: matching {shown} with the names of the model's modules takes more than {_MATCHING_S:.0f} s. "
            "Write the names of the modules there instead."
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise CheckpointError(f"{file}: {shown} is no regular expression: {said[-1]}. Correct it there.") from error
