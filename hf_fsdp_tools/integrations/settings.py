"""Every FSDP setting of Accelerate and of `TrainingArguments`, in one table, and what FSDP2 makes of it.

    SETTINGS  ->  the YAML that FSDPConfig writes and checks, the variables that are known, the keys of fsdp_config

`docs/settings.md` says what becomes of each. Names: accelerate 1.15 (`utils.launch`, `utils.dataclasses`), transformers
5.23 (`TrainingArguments._process_fsdp_args`). `tests/unit/test_settings.py` reads both and fails when they name others.
"""

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_fsdp_tools.errors import ConfigError

__all__ = [
    "SETTINGS",
    "TRAINING_KEYS",
    "VARIABLES",
    "YAML_KEYS",
    "AutoWrapPolicy",
    "BackwardPrefetch",
    "MixedPrecision",
    "Setting",
    "StateDictType",
    "drop_fsdp1_settings",
    "is_set",
    "nearest",
    "plugin_arguments",
    "read_value",
    "reshard_after_forward",
    "reshards",
    "warn_of_idle_wrap_settings",
    "warn_of_unknown_variables",
]

AutoWrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
MixedPrecision = Literal["no", "bf16", "fp16"]
StateDictType = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
_Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""Words in Accelerate's order: files and variables may also number them, from 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, under each name that Accelerate and transformers have for it; None where they have none."""

    argument: str | None = None
    """Of Accelerate's `FullyShardedDataParallelPlugin`; None for what runs on TPUs only."""
    key: str | None = None
    """In the section `fsdp_config` of Accelerate's YAML; all but ignored_modules are options of the launcher too."""
    variable: str | None = None
    """Set by `accelerate launch` for its processes, or by hand under `torchrun`."""
    training: tuple[str, ...] = ()
    """In `TrainingArguments.fsdp_config`: what transformers passes on, and what it drops although Accelerate has it."""
    field: str = ""
    """Of FSDPConfig, where it has one."""
    kind: type | tuple[str, ...] = str
    """What a file may say: a value of this type, or one of these words."""
    versions: tuple[int, ...] = (1, 2)
    """The versions of FSDP that know it."""
    fsdp2: object = None
    """For a setting that only FSDP1 knows: what FSDP2 does anyway."""


def _launched(name: str, kind: type | tuple[str, ...] = str, **other: Any) -> Setting:
    """A setting that launcher, plugin and `TrainingArguments` know, by the name that they share but for `other`."""
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
    _launched("sharding_strategy"),
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
    _launched("activation_checkpointing_offload", bool, versions=(2,)),
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
TRAINING_KEYS = {name: row for row in SETTINGS for name in row.training}


def is_set(variable: str) -> bool:
    """Whether a variable of Accelerate's is switched on."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest of the known ones, or all of them."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."


def read_value(kind: type | tuple[str, ...], value: Any) -> Any:
    """A value of a YAML file as `kind`; the launcher takes numbers and booleans as text, and words in any case.

    Raises:
        ValueError: it is none; the message says what is expected.
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
"""As Accelerate's `str_to_bool` reads them."""


def _word(text: str, words: tuple[str, ...]) -> str:
    numbered = text.isdigit() and 0 < int(text) <= len(words)
    return words[int(text) - 1] if numbered else text.upper()


# ---- what is said by variables and by TrainingArguments ----


def warn_of_unknown_variables() -> None:
    """One line for every FSDP_* variable that nobody reads, with the nearest names that somebody does."""
    for name in sorted(os.environ):
        if name.startswith("FSDP_") and name not in VARIABLES:
            warnings.warn(f"The variable {name} has no effect: {nearest(name, VARIABLES)}", stacklevel=4)


