"""The command `hf-fsdp`: start recipes, look at models and machines, write configs and checkpoints.

Every command prints text, or with `--json` one JSON value. An error is one message on stderr and exit code 1; wrong
usage is exit code 2. Heavy libraries are imported inside the commands, so that `--help` is fast.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_tools import __version__
from hf_fsdp_tools.cli.common import in_options, quiet
from hf_fsdp_tools.cli.config import add_config
from hf_fsdp_tools.cli.doctor import add_doctor
from hf_fsdp_tools.cli.estimate import add_estimate
from hf_fsdp_tools.cli.export import add_export, add_merge
from hf_fsdp_tools.cli.launch import add_recipes
from hf_fsdp_tools.cli.plan import add_blocks, add_plan
from hf_fsdp_tools.cli.schedule import add_schedule
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.text import did_you_mean


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `hf-fsdp` command; return the exit code: 1 for an error, also one that `doctor` finds, else 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    commands: Any = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices
    if not words[0].startswith("-") and words[0] not in commands:
        parser.error(f"{words[0]!r} is no command{did_you_mean(words[0], commands, otherwise='; --help lists all')}")
    options, rest = parser.parse_known_args(words)
    if rest and not hasattr(options, "rest"):
        known = set(re.findall(r"--[a-z][\w-]*", options.command.format_help()))
        options.command.error(f"{rest[0]} is no option of this command{did_you_mean(rest[0], known, otherwise='')}")
    options.rest = rest
    options.command_line = shlex.join(["hf-fsdp", *words])
    try:
        return int(options.run(options) or 0)
    except FSDPToolsError as error:
        if options.traceback:
            raise
        print(f"hf-fsdp: error: {in_options(str(error), options.command, words)}", file=sys.stderr)
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
    add_blocks(commands)
    add_plan(commands)
    add_doctor(commands)
    add_estimate(commands)
    add_schedule(commands)
    add_config(commands)
    add_export(commands)
    add_merge(commands)
    _add_demo_model(commands)
    for command in commands.choices.values():
        command.set_defaults(command=command)
    return parser


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


def _demo_model(options: argparse.Namespace) -> None:
    quiet()
    from hf_fsdp_tools.scripting.demo import make_demo_model
    from hf_fsdp_tools.scripting.demo_data import write_demo_dataset

    if options.dataset is not None and options.dataset.is_file():
        raise ConfigError(f"--dataset {options.dataset} is a file; name a folder")
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
