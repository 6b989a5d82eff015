"""Make sharded models look right to transformers: class names, marks, `save_pretrained` and `use_cache`."""

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
    """Give a model with all its units the class names, mark and methods that transformers looks at.

    - FSDP2's classes (`FSDPLlamaForCausalLM`) get the names of the classes that they extend. By class name the Trainer
      decides whether to shift labels under label smoothing, and writes model cards.
    - With transformers' own mark, `generate` goes on until every rank has finished, and layer drop runs every layer.
    - `model.save_pretrained(folder)` raises an error that names the right call (`refuse_plain_save`).
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        if isinstance(module, FSDPModule):
            cls, own = type(module), own_class(module)
            cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__
    refuse_plain_save(model)


def refuse_plain_save(model: nn.Module) -> None:
    """Let `model.save_pretrained(folder)` on shards raise an error that names the right call.

    With a `state_dict` the method works as before. Without, those of transformers and PEFT fail inside safetensors
    ("invalid python storage") on ranks that write, and return without an error on the other ranks.
    """
    plain = getattr(model, "save_pretrained", None)
    if plain is not None and "save_pretrained" not in model.__dict__:
        model.save_pretrained = partial(_save_whole, plain)  # type: ignore[assignment]


def _save_whole(plain: Any, folder: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """Save a given state dict by the plain method.

    Raises:
        ConfigError: no state dict is given, and the model has shards only.
    """
    if state_dict is None:
        raise ConfigError(
            "model.save_pretrained needs whole weights, and each rank has its shards only. On every rank call "
            f"save_pretrained(model, {str(folder)!r}) from hf_fsdp_tools, accelerator.save_model(model, folder), or "
            "trainer.save_model(folder)."
        )
    return plain(folder, *args, state_dict=state_dict, **kwargs)


def turn_cache_off(model: nn.Module) -> None:
    """Turn off the cache of keys and values of a model that is trained.

    `generate` asks for its own cache, and saving writes the value that was set before (`with_cache_as_found`).
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
        model._cache_is_off = True  # type: ignore[assignment]  # a plain attribute of our own


@contextmanager
def with_cache_as_found(model: nn.Module) -> Iterator[None]:
    """Undo `turn_cache_off` in the config for a block that writes the config to a checkpoint."""
    if not model.__dict__.get("_cache_is_off", False):
        yield
        return
    config: Any = model.config
    config.use_cache = True
    try:
        yield
    finally:
        config.use_cache = False
