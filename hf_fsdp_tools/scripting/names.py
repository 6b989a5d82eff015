"""Names of options that no recipe has, and all that some recipe may have, found without importing a library."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean

_OF_LAUNCHER = ["cp_size", "tp_size", "ep_size", "dp_replicate_size", "num_processes", "num_machines", "machine_rank"]
_OF_LAUNCHER += ["compute_environment", "distributed_type"]
_FILE = "goes into the launch file: `hf-fsdp config --output FILE` writes one, and --config_file of hf-fsdp and of "
ELSEWHERE = dict.fromkeys(_OF_LAUNCHER, f"{_FILE}`accelerate launch` takes it.")
ELSEWHERE["mixed_precision"] = "is for the launcher: give it before the script, or the script --bf16 true."
ELSEWHERE["deepspeed"] = "is not used: FSDP2 shards here. `hf-fsdp config --from FILE` translates its JSON."
OURS = {"batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs", "lr": "learning_rate"}
OURS |= {"max_seq_length": "max_length", "max_length": "max_completion_length"}
ELSEWHERE |= {name: f"is no option of this recipe: did you mean --{ours}?" for name, ours in OURS.items()}
"""Names of the launcher's options, of other programs', and where each belongs."""


def unknown_option(name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The error of a name that no option has."""
    near = f"is no option of this recipe{did_you_mean(name, known, otherwise='; --help lists all.')}"
    return ConfigError(f"{where}{name} {ELSEWHERE.get(plain(name), near)}")


def plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


_FILES = (
    ("trl", "**/*config*.py"),
    ("trl", "scripts/*.py"),
    ("transformers", "training_args*.py"),
    ("sentence_transformers", "**/training_args*.py"),
    ("accelerate", "commands/launch.py"),
)
"""Files of libraries that define options, by patterns within the package."""


def refuse_unknown(words: Sequence[str], sources: Iterable[Path]) -> None:
    """Refuse options, and keys of the file of `--config`, that neither these files of this package nor the libraries
    can have: before these are imported, which takes many seconds."""
    names = set().union(*map(_names_in, sources))
    for package, pattern in _FILES:
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            names.update(*map(_names_in, Path(place).glob(pattern)))
    import yaml

    given = [(word.partition("=")[0], "") for word in words if word.startswith("--")]
    for word, value in pairwise(words):
        if word == "--config" and Path(value).is_file():
            with suppress(yaml.YAMLError, UnicodeDecodeError, RecursionError):  # the recipe says what is wrong
                content = yaml.safe_load(Path(value).read_text()) if Path(value).stat().st_size < 10**6 else None
                if "model_type" in (content or {}):
                    raise ConfigError(
                        f"--config {value}: is the config of a model: name its folder by --model_name_or_path."
                    )
                given += [(str(key), f"--config {value}: ") for key in content if key != "env"] if content else []
    for option, where in given:
        name = plain(option)
        begins = any(known.startswith(name.removeprefix("no_")) for known in names)  # as a parser takes it
        if name not in names and not name.endswith("_column") and (name in ELSEWHERE or not begins):
            raise unknown_option(option, names if where else [f"--{known}" for known in names], where)


def _names_in(file: Path) -> Iterator[str]:
    """The fields of classes in a Python file, and the options that it gives to a parser."""
    text = file.read_text(encoding="utf-8", errors="replace")
    yield from (plain(found) for found in re.findall(r"[\"'](--[a-z][\w-]+)[\"']", text))
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
