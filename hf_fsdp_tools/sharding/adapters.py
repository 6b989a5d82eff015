"""Add PEFT adapters to sharded models.

The order is the same for this package, a user's script and a trainer of TRL: the base is sharded and loaded, PEFT adds
small whole tensors to it, and `shard_added` shards them.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import fields
from functools import cache, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, opened, rank_and_size, same_on_all_ranks, shared_rng_state
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors, warn
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.modeling.packed import listed_as_parameters
from hf_fsdp_tools.modeling.patterns import matched_in
from hf_fsdp_tools.modeling.pickles import load_pickled, read_json_object
from hf_fsdp_tools.sharding.added import shard_added
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.injection import add_in_passes, errors_of_peft, guarded, names_as_saved
from hf_fsdp_tools.stores import pinned
from hf_fsdp_tools.text import did_you_mean, first_line, quoted

ADAPTER_CONFIG = "adapter_config.json"

ADAPTER_WEIGHTS = "adapter_model.safetensors"

ADAPTER_FILES = (ADAPTER_WEIGHTS, "adapter_model.bin")
"""Files of weights, in the order in which PEFT looks for them."""

_SIZES = ("encoder_hidden_size", "init_r", "n_frequency", "num_layers", "num_virtual_tokens", "r", "token_dim")
"""Entries that are dimensions of tensors which PEFT (0.21) makes."""

_COPY = "Copy or download the adapter again."


@pinned()
def open_adapter(peft: Any, name: str, hub_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The local folder of an adapter, and PEFT's config of it; one on the hub is fetched."""
    subfolder = hub_kwargs.get("subfolder") or ""
    path = local_path(name)
    folder = fetch(name, "adapter_*", **hub_kwargs)[0] if path is None else path / subfolder
    config = open_adapter_config(peft, folder)
    if config is None:
        raise CheckpointError(
            f"No adapter_config.json in {name!r}{f', folder {subfolder!r}' if subfolder else ''}. Give a folder that "
            "save_pretrained wrote for an adapter, or a hub name."
        )
    _check_weights(peft, folder, read_adapter_config(folder) or {})
    return str(folder), config


def open_adapter_config(peft: Any, folder: Path) -> Any:
    """PEFT's config of the adapter in a folder; None where it has none. No rank communicates."""
    if read_adapter_config(folder) is None:
        return None
    with library_errors(f"{folder / ADAPTER_CONFIG}: cannot be used by PEFT", _COPY):
        return peft.PeftConfig.from_pretrained(str(folder))


def read_adapter_config(folder: Path) -> Mapping[str, Any] | None:
    """The `adapter_config.json` of a folder, with base and revision as texts; None where it has none."""
    file = folder / ADAPTER_CONFIG
    with watched(file):
        if not file.is_file():
            return None
    written = read_json_object(file)
    if "fine_tune_type" in written and "peft_type" not in written:
        raise CheckpointError(
            f"{str(folder)!r} is an adapter of MLX-LM, which PEFT cannot read. Merge it into its base once: "
            f"mlx_lm.fuse --model BASE --adapter-path {folder} --save-path OUT."
        )
    wrote = [int(part) for part in re.findall(r"\d+", str(written.get("peft_version", "0.17")))[:2]]
    if written.get("target_parameters") and wrote < [0, 19]:
        raise CheckpointError(
            f"{file}: PEFT before 0.19 wrote the factors of stacked experts (target_parameters) with rows and columns "
            "exchanged, and newer ones compute other values with them. Merge it with the PEFT that wrote it "
            f"({written.get('peft_version', 'before 0.18')}) by merge_and_unload, or train it again."
        )
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(written.get(key), (str, type(None))):
            raise CheckpointError(
                f"{file}: {key} is {quoted(written[key])}, expected a name. Copy the adapter again, or write it there."
            )
    if written.get("megatron_core") not in (None, "megatron.core"):  # PEFT imports what is written there
        raise CheckpointError(
            f"{file}: megatron_core is {quoted(written['megatron_core'])}, expected 'megatron.core'. {_COPY}"
        )
    return written


def _check_weights(peft: Any, folder: Path, written: Mapping[str, Any]) -> None:
    """Read the weights of an adapter as PEFT does, and compare their number with the sizes in its config."""
    weights = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"No weights in {str(folder)!r}: expected {' or '.join(ADAPTER_FILES)}. {_COPY}")
    if weights.suffix == ".bin":
        load_pickled(weights)
    with watched(weights), library_errors(f"{weights}: cannot be read as the weights of an adapter", _COPY):
        held = sum(tensor.numel() for tensor in peft.load_peft_weights(str(folder), device="cpu").values())
    ranks = written.get("rank_pattern")
    sizes = [written.get(key) for key in _SIZES] + list(ranks.values() if isinstance(ranks, dict) else ())
    if large := [size for size in sizes if isinstance(size, (int, float)) and size > held]:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: a dimension is {quoted(large[0])}, and {weights.name} holds {held:,} values. "
            f"{_COPY}"
        )


