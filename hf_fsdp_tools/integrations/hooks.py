"""Whether the methods that this room overrides are still there, in later versions of the libraries that have them."""

import inspect
import warnings
from functools import cache
from typing import Any

from hf_fsdp_tools.diagnostics.environment import untried_versions
from hf_fsdp_tools.errors import ConfigError

__all__ = ["check_hooks", "overridden"]


def overridden(own: type) -> list[str]:
    """The names of the methods that a class of this room defines: it has no others than those of its base."""
    return [name for name, value in vars(own).items() if inspect.isfunction(value) and not name.startswith("__")]


def check_hooks(own: type, base: Any) -> None:
    """Stop where a method that `own` overrides is gone from its base: nobody would call it, and nothing would say so.

    Warns once in a process of versions of Accelerate and transformers that are later than any tested one.

    Args:
        own: a class of this room.
        base: the class that it extends, or `super()` of both.

    Raises:
        ConfigError: names are gone; the message lists them.
    """
    _warn_of_untried_versions()
    if gone := [name for name in overridden(own) if not hasattr(base, name)]:
        raise ConfigError(
            f"{own.__name__} overrides {', '.join(gone)}, which the class that it extends does not have: nobody would "
            "call it. Install a version that was tested (`hf-fsdp doctor`); write FSDPTrainerMixin before the Trainer."
        )


@cache
def _warn_of_untried_versions() -> None:
    for finding in untried_versions("accelerate", "transformers"):
        warnings.warn(f"{finding.fact} Cure: {finding.cure}", stacklevel=4)
