"""What `TrainingArguments` ask for where settings are settled already, by a given plugin or by a sharded model."""

from dataclasses import replace
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.model import LOW_PRECISION
from hf_fsdp_tools.integrations.plugin import HybridFSDPPlugin
from hf_fsdp_tools.integrations.settings import SETTINGS, TRAINING_KEYS, named_keys, plugin_arguments
from hf_fsdp_tools.modeling.notes import add_to_note
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.sharding.added import plan_with_adapters
from hf_fsdp_tools.sharding.shard import (
    Sharding,
    check_checkpointing,
    checkpoint_activations,
    sharded_module,
    sharding_of,
)

_UNITS = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params", "ignored_modules")
"""Arguments of the plugin that decide together what becomes a unit."""

_DETECTED = (HybridPolicy(), None)
"""What they say where they leave the units to the model's structure: nothing that could differ."""


def plugin_of(args: Any) -> HybridFSDPPlugin:
    """The plugin that variables and `TrainingArguments(fsdp=True, fsdp_config=…)` make, the second over the first."""
    plugin = HybridFSDPPlugin(**({} if args is None else plugin_arguments(args)))
    plugin.is_given = False
    return plugin


def agree_with_arguments(
    asked: HybridFSDPPlugin, args: Any, model: nn.Module | None, given: HybridFSDPPlugin | None = None
) -> None:
    """Apply what `TrainingArguments` name to a model that is sharded already, or refuse what comes too late for it.

    Activation checkpointing can still be turned on. A plugin that was given must say the same. Keys that
    `fsdp_config` does not name are not looked at. Nothing is communicated.
    """
    sharding = None if model is None else sharding_of(model)
    if given is None and AcceleratorState._shared_state:
        given = AcceleratorState().fsdp_plugin
    late = []
    if isinstance(given, HybridFSDPPlugin) and given.is_given:
        late = _differences(args, _values(asked), _values(given), "HybridFSDPPlugin")
    if model is not None and sharding is not None:
        if not late and "activation_checkpointing" in named_keys(args) and asked.activation_checkpointing:
            sharding = _checkpoint_late(model, sharding)
        late += _differences(args, *_values_of_model(asked, model, sharding), "the model")
        shape, wanted = tuple(sharding.mesh.shape), args.parallelism_config
        sizes = wanted and (wanted.dp_replicate_size, wanted.dp_shard_size)
        if wanted is not None and sizes != (shape if len(shape) > 1 else (1, *shape)):
            late.append(f"parallelism_config of {sizes[0]} x {sizes[1]} ranks (the model: {shape})")
    if late:
        raise ConfigError(
            f"TrainingArguments ask for what is settled otherwise already: {'; '.join(dict.fromkeys(late))}. Make the "
            "Accelerator of the arguments, make_accelerator(arguments), before the model is loaded; or leave out what "
            "differs."
        )


def precision_of(args: Any, model: nn.Module | None) -> str:
    """The mixed precision of a Trainer: that of its arguments, or, where they name none, what is in force already."""
    if args.mixed_precision != "no":
        return str(args.mixed_precision)
    if AcceleratorState._shared_state:
        return str(AcceleratorState().mixed_precision)
    sharding = None if model is None else sharding_of(model)
    names = {dtype: name for name, dtype in LOW_PRECISION.items()}
    return names.get(sharding.mp_policy.param_dtype, "no") if sharding is not None else "no"  # type: ignore[arg-type]


def _differences(args: Any, asked: dict[str, Any], there: dict[str, Any], whose: str) -> list[str]:
    keys = [(key, TRAINING_KEYS[key].argument) for key in named_keys(args)]
    return [
        f"fsdp_config {key}={args.fsdp_config[key]!r} ({whose}: {_shown(there[name])})"
        for key, name in keys
        if name in there and asked[name] not in (there[name], _DETECTED)
    ]


def _shown(value: Any) -> str:
    return "other units" if isinstance(value, tuple) else str(getattr(value, "name", value))


def _values(plugin: HybridFSDPPlugin) -> dict[str, Any]:
    """What a plugin says, by the names of its arguments."""
    assert plugin.policy is not None
    values = {row.argument: getattr(plugin, row.argument) for row in SETTINGS if row.argument}
    values["sharding_strategy"] = values["reshard_after_forward"]
    if plugin.fsdp_version == 2:
        values["cpu_offload"] = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    units = (replace(plugin.policy, reshard_after_forward={}), plugin.ignored_modules)
    return values | dict.fromkeys(_UNITS, units)


def _values_of_model(
    asked: HybridFSDPPlugin, model: nn.Module, sharding: Sharding
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a plugin says, and what a sharded model has, by the names of the plugin's arguments."""
    mine, root = _values(asked), sharded_module(model)
    assert root is not None
    reshards = any(unit.reshard_after_forward is not False for unit in sharding.plan.units)
    there = {
        "fsdp_version": 2,
        "reshard_after_forward": reshards,
        "sharding_strategy": reshards,
        "cpu_offload": isinstance(sharding.offload_policy, CPUOffloadPolicy),
        "activation_checkpointing": sharding.activation_checkpointing,
        "mixed_precision_policy": sharding.mp_policy,
    }
    if asked.fsdp_version == 2 and mine[_UNITS[0]] != _DETECTED:
        wanted = plan_with_adapters(root, asked.policy_for(root))
        plans = [({unit.modules for unit in plan.units}, plan.replicated) for plan in (wanted, sharding.plan)]
        mine |= dict.fromkeys(_UNITS, plans[0])
        there |= dict.fromkeys(_UNITS, plans[1])
    return mine, there


def _checkpoint_late(model: nn.Module, sharding: Sharding) -> Sharding:
    """Turn activation checkpointing on in a sharded model, if it is off; compiled blocks stay as they are."""
    root = sharded_module(model)
    if root is None or sharding.activation_checkpointing or sharding.compile is not None:
        return sharding
    check_checkpointing(root)
    checkpoint_activations(root)
    sharding = replace(sharding, activation_checkpointing=True)
    add_to_note(root, sharding=sharding)
    return sharding
