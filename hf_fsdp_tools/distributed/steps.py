"""What runs in each step of any optimizer of this process: one hook of torch's before a step, and one after it."""

from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Step(IntEnum):
    """When a function runs, with the optimizer; the lowest first."""

    STOP = 1  # the error of a save is raised in place of the step
    AWAY = 2  # what is stepped on another thread leaves the groups
    PART = 3  # groups are parted by kinds of parameters
    OWN = 4  # the optimizer's own step
    JOIN = 5  # groups are as they were made
    BACK = 6  # what is stepped on another thread is in its group again
    COUNT = 7  # scales of FP8 weights are to be renewed


_ENTRIES: dict[Callable[[Any], None], Step] = {}


def at_steps(when: Step, call: Callable[[Any], None]) -> Callable[[], Any]:
    """Run a function in all steps from now on, once in each; what is returned takes it away again."""
    _watch_steps()
    _ENTRIES[call] = when
    return partial(_ENTRIES.pop, call, None)


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(partial(_run, (Step.STOP, Step.AWAY, Step.PART)))
    register_optimizer_step_post_hook(partial(_run, (Step.JOIN, Step.BACK, Step.COUNT)))


def _run(steps: tuple[Step, ...], optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for when in steps:
        if when is Step.AWAY and any(map(callable, (*args[1:], *kwargs.values()))):
            continue  # a closure makes other gradients
        for call in [call for call, own in _ENTRIES.items() if own is when]:
            call(optimizer)
