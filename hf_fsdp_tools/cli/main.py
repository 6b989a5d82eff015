"""The command `hf-fsdp`: start recipes, look at models and machines, write configs and checkpoints.

Every command prints text, or with `--json` one JSON value. An error is one message on stderr and exit code 1; wrong
usage is exit code 2. Heavy libraries are imported inside the commands, so that `--help` is fast.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_fsdp_tools import __version__
from hf_fsdp_tools.cli.common import add_model_class, parse_dtype, quiet, write
from hf_fsdp_tools.cli.config import add_config
from hf_fsdp_tools.cli.estimate import add_estimate
from hf_fsdp_tools.cli.export import add_export, add_merge
from hf_fsdp_tools.cli.launch import add_recipes
from hf_fsdp_tools.cli.schedule import add_schedule
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `hf-fsdp` command; return the exit code: 1 for an error, also one that `doctor` finds, else 0.

    Args:
        arguments: without the program's name; None means those of the process.

    Raises:
        SystemExit: with 2 for wrong usage, with 0 after `--help`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    if not hasattr(options, "rest"):
        parser.parse_args(words)  # says which words it does not know
    options.rest = rest
    options.command_line = shlex.join(["hf-fsdp", *words])
    try:
        return int(options.run(options) or 0)
    except FSDPToolsError as error:
        if options.traceback:
            raise
        print(f"hf-fsdp: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf-fsdp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-fsdp", description="Shard Hugging Face models with PyTorch FSDP.")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"hf-fsdp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_recipes(commands)
    _add_blocks(commands)
    _add_plan(commands)
    _add_doctor(commands)
    add_estimate(commands)
    add_schedule(commands)
    add_config(commands)
    add_export(commands)
    add_merge(commands)
    _add_demo_model(commands)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    about = "hub name, local folder, or path of a config.json"
    parser.add_argument("model", metavar="NAME", nargs="?" if optional else None, help=about)
    add_model_class(parser.add_argument)
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")


def _add_blocks(commands: Any) -> None:
    about = "show what repeats in a model: blocks, embeddings, final norm, head, ties (no weights are read)"
    parser = commands.add_parser("blocks", help=about, description=about)
    _add_model_arguments(parser)
    parser.set_defaults(run=_blocks)


def _add_plan(commands: Any) -> None:
    about = "show what would be sharded together, why, and how much is gathered at once (no weights are read)"
    parser = commands.add_parser("plan", help=about, description=about)
    _add_model_arguments(parser)
    about_units = "modules outside blocks above this size are units, such as 2e7"
    parser.add_argument("--min-unit-params", type=float, metavar="N", help=about_units)
    parser.add_argument("--block-types", metavar="A,B", help="class names or fqn patterns of blocks, not detected ones")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the weights, such as bfloat16 (default: the config's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=_plan)


def _add_doctor(commands: Any) -> None:
    about = (
        "check this machine, an Accelerate config, or how a model would be sharded on N processes (no weights, no GPUs)"
    )
    parser = commands.add_parser("doctor", help=about, description=f"{about}; exit code 1 if an error is found")
    _add_model_arguments(parser, optional=True)
    parser.add_argument(
        "--config-file", "--config_file", type=Path, metavar="FILE", help="check this file for `accelerate launch`"
    )
    parser.add_argument(
        "--num-processes", type=int, default=8, metavar="N", help="processes to pretend (default: %(default)s)"
    )
    parser.set_defaults(run=_doctor)


def _add_demo_model(commands: Any) -> None:
    about = "make a small Llama checkpoint with a trained tokenizer and its text, without a download"
    parser = commands.add_parser("demo-model", help=about, description=about)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder for the checkpoint")
    parser.add_argument("--dataset", type=Path, metavar="FOLDER", help="also write train.jsonl and eval.jsonl there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    for name, meaning in _DEMO_SIZES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, metavar="N", help=f"number of {meaning}")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    parser.set_defaults(run=_demo_model)


def _blocks(options: argparse.Namespace) -> None:
    model = _meta_model(options, dtype=None)
    from hf_fsdp_tools.planning.blocks import detect_blocks

    blocks = detect_blocks(model)
    print(blocks.to_json() if options.json else f"{blocks}{_class_note(options, model)}")


def _plan(options: argparse.Namespace) -> None:
    model = _meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import HybridPolicy

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = HybridPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
    plan = make_wrap_plan(model, policy=policy)
    if options.output:
        write(options.output, plan.to_json() + "\n")
    print(plan.to_json() if options.json else f"{plan}{_class_note(options, model)}")
    if options.output and not options.json:
        print(f"wrote {options.output}")


def _doctor(options: argparse.Namespace) -> int:
    if options.config_file is not None:
        return _doctor_of_file(options)
    from hf_fsdp_tools.diagnostics.environment import check_environment, rehearse

    if options.model is None:
        found: Any = check_environment()
    else:
        found = rehearse(_meta_model(options, dtype=None), num_processes=options.num_processes)
    print(found.to_json() if options.json else found)
    return int(found.has_errors)


def _doctor_of_file(options: argparse.Namespace) -> int:
    from hf_fsdp_tools import FSDPConfig

    if options.model is not None:
        raise ConfigError("doctor looks at a model or at a config; give NAME or --config_file, not both")
    findings = FSDPConfig.check_file(options.config_file)
    if options.json:
        value = {"config_file": str(options.config_file), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(value, indent=1))
    else:
        print("\n".join([str(options.config_file), "", *(map(str, findings) if findings else ["no findings"])]))
    return int(any(finding.severity == "error" for finding in findings))


def _demo_model(options: argparse.Namespace) -> None:
    quiet()
    from hf_fsdp_tools.scripting.demo import make_demo_model
    from hf_fsdp_tools.scripting.demo_data import write_demo_dataset

    sizes = {name: value for name, value in vars(options).items() if name in _DEMO_SIZES}
    folder = make_demo_model(options.folder, seed=options.seed, **sizes)
    data = [str(path) for path in write_demo_dataset(options.dataset)] if options.dataset else []
    weights = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in weights)
    if options.json:
        value = {"folder": str(folder), "weights": [path.name for path in weights], "dataset": data}
        print(json.dumps(value, indent=1))
        return
    print(f"model    {folder}  ({len(weights)} weight file{'s' * (len(weights) != 1)}, {total / 1e6:.1f} MB)")
    print("".join(f"dataset  {path}\n" for path in data), end="")
    print(f"next     hf-fsdp plan {shlex.quote(str(folder))}")


_DEMO_SIZES = {
    "hidden_size": "features",
    "num_layers": "blocks",
    "num_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "vocab_size": "tokens of the tokenizer",
    "max_length": "positions",
}
"""What each parameter of make_demo_model counts, for the help texts."""


def _class_note(options: argparse.Namespace, model: Any) -> str:
    """A line for the case that nobody asked for the model's class; nothing otherwise."""
    from hf_fsdp_tools.modeling.model_class import other_class_note

    note = None if options.auto_class else other_class_note(model.config, type(model))
    return f"\nnote: {note}" if note else ""


def _meta_model(options: argparse.Namespace, *, dtype: str | None) -> Any:
    """The model that the options name, on meta."""
    quiet()
    from hf_fsdp_tools.hub import local_path

    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return build_meta_model(
        options.model,
        auto_class=options.auto_class,
        dtype=parse_dtype(dtype),
        trust_remote_code=options.trust_remote_code,
    )