# ---- configs from the caller ----


def as_peft_config(value: Any) -> Any:
    """A config of PEFT; of a dict, the one with these arguments (LoRA where it names no `peft_type`)."""
    if value is None or hasattr(value, "peft_type"):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"peft_config is {quoted(value)}: it must be a config of PEFT, such as LoraConfig(r=16, "
            "target_modules='all-linear'), or a dict of its arguments."
        )
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    arguments = dict(value)
    kinds = {str(getattr(kind, "value", kind)): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(arguments.pop("peft_type", "LORA")).upper()
    if (config := kinds.get(name)) is None:
        raise ConfigError(f"peft_config has the peft_type {name!r}, which PEFT lacks{did_you_mean(name, kinds)}")
    known = [each.name for each in fields(config) if each.init]
    for key in arguments.keys() - set(known):
        raise ConfigError(f"{config.__name__} of PEFT has no {key!r}{did_you_mean(key, known)}")
    try:
        return config(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config is no {config.__name__}: {first_line(error)}.") from None


_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}
"""What PEFT itself adds to `modules_to_save` for a task type. (PEFT 0.21)"""


def with_modules_to_save(config: Any, parameters: Iterable[str]) -> Any:
    """A config of PEFT by which the owners of these parameters are trained whole and saved; the same if they are."""
    if not hasattr(config, "modules_to_save"):
        return config
    task = getattr(config.task_type, "value", config.task_type)
    chosen = list(config.modules_to_save or ())
    covered = (*chosen, *_HEADS.get(str(task), ()))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    added = [owner for owner in owners if owner and not _ends_in(owner, covered)]
    if added:
        config = copy(config)
        config.modules_to_save = [*chosen, *added]
    return config


def _ends_in(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the name of a module, or of one around it, ends in one of these."""
    names = name.split(".")
    return any(".".join(names[:count]).endswith(endings) for count in range(1, len(names) + 1))


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
    with _undone_if_it_fails(model):
        with _seeded(seed), _made_alike(peft_config), guarded(model, peft_config):
            adapted = _peft().get_peft_model(model, peft_config, adapter_name)
        say_what_has_none(adapted)
        shard_added(adapted)
    return adapted.eval()


def stacked_experts(model: nn.Module) -> dict[str, int]:
    """How many values the stacked experts of a mixture have, by the names that `target_parameters` takes; those that
    have an adapter are left out."""
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and "experts." in name and ".base_layer." not in name and "lora_" not in name:
            sizes[".".join(name.split(".")[-2:])] += parameter.numel()
    return dict(sorted(sizes.items()))


def say_what_has_none(adapted: Any) -> None:
    """Say on rank 0, once, which share of the weights are stacked experts without an adapter, where LoRA could add one:
    no name of a linear layer means them, and neither does all-linear."""
    bare = stacked_experts(adapted)
    if bare and rank_and_size()[0] == 0 and any(hasattr(c, "target_parameters") for c in adapted.peft_config.values()):
        share = sum(bare.values()) / sum(p.numel() for n, p in adapted.named_parameters() if "lora_" not in n)
        _warn_once(
            f"{share:.0%} of the weights get no adapter: they are stacked experts, and names of linear layers, and "
            f"all-linear, mean none of them. LoraConfig(target_parameters={[*bare]}) adds to them; in recipes "
            "--lora_experts true."
        )


@cache
def _warn_once(text: str) -> None:
    warn(text)


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
    with _undone_if_it_fails(model), names_as_saved():
        file = Path(folder) / ADAPTER_CONFIG
        with _made_alike(config), guarded(model, config), matched_in("peft", file), warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            try:
                adapted = peft.PeftModel.from_pretrained(
                    model, folder, config=config, is_trainable=is_trainable, torch_device="cpu"
                )
            except UserWarning as error:
                raise ConfigError(
                    f"{folder}: {quoted(str(error))} The adapter was trained on another class than "
                    f"{type(model).__name__}: give it as auto_class."
                ) from None
        shard_added(adapted)
    return adapted.eval()


def add_lora(model: nn.Module, *, r: int, target_modules: str | list[str] | None, dropout: float = 0.0) -> nn.Module:
    """Add LoRA to a plain model, in place, and freeze its base; return the `PeftModel`. Nothing is communicated."""
    peft = _peft()
    config = peft.LoraConfig(r=r, target_modules=target_modules, lora_dropout=dropout)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with errors_of_peft(config), warnings.catch_warnings(), listed_as_parameters(model):
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it
        adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=is_meta)
    add_in_passes(adapted)
    return adapted


# ---- PEFT on shards ----


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("Adapters need PEFT, which is not installed: pip install 'peft>=0.19'.") from None
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
