"""One FSDP setting under all its names, readers of values, sharding strategies of version 1, and contradictions.

The table of all settings is made from the fields of LaunchConfig (`config.SETTINGS`).
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_fsdp_tools.axes import product, size_names
from hf_fsdp_tools.errors import ConfigError, warn

AutoWrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
MixedPrecision = Literal["no", "bf16", "fp16", "fp8"]
StateDictType = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""Values of settings, in Accelerate's order: files and variables may also give their number, from 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, under each name that Accelerate and transformers have for it; None where they have none."""

    argument: str | None = None
    """Argument of Accelerate's `FullyShardedDataParallelPlugin`; None for settings of TPUs."""
    key: str | None = None
    """Key in section `fsdp_config` of Accelerate's YAML; all but ignored_modules are options of the launcher too."""
    variable: str | None = None
    """Environment variable, set by `accelerate launch` for its processes, or by hand under `torchrun`."""
    training: tuple[str, ...] = ()
    """Keys in `TrainingArguments.fsdp_config`, also those that transformers drops although Accelerate knows them."""
    field: str = ""
    """Field of LaunchConfig, from which the YAML is written; "" where it has none."""
    kind: type | tuple[str, ...] = str
    """Allowed values in a file: a type, or one of some words."""
    is_old: bool = False
    """Whether only version 1 of FSDP has the setting."""
    fsdp2: object = None
    """The value that FSDP2 always has for such a setting."""


def launched(name: str, kind: type | tuple[str, ...] = str, **other: Any) -> Setting:
    """A setting that launcher, plugin and `TrainingArguments` know under one name; `other` has the exceptions."""
    same = {"key": f"fsdp_{name}", "variable": f"FSDP_{name.upper()}", "argument": name, "training": (name,)}
    return Setting(kind=kind, **same | other)


def read_value(kind: type | tuple[str, ...], value: Any) -> Any:
    """A value of a file as `kind`; like the launcher, takes numbers and booleans as text, and words in any case."""
    text = str(value).strip()
    if kind is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if kind is int and text.lstrip("-").isdigit():
        return int(text)
    if kind is str and not isinstance(value, list | dict):
        return text
    if isinstance(kind, tuple) and (word := _word(text, kind)) in kind:
        return word
    names = {bool: "true or false", int: "a whole number", str: "text"}
    raise ValueError(f"one of {', '.join(kind)}" if isinstance(kind, tuple) else names[kind])


_TRUE, _FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")
"""Words for true and false (source: `str_to_bool` of accelerate 1.15)."""


def _word(text: str, words: tuple[str, ...]) -> str:
    numbered = text.isdigit() and 0 < int(text) <= len(words)
    return words[int(text) - 1] if numbered else text.upper()


