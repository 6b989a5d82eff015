"""The commands `hf-fsdp init`, `search` and `convert`: an Accelerate config for machines, the fastest settings of a
model that fit, or the translation of another file, each with reasons."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.launch import cpu_words, recipes
from hf_fsdp_tools.cli.options import (
    COMPUTES,
    FLOAT8,
    add_json,
    add_link_options,
    add_machine_options,
    add_model,
    add_sharding_options,
    add_training_options,
    address_words,
    check_writable,
    count,
    decide,
    described,
    examples,
    explicit_fields,
    prepare_model,
    progress,
    refuse,
    write,
)
from hf_fsdp_tools.cli.presets import Preset
from hf_fsdp_tools.cli.templates import TEMPLATES, Job, Template
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.recipes import DEFAULT_RECIPE, RECIPES
from hf_fsdp_tools.text import printable, quoted

if TYPE_CHECKING:
    from hf_fsdp_tools import LaunchConfig
    from hf_fsdp_tools.foresight.recommend import Recommendation


def add_init(commands: Any) -> None:
    """Add the command `init`."""
    about = "write an Accelerate config for this machine, or others"
    uses = ("init --output here.yaml", "init --gpu h100-80gb --num-processes 16 --output two.yaml --slurm")
    _add_machines(_parser(commands, "init", about, uses))


def add_search(commands: Any) -> None:
    """Add the command `search`."""
    about = "find the fastest settings of NAME that fit, and write them"
    uses = (
        "search Qwen/Qwen3-8B --gpu h100-80gb --num-processes 8 --recipe finetune --output qwen.yaml",
        "search Qwen/Qwen3-8B --gpu rtx-4090 --num-processes 1 --load-in-4bit --lora-r 16",
    )
    parser = _parser(commands, "search", about, uses)
    add_model(parser, optional=True)
    add_link_options(_add_machines(parser, searched=" (searched unless given)"))
    train = parser.add_argument_group("what is trained (batches are searched unless given)").add_argument
    train("--global-batch-size", type=count, metavar="N", help="sequences per optimizer step over all GPUs")
    train("--margin", type=float, metavar="X", help="part of the GPU's memory that stays free (default: 0.1)")
    add_training_options(train, recipes())


def add_convert(commands: Any) -> None:
    """Add the command `convert`."""
    about = "translate a file of `accelerate config` (FSDP, DDP, DeepSpeed), or DeepSpeed's JSON"
    parser = _parser(commands, "convert", about, ("convert deepspeed.json --output fsdp.yaml",))
    parser.add_argument("source", type=Path, metavar="FILE", help="the file to translate")
    _add_machines(parser)


def _parser(commands: Any, name: str, about: str, uses: Sequence[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, epilog=examples(*uses))
    parser.set_defaults(run=_config, model=None, source=None)
    return parser


def _add_machines(parser: argparse.ArgumentParser, searched: str = "") -> Callable[..., Any]:
    """Add the file to write, machines, and what FSDP does there; return what adds more about machines."""
    if not searched:
        add_json(parser.add_argument)
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: stdout)")
    templates = parser.add_mutually_exclusive_group()
    for name, template in TEMPLATES.items():
        about = f"also write {template.about}, next to the file of --output"
        templates.add_argument(f"--{name}", dest="template", action="store_const", const=name, help=about)
    parser.add_argument("--force", action="store_true", help="replace files that say something else")
    machines = parser.add_argument_group("machines").add_argument
    machines("--cpu", action="store_true", help="CPU ranks with gloo, whatever this machine has")
    add_machine_options(machines, processes="all GPUs of this machine", gpu="this machine's")
    machines("--machine-rank", type=int, metavar="R", help="number of the machine that the file is for, from 0")
    machines("--main-process-ip", metavar="ADDRESS", help="address of machine 0, where the processes meet")
    about = "port there (default: a free one; 29500 for several machines)"
    machines("--main-process-port", type=count, metavar="PORT", help=about)
    machines("--gpu-ids", metavar="0,1", help="GPUs of this machine (default: all)")
    shard = parser.add_argument_group(f"sharding{searched}").add_argument
    add_sharding_options(shard)
    kinds = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    shard("--state-dict-type", choices=kinds, help="form of training checkpoints (default: SHARDED_STATE_DICT)")
    return machines


@dataclass(kw_only=True)
class _Answer:
    """What is decided: the config, why, and the command that starts with it."""

    config: "LaunchConfig"
    reasons: dict[str, str]
    lines: list[str]
    """The reasons as they are printed."""
    start: list[str]
    """Words of the command up to the config's file."""
    script: list[str]
    """Words behind it."""
    best: "Recommendation | None" = None
    preset: Preset | None = None
    """What is written in place of the config."""


