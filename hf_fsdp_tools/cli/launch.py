"""The commands `hf-fsdp finetune`, `hf-fsdp dpo`, …: a recipe of the package, started by `accelerate launch`."""

import argparse
import ast
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.machine import FIELDS, add_machine_options, decide, launcher_words
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean

_ALONE = ("dequantize",)
"""Recipes that are one process, started as `python recipes/NAME.py`."""

_PASSED = (
    "num_cpu_threads_per_process", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir",
    "fsdp_activation_checkpointing", "fsdp_offload_params", "fsdp_reshard_after_forward", "fsdp_state_dict_type",
)  # fmt: skip
"""Options of `accelerate launch` with one value that it gets as they are."""

_ALWAYS = "recipes run FSDP2 on all devices; leave it out"
_REFUSED = {
    "use_fsdp": _ALWAYS,
    "multi_gpu": _ALWAYS,
    "use_deepspeed": f"{_ALWAYS}, and translate a DeepSpeed file with `hf-fsdp config --from FILE`",
    "deepspeed_config_file": f"{_ALWAYS}, and translate the file with `hf-fsdp config --from FILE`",
    "dynamo_backend": "use --torch_compile true --torch_compile_backend NAME",
}
"""Options of `accelerate launch` that a recipe has no use for, and what to do instead."""


def shipped(folder: str) -> Path:
    """The folder of the recipes (`recipes`) or of the configs (`accelerate_configs`): of the clone from which the
    package is imported, otherwise inside the installed package."""
    package = Path(__file__).parents[1]
    clone = package.parent
    return clone / folder if (clone / "pyproject.toml").is_file() and (clone / folder).is_dir() else package / folder