_MEANINGS = {
    "TRUE": (True, False),
    "FALSE": (False, False),
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
"""`reshard_after_forward` and strategies of version 1: are units freed after forward, has each machine a copy."""


def strategy_name(value: Any) -> str:
    """The name of a strategy that is given by its name in any case, its number or torch's enum."""
    return _word(str(getattr(value, "name", value)), get_args(Strategy))


def read_strategies(values: Iterable[Any], *, may_copy: bool) -> tuple[bool, bool]:
    """Whether units are freed after the forward pass, and whether each machine has a replica.

    The values are those of `reshard_after_forward` and of the sharding strategy; None says nothing. HYBRID_SHARD
    means something in settings that were made for version 1 (`may_copy`).
    """
    meanings = [_MEANINGS["TRUE"]]
    for value in values:
        word = strategy_name(value)
        meaning = _MEANINGS.get(word)
        if meaning is None and word == "NONE":
            continue
        if meaning is None or (meaning[1] and not may_copy):
            cure = "Use true or false (FULL_SHARD, SHARD_GRAD_OP)"
            if word.startswith("HYBRID"):
                cure = "Use parallelism_config with dp_replicate_size, the number of copies, and dp_shard_size"
            elif word == "NO_SHARD":
                cure = "Use Accelerate's MULTI_GPU, which shards nothing"
            raise ConfigError(f"FSDP2 has no sharding strategy {value}. {cure}.")
        meanings.append(meaning)
    return all(freed for freed, _ in meanings), any(copies for _, copies in meanings)


def is_set(variable: str) -> bool:
    """Whether an environment variable of Accelerate is switched on."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def is_by_launcher() -> bool:
    """Whether `accelerate launch` made the variables, not TrainingArguments or a user: it alone sets the second."""
    return is_set("ACCELERATE_USE_FSDP") and "ACCELERATE_DYNAMO_USE_FULLGRAPH" in os.environ


def warn_on_node(text: str) -> None:
    """Warn on the first rank of each machine: the text is the same on all ranks."""
    from hf_fsdp_tools.distributed.mesh import rank_on_node  # which imports torch

    if rank_on_node()[0] == 0:
        warn(text)


# ---- contradictions ----

Problem = tuple[str, str]
"""A fact and its cure."""


def contradictions(config: Any) -> list[Problem]:
    """The fact and the cure of every contradiction in a config, or in anything with its attributes."""
    problems = [*_type_problems(config)]  # the other checks compare numbers, and need right types
    return problems or [*_process_problems(config), *_sharding_problems(config)]


def _type_problems(config: Any) -> Iterator[Problem]:
    choices: dict[str, tuple[object, ...]] = {"mixed_precision": get_args(MixedPrecision), "fsdp_version": (2,)}
    choices |= {"state_dict_type": get_args(StateDictType), "auto_wrap_policy": get_args(AutoWrapPolicy)}
    for name, allowed in choices.items():
        if (value := getattr(config, name)) not in allowed:
            yield f"{name} is {value!r}", f"use one of {', '.join(map(str, allowed))}"
    lowest = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "activation_checkpointing_every_n_layers": 1}
    lowest |= dict.fromkeys(size_names(), 1)
    for name, least in lowest.items():
        value = getattr(config, name)
        if type(value) is not int or value < least:
            yield f"{name} is {value!r}", f"use a whole number from {least}"
    port = config.main_process_port
    if port is not None and (type(port) is not int or not 0 <= port < 2**16):
        yield f"main_process_port is {port!r}", "use a number from 1 to 65535, or 0 for a free port"


def _process_problems(config: Any) -> Iterator[Problem]:
    processes, machines, ids = config.num_processes, config.num_machines, config.gpu_ids
    if processes % machines:
        fact = f"num_processes {processes} counts all machines and is not a multiple of num_machines {machines}"
        yield fact, "every machine runs the same number"
    if config.machine_rank >= machines:
        yield f"machine_rank is {config.machine_rank}", f"it counts from 0 and must be below num_machines {machines}"
    missing = [name for name in ("main_process_ip", "main_process_port") if not getattr(config, name)]
    if machines > 1 and missing:
        yield f"num_machines is {machines}", f"several machines need {' and '.join(missing)} of machine 0"
    if config.use_cpu and ids is not None:
        yield f"gpu_ids {ids!r} picks GPUs and use_cpu hides them", "drop one of the two"
    elif ids is not None and len(ids.split(",")) < processes // machines:
        fact = f"gpu_ids {ids!r} has fewer GPUs than a machine has processes ({processes // machines})"
        yield fact, "each process needs its own"
    if config.use_cpu and config.mixed_precision == "fp16":
        yield 'mixed_precision "fp16" needs a GPU for its loss scaling', 'on CPU use "bf16" or "no"'
    if config.use_cpu and config.offload_params:
        yield "offload_params moves weights to the CPU, where use_cpu already has them", "drop offload_params"


def _above_one(config: Any, names: Iterable[str]) -> str:
    return " x ".join(f"{name} {size}" for name in names if (size := getattr(config, name)) > 1)


def _sharding_problems(config: Any) -> Iterator[Problem]:
    processes, policy, of_copies, of_rows = (
        config.num_processes,
        config.auto_wrap_policy,
        size_names("copy"),
        size_names(of_rows=True),
    )
    copies, per_row = product(config, of_copies), product(config, of_rows)
    if processes % copies:
        yield f"{_above_one(config, of_copies)} does not divide num_processes {processes}", "use a divisor"
    elif (processes // copies) % per_row:
        yield (
            f"{_above_one(config, of_rows)} does not divide the {processes // copies} processes of a copy",
            "use a divisor",
        )
    elif config.ep_size % per_row and config.ep_size > 1:
        yield (
            f"ep_size {config.ep_size} is no multiple of {' x '.join(of_rows)}",
            "ranks with the same rows share experts too",
        )
    elif (processes // copies) % config.ep_size:
        yield f"ep_size {config.ep_size} does not divide the {processes // copies} processes of a copy", "use a divisor"
    elif copies == processes > 1:
        fact = f"{_above_one(config, of_copies)} leaves one process per copy, so nothing is sharded"
        yield fact, f"use a smaller divisor of {processes}"
    if (names := config.transformer_layer_cls_to_wrap) and policy != "TRANSFORMER_BASED_WRAP":
        fact = f"transformer_layer_cls_to_wrap {', '.join(names)} has no effect with auto_wrap_policy {policy}"
        yield fact, "use TRANSFORMER_BASED_WRAP or drop it"
    if ((size := config.min_num_params) is not None) != (policy == "SIZE_BASED_WRAP"):
        fact = f"min_num_params is {size} with auto_wrap_policy {policy}"
        yield fact, "SIZE_BASED_WRAP needs it and nothing else uses it"
    if not config.activation_checkpointing:
        for name, usual in (("offload", False), ("every_n_layers", 1), ("save_ops", ())):
            if (value := getattr(config, f"activation_checkpointing_{name}")) != usual:
                shown = ", ".join(value) if isinstance(value, tuple) else value
                fact = f"activation_checkpointing_{name} is {shown} without activation_checkpointing"
                yield fact, "turn activation_checkpointing on or drop it"
    if config.state_dict_type == "LOCAL_STATE_DICT":
        fact = "state_dict_type is LOCAL_STATE_DICT: only version 1 of FSDP has this"
        yield fact, "use SHARDED_STATE_DICT or FULL_STATE_DICT"
