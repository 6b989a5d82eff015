"""Methods of Accelerate and transformers that are overridden here: whether they are still there, and who is called."""

import inspect
import warnings
from functools import cache
from typing import Any

from hf_fsdp_tools.diagnostics.environment import untried_versions
from hf_fsdp_tools.errors import ConfigError


def overridden(own: type) -> list[str]:
    """The names of the methods that a class of this room defines, all of which override methods of its base."""
    return [name for name, value in vars(own).items() if inspect.isfunction(value) and not name.startswith("__")]


def check_hooks(own: type, base: Any) -> None:
    """Refuse a base class that lacks a method that `own` overrides, because the method would silently not be called.

    Warns once per process of versions of Accelerate and transformers that are later than the tested ones.
    """
    _warn_of_untried_versions()
    if gone := [name for name in overridden(own) if not hasattr(base, name)]:
        raise ConfigError(
            f"{own.__name__} overrides {', '.join(gone)}, which the class that it extends does not have: nobody would "
            "call it. Install a version that was tested (`hf-fsdp doctor`)."
        )


def warn_of_uncalled(cls: type, mixin: type, trainer: type) -> None:
    """Warn of methods of a user's trainer that are not called, because the mixin saves and loads shards instead."""
    order = cls.__mro__[: cls.__mro__.index(trainer)]
    # A user could not mend TRL's.
    behind = [each for each in order[order.index(mixin) + 1 :] if not each.__module__.startswith("trl.")]
    uncalled = [f"{each.__name__}._save" for each in order if "_save" in vars(each)]
    uncalled += [f"{each.__name__}.{name}" for each in behind for name in _REPLACED if name in vars(each)]
    if uncalled:
        warnings.warn(
            f"{', '.join(uncalled)}: not called, because {mixin.__name__} saves and loads shards. Write save_model in "
            f"{cls.__name__}, with super().save_model(output_dir, _internal_call) on every rank, and what is yours "
            "after it.",
            stacklevel=3,
        )


_REPLACED = ("save_model", "_save_optimizer_and_scheduler", "_load_best_model")
"""Methods of the Trainer in whose place the mixin's run."""


@cache
def _warn_of_untried_versions() -> None:
    for finding in untried_versions("accelerate", "transformers"):
        warnings.warn(f"{finding.fact} Cure: {finding.cure}", stacklevel=4)