def recipes() -> dict[str, Path]:
    """The recipes that `accelerate launch` starts, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("[a-z]*.py")) if path.stem not in _ALONE}


def add_recipes(commands: Any) -> None:
    """Add one command for each recipe that `accelerate launch` starts."""
    for path in recipes().values():
        about = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).splitlines()[0]
        name = path.stem.replace("_", "-")
        parser = commands.add_parser(
            name,
            aliases=[path.stem] if path.stem != name else [],
            help=about[:1].lower() + about[1:].rstrip("."),
            usage=f"hf-fsdp {name} [--config_file YAML | --gpus N | --cpu] [ARGUMENT OF THE RECIPE ...]",
            add_help=False,
            allow_abbrev=False,
        )
        add = parser.add_argument_group("where it runs (everything else goes to the recipe)").add_argument
        about = "config of `accelerate launch`: a file, or the name of one that comes with the package (default: "
        add("--config_file", "--config-file", metavar="YAML", help=f"{about}one made for this machine)")
        add("--cpu", action="store_true", help="run on CPU with gloo, whatever this machine has")
        add_machine_options(add)
        add("--gpu-ids", "--gpu_ids", metavar="0,1", help="GPUs to use (default: all)")
        about = "compute dtype (default: that of the config; bf16 on GPUs that have it)"
        add("--mixed-precision", "--mixed_precision", choices=("no", "bf16", "fp16"), help=about)
        for option in _PASSED:
            add(f"--{option}", f"--{option.replace('_', '-')}", help=argparse.SUPPRESS)
        for option in _REFUSED:
            add(f"--{option}", f"--{option.replace('_', '-')}", nargs="?", const="", help=argparse.SUPPRESS)
        add("-h", "--help", action="store_true", help="show this, and all options of the recipe")
        parser.set_defaults(run=_launch, recipe=path, rest=[], show=parser.format_help, fields=FIELDS)


def _launch(options: argparse.Namespace) -> int:
    if options.help:
        print(options.show(), flush=True)
        return subprocess.call([sys.executable, str(options.recipe), "--help"])
    # TrainingArguments have the option too; the launcher has to know it.
    options.cpu |= any(word in ("--use_cpu", "--use-cpu") for word in options.rest)
    launch = [sys.executable, "-m", "hf_fsdp_tools.integrations.accelerate_launch", "--config_file"]
    given = vars(options)
    for name, cure in _REFUSED.items():
        if given[name] is not None:
            raise ConfigError(f"--{name} of `accelerate launch` means nothing to a recipe: {cure}")
    passed = [word for name in _PASSED if given[name] is not None for word in (f"--{name}", given[name])]
    script = [*passed, str(options.recipe), *options.rest]
    if options.config_file is not None:
        path = named_config(options.config_file)
        return _run([*launch, str(path), *_beside_file(options, path), *script])
    config, _ = decide(options)
    if options.gpus is not None and config.num_processes > 0:
        _check_devices(config.num_processes // config.num_machines)
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config.to_accelerate_yaml(), encoding="utf-8")
        return _run([*launch, str(path), *launcher_words(config), *script])


def named_config(name: str) -> Path:
    """The file of that path, or the one of that name (or of that path in a clone) that comes with the package."""
    own = {path.stem: path for path in sorted(shipped("accelerate_configs").glob("*.yaml"))}
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"--config_file {name} is a folder; name a file of `accelerate launch`")
    if path.stem not in own or path.parent not in (Path(), Path("accelerate_configs")):
        ours = f"; `hf-fsdp config` makes one, and the package has {', '.join(own)}"
        known = did_you_mean(path.stem, own, otherwise=ours)
        raise ConfigError(f"--config_file {name}: there is no such file{known}")
    return own[path.stem]


def _beside_file(options: argparse.Namespace, path: Path) -> list[str]:
    """What the command line says beside a file, as options of `accelerate launch`; prints warnings about the file."""
    import yaml

    from hf_fsdp_tools import FSDPConfig

    findings = FSDPConfig.check_file(path)
    if problems := [f"{each.fact} {each.cure}" for each in findings if each.severity == "error"]:
        raise ConfigError(f"{path}: {' '.join(problems)} `hf-fsdp config --from {path}` translates it.")
    file = yaml.safe_load(path.read_text(encoding="utf-8"))
    answered = {"few-devices"}  # below, with what the command line says
    if options.gpus is not None or options.num_processes is not None:
        answered.add("num-processes")
    for each in findings:
        if each.severity == "warning" and each.code not in answered:
            print(f"warning: {path}: {each.fact} {each.cure}", file=sys.stderr)
    if options.cpu and not file.get("use_cpu"):
        raise ConfigError(f"--cpu: {path} is for GPUs; leave --config_file out, which makes a config for the CPU")
    words = []
    names = (
        "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
        "mixed_precision",
    )  # fmt: skip
    given = {name: getattr(options, name) for name in names}
    given |= {"num_processes": options.gpus} if options.gpus is not None else {}
    for name, value in given.items():
        if name in ("num_processes", "num_machines") and value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; use a whole number from 1")
        if value is not None:
            words += [f"--{name}", str(value)]
    if not file.get("use_cpu"):
        found = {name: given[name] or file.get(name) or 1 for name in ("num_processes", "num_machines")}
        _check_devices(found["num_processes"] // found["num_machines"])
    return words


def _check_devices(needed: int) -> None:
    """Refuse a run on more GPUs than this machine has."""
    import torch

    from hf_fsdp_tools.accelerator import find_accelerator

    count = torch.accelerator.device_count() if find_accelerator() is not None else 0
    if count < needed:
        raise ConfigError(
            f"the run needs {needed} GPU{'s' * (needed > 1)} on this machine, and torch finds {count or 'none'}; "
            + (f"use --gpus {count}" if count else "check the driver with nvidia-smi, or run on the CPU with --cpu")
        )


def _run(command: list[str]) -> int:
    """The exit code of a command, which is ended with this process."""
    print(f"accelerate launch {shlex.join(command[3:])}", file=sys.stderr, flush=True)
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # a terminal sends it to the launcher too, which ends its processes
                continue
    finally:
        signal.signal(signal.SIGTERM, before)
