"""The command `hf-fsdp`: start recipes, look at models and machines, write configs and checkpoints.

Every command prints text, or with `--json` one JSON value. An error is one message on stderr and exit code 1; wrong
usage is exit code 2. Heavy libraries are imported inside the commands, so that `--help` is fast.
"""

import argparse
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from hf_fsdp_tools import __version__
from hf_fsdp_tools.cli.config import add_convert, add_init, add_search
from hf_fsdp_tools.cli.estimate import add_estimate, add_gpus
from hf_fsdp_tools.cli.export import add_export
from hf_fsdp_tools.cli.launch import add_recipes
from hf_fsdp_tools.cli.options import FIRST_S, SHOWN, column, examples
from hf_fsdp_tools.cli.plan import add_doctor, add_plan
from hf_fsdp_tools.cli.report import add_report
from hf_fsdp_tools.cli.verify import add_verify
from hf_fsdp_tools.errors import FSDPToolsError
from hf_fsdp_tools.text import OURS, did_you_mean

_LOADING = "hf-fsdp: loading libraries …"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `hf-fsdp` command; return the exit code: 1 for an error, also one that `doctor` finds, else 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words[:1] = [word.replace("_", "-") for word in words[:1]]  # a recipe, by the name of its file
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    commands: Any = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices
    words = _renamed(words, commands)
    if not words[0].startswith("-") and words[0] not in commands:
        cure = _ELSEWHERE.get(words[0]) or did_you_mean(words[0], commands, otherwise="; --help lists all")
        parser.error(f"{words[0]!r} is no command{cure}")
    options, rest = parser.parse_known_args(words)
    if hasattr(options, "rest"):  # a recipe, which has options of its own
        options.rest = words[1:]
    elif rest:
        known = set(re.findall(r"--[a-z][\w-]*", options.command.format_help()))
        ours = "--" + OURS.get(rest[0].lstrip("-").replace("-", "_"), "").replace("_", "-")
        near = f": did you mean {ours}?" if ours in known else did_you_mean(rest[0], known, otherwise="")
        options.command.error(f"{rest[0]} is no option of this command{near}")
    options.command_line = shlex.join(["hf-fsdp", *words])
    for talker in ("torchao", "torch.utils._pytree"):  # where it is installed, of kernels that its wheel lacks
        logging.getLogger(talker).setLevel(logging.ERROR)
    SHOWN.clear()
    loading = threading.Timer(FIRST_S, lambda: SHOWN.is_set() or print(_LOADING, file=sys.stderr, flush=True))
    loading.daemon = True
    loading.start()
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
    finally:
        loading.cancel()
    return 0


class _Formatter(argparse.HelpFormatter):
    """Help whose tables and examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """A parser that understands `--config_file` for `--config-file`, as Accelerate's does, and prints no usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in args or ()]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


_GROUPS = {
    "start here": (add_doctor, add_gpus, add_estimate, add_search, add_init, add_convert),
    "train": (add_recipes, add_report),
    "checkpoints": (add_export,),
    "look inside": (add_plan, add_verify),
}
"""The commands, in the order in which they are used."""

_ELSEWHERE = {
    "merge": ": `hf-fsdp export BASE OUT --adapter ADAPTER` merges an adapter",
    "tune": ": `hf-fsdp search NAME` finds the fastest settings that fit",
    "train": ": `hf-fsdp finetune` trains, and so do the other recipes that --help lists",
}
"""Where to find what other tools call so."""


def _renamed(words: list[str], commands: Any) -> list[str]:
    """The words of a command with its name of today, with a line where it had another."""
    name, rest = words[0], words[1:]
    if name not in ("config", "prove"):
        return words
    now = "verify"
    if name == "config":
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--from")
        given, rest = parser.parse_known_args(rest)
        source = vars(given)["from"]
        rest = [*[source] * (source is not None), *rest]
        now = "convert" if source else "search" if commands["search"].parse_known_args(rest)[0].model else "init"
    print(f"hf-fsdp: `{name}` is `{now}` now", file=sys.stderr)
    return [now, *rest]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hf-fsdp", usage="hf-fsdp COMMAND ...", description="Shard Hugging Face models with PyTorch FSDP."
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"hf-fsdp {__version__}")
    commands: Any = parser.add_subparsers(metavar="COMMAND", required=True, prog="hf-fsdp", help=argparse.SUPPRESS)
    lines = []
    for title, adders in _GROUPS.items():
        former = len(commands._choices_actions)
        for add in adders:
            add(commands)
        rows = [(f"  {each.dest} ", f"{each.help}") for each in commands._choices_actions[former:]]
        lines += [f"{title}:", *(column(*row) for row in rows), ""]
    usual = (
        "doctor",
        "search Qwen/Qwen3-8B --gpu h100-80gb --num-processes 8 --recipe finetune --output qwen.yaml",
        "finetune --preset qwen.yaml --dataset_name trl-lib/Capybara",
    )
    parser.epilog = "\n".join([*lines, examples(*usual), "", "Each command has --help."])
    for command in commands.choices.values():
        command.set_defaults(command=command)
    return parser
