"""What callers give as the values that are meant: names of dtypes and classes, numbers as text; or one clear error."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from os import PathLike, fspath
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import dtype_name, quoted

_P = ParamSpec("_P")
_T = TypeVar("_T")

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Names of dtypes that Accelerate, Trainer and the command line have, and torch has not."""

_CURES = {"num_tokens": " Give len(tokenizer)."}
"""What to give, by the names of arguments that are counts."""


def taking(**converters: Callable[[Any, str], Any]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: the function gets each named argument, where it is given, as its converter understands it."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            given = None
            with suppress(TypeError):  # for Python's own error below, which names the function
                given = signature.bind(*args, **kwargs)
            if given is None:
                return function(*args, **kwargs)
            for name in [name for name in converters if name in given.arguments]:
                given.arguments[name] = converters[name](given.arguments[name], name)
            return function(*given.args, **given.kwargs)

        call.__dict__["takes"] = frozenset(converters)
        return call

    return decorate


def as_model(value: Any, name: str) -> nn.Module:
    """The model itself."""
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, (str, PathLike)):
        shown = repr(fspath(value))
        raise ConfigError(
            f"{name} is {shown}, a name: it must be a model. Make one with from_pretrained({shown}), or, without its "
            f"weights, with build_meta_model({shown})."
        )
    raise ConfigError(f"{name} is {_shown(value)}: it must be a model (torch.nn.Module).")


def as_path(value: Any, name: str) -> Any:
    """A name or folder as it is."""
    if isinstance(value, (str, PathLike)):
        return value
    if name == "folder":
        raise ConfigError(f"{name} is {_shown(value)}: it must be the name of a folder to save to, as text.")
    there = " A model that is there already is sharded by shard_model." if isinstance(value, nn.Module) else ""
    raise ConfigError(
        f"{name} is {_shown(value)}: it must be a folder, or the name of a model on the hub, as text.{there}"
    )


def as_config(value: Any, name: str) -> Any:
    """A configuration, or its name or folder; None where the function decides."""
    if value is None or isinstance(value, (str, PathLike, PreTrainedConfig)):
        return value
    raise ConfigError(
        f"{name} is {_shown(value)}: it must be a configuration of transformers, or its name or folder. Of a dict, "
        "AutoConfig.for_model(**config) makes one."
    )


def as_flag(value: Any, name: str) -> Any:
    """True or False; None where the function decides."""
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{name} is {_shown(value)}: give True or False.")


def as_count(value: Any, name: str) -> int | None:
    """A whole number from 1, also from text or a float that is whole; None where the function decides."""
    if value is None:
        return None
    text = value.strip().replace("_", "") if isinstance(value, str) else value
    is_number = isinstance(text, int | float) and not isinstance(text, bool)
    if (isinstance(text, str) and text.isdecimal()) or (is_number and text == int(text)):
        if (number := int(text)) >= 1:
            return number
        raise ConfigError(f"{name} is {number}; it must be at least 1.{_CURES.get(name, '')}")
    raise ConfigError(f"{name} is {_shown(value)}; it must be a whole number, at least 1.{_CURES.get(name, '')}")


def as_mapping(value: Any, name: str) -> Mapping[str, Any] | None:
    """A mapping from names of arguments; None for none."""
    if value is None or isinstance(value, Mapping):
        return value
    raise ConfigError(f"{name} is {_shown(value)}: it must be a dict of arguments by their names.")


def as_dtype(value: Any, name: str) -> Any:
    """A floating-point dtype, also by its name (`"bfloat16"`, `"bf16"`, `"torch.bfloat16"`); None where the function
    decides.
    """
    if value is None:
        return None
    found = value
    if isinstance(value, str):
        plain = value.strip().lower().removeprefix("torch.")
        found = _SHORT.get(plain, getattr(torch, plain, None))
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    shown = dtype_name(value) if isinstance(value, torch.dtype) else value
    raise ConfigError(f"{name}={shown!r} is no floating-point dtype. Use float32, bfloat16 or float16.")


def _shown(value: Any) -> str:
    """A value for a message."""
    return repr(value) if isinstance(value, torch.dtype) else quoted(value)
