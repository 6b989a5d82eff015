"""Settings of `TrainingArguments`: the plugin that they make, and those that a sharded model cannot take up."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_fsdp_tools.distributed.mesh import dims_of
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.integrations.model import LOW_PRECISION
from hf_fsdp_tools.integrations.plugin import FSDPPlugin
from hf_fsdp_tools.integrations.settings import ARGUMENTS, TRAINING_KEYS, as_setting, warn_on_node
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.planning.policy import WrapPolicy
from hf_fsdp_tools.sharding.added import plan_with_adapters
from hf_fsdp_tools.sharding.recompute import Recompute, check_checkpointing
from hf_fsdp_tools.sharding.shard import recompute_activations
from hf_fsdp_tools.sharding.sharding import Float8Policy, Sharded, Sharding, sharded_module, sharding_of
from hf_fsdp_tools.text import did_you_mean

_UNITS = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params", "ignored_modules")
"""Arguments of the plugin that decide together what becomes a unit."""

_DETECTED = (WrapPolicy(), None)
"""What they say where they leave the units to the model's structure: nothing that could differ."""


def plugin_arguments(args: Any) -> dict[str, Any]:
    """Arguments for the plugin from `TrainingArguments(fsdp=True, fsdp_config=…)`; none without `fsdp`.

    Passes every key on that Accelerate has; transformers drops some. Without a state dict type in `fsdp_config`, the
    plugin decides (sharded, or the launcher's setting).
    """
    config: Mapping[str, Any] = args.fsdp_config or {}
    if not args.fsdp:
        if config:
            warn_on_node("TrainingArguments.fsdp_config has no effect without fsdp: add fsdp=True.")
        return {}
    problems = [f"{key}{did_you_mean(key, TRAINING_KEYS)}" for key in config if key not in TRAINING_KEYS]
    problems += [f"{key}: FSDP on TPUs is not part of this package." for key in config if "xla" in key and config[key]]
    if problems:
        raise ConfigError(f"TrainingArguments.fsdp_config cannot be used: {' '.join(problems)} Remove or mend them.")
    arguments = dict(args.fsdp_plugin_args or {})
    if "state_dict_type" not in config:
        arguments.pop("state_dict_type", None)
    for key, value in config.items():
        row = TRAINING_KEYS[key]
        if row.argument and value is not None and (row.argument not in arguments or key == "offload_params"):
            arguments[row.argument] = as_setting(row, value) if row.kind is bool else value
    return arguments


def _named_keys(args: Any) -> list[str]:
    """The keys of `TrainingArguments.fsdp_config` that the user set; transformers adds some that ask for nothing."""
    config = args.fsdp_config if args.fsdp else {}
    added = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    return [key for key, value in config.items() if value is not None and value != added.get(key)]


def use_one_device(args: Any) -> None:
    """Let a Trainer with these arguments use the one device of Accelerate's state, where `TrainingArguments` alone
    count all GPUs of the machine (for `DataParallel`), take MPS on a Mac, and device 0 where LOCAL_RANK is not set."""
    state = PartialState()
    if args.n_gpu > 1:
        if state.num_processes == 1:
            warn(
                f"1 of {args.n_gpu} devices is used ({state.device}): this process was started alone. To use all: "
                f"torchrun --nproc-per-node={args.n_gpu} script.py, or accelerate launch."
            )
        args._n_gpu = 1
    args._setup_devices = state.device


def group_options(args: Any) -> dict[str, Any]:
    """What `TrainingArguments` ask of the process group: `ddp_timeout`, where it is not left at its default."""
    default = next(field.default for field in fields(args) if field.name == "ddp_timeout")
    return {} if args.ddp_timeout == default else {"timeout": args.ddp_timeout_delta}


def plugin_of(args: Any) -> FSDPPlugin:
    """The plugin that variables and `TrainingArguments(fsdp=True, fsdp_config=…)` make, the second over the first."""
    plugin = FSDPPlugin(**({} if args is None else plugin_arguments(args)))
    plugin.is_explicit = False
    return plugin


