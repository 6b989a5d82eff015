"""`accelerate launch`, with one line at its end where a rank fails: what was wrong, the rank itself has said before."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.launch import main as launch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.settings import OWN_KEYS

_SETTINGS = (
    "config_file", "cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "gpu_ids", "mixed_precision",
)  # fmt: skip
_OF_RECIPES = ("--gradient_accumulation_steps", "--gradient-accumulation-steps", "--debug")
"""Options that the launcher has for other engines, and `TrainingArguments` for recipes."""

_OTHER_ENGINES = ("multi_gpu", "tpu", "use_deepspeed", "use_megatron_lm", "dynamo_backend")
"""Options that choose another engine than FSDP2, or compilation, which `TrainingArguments` have."""


def split_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The settings of `accelerate launch` in the command of a recipe, the launcher's words without file and device, and
    the recipe's words."""
    parser = launch_command_parser()
    parser.error = _refuse  # its own prints a hundred lines of usage
    parser._actions = [action for action in parser._actions if action.option_strings]  # no script is named
    for name in _OF_RECIPES:
        parser._option_string_actions.pop(name, None)
    settings, rest = parser.parse_known_args(words)
    for name in _OTHER_ENGINES:
        if getattr(settings, name, None):
            raise ConfigError(
                f"--{name} of `accelerate launch` means nothing to a recipe, which runs FSDP2 on all devices; leave "
                "it out, translate a DeepSpeed file with `hf-fsdp convert FILE`, or use --torch_compile true"
            )
    own, left = [], list(rest)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        elif word != "--cpu":  # which the launcher takes for another engine
            own.append(word)
    names = [word.partition("=")[0].replace("-", "_") for word in own]
    if "__config_file" in names:
        place = names.index("__config_file")
        del own[place : place + (1 if "=" in own[place] else 2)]
    return {name: getattr(settings, name) for name in _SETTINGS}, own, rest


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"accelerate launch: {message.removeprefix('argument ')}")


def main() -> None:
    """Launch what the command line says, with the keys of this package, which the launcher does not pass on."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank and `_ended` say it
    settings, _ = launch_command_parser().parse_known_args()
    file = yaml.safe_load(Path(settings.config_file).read_text(encoding="utf-8"))  # which `cli.launch` has checked
    for key in OWN_KEYS:
        os.environ.setdefault(key.upper(), str((file.get("fsdp_config") or {}).get(key) or ""))
    try:
        launch()
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise SystemExit(_ended(f"rank {rank}", failure.exitcode)) from None
    except (KeyboardInterrupt, SignalException) as stopped:
        number = getattr(stopped, "sigval", signal.SIGINT)
        name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print(f"hf-fsdp: {name}", file=sys.stderr)
        raise SystemExit(128 + number) from None  # as shells have it
    except subprocess.CalledProcessError as failed:  # a world of one
        raise SystemExit(_ended("the process", failed.returncode)) from None


def _ended(name: str, code: int) -> str:
    if code >= 0:
        return f"hf-fsdp: {name} ended with exit code {code}; its error stands above"
    about = " (the machine's memory was full, or a scheduler ended the job)" if -code == signal.SIGKILL else ""
    return f"hf-fsdp: {name} was ended by {signal.Signals(-code).name}{about}"


if __name__ == "__main__":
    main()
