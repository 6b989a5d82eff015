"""Add PEFT adapters to sharded models.

The order is the same for this package, a user's script and a trainer of TRL: the base is sharded and loaded, PEFT adds
small whole tensors to it, and `shard_added` shards them.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, opened, same_on_all_ranks, shared_rng_state
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.sharding.adapter_files import as_peft_config, open_adapter
from hf_fsdp_tools.sharding.added import shard_added
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.injection import errors_of_peft, guard_injection, refuse_for_shards


def add_adapter(model: nn.Module, peft_config: Any, *, adapter_name: str = "default", seed: int | None = None) -> Any:
    """Add a PEFT adapter to a sharded, loaded model; return the `PeftModel`, sharded in the units of its base.

    The adapter's values are those that `get_peft_model` gives on one process from rank 0's random state. Adapters are
    fp32, as PEFT makes them; the frozen base keeps its dtype. Each rank holds the whole adapter for a moment.

    Args:
        model: sharded by `shard_model` and loaded; changed in place.
        peft_config: of PEFT, for example `LoraConfig(r=16, target_modules="all-linear")`, or a dict of its arguments
            (`{"r": 16}`; LoRA where it names no `peft_type`).
        adapter_name: name of the adapter in PEFT.
        seed: of the adapter's initial values, as in `torch.manual_seed`; None takes the random state of rank 0.

    Every rank must call, with equal arguments. The ranks exchange errors and digests; rank 0 sends the values.

    Raises:
        ConfigError: the adapter needs whole weights of the base, PEFT cannot make it (it fits no module, …), or
            arguments differ between ranks; the same on every rank. The model is then as it was.

    Example:
        >>> from peft import LoraConfig
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> adapted = add_adapter(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), seed=0)
        >>> sum(parameter.requires_grad for parameter in adapted.parameters())
        8
    """
    peft_config = as_peft_config(peft_config)
    same_on_all_ranks("adding an adapter", peft_config=peft_config, adapter_name=adapter_name, seed=seed)
    refuse_for_shards(peft_config, model)
    with _undone_if_it_fails(model):
        with _seeded(seed), _made_alike(peft_config), errors_of_peft(peft_config):
            adapted = _peft().get_peft_model(model, peft_config, adapter_name)
        shard_added(adapted)
    return adapted.eval()


def load_adapter(
    model: nn.Module, name_or_path: str | PathLike[str], *, is_trainable: bool = False, **hub_kwargs: Any
) -> Any:
    """Add a saved PEFT adapter to a sharded, loaded model; return the `PeftModel`, sharded in the units of its base.

    Each rank holds the whole adapter for a moment, then its shards.

    Args:
        model: as for `add_adapter`.
        name_or_path: hub name, or a folder with `adapter_config.json`.
        is_trainable: whether the adapter is trainable; it is frozen otherwise, as in `PeftModel.from_pretrained`.
        hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`.

    Every rank must call, with equal arguments but for the name of a folder. The ranks exchange errors and digests;
    rank 0 sends the values.

    Raises:
        CheckpointError: there is no such adapter, the hub does not give it, or it is damaged; the same on every rank.
        ConfigError: the adapter cannot be added (see `add_adapter`), or the configs of ranks differ; the same on every
            rank. The model is then as it was.

    Example:
        >>> from peft import LoraConfig
        >>> plain = {"load_kwargs": {"progress": False}}
        >>> adapted = from_pretrained("checkpoint", peft_config=LoraConfig(target_modules=["q_proj"]), **plain)
        >>> report = save_pretrained(adapted, "adapter")
        >>> model = load_adapter(from_pretrained("checkpoint", **plain), "adapter", is_trainable=True)
        >>> model.active_adapter
        'default'
    """
    peft = _peft()
    read = partial(open_adapter, peft, fspath(name_or_path))
    folder, config = opened("opening the adapter", name_or_path, read, hub_kwargs)
    if getattr(config, "init_lora_weights", None) == "eva":
        config.init_lora_weights = True  # the files hold the values
    same_on_all_ranks("adding an adapter", peft_config=config, is_trainable=is_trainable)
    refuse_for_shards(config, model)
    with _undone_if_it_fails(model):
        with _made_alike(config), errors_of_peft(config):
            adapted = peft.PeftModel.from_pretrained(
                model, folder, config=config, is_trainable=is_trainable, torch_device="cpu"
            )
        shard_added(adapted)
    return adapted.eval()


def add_lora(model: nn.Module, *, r: int, target_modules: str | list[str], dropout: float = 0.0) -> nn.Module:
    """Add LoRA to a plain model, in place, and freeze its base; return the `PeftModel`. Nothing is communicated."""
    peft = _peft()
    config = peft.LoraConfig(r=r, target_modules=target_modules, lora_dropout=dropout)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with errors_of_peft(config), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it
        adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=is_meta)
    return adapted


# ---- PEFT on shards ----


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("Adapters need PEFT, which is not installed: pip install 'peft>=0.19'.") from None
    guard_injection()
    return peft


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    state = shared_rng_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(state)
        yield


def _made_alike(config: Any) -> AbstractContextManager[None]:
    """A block in which PEFT makes an adapter on all ranks or on none; not for DoRA, whose norms take collectives."""
    return nullcontext() if getattr(config, "use_dora", False) else agreed("making the adapter")


@contextmanager
def _undone_if_it_fails(model: nn.Module) -> Iterator[None]:
    """Put the modules, parameters, hooks and attributes of a model back if the block fails: no half of an adapter."""
    before = [
        (module, dict(vars(module)), {name: dict(v) for name, v in vars(module).items() if isinstance(v, dict)})
        for module in model.modules()
    ]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
        for parameter, was_trainable in trainable:
            parameter.requires_grad_(was_trainable)
        renew(model)
        raise
