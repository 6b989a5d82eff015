"""Presets: what a recipe trains and on which GPUs, in one file; `hf-fsdp search` writes them, `--preset` reads them."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_fsdp_tools.axes import with_degrees
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.recipes import DEFAULT_RECIPE
from hf_fsdp_tools.text import comment, did_you_mean, first_line, show_bytes

_OPTIONS = "# Searched: length, batch, accumulation and what saves memory. To be chosen: the learning rate and below."
_PACKING = "# Rows that are shorter: packing: true fills each with several (docs/data.md)."

_LESS = 0.01
"""Part of a GPU's memory by which two of one kind may differ. (assumed: cards of one name report the same)"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe, the kind of GPU for which it was searched, fields of `LaunchConfig`, and options of the recipe."""

    recipe: str
    gpu: str
    allocator: str = ""  # PYTORCH_ALLOC_CONF, unless the environment has one
    launch: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: str, gpu: str, allocator: str, config: Any, options: Mapping[str, Any]) -> "Preset":
        """The preset of a `LaunchConfig`, of which it holds what is no default."""
        usual, given = {each.name: each.default for each in fields(config)}, asdict(config)
        launch = {name: value for name, value in given.items() if value != usual[name]}
        launch = {name: list(value) if isinstance(value, tuple) else value for name, value in launch.items()}
        own = {name: value for name, value in options.items() if name != "dataset_name"}
        return cls(recipe=recipe, gpu=gpu, allocator=allocator, launch=launch, options=own)

    def text(self, notes: Sequence[str]) -> str:
        """The file, with lines of comment above."""
        import yaml

        is_packed = self.recipe != DEFAULT_RECIPE or "packing" in self.options
        values = {name: value for name, value in asdict(replace(self, options={})).items() if value != ""}
        above = [*map(comment, notes), yaml.safe_dump(values, sort_keys=False)]
        above[-1] = above[-1].removesuffix("options: {}\n") + _OPTIONS + ("" if is_packed else f"\n{_PACKING}")
        return "\n".join([*above, yaml.safe_dump({"options": dict(self.options)}, sort_keys=False)])

    @classmethod
    def read(cls, path: Path) -> "Preset":
        """The preset in a file; ConfigError where it is none."""
        import yaml

        from hf_fsdp_tools import LaunchConfig
        from hf_fsdp_tools.modeling.pickles import load_yaml

        try:
            found = cls(**load_yaml(path))
            lists = {name: tuple(value) for name, value in found.launch.items() if isinstance(value, list)}
            with_degrees(LaunchConfig)(**(launch := {**found.launch, **lists}))
            return replace(found, launch=launch, options=dict(found.options))
        except (OSError, yaml.YAMLError, TypeError, ValueError, AttributeError, ConfigError) as error:
            cure = "`hf-fsdp search NAME --recipe RECIPE --output FILE` writes one"
            raise ConfigError(f"--preset {path} is no preset ({first_line(error)}); {cure}") from None


def shipped(folder: str) -> Path:
    """The folder of the recipes (`recipes`) or of the configs (`accelerate_configs`): of the clone from which the
    package is imported, otherwise inside the installed package."""
    package = Path(__file__).parents[1]
    clone = package.parent
    return clone / folder if (clone / "pyproject.toml").is_file() and (clone / folder).is_dir() else package / folder


def taken_preset(words: list[str], recipe: str, launch: Mapping[str, Any]) -> tuple[Preset | None, list[str]]:
    """The preset that a command names, if any, and the recipe's words with its options before the others."""
    from hf_fsdp_tools.foresight.memory import ALLOCATORS
    from hf_fsdp_tools.scripting.setups import recipe_words

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?", const="")
    parser.add_argument("--config", nargs="?")
    given, rest = parser.parse_known_args(words)
    if given.preset == "":
        raise ConfigError(
            "--preset names a file of `hf-fsdp search`, or a model that comes with the package (qwen3-8b)"
        )
    if given.config is not None and given.preset is None and _is_name(given.config):
        given.preset, given.config = given.config, None
        print(f"hf-fsdp: --config {given.preset} is --preset {given.preset} now", file=sys.stderr)
    if given.preset is None:
        return None, words
    if given.config is not None:
        raise ConfigError(
            "--preset and --config: both have options of the recipe; give one, and others by --NAME VALUE"
        )
    path = _preset_file(given.preset)
    preset, cpu_or_file = Preset.read(path), launch["cpu"] or launch["config_file"]
    again = f"hf-fsdp search {preset.options.get('model_name_or_path', 'NAME')} --recipe {recipe}"
    if preset.recipe != recipe:
        raise ConfigError(
            f"--preset {given.preset} is for {preset.recipe}, and {recipe} takes other memory. Make one: {again} --gpu "
            f"{preset.gpu} --num-processes {preset.launch['num_processes']} --output FILE.yaml"
        )
    if preset.allocator and not {*ALLOCATORS} & os.environ.keys():
        os.environ[ALLOCATORS[0]] = preset.allocator
    if not cpu_or_file:
        _check_machine(given.preset, preset, again, launch["num_processes"])
    return preset, [*recipe_words(dict(preset.options)), *rest]


def is_preset(file: Path) -> bool:
    """Whether a file has the keys of a preset."""
    keys = re.findall(r"^([a-z]+):", file.read_text("utf-8", "replace")[: 10**5], re.MULTILINE)
    return {each.name for each in fields(Preset) if each.default is MISSING} <= {*keys}


def _is_name(text: str) -> bool:
    return Path(text).suffix not in (".yaml", ".yml") and not Path(text).is_file()


def _preset_file(name: str) -> Path:
    """The preset in that file, or the one of that name that comes with the package."""
    own = {path.stem: path for path in sorted((shipped("accelerate_configs") / "models").glob("*.yaml"))}
    if not _is_name(name):
        return Path(name)
    if name.lower() not in own:
        near = did_you_mean(name.lower(), own, otherwise=".")
        raise ConfigError(f"--preset {name}: no such file, and none of the package{near} It has {', '.join(own)}.")
    return own[name.lower()]


def _check_machine(name: str, preset: Preset, again: str, num_processes: int | None) -> None:
    """Refuse GPUs for which a preset was not searched: another number, or less memory."""
    from hf_fsdp_tools import accelerator
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    count, gpu = preset.launch["num_processes"], gpu_named(preset.gpu)
    if num_processes not in (None, count):
        raise ConfigError(
            f"--preset {name} is for {count} GPUs, not for --num_processes {num_processes}: memory and global batch "
            f"would be others. Make one: {again} --gpu {preset.gpu} --num-processes {num_processes} --output FILE.yaml"
        )
    check_count(count // preset.launch.get("num_machines", 1))
    device = accelerator.find_accelerator()
    memory = None if device is None else accelerator.device_bytes(device)
    if memory is not None and memory < gpu.memory_bytes * (1 - _LESS):
        raise ConfigError(
            f"--preset {name} is for {gpu.name} of {show_bytes(gpu.memory_bytes)}, and these GPUs have "
            f"{show_bytes(memory)}. Make one: {again} --num-processes {count} --output FILE.yaml"
        )


def check_count(needed: int) -> None:
    """Refuse more processes than this machine has GPUs."""
    import torch

    from hf_fsdp_tools.accelerator import find_accelerator

    count = torch.accelerator.device_count() if find_accelerator() is not None else 0
    if count < needed:
        cure = f"use --num_processes {count}" if count else "check the driver with nvidia-smi, or use --cpu"
        raise ConfigError(f"{needed} processes on a machine with {count} GPU(s): {cure}")
