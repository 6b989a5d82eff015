"""The way to `extensions/`: its modules are named here alone, so that the core runs without the folder."""

from collections.abc import Collection
from importlib import import_module
from typing import Any

from hf_fsdp_tools.errors import ConfigError

_FOLDER = "hf_fsdp_tools.extensions"

FEATURES = ("context_parallel", "float8", "liger", "packed_rows", "streamed", "tensor_parallel", "sequence_parallel")
"""The modules of the folder that change what a model does, in the order in which they do: sharing rows is tried while
its layers are whole, and weights are converted before shards of them are offloaded."""


def features_asked_for(asked: Collection[str]) -> list[Any]:
    """The `FEATURE` of each of these modules that is asked for; the others are not imported."""
    return [load_extension(name).FEATURE for name in FEATURES if name in asked]


def load_extension(name: str) -> Any:
    """One module of the folder.

    Raises:
        ConfigError: it is not there.
    """
    try:
        return import_module(f"{_FOLDER}.{name}")
    except ModuleNotFoundError as error:
        if not f"{error.name}".startswith(_FOLDER):
            raise
        raise ConfigError(
            f"This installation has no {_FOLDER}.{name}, which this needs. Install the package."
        ) from None