def agree_with_arguments(
    plugin: FSDPPlugin, args: Any, model: nn.Module | None, explicit: FSDPPlugin | None = None
) -> None:
    """Apply what `TrainingArguments` name to a model that is sharded already, or refuse what comes too late for it.

    Activation checkpointing can still be turned on. A plugin that was given must say the same. Keys that
    `fsdp_config` does not name are not looked at. Nothing is communicated.
    """
    sharding = None if model is None else sharding_of(model)
    if explicit is None and AcceleratorState._shared_state:
        explicit = AcceleratorState().fsdp_plugin
    late = []
    if isinstance(explicit, FSDPPlugin) and explicit.is_explicit:
        late = _differences(args, _values(plugin), _values(explicit), "FSDPPlugin")
    if model is not None and sharding is not None:
        if not late and "activation_checkpointing" in _named_keys(args) and plugin.activation_checkpointing:
            sharding = _checkpoint_late(model, sharding, plugin.recompute)
        late += _differences(args, *_values_of_model(plugin, model, sharding), "the model")
        made, wanted = replace(sharding.axes.dims, ep_size=1), args.parallelism_config
        if wanted is not None and (asked := dims_of(wanted)) != made:
            late.append(f"parallelism_config of {asked} (the model: {made})")
    if late:
        raise ConfigError(
            f"TrainingArguments ask for what is settled otherwise already: {'; '.join(dict.fromkeys(late))}. Make the "
            "Accelerator of the arguments, make_accelerator(arguments), before the model is loaded; or leave out what "
            "differs."
        )


def precision_of(args: Any, model: nn.Module | None) -> str:
    """The mixed precision of a Trainer: that of its arguments, or, where they name none, what is in force already.

    `TrainingArguments` have no fp8: bf16 in them means fp8 where the launcher says so, as it is what else is bf16.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched == "fp8" and args.mixed_precision == "fp16":
        raise ConfigError(
            "The launcher says mixed_precision fp8, and TrainingArguments fp16=True. Leave out fp16: next to FP8, "
            "all else is computed in bf16."
        )
    if args.mixed_precision != "no":
        return launched if launched == "fp8" else str(args.mixed_precision)
    if AcceleratorState._shared_state:
        return str(AcceleratorState().mixed_precision)
    policy = getattr(None if model is None else sharding_of(model), "mp_policy", None)
    names = {None: "no"} | {dtype: name for name, dtype in LOW_PRECISION.items()}
    return "fp8" if isinstance(policy, Float8Policy) else names.get(getattr(policy, "param_dtype", None), "no")


def _differences(args: Any, wanted: dict[str, Any], present: dict[str, Any], whose: str) -> list[str]:
    keys = [(key, TRAINING_KEYS[key].argument) for key in _named_keys(args)]
    return [
        f"fsdp_config {key}={args.fsdp_config[key]!r} ({whose}: {'other units' if name in _UNITS else present[name]})"
        for key, name in keys
        if name in present and wanted[name] not in (present[name], _DETECTED)
    ]


def _values(plugin: FSDPPlugin) -> dict[str, Any]:
    """What a plugin says, by the names of its arguments."""
    assert plugin.policy is not None
    values = {name: getattr(plugin, name) for name in ARGUMENTS}
    values["sharding_strategy"] = values["reshard_after_forward"]
    if plugin.fsdp_version == 2:
        values["cpu_offload"] = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    units = (replace(plugin.policy, reshard_after_forward={}), plugin.ignored_modules)
    return values | dict.fromkeys(_UNITS, units)


def _values_of_model(plugin: FSDPPlugin, model: nn.Module, sharding: Sharding) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a plugin says, and what a sharded model has, by the names of the plugin's arguments."""
    wanted_values, root, recompute = _values(plugin), sharded_module(model), sharding.activation_checkpointing
    assert root is not None
    reshards = any(unit.reshard_after_forward is not False for unit in sharding.plan.units)
    present = {
        "fsdp_version": 2,
        "reshard_after_forward": reshards,
        "sharding_strategy": reshards,
        "cpu_offload": isinstance(sharding.offload_policy, CPUOffloadPolicy),
        "activation_checkpointing": recompute is not None,
        **{f"activation_checkpointing_{name}": value for name, value in vars(recompute or Recompute()).items()},
        "mixed_precision_policy": sharding.mp_policy,
        "ep_size": sharding.axes.dims.ep_size,
        "sequence_parallel": "sequence_parallel" in Chosen.of(root).features,
    }
    if plugin.fsdp_version == 2 and wanted_values[_UNITS[0]] != _DETECTED:
        plan_of_arguments = plan_with_adapters(root, plugin.policy_for(root))
        plans = [
            ({unit.modules for unit in plan.units}, plan.replicated) for plan in (plan_of_arguments, sharding.plan)
        ]
        wanted_values |= dict.fromkeys(_UNITS, plans[0])
        present |= dict.fromkeys(_UNITS, plans[1])
    return wanted_values, present


def _checkpoint_late(model: nn.Module, sharding: Sharding, recompute: Recompute | None) -> Sharding:
    """Turn activation checkpointing on in a sharded model, if it is off; compiled blocks stay as they are."""
    root = sharded_module(model)
    if root is None or sharding.activation_checkpointing or sharding.compile is not None:
        return sharding
    check_checkpointing(root, recompute)
    sharding = replace(sharding, activation_checkpointing=recompute)
    recompute_activations(root, sharding)
    Sharded.put(root, sharding=sharding)
    return sharding
