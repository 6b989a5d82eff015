"""Reward functions of TRL's online trainers: a rank whose function fails, or returns no rewards, stops all ranks."""

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.text import first_lines, quoted

REWARDING = ("_calculate_rewards", "_calculate_rewards_from_functions")
"""Methods of TRL's trainers (1.16) that call the reward functions; GRPO's and RLOO's then gather what they returned."""


def guard_rewards(trainer: Any) -> None:
    """Let the ranks agree on the rewards of a TRL trainer's functions, once after each batch; of others, do nothing."""
    for name in REWARDING:
        if hasattr(trainer, name):
            setattr(trainer, name, partial(_agreed_rewards, trainer, getattr(trainer, name)))


def _agreed_rewards(trainer: Any, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What TRL's method returns, if the functions of all ranks returned rewards. Every rank must call."""
    failures: list[ConfigError] = []
    functions = [f if isinstance(f, nn.Module) else _guarded(f, failures) for f in trainer.reward_funcs or ()]
    with replaced(trainer, reward_funcs=functions):
        rewards = calculate(*args, **kwargs)
    with agreed("computing rewards"):
        if failures:
            raise failures[0]
    return rewards


def _guarded(function: Any, failures: list[ConfigError]) -> Any:
    """A reward function that notes its failure and returns zeros then, with which TRL comes to where ranks gather."""
    plain = function
    while isinstance(plain, partial):
        plain = plain.func
    name = getattr(plain, "__name__", type(plain).__name__)

    def failed(error: Exception, completions: Sequence[Any]) -> list[float]:
        own = error if isinstance(error, ConfigError) else None
        frames = traceback.extract_tb(error.__traceback__)[1:]  # behind the call below
        lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
        place = f" ({Path(frames[0].filename).name}:{lines[-1]})" if lines else ""
        fact = f"{type(error).__name__}: {first_lines(error)}{place}"
        said = ConfigError(f"The reward function {name} raised {fact}. Mend it.")
        said.__cause__ = error
        failures.append(own or said)
        return [0.0] * len(completions)

    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None)):  # noqa: B004

        async def later(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
            try:
                return _checked(name, await function(*args, completions=completions, **kwargs), len(completions))
            except Exception as error:
                return failed(error, completions)

        return later

    def at_once(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
        try:
            return _checked(name, function(*args, completions=completions, **kwargs), len(completions))
        except Exception as error:
            return failed(error, completions)

    return at_once


def _checked(name: str, returned: Any, expected: int) -> list[float | None]:
    """The rewards that a function returned, if they are one finite number, or None, for each completion."""
    cure = "Return one finite number for each completion, None for one that it does not judge."
    if inspect.isgenerator(returned) or not hasattr(returned, "__iter__"):
        raise ConfigError(f"The reward function {name} returned {quoted(returned)}, which is no list. {cure}")
    rewards = [reward.item() if hasattr(reward, "item") else reward for reward in returned]
    if len(rewards) != expected:
        raise ConfigError(
            f"The reward function {name} returned {len(rewards)} rewards for {expected} completions. {cure}"
        )
    for number, reward in enumerate(rewards):
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise ConfigError(
                f"The reward function {name} returned {quoted(reward)} for completion {number + 1} of {expected}. "
                f"{cure}"
            )
    return rewards
