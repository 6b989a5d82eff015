"""The commands `hf-fsdp finetune`, `hf-fsdp dpo`, …: a recipe of the package, started by `accelerate launch`."""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.options import ANY_ADDRESS, SHOWN, column, decide, filled
from hf_fsdp_tools.cli.presets import check_count, is_preset, shipped, taken_preset
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.recipes import commands_of, recipe_of
from hf_fsdp_tools.text import ELSEWHERE, did_you_mean, kind_of_file, no_option

_SHARED = tuple(
    Path(__file__).parents[1] / name for name in ("scripting/arguments.py", "integrations/trainer_settings.py")
)
"""Have the options that all recipes share."""

_LIBRARIES = (
    ("trl", "trainer/*_config.py"), ("trl", "scripts/*.py"), ("transformers", "training_args*.py"),
    ("sentence_transformers", "**/training_args.py"),
)  # fmt: skip
"""Have the others, which are read there: importing TRL takes many seconds."""

_USUAL = {
    "model_name_or_path": "the model: a hub name or a folder; without one the recipe is a demo",
    "dataset_name": "the rows: a hub name, a folder or a file (docs/data.md)",
    "max_length": "tokens at which a row is cut",
    "max_completion_length": "tokens that are written to a prompt at most",
    "learning_rate": "size of the first steps",
    "output_dir": "folder of the result (default: outputs and the name of the recipe)",
}
"""The options that nearly every run has, which help lists first."""

_ABOUT = {
    "--config_file YAML": "takes its config: a file, or the name of one that comes with the package (8x80gb)",
    "--preset NAME": "takes options and launch config for a model from one file of `hf-fsdp search`, or from one that "
    "comes with the package, for 8 GPUs of 80 GB or one (qwen3-8b)",
    "--cpu": "runs on CPU with gloo, whatever this machine has",
    "--num_processes N": "starts so many processes over all machines; likewise --num_machines, --machine_rank, "
    "--main_process_ip, --main_process_port, --gpu_ids, --mixed_precision",
}
_HELP = """\
usage: hf-fsdp {name} [OPTION OF `accelerate launch` ...] [OPTION OF THE RECIPE ...]

Without --config_file the recipe runs on all GPUs of this machine, or on 2 CPU processes. Of `accelerate launch`:
{about}
`hf-fsdp estimate MODEL --recipe {name}` predicts memory and time.
"""


def recipes() -> dict[str, Path]:
    """The recipes that `accelerate launch` starts, by name: the usual first."""
    found = {path.stem: path for path in sorted(shipped("recipes").glob("[a-z]*.py"))}
    usual = [name for name in ("finetune", "pretrain", "dpo", "grpo", "distill") if name in found]
    return {name: found[name] for name in dict.fromkeys([*usual, *found])}


def add_recipes(commands: Any) -> None:
    """Add one command for each recipe that `accelerate launch` starts."""
    for stem, path in recipes().items():
        name = stem.replace("_", "-")
        about = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or stem).splitlines()[0]
        about = re.split(r"[,:;] (?![^(]*\))|\.$", about)[0].replace(" under FSDP2", "")
        parser = commands.add_parser(name, help=f"{about[:1].lower()}{about[1:]}", add_help=False)
        parser.set_defaults(run=lambda options, path=path: launched(path, options.rest), rest=[])


def launched(recipe: Path, words: Sequence[str], heard: list[str] | None = None) -> int:
    """Do what `hf-fsdp RECIPE WORDS` says; return its exit code. What is printed is also added to `heard`."""
    if {"-h", "--help", "--help-all"} & set(words):
        SHOWN.set()
        about = "\n".join(column(f"  {name} ", text) for name, text in _ABOUT.items())
        print(filled(_HELP.format(name=recipe.stem.replace("_", "-"), about=about)), flush=True)
        if "--help-all" in words:
            return subprocess.call([sys.executable, str(recipe), "--help"])
        print(_help_of(recipe))
        return 0
    _check_words(recipe, words)
    run = _run if heard is None else partial(_run, heard=heard)
    from hf_fsdp_tools.integrations.accelerate_launch import split_words

    launch, launcher_words, recipe_words = split_words(words)
    preset, recipe_words = taken_preset(recipe_words, recipe.stem.replace("_", "-"), launch)
    # TrainingArguments have the option too; the launcher has to know it.
    launch["cpu"] |= any(word in ("--use_cpu", "--use-cpu") for word in recipe_words)
    command = [sys.executable, "-m", "hf_fsdp_tools.integrations.accelerate_launch", *launcher_words]
    script = [str(recipe), *recipe_words]
    if launch["config_file"] is not None:
        path = named_config(launch["config_file"])
        if is_preset(path):
            raise ConfigError(f"--config_file {path} is a preset: --preset {path} takes it")
        _check_file(path, launch)
        return run([*command, "--config_file", str(path), *script])
    config, _ = decide(launch, None if preset is None or launch["cpu"] else preset.launch)
    if config.main_process_ip == ANY_ADDRESS:
        raise ConfigError(
            f"--num_machines {config.num_machines}: give --main_process_ip, the address of machine 0, and on each "
            "machine its --machine_rank"
        )
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config.to_accelerate_yaml(), encoding="utf-8")
        return run([*command, *cpu_words(config), "--config_file", str(path), *script])