def _config(options: argparse.Namespace) -> None:
    from hf_fsdp_tools import LaunchConfig

    template = TEMPLATES.get(options.template)
    if options.output is None and template is not None:
        raise ConfigError(f"--{options.template} writes {template.about} next to the config: name that with --output")
    if options.cpu and options.gpu is not None:
        raise ConfigError("--cpu and --gpu: give one of them")
    refuse(options, ("force",) * (options.output is None), "is for the file of --output: name it")
    check_writable(options.output)
    translation = None if options.source is None else LaunchConfig.translate_file(options.source)
    config, reasons = decide(vars(options), None if translation is None else translation.fields)
    if hasattr(options, "recipe"):
        answer = _of_model(options, config, reasons)
    else:
        start = [*config.launch_variables, "accelerate", "launch"]
        words = [] if translation is None else translation.words
        lines, script = _reason_lines(config, reasons), ["your_script.py", *words]
        answer = _Answer(config=config, reasons=reasons, lines=lines, start=start, script=script)
    text, launch, texts = _files(options, answer, template)
    written = _write(texts, force=options.force)
    if options.json:
        value: dict[str, Any] = {"config": asdict(answer.config), "reasons": answer.reasons, "launch": launch}
        value |= {"yaml": text, "output": options.output and str(options.output)}
        value |= {} if answer.best is None else {"recommendation": json.loads(answer.best.to_json())}
        if translation is not None:
            value["translated"] = [dict(zip(("key", "value", "became"), row, strict=True)) for row in translation.rows]
        print(json.dumps(value, indent=1))
        return
    rows: list[str] = []
    if translation is not None:  # long values are shortened
        short = ((key, f"{value[:23]}…" if len(value) > 24 else value, end) for key, value, end in translation.rows)
        rows = [*_aligned([*short]), ""]
    report = [*rows, *answer.lines, *[""] * (answer.best is not None), *written]
    if answer.best is not None and answer.preset is None:  # the words are TRL's, and a script of TRL takes them too
        own = shlex.join(["--config_file", str(options.output or "FILE"), "your_script.py", *answer.script])
        report.append(f"or      accelerate launch {own}")
    report.append(f"launch  {launch}")
    if not options.output:  # stdout has the YAML alone, so that it can be redirected into a file
        print(text, end="")
    print(printable("\n".join(report)), file=sys.stdout if options.output else sys.stderr)


def _of_model(options: argparse.Namespace, config: "LaunchConfig", reasons: dict[str, str]) -> _Answer:
    """The fastest settings of a model that fit, and the recipe that trains it with them."""
    if options.model is None:
        raise ConfigError("search NAME: which model? `hf-fsdp init` writes a config for machines alone")
    from hf_fsdp_tools.foresight.memory import EXPANDABLE
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named
    from hf_fsdp_tools.scripting import setups

    recipe = options.recipe or DEFAULT_RECIPE
    best = _recommend(options, config, recipe)
    values = setups.options_of(recipe, options.model, best.setup)
    if recipe == DEFAULT_RECIPE and config.num_processes == 1 and _packs(options):
        values["packing"] = True
    lines = [*str(best).splitlines(), *filter(None, [RECIPES[recipe].note])]
    if options.template not in (None, "slurm") and Path(options.model).exists():
        lines.append(f"model     {options.model} lies on this machine: bring it to the job, or name a hub")
    if "num_machines" in reasons and config.num_machines > 1:
        lines.append(f"machines  {config.num_machines} {reasons['num_machines']}")
    if config.mixed_precision == "fp8":
        lines.append(f"fp8       {FLOAT8}")
    names = vars(config).keys() & vars(best.setup).keys() - {"num_processes", "mixed_precision"}
    config, preset = replace(config, **{name: getattr(best.setup, name) for name in names}), None
    start, script = ["hf-fsdp", recipe], setups.recipe_words(values)
    if options.recipe is not None and options.output is not None:
        values = setups.run_values(values, best.setup, recipe=recipe)
        allocator = EXPANDABLE.partition("=")[2] if best.expandable_bytes else ""
        preset = Preset.of(recipe, gpu_named(best.setup.gpu).name, allocator, config, values)
        script = ["--dataset_name", "DATASET"]
    decided: dict[str, Any] = {"config": config, "reasons": reasons, "lines": lines, "start": start, "script": script}
    return _Answer(**decided, best=best, preset=preset)


