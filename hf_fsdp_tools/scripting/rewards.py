"""Reward functions of `--reward_funcs`: TRL's own, those of installed modules, and those of a file of the user's."""

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import ConfigError, library_errors
from hf_fsdp_tools.text import did_you_mean, listed

_GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
"""What TRL gives to every reward function; next to it, each column of the rows but `prompt` and `completion`."""

_OWN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
"""Names of TRL's script for its own functions; the first two need math_verify."""


def load_rewards(script: Any, columns: Iterable[str]) -> list[Callable[..., Any]]:
    """The reward functions of `--reward_funcs`, in that order; none where the option is absent.

    A name is one of TRL's own (`think_format_reward`), a dotted path (`my_lib.rewards.length_reward`), which is also
    looked for in the working folder, or a file and a name in it (`my_rewards.py:length_reward`). The file is run.

    `script` is TRL's `GRPOScriptArguments`; a function may take `columns` by name. Every rank must call.

    Raises:
        ConfigError: there is no such function, file or module, it cannot be run, or the function does not take what
            TRL gives it, or wants a column that the rows lack; on every rank alike.

    Example:
        >>> import argparse
        >>> script = argparse.Namespace(reward_funcs=["think_format_reward"])
        >>> [function.__name__ for function in load_rewards(script, ["prompt"])]
        ['think_format_reward']
    """
    with agreed("loading the reward functions"):
        return [_checked(name, _found(name), {*columns}) for name in script.reward_funcs or ()]


def _found(name: str) -> Any:
    import trl.rewards

    if name.endswith(".py"):
        raise ConfigError(f"--reward_funcs {name}: say which function of the file: {name}:NAME.")
    file, _, function = name.rpartition(":")
    module, _, function = ("", "", function) if file else name.rpartition(".")
    if not file and "accuracy_reward" in name and find_spec("math_verify") is None:
        raise ConfigError(f"--reward_funcs {name} needs math_verify: pip install math-verify.")
    if file and not (Path(file).is_file() and file.endswith(".py")):
        raise ConfigError(f"--reward_funcs {name}: {file} is no Python file. Give FILE.py:NAME.")
    folder = str(Path(file).parent.absolute())  # of the file, whose neighbours it may import, or the working folder
    sys.path.insert(0, folder)
    try:
        with library_errors(f"--reward_funcs {name}", "Correct it.", ConfigError):
            own = {each: getattr(trl.rewards, each) for each in _OWN}
            found = runpy.run_path(file) if file else vars(importlib.import_module(module)) if module else own
    finally:
        sys.path.remove(folder)
    names = [key for key, value in found.items() if callable(value) and not key.startswith("_")]
    if function not in names:
        end = did_you_mean(function, names, otherwise=f"; it has {listed(names)}")
        raise ConfigError(f"--reward_funcs {name}: {file or module or 'TRL'} has no function {function!r}{end}")
    if name == "get_soft_overlong_punishment":
        return found[function](max_completion_len=1280, soft_punish_cache=256)  # as TRL's script
    return found[function]


def _checked(name: str, function: Any, columns: set[str]) -> Any:
    """The function, if TRL can call it."""
    parameters = inspect.signature(function).parameters.values()
    given = _GIVEN | columns - {"prompt", "completion"}
    if all(each.kind != each.VAR_KEYWORD for each in parameters):
        raise ConfigError(f"--reward_funcs {name}: it must take whatever TRL gives it. Add **kwargs to its parameters.")
    needed = [each for each in parameters if each.default is each.empty]
    named = [each.name for each in needed if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if absent := [f"`{each}`" for each in named if each not in given]:
        there = listed(f"`{each}`" for each in sorted(given))
        raise ConfigError(
            f"--reward_funcs {name} takes {listed(absent)}, which the rows do not have: {there} are there. Rename a "
            "column or the parameter."
        )
    return function