def cpu_words(config: Any) -> list[str]:
    """The launcher's option for the threads of a process on this machine's CPU, which has no key in a file."""
    threads = (os.cpu_count() or 1) // config.num_processes
    return ["--num_cpu_threads_per_process", str(threads)] if config.use_cpu and threads > 1 else []


def _classes_of(recipe: Path) -> list[ast.ClassDef]:
    """The classes that a recipe names, and those from which they inherit, as they stand in sources."""
    files = [recipe, *_SHARED]
    for package, pattern in _LIBRARIES:
        if (spec := find_spec(package)) is not None and spec.origin is not None:
            files += sorted(Path(spec.origin).parent.glob(pattern))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    there = {node.name: node for tree in reversed(trees) for node in tree.body if isinstance(node, ast.ClassDef)}
    names = [name for name in dict.fromkeys(re.findall(r"\w+", files[0].read_text(encoding="utf-8"))) if name in there]
    names += [] if recipe_of(recipe.stem).options else ["ModelArguments"]  # of `scripting.start`
    for name in names:  # which grows
        bases = (ast.unparse(base).rpartition(".")[2] for base in there[name].bases)
        names += [base for base in bases if base in there and base not in names]
    return [there[name] for name in names]


def _check_words(recipe: Path, words: Sequence[str]) -> None:
    """Refuse a package that is absent, and options or keys of the file of `--config` that the recipe does not have, all
    by sources: before processes start, and import libraries for half a minute."""
    nodes = [*ast.walk(ast.parse(recipe.read_text(encoding="utf-8")))]
    roots = [node.module.partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    if (absent := next((root for root in roots if find_spec(root) is None), None)) is not None:
        raise ConfigError(f"{recipe.stem} needs {absent}: pip install {absent.replace('_', '-')}")
    known = _options_of(*_classes_of(recipe)).keys() | {"config", "preset"}
    known |= {f"{name}_column" for name in recipe_of(recipe.stem).columns}
    if "learning_rate" not in known or (accelerate := find_spec("accelerate")) is None:
        return  # a version that has its classes elsewhere: the recipe says it
    launcher = Path(str(accelerate.origin)).with_name("commands") / "launch.py"
    taken = {name.replace("-", "_") for name in re.findall(r'"--([\w-]+)"', launcher.read_text(encoding="utf-8"))}
    if words and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]} stands behind no option; a recipe takes --NAME VALUE alone")
    for word in words:
        option = word.partition("=")[0]
        name = option.lstrip("-").replace("-", "_")
        if re.match("--[a-zA-Z]", word) is None or name in taken:
            continue
        if name in ELSEWHERE.keys() - {"preset"} or not any(
            each.startswith(name.removeprefix("no_")) for each in known | taken
        ):
            raise ConfigError(no_option(option, [f"--{each}" for each in known]))
    for file in re.findall(r"\0--config[=\0]([^\0]+)", "\0" + "\0".join(words)):
        if Path(file).suffix in (".yaml", ".yml") and not Path(file).exists():
            raise ConfigError(f"--config {file}: there is no such file")
        if not Path(file).is_file():
            continue
        if (kind := kind_of_file(Path(file))) is not None:
            raise ConfigError(f"--config {file} is {kind}, and no YAML of a recipe's options, such as max_steps: 10")
        if is_preset(Path(file)):
            raise ConfigError(f"--config {file} is a preset: --preset {file} takes it")
        keys = re.findall(r"^([a-zA-Z]\w*):(?:\s|$)", Path(file).read_text("utf-8", "replace")[: 10**6], re.MULTILINE)
        if (key := next((key for key in keys if key not in known | {"env"}), None)) is not None:
            raise ConfigError(f"--config {file}: {no_option(key, known)}")


