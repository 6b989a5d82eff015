"""The command `hf-fsdp config`: an Accelerate config for this machine or another, with a reason for each choice; with a
model, the fastest that fits."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import add_model, check_writable, write
from hf_fsdp_tools.cli.fitting import add_search_options, recipe_words, recommend
from hf_fsdp_tools.cli.machine import FIELDS, add_machine_options, address_words, decide, launcher_words
from hf_fsdp_tools.cli.slurm import batch_script
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig
    from hf_fsdp_tools.integrations.interpret import Translation


def add_config(commands: Any) -> None:
    """Add the command `config`."""
    about = "write an Accelerate config for FSDP: with NAME the fastest that fits, else one for this machine"
    parser = commands.add_parser("config", help=about, description=about)
    add_model(parser, optional=True)
    about = "translate this file: of `accelerate config` (FSDP, DDP, DeepSpeed), or DeepSpeed's JSON"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help=about)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the YAML there instead of to stdout")
    about = "also write the batch script for `sbatch`, beside the file of --output"
    parser.add_argument("--slurm", action="store_true", help=about)
    parser.add_argument("--force", action="store_true", help="write over a file that says something else")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    place = parser.add_argument_group("machines").add_argument
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="run on CPU with gloo, whatever this machine has")
    about = "run on GPUs, also when written on a machine without; with NAME also which, such as h100-80gb"
    kind.add_argument("--gpu", nargs="?", const=True, metavar="NAME", help=about)
    add_machine_options(place)
    place("--gpu-ids", metavar="0,1", help="GPUs to use (default: all)")
    model = parser.add_argument_group("model and training").add_argument
    model(
        "--mixed-precision", choices=("no", "bf16", "fp16"), help="compute dtype (default: bf16 on GPUs that have it)"
    )
    model("--hsdp", type=int, metavar="N", help="N copies of the model, each sharded over its part of the processes")
    model(
        "--no-reshard-after-forward",
        action="store_true",
        help="keep gathered weights until backward: faster, more memory",
    )
    about = "keep shards and optimizer state in host memory, or never (default with NAME: where nothing fits without)"
    model("--offload", action=argparse.BooleanOptionalAction, help=about)
    model(
        "--activation-checkpointing", action="store_true", help="recompute activations in backward: slower, less memory"
    )
    model(
        "--state-dict-type",
        choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
        help="how training checkpoints are written (default: SHARDED_STATE_DICT)",
    )
    add_search_options(parser)
    parser.set_defaults(run=_config, fields=FIELDS)


def _config(options: argparse.Namespace) -> None:
    if options.output is None and options.slurm:
        raise ConfigError("--slurm writes the batch script beside the config: name that with --output")
    check_writable(options.output)
    old = None if options.source is None else _translated(options)
    config, reasons = decide(options, None if old is None else old.fields)
    found = None if options.model is None else recommend(options, config)
    if found is None:
        start, script = ["accelerate", "launch"], ["your_script.py", *(() if old is None else old.words)]
        reason_lines = _decisions(config, reasons)
    else:
        start, script = ["hf-fsdp", options.recipe or "finetune"], recipe_words(options.model, found.setup)
        reason_lines = str(found).splitlines()
        if "num_machines" in reasons and config.num_machines > 1:
            reason_lines.append(f"machines  {config.num_machines} {reasons['num_machines']}")
        own = {"offload": "offload_params"}
        searched = {own.get(each.field, each.field): "; ".join(each.reasons) for each in found.choices}
        reasons |= {name: reason for name, reason in searched.items() if hasattr(config, name)}
        config = replace(
            config,
            reshard_after_forward=found.setup.reshard_after_forward,
            dp_replicate_size=found.setup.dp_replicate_size,
            offload_params=found.setup.offload,
            activation_checkpointing=found.setup.activation_checkpointing,
        )
    start += ["--config_file", str(options.output or "FILE")]
    notes = [f"Start it with: {shlex.join([*start, *address_words(config), *script])}", "", *reason_lines]
    text = config.to_accelerate_yaml(command=options.command_line, notes=notes)
    written = _written(options, text, batch_script(config, [*start, *script], options.command_line))
    launch = shlex.join([*start, *launcher_words(config), *script])
    if options.slurm:
        launch = f"sbatch {shlex.quote(str(options.output.with_suffix('.sbatch')))}"
    if options.json:
        value: dict[str, Any] = {"config": asdict(config), "reasons": reasons, "launch": launch, "yaml": text}
        value["output"] = str(options.output) if options.output else None
        if found is not None:
            value["recommendation"] = json.loads(found.to_json())
        if old is not None:
            value["translated"] = [dict(zip(("key", "value", "became"), row, strict=True)) for row in old.rows]
        print(json.dumps(value, indent=1))
        return
    table = [] if old is None else [*_translation_lines(old.rows), ""]
    report = [*table, *reason_lines, *[""] * (found is not None), *written, f"launch  {launch}"]
    if not options.output:  # stdout has the YAML alone, so that it can be redirected into a file
        print(text, end="")
    print("\n".join(report), file=sys.stdout if options.output else sys.stderr)


def _written(options: argparse.Namespace, text: str, script: str) -> list[str]:
    """Write the config, and with `--slurm` the batch script beside it; return a line for each."""
    if options.output is None:
        return []
    texts = {options.output: text} | ({options.output.with_suffix(".sbatch"): script} if options.slurm else {})
    for path, content in texts.items():
        _check_replaceable(path, content, options.force)
    made = "" if options.output.parent.exists() else " (a new folder)"
    for path, content in texts.items():
        write(path, content)
    return [f"wrote   {path}{made}" for path in texts]


def _decisions(config: "FSDPConfig", reasons: dict[str, str]) -> list[str]:
    """Aligned lines of setting, value and reason, of the settings that have a reason."""
    names = ["use_cpu", "num_processes", "mixed_precision"]
    rows = [(name, getattr(config, name), reasons[name]) for name in [*names, *sorted(set(reasons) - set(names))]]
    rows[0] = ("device", "CPU, gloo" if config.use_cpu else "CUDA, NCCL", rows[0][2])
    widths = [max(len(str(row[column])) for row in rows) for column in range(2)]
    return [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {reason}" for name, value, reason in rows]


def _translated(options: argparse.Namespace) -> "Translation":
    """What the file of `--from` means here."""
    from hf_fsdp_tools import FSDPConfig

    if options.model is not None:
        raise ConfigError(f"{options.model} is searched for what --from gives; leave one of them out")
    return FSDPConfig.translate_file(options.source)


def _translation_lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Aligned lines of key, value and what became of it; long values are shortened."""
    short = [(key, value if len(value) <= 24 else f"{value[:23]}…", became) for key, value, became in rows]
    widths = [max((len(row[column]) for row in short), default=0) for column in range(2)]
    return [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {became}" for key, value, became in short]


def _check_replaceable(path: Path, text: str, force: bool) -> None:
    """Refuse to write over a file that says something else."""
    try:
        same = force or not path.exists() or path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        same = False
    if not same:
        raise ConfigError(f"{path} exists and holds something else; --force writes over it, --output names another")