def plugin_arguments(args: Any) -> dict[str, Any]:
    """Arguments for the plugin from `TrainingArguments(fsdp=True, fsdp_config=…)`; none without `fsdp`.

    More than transformers passes on: every key that Accelerate has. The state dict type is left to the plugin (sharded,
    or what the launcher says) where `fsdp_config` does not name one.

    Raises:
        ConfigError: unknown keys, with the nearest names; XLA's, which run on TPUs.
    """
    config: Mapping[str, Any] = args.fsdp_config or {}
    if not args.fsdp:
        if config:
            warnings.warn("TrainingArguments.fsdp_config has no effect without fsdp: add fsdp=True.", stacklevel=4)
        return {}
    problems = [f"{key}: {nearest(key, TRAINING_KEYS)}" for key in config if key not in TRAINING_KEYS]
    problems += [
        f"{key}: FSDP on TPUs is not part of this package. Remove it" for key in config if "xla" in key and config[key]
    ]
    if problems:
        raise ConfigError("TrainingArguments.fsdp_config cannot be used: " + "; ".join(problems) + ".")
    arguments = dict(args.fsdp_plugin_args or {})
    if "state_dict_type" not in config:
        arguments.pop("state_dict_type", None)
    for key, value in config.items():
        name = TRAINING_KEYS[key].argument
        if name and value is not None and (name not in arguments or key == "offload_params"):
            arguments[name] = value == "true" if value in ("true", "false") else value
    return arguments


# ---- what FSDP2 says otherwise, or has no use for ----


def reshard_after_forward(plugin: Any) -> bool:
    """FSDP2's switch, from itself or from FSDP1's names for it (SHARD_GRAD_OP keeps units gathered until backward).

    Raises:
        ConfigError: a strategy that FSDP2 says otherwise.
    """
    said = [plugin.reshard_after_forward, plugin.sharding_strategy]
    said[0] = os.environ.get("FSDP_RESHARD_AFTER_FORWARD") if said[0] is None else said[0]
    said[1] = os.environ.get("FSDP_SHARDING_STRATEGY") if said[1] is None else said[1]
    return all(reshards(value) for value in said if value is not None and str(value) not in ("None", "none"))


def reshards(value: Any) -> bool:
    """Whether FSDP2 frees a unit after its forward pass, from its own word for it or FSDP1's.

    Raises:
        ConfigError: FSDP2 has no such strategy; the message says what to use.
    """
    word = _word(str(getattr(value, "name", value)), get_args(_Strategy))
    known = {"TRUE": True, "FULL_SHARD": True, "FALSE": False, "SHARD_GRAD_OP": False}
    if word in known:
        return known[word]
    cure = "Use true or false (FULL_SHARD, SHARD_GRAD_OP)"
    if word.startswith("HYBRID"):
        cure = "Use parallelism_config with dp_replicate_size, the number of copies, and dp_shard_size"
    elif word == "NO_SHARD":
        cure = "Use Accelerate's MULTI_GPU, which shards nothing"
    raise ConfigError(f"FSDP2 has no sharding strategy {value}. {cure}.")


def drop_fsdp1_settings(plugin: Any) -> None:
    """Unset what only FSDP1 knows, in place, with one line that names what was asked for and is not done."""
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
    if asked:
        warnings.warn(
            f"Only FSDP1 has {', '.join(asked)}. FSDP2 gathers ahead, keeps original parameters and limits memory by "
            "itself: left out.",
            stacklevel=4,
        )


def _from_variable(name: str | None) -> Any:
    text = os.environ.get(name) if name else None
    return {"true": True, "false": False, "none": None}.get(text.lower(), text.upper()) if text else None


def warn_of_idle_wrap_settings(plugin: Any) -> None:
    """One line for layer classes or a size that the chosen wrap policy does not look at."""
    wrap = getattr(getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy), "__name__", "")
    said = []
    if plugin.transformer_cls_names_to_wrap and wrap != "transformer_auto_wrap_policy":
        names = ",".join(plugin.transformer_cls_names_to_wrap)
        said.append(f"transformer_cls_names_to_wrap={names} has effect only with TRANSFORMER_BASED_WRAP")
    if plugin.min_num_params and wrap != "size_based_auto_wrap_policy":
        said.append(f"min_num_params={plugin.min_num_params} has effect only with SIZE_BASED_WRAP")
    if said:
        warnings.warn(f"{'; '.join(said)}. Set auto_wrap_policy so.", stacklevel=5)