def _help_of(recipe: Path) -> str:
    """The docstring of a recipe, its commands and the options that it and this package define, from their source:
    importing TRL, which has all others, takes seconds."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (recipe, *_SHARED)]
    row, name = recipe_of(recipe.stem), recipe.stem.replace("_", "-")
    about = "options of this recipe, which has those of TRL and transformers too:"
    lines = [filled(ast.get_docstring(trees[0]) or ""), "", commands_of(name), "", about]
    known = _options_of(*_classes_of(recipe))
    lines += [column(f"  --{name} ", text) for name, text in _USUAL.items() if name in known]
    own = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.decorator_list]
    lines += [line for name, line in _options_of(*own).items() if name not in _USUAL]
    if row.columns:
        columns = ", ".join(f"--{column}_column" for column in row.columns)
        lines.append(column("  columns ", f"{columns}: what the dataset calls them (docs/data.md)"))
    about = f"an adapter (LoRA), with learning rate {row.rates[1]:g} unless one is given"
    lines += [column("  --use_peft ", about)] * ("use_peft" in known)
    lines += ["", f"all options (some seconds): hf-fsdp {name} --help-all"]
    return "\n".join(lines)


def _options_of(*kinds: ast.ClassDef) -> dict[str, str]:
    """A line for each option that dataclasses make, by its name; the first that has a field knows whether it is one."""
    lines: dict[str, str] = {}
    for line in (line for kind in reversed(kinds) for line in kind.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            about, given = "", dict[str, Any](default=line.value)
            if isinstance(line.value, ast.Call):
                given = {each.arg: each.value for each in line.value.keywords if each.arg is not None}
            with suppress(KeyError, ValueError):  # libraries put some texts together
                about = ast.literal_eval(given["metadata"])["help"]
            default = ast.unparse(given["default"]) if given.get("default") is not None else "None"
            text = column(f"  --{line.target.id} ", f"{about} (default: {default})".strip())
            lines[line.target.id] = "" if "init" in given else text
    return {name: line for name, line in lines.items() if line}


def named_config(name: str) -> Path:
    """The file of that path, or the one of that name (or of that path in a clone) that comes with the package."""
    own = {path.stem: path for path in sorted(shipped("accelerate_configs").glob("*.yaml"))}
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"--config_file {name} is a folder; name a file of `accelerate launch`")
    if path.stem not in own or path.parent not in (Path(), Path("accelerate_configs")):
        ours = f"; `hf-fsdp init` makes one, and the package has {', '.join(own)}"
        known = did_you_mean(path.stem, own, otherwise=ours)
        raise ConfigError(f"--config_file {name}: there is no such file{known}")
    return own[path.stem]


def _check_file(path: Path, launch: dict[str, Any]) -> None:
    """Refuse a file that cannot be launched as the command line says, and print warnings about it."""
    from hf_fsdp_tools import LaunchConfig
    from hf_fsdp_tools.modeling.pickles import load_yaml

    findings = [each for each in LaunchConfig.check_file(path) if each.code != "few-devices"]
    if problems := [f"{each.problem} {each.fix}" for each in findings if each.severity == "error"]:
        raise ConfigError(f"{path}: {' '.join(problems)} `hf-fsdp convert {path}` translates it.")
    for each in findings:
        if each.severity == "warning" and not (each.code == "num-processes" and launch["num_processes"]):
            print(f"warning: {path}: {each.problem} {each.fix}", file=sys.stderr)
    file = load_yaml(path)
    if file.get("use_cpu"):
        return
    if launch["cpu"]:
        raise ConfigError(f"--cpu: {path} is for GPUs; leave --config_file out, which makes a config for the CPU")
    processes, machines = (launch[name] or file.get(name) or 1 for name in ("num_processes", "num_machines"))
    check_count(processes // machines)


def _run(command: list[str], heard: list[str] | None = None) -> int:
    """The exit code of a command, which is ended with this process: signals of a terminal, which come to this process
    alone, go to all that the command has started, and SIGTERM to the command. Its lines are also added to `heard`."""
    print(f"accelerate launch {shlex.join(command[3:])}", file=sys.stderr, flush=True)
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    piped |= {"env": os.environ | {"PYTHONUNBUFFERED": "1"}}
    lines = [] if heard is None else heard
    process = subprocess.Popen(command, start_new_session=True, **(piped if heard is not None else {}))

    def forward(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)

    taken = [n for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in taken}
    try:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
