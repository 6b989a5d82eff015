"""How a sharded model looks to the libraries around it: transformers goes by class names and marks, users by
methods."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import own_class

__all__ = ["mark_for_transformers", "refuse_plain_save", "turn_cache_off", "with_cache_as_found"]


def mark_for_transformers(model: nn.Module) -> None:
    """Give a sharded model the marks, class names and methods by which transformers knows it; when all units are made.

    - FSDP2's classes are called `FSDPLlamaForCausalLM`. By class name the Trainer decides whether labels are to be
      shifted under label smoothing, and what goes into a model card. They get the names of the classes that they
      extend.
    - With transformers' own mark, `generate` goes on until every rank has finished, and layer drop runs each layer.
    - `model.save_pretrained(folder)` is answered with the call that works (`refuse_plain_save`).
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        if isinstance(module, FSDPModule):
            cls, own = type(module), own_class(module)
            cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__
    refuse_plain_save(model)


def refuse_plain_save(model: nn.Module) -> None:
    """Answer `model.save_pretrained(folder)` on shards with the call that works.

    With a `state_dict` it stays as it was. Without, transformers' and PEFT's own fail inside safetensors ("invalid
    python storage") on the ranks that write, and return as if all were well on the others.
    """
    plain = getattr(model, "save_pretrained", None)
    if plain is not None and "save_pretrained" not in model.__dict__:
        model.save_pretrained = partial(_save_whole, plain)  # type: ignore[assignment]


def _save_whole(plain: Any, folder: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """Save a state dict that holds whole tensors.

    Raises:
        ConfigError: None is given, and the model has shards only.
    """
    if state_dict is None:
        raise ConfigError(
            "model.save_pretrained needs whole weights, and each rank has its shards only. On every rank call "
            f"save_pretrained(model, {str(folder)!r}) from hf_fsdp_tools, accelerator.save_model(model, folder), or "
            "trainer.save_model(folder)."
        )
    return plain(folder, *args, state_dict=state_dict, **kwargs)


def turn_cache_off(model: nn.Module) -> None:
    """Let a model that is trained keep no keys and values.

    `generate` asks for its own cache, and saving writes what was set before.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
        model._cache_is_off = True  # type: ignore[assignment]  # a plain attribute of our own


@contextmanager
def with_cache_as_found(model: nn.Module) -> Iterator[None]:
    """The config with `use_cache` as it was before `turn_cache_off`, for as long as it is written to a checkpoint."""
    if not model.__dict__.get("_cache_is_off", False):
        yield
        return
    config: Any = model.config
    config.use_cache = True
    try:
        yield
    finally:
        config.use_cache = False
