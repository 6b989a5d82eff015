"""Every FSDP setting of Accelerate's and of TrainingArguments': what is known, and what those say that FSDP2 has no use for.

`docs/settings.md` says what becomes of each. Names: accelerate 1.15 (`utils.launch`, `utils.dataclasses`), transformers 5.23
(`TrainingArguments._process_fsdp_args`).
"""

import difflib
import os
import warnings
from collections.abc import Iterable
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin, str_to_bool
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from hf_fsdp_tools.errors import ConfigError

__all__ = [
    "drop_fsdp1_settings",
    "is_set",
    "plugin_arguments",
    "reshard_after_forward",
    "warn_of_idle_wrap_settings",
    "warn_of_unknown_variables",
]

VARIABLES = (
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "FSDP_FORWARD_PREFETCH",
    "FSDP_IGNORED_MODULES",
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "FSDP_SYNC_MODULE_STATES",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_USE_ORIG_PARAMS",
    "FSDP_VERSION",
)
"""What `accelerate launch` sets for its processes, and what `torchrun` users set by hand."""

TRAINING_KEYS = {
    "activation_checkpointing": "activation_checkpointing",
    "activation_checkpointing_offload": "activation_checkpointing_offload",
    "auto_wrap_policy": "auto_wrap_policy",
    "backward_prefetch": "backward_prefetch",
    "cpu_offload": "cpu_offload",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "forward_prefetch": "forward_prefetch",
    "ignored_modules": "ignored_modules",
    "limit_all_gathers": "limit_all_gathers",
    "min_num_params": "min_num_params",
    "mixed_precision_policy": "mixed_precision_policy",
    "offload_params": "cpu_offload",
    "reshard_after_forward": "reshard_after_forward",
    "sharding_strategy": "sharding_strategy",
    "state_dict_type": "state_dict_type",
    "sync_module_states": "sync_module_states",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "use_orig_params": "use_orig_params",
    "version": "fsdp_version",
    "xla": "",
    "xla_fsdp_grad_ckpt": "",
    "xla_fsdp_settings": "",
    "xla_fsdp_v2": "",
}
"""Keys of `TrainingArguments.fsdp_config` and the plugin's argument for each: what transformers passes on, and what it drops
although Accelerate has it. XLA's have none."""

FSDP1_ONLY: dict[str, tuple[object, ...]] = {
    "backward_prefetch": (None, "BACKWARD_PRE"),
    "forward_prefetch": (None, False),
    "limit_all_gathers": (None, True),
    "optim_state_dict_config": (None,),
    "param_init_fn": (None,),
    "state_dict_config": (None,),
    "sync_module_states": (None, True),
    "use_orig_params": (None, True),
}
"""Arguments that FSDP2 has no counterpart for, with the values that it fulfils anyway."""


def is_set(variable: str) -> bool:
    """Whether a variable of Accelerate's is switched on."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def warn_of_unknown_variables() -> None:
    """One line for every FSDP_* variable that nobody reads, with the nearest names that somebody does."""
    for name in sorted(os.environ):
        if name.startswith("FSDP_") and name not in VARIABLES:
            warnings.warn(f"The variable {name} has no effect: {_nearest(name, VARIABLES)}", stacklevel=4)


def plugin_arguments(args: Any) -> dict[str, Any]:
    """Arguments for the plugin from `TrainingArguments(fsdp=True, fsdp_config=…)`; none without `fsdp`.

    More than transformers passes on: every key that Accelerate has. The state dict type is left to the plugin (sharded, or
    what the launcher says) where `fsdp_config` does not name one.

    Raises:
        ConfigError: unknown keys, with the nearest names; XLA's, which run on TPUs.
    """
    config = args.fsdp_config or {}
    if not args.fsdp:
        if config:
            warnings.warn("TrainingArguments.fsdp_config has no effect without fsdp: add fsdp=True.", stacklevel=4)
        return {}
    problems = [f"{key}: {_nearest(key, TRAINING_KEYS)}" for key in config if key not in TRAINING_KEYS]
    problems += [
        f"{key}: FSDP on TPUs is not part of this package. Remove it" for key in config if "xla" in key and config[key]
    ]
    if problems:
        raise ConfigError("TrainingArguments.fsdp_config cannot be used: " + "; ".join(problems) + ".")
    arguments = dict(args.fsdp_plugin_args or {})
    if "state_dict_type" not in config:
        arguments.pop("state_dict_type", None)
    for key, value in config.items():
        name = TRAINING_KEYS[key]
        if name and value is not None and (name not in arguments or key == "offload_params"):
            arguments[name] = str_to_bool(value, to_bool=True) if value in ("true", "false") else value
    return arguments


def reshard_after_forward(plugin: FullyShardedDataParallelPlugin) -> bool:
    """FSDP2's switch, from itself or from FSDP1's names for it (SHARD_GRAD_OP keeps units gathered until backward).

    Raises:
        ConfigError: a strategy that FSDP2 says otherwise.
    """
    said = [plugin.reshard_after_forward, plugin.sharding_strategy]
    said[0] = os.environ.get("FSDP_RESHARD_AFTER_FORWARD") if said[0] is None else said[0]
    said[1] = os.environ.get("FSDP_SHARDING_STRATEGY") if said[1] is None else said[1]
    answers = [_reshards(value) for value in said if value is not None and str(value) not in ("None", "none")]
    return all(answers)


def _reshards(value: Any) -> bool:
    text = str(getattr(value, "name", value)).upper()
    if text.isdigit() and 0 < int(text) <= len(FSDP_SHARDING_STRATEGY):
        text = FSDP_SHARDING_STRATEGY[int(text) - 1]
    known = {"TRUE": True, "FULL_SHARD": True, "FALSE": False, "SHARD_GRAD_OP": False}
    if text in known:
        return known[text]
    cure = "Use true or false (FULL_SHARD, SHARD_GRAD_OP)"
    if text.startswith("HYBRID"):
        cure = "Use parallelism_config with dp_replicate_size, the number of copies, and dp_shard_size"
    elif text == "NO_SHARD":
        cure = "Use Accelerate's MULTI_GPU, which shards nothing"
    raise ConfigError(f"FSDP2 has no sharding strategy {value}. {cure}.")


def drop_fsdp1_settings(plugin: FullyShardedDataParallelPlugin) -> None:
    """Unset what only FSDP1 has, in place, with one line that names what was asked for and is not done."""
    asked = []
    for name, fulfilled in FSDP1_ONLY.items():
        value = getattr(plugin, name)
        if value is None:
            value = _from_variable(name)
        said = getattr(value, "name", value)
        if (said.upper() if isinstance(said, str) else said) not in fulfilled:
            asked.append(f"{name}={getattr(value, 'name', value)}")
        setattr(plugin, name, True if name == "limit_all_gathers" else None)
    if asked:
        warnings.warn(
            f"Only FSDP1 has {', '.join(asked)}. FSDP2 gathers ahead, keeps original parameters and limits memory by itself: "
            "left out.",
            stacklevel=4,
        )


def warn_of_idle_wrap_settings(plugin: FullyShardedDataParallelPlugin) -> None:
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


def _from_variable(name: str) -> Any:
    text = os.environ.get("FSDP_" + name.upper())
    return {"true": True, "false": False, "none": None}.get(text.lower(), text.upper()) if text else None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."