def _packs(options: argparse.Namespace) -> bool:
    """Whether documents of packed rows attend without a mask."""
    from hf_fsdp_tools.extensions.packed_rows import configs_of_documents
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return bool(configs_of_documents(build_meta_model(options.model, **prepare_model(options)), 1))


def _files(options: argparse.Namespace, answer: _Answer, template: Template | None) -> tuple[str, str, dict[Path, str]]:
    """The YAML, the command that starts with it, and the text of each file that is asked for."""
    from hf_fsdp_tools.foresight.memory import EXPANDABLE
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    config, best, command = answer.config, answer.best, options.command_line
    start = [EXPANDABLE] if best is not None and best.expandable_bytes and answer.preset is None else []
    start += [*answer.start, "--config_file" if answer.preset is None else "--preset", str(options.output or "FILE")]
    for word in (*start, *address_words(config), *answer.script, options.model or ""):
        if printable(word) != word or "\n" in word:
            raise ConfigError(
                f"{quoted(word)} would be written into a file that shells read, and has a line break, another control "
                "character, or the password or query of a URL. Take another name; stores have settings of their own."
            )
    notes = [f"Start it with: {shlex.join([*start, *address_words(config), *answer.script])}", "", *answer.lines]
    if answer.preset is not None:
        text = answer.preset.text([f"Generated by: {command}", *notes])
    else:
        text = config.to_accelerate_yaml(command=command, notes=notes)
    launch = shlex.join([*start, *address_words(config), *cpu_words(config), *answer.script])
    if options.output is None:
        return text, launch, {}
    texts: dict[Path, str] = {options.output: text}
    if template is not None:
        path = template.path(options.output)
        gpu = None if config.use_cpu or (name := _gpu_name(options)) is None else gpu_named(name).name
        words = [*start, *answer.script]
        job = Job(config=config, launch=words, path=options.output, text=text, command=command, gpu=gpu)
        launch, texts[path] = template.start_command(options.output), template.make(job, str(path))
    return text, launch, texts


def _write(texts: dict[Path, str], *, force: bool) -> list[str]:
    """Write the config and what belongs to it, in one folder; return a line for each."""
    for path, content in texts.items():
        if not force and path.exists() and path.read_text(encoding="utf-8", errors="replace") != content:
            raise ConfigError(f"{path} exists and holds something else; --force writes over it, --output names another")
    note = "" if all(path.parent.exists() for path in texts) else " (a new folder)"
    for path, content in texts.items():
        write(path, content)
    return [f"wrote   {path}{note}" for path in texts]


def _reason_lines(config: "LaunchConfig", reasons: dict[str, str]) -> list[str]:
    """Aligned lines of setting, value and reason, of the settings that have a reason."""
    names = ["use_cpu", "num_processes", "mixed_precision"]
    rows = [(name, getattr(config, name), reasons[name]) for name in [*names, *sorted(set(reasons) - set(names))]]
    rows[0] = ("device", "CPU, gloo" if config.use_cpu else "CUDA, NCCL", rows[0][2])
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, Any, str]]) -> list[str]:
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in range(2)]
    return [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {text}" for name, value, text in rows]


def _gpu_name(options: argparse.Namespace) -> str | None:
    """The kind of GPU that is asked for, or that this machine has."""
    from hf_fsdp_tools.accelerator import device_title, find_accelerator

    device = find_accelerator()
    given: str | None = options.gpu
    return given or (None if device is None else device_title(device))


def _recommend(options: argparse.Namespace, config: "LaunchConfig", recipe: str) -> "Recommendation":
    """The fastest setting of the model that fits on the machines of a config, of what the options leave open."""
    if config.use_cpu:
        raise ConfigError(
            f"what fits on the CPU is not known: leave {options.model} out, or say for which GPUs: --gpu h100-80gb "
            "--num-processes 8"
        )
    from hf_fsdp_tools.foresight.recommend import recommend_config
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    name = _gpu_name(options)
    if name is None:
        raise ConfigError("which GPUs? Say --gpu and its name, such as --gpu h100-80gb")
    values = explicit_fields(options) | {"gpu": gpu_named(name).name, "num_processes": config.num_processes}
    values["gpus_per_node"] = config.num_processes // config.num_machines
    values["mixed_precision"] = COMPUTES.get(config.mixed_precision, config.mixed_precision)
    setup = described(options, values, recipe)
    values |= RECIPES[recipe].fields
    values |= {} if options.margin is None else {"margin": options.margin}
    with progress() as say:
        return recommend_config(
            options.model,
            setup,
            global_batch_size=options.global_batch_size,
            model_kwargs=prepare_model(options),
            say=say,
            **values,
        )
