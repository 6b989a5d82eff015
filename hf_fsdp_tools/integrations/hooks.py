"""Methods of Accelerate and transformers that are overridden here: whether they are still there."""

import inspect
from functools import cache
from typing import Any

from hf_fsdp_tools.diagnostics.environment import untried_versions
from hf_fsdp_tools.errors import ConfigError, warn


def check_hooks(own: type, base: Any) -> None:
    """Refuse a base class that lacks a method of `own`, all of which override: it would silently not be called.

    Warns once per process of versions of Accelerate and transformers that are later than the tested ones.
    """
    _warn_of_untried_versions()
    names = [name for name, value in vars(own).items() if inspect.isfunction(value) and not name.startswith("__")]
    if gone := [name for name in names if not hasattr(base, name)]:
        raise ConfigError(
            f"{own.__name__} overrides {', '.join(gone)}, which the class that it extends does not have: nobody would "
            "call it. Install a version that was tested (`hf-fsdp doctor`)."
        )


@cache
def _warn_of_untried_versions() -> None:
    for finding in untried_versions("accelerate", "transformers"):
        warn(f"{finding.problem} Fix: {finding.fix}")
