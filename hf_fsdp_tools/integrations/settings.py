"""Every FSDP setting of Accelerate and of `TrainingArguments` in one table, and what FSDP2 makes of it.

From `SETTINGS` come the keys of the YAML that FSDPConfig writes and checks, the known variables, and the known keys of
`TrainingArguments.fsdp_config`. `docs/settings.md` says what becomes of each setting. The names are those of accelerate
1.15 (`utils.launch`, `utils.dataclasses`) and transformers 5.23 (`TrainingArguments._process_fsdp_args`);
`tests/unit/test_settings.py` reads both libraries and fails when their names differ.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_fsdp_tools.distributed.launcher import local_rank
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean

AutoWrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
MixedPrecision = Literal["no", "bf16", "fp16"]
StateDictType = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
_Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
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
    """Field of FSDPConfig, from which the YAML is written; "" where it has none, and a check of
    the file answers the key."""
    kind: type | tuple[str, ...] = str
    """Allowed values in a file: a type, or one of some words."""
    versions: tuple[int, ...] = (1, 2)
    """The versions of FSDP that have the setting."""
    fsdp2: object = None
    """The value that FSDP2 always has for a setting of FSDP1 alone."""


def _launched(name: str, kind: type | tuple[str, ...] = str, **other: Any) -> Setting:
    """A setting that launcher, plugin and `TrainingArguments` know under one name; `other` has the exceptions."""
    same = {
        "key": f"fsdp_{name}",
        "variable": f"FSDP_{name.upper()}",
        "argument": name,
        "training": (name,),
        "field": name,
    }
    return Setting(kind=kind, **same | other)


SETTINGS = (
    _launched("version", int, argument="fsdp_version", field="fsdp_version"),
    _launched("reshard_after_forward"),
    _launched("sharding_strategy", field=""),
    _launched("offload_params", bool, argument="cpu_offload", training=("offload_params", "cpu_offload")),
    _launched("auto_wrap_policy", get_args(AutoWrapPolicy)),
    _launched(
        "transformer_layer_cls_to_wrap",
        argument="transformer_cls_names_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    _launched("min_num_params", int),
    _launched("ignored_modules"),
    _launched("activation_checkpointing", bool),
    _launched("activation_checkpointing_offload", bool, versions=(2,), field=""),
    _launched("state_dict_type", get_args(StateDictType)),
    _launched("cpu_ram_efficient_loading", bool),
    _launched("backward_prefetch", get_args(BackwardPrefetch), versions=(1,), fsdp2="BACKWARD_PRE"),
    _launched("forward_prefetch", bool, versions=(1,), fsdp2=False),
    _launched("sync_module_states", bool, versions=(1,), fsdp2=True),
    _launched("use_orig_params", bool, versions=(1,), fsdp2=True),
    Setting(argument="mixed_precision_policy", training=("mixed_precision_policy",)),
    Setting(argument="limit_all_gathers", training=("limit_all_gathers",), kind=bool, versions=(1,), fsdp2=True),
    Setting(argument="param_init_fn", versions=(1,)),
    Setting(argument="state_dict_config", versions=(1,)),
    Setting(argument="optim_state_dict_config", versions=(1,)),
    *(Setting(training=(name,)) for name in ("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2")),
)

VARIABLES = {row.variable: row for row in SETTINGS if row.variable}
YAML_KEYS = {row.key: row for row in SETTINGS if row.key}
OLD_KEYS = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
"""What keys are called that `accelerate config` wrote until 2023, and the launcher drops now (accelerate#2288)."""
TRAINING_KEYS = {name: row for row in SETTINGS for name in row.training}


def is_set(variable: str) -> bool:
    """Whether an environment variable of Accelerate is switched on."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def warn_on_node(text: str, *, stacklevel: int) -> None:
    """Warn on the first rank of each machine: what is said is the same on all ranks."""
    if not local_rank(os.environ):  # 0, or nobody launched it
        warnings.warn(text, stacklevel=stacklevel + 1)


def read_value(kind: type | tuple[str, ...], value: Any) -> Any:
    """A value of a YAML file as `kind`; like the launcher, takes numbers and booleans as text, and words in any
    case.
    """
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


# ---- settings from variables and TrainingArguments ----


def warn_of_unknown_variables() -> None:
    """Warn of every FSDP_* variable that has no effect, with the nearest names that have one."""
    for name in sorted(os.environ):
        if name.startswith("FSDP_") and name not in VARIABLES:
            warn_on_node(f"The variable {name} has no effect{did_you_mean(name, VARIABLES)}", stacklevel=4)


def plugin_arguments(args: Any) -> dict[str, Any]:
    """Arguments for the plugin from `TrainingArguments(fsdp=True, fsdp_config=…)`; none without `fsdp`.

    Passes every key on that Accelerate has; transformers drops some. Without a state dict type in `fsdp_config`, the
    plugin decides (sharded, or the launcher's setting).
    """
    config: Mapping[str, Any] = args.fsdp_config or {}
    if not args.fsdp:
        if config:
            warn_on_node("TrainingArguments.fsdp_config has no effect without fsdp: add fsdp=True.", stacklevel=4)
        return {}
    problems = [f"{key}{did_you_mean(key, TRAINING_KEYS)}" for key in config if key not in TRAINING_KEYS]
    problems += [
        f"{key}: FSDP on TPUs is not part of this package. Remove it" for key in config if "xla" in key and config[key]
    ]
    if problems:
        said = "; ".join(problems)
        raise ConfigError(
            f"TrainingArguments.fsdp_config cannot be used: {said.rstrip('.')}{'' if said.endswith('?') else '.'}"
        )
    arguments = dict(args.fsdp_plugin_args or {})
    if "state_dict_type" not in config:
        arguments.pop("state_dict_type", None)
    for key, value in config.items():
        name = TRAINING_KEYS[key].argument
        if name and value is not None and (name not in arguments or key == "offload_params"):
            arguments[name] = value == "true" if value in ("true", "false") else value
    return arguments


def named_keys(args: Any) -> list[str]:
    """The keys of `TrainingArguments.fsdp_config` that the user gave; transformers adds some that ask for nothing."""
    config = args.fsdp_config if args.fsdp else {}
    added = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    return [key for key, value in config.items() if value is not None and value != added.get(key)]


# ---- settings that FSDP2 names differently or does not have ----


def reshard_after_forward(plugin: Any) -> bool:
    """`reshard_after_forward` of a plugin, from its own setting or from FSDP1's sharding strategy.

    SHARD_GRAD_OP keeps units gathered until the backward pass.
    """
    said = [plugin.reshard_after_forward, plugin.sharding_strategy]
    said[0] = os.environ.get("FSDP_RESHARD_AFTER_FORWARD") if said[0] is None else said[0]
    said[1] = os.environ.get("FSDP_SHARDING_STRATEGY") if said[1] is None else said[1]
    return all(reshards(value) for value in said if value is not None and str(value) not in ("None", "none"))


def reshards(value: Any) -> bool:
    """Whether a value of `reshard_after_forward` or of FSDP1's sharding strategy frees units after the forward pass."""
    word = strategy_of(value)
    known = {"TRUE": True, "FULL_SHARD": True, "FALSE": False, "SHARD_GRAD_OP": False}
    if word in known:
        return known[word]
    cure = "Use true or false (FULL_SHARD, SHARD_GRAD_OP)"
    if word.startswith("HYBRID"):
        cure = "Use parallelism_config with dp_replicate_size, the number of copies, and dp_shard_size"
    elif word == "NO_SHARD":
        cure = "Use Accelerate's MULTI_GPU, which shards nothing"
    raise ConfigError(f"FSDP2 has no sharding strategy {value}. {cure}.")


def strategy_of(value: Any) -> str:
    """FSDP1's name of a sharding strategy that is given by its name in any case, its number or torch's enum."""
    return _word(str(getattr(value, "name", value)), get_args(_Strategy))


HYBRID = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
"""What strategies with copies do within one machine."""


def drop_fsdp1_settings(plugin: Any) -> str:
    """Unset the plugin's settings of FSDP1 alone, in place; return those whose values differ from what FSDP2 does."""
    asked = []
    for row in SETTINGS:
        if not row.argument or 2 in row.versions:
            continue
        value = getattr(plugin, row.argument)
        if value is None:
            value = _from_variable(row.variable)
        said = getattr(value, "name", value)
        if (said.upper() if isinstance(said, str) else said) not in (None, row.fsdp2):
            asked.append(f"{row.argument}={said}")
        setattr(plugin, row.argument, True if row.argument == "limit_all_gathers" else None)
    return ", ".join(asked)


def warn_of_fsdp1_settings(left_out: str) -> None:
    """Warn of settings that `drop_fsdp1_settings` left out, if any."""
    if left_out:
        warn_on_node(
            f"Only FSDP1 has {left_out}. FSDP2 gathers ahead, keeps original parameters and limits memory by itself: "
            "left out.",
            stacklevel=4,
        )


def _from_variable(name: str | None) -> Any:
    text = os.environ.get(name) if name else None
    return {"true": True, "false": False, "none": None}.get(text.lower(), text.upper()) if text else None


def warn_of_idle_wrap_settings(plugin: Any) -> None:
    """Warn of layer classes or a size that the plugin's wrap policy does not use."""
    wrap = getattr(getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy), "__name__", "")
    said = []
    if plugin.transformer_cls_names_to_wrap and wrap != "transformer_auto_wrap_policy":
        names = ",".join(plugin.transformer_cls_names_to_wrap)
        said.append(f"transformer_cls_names_to_wrap={names} has effect only with TRANSFORMER_BASED_WRAP")
    if plugin.min_num_params and wrap != "size_based_auto_wrap_policy":
        said.append(f"min_num_params={plugin.min_num_params} has effect only with SIZE_BASED_WRAP")
    if said:
        warn_on_node(f"{'; '.join(said)}. Set auto_wrap_policy so.", stacklevel=5)
