"""The way to `extensions/`: its modules are found by their names, so that the core runs without the folder."""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from hf_fsdp_tools.errors import ConfigError

_FOLDER = "hf_fsdp_tools.extensions"


def extensions() -> list[ModuleType]:
    """The modules and packages of the folder; none where it is not there."""
    found = find_spec(_FOLDER)
    paths = found.submodule_search_locations if found is not None else None
    return [import_module(f"{_FOLDER}.{each.name}") for each in iter_modules(paths or ())]


def extension(name: str) -> Any:
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
