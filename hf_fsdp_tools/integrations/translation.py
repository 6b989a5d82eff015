"""Translate a file of `accelerate launch` (FSDP1, FSDP2, DDP, DeepSpeed) or DeepSpeed's JSON for FSDPConfig.

A key becomes a field, an argument of the Trainer, or is left out; each time with a sentence that says so. The keys of
DeepSpeed are in `deepspeed`.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import ClusterConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations import deepspeed
from hf_fsdp_tools.integrations.settings import HYBRID, OLD_KEYS, YAML_KEYS, read_value, reshards, strategy_of
from hf_fsdp_tools.modeling.untrusted import load_yaml
from hf_fsdp_tools.text import did_you_mean, quoted, reason_of


@dataclass(kw_only=True)
class Translation:
    """What a file means here."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of FSDPConfig."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Options of `TrainingArguments`, which have a place for what no launch file holds."""
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """Per key of the file: key, value, what became of it."""

    @property
    def words(self) -> list[str]:
        """The arguments as a command line has them."""
        return [word for name, value in self.arguments.items() for word in (f"--{name}", value)]

    def say(self, key: str, value: Any, became: str) -> None:
        """Add a row."""
        self.rows.append((key, json.dumps(value) if isinstance(value, list | dict | bool) else str(value), became))


def translate_file(path: str | os.PathLike[str]) -> Translation:
    """What a file of `accelerate launch` (YAML or JSON), or DeepSpeed's JSON, means for FSDP2 with this package."""
    data = _read(Path(path))
    made = Translation()
    if "distributed_type" not in data and deepspeed.KEYS & data.keys():
        deepspeed.translate_json(data, made)
        return made
    kind = str(data.get("distributed_type", "NO"))
    if kind not in _KINDS or data.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        what = f"distributed_type {kind}, compute_environment {data.get('compute_environment', 'LOCAL_MACHINE')}"
        raise ConfigError(f"{path}: {what} has no meaning here; known are {', '.join(_KINDS)} on LOCAL_MACHINE")
    if kind in ("NO", "MULTI_CPU"):
        made.fields["use_cpu"] = kind == "MULTI_CPU" or bool(data.get("use_cpu"))
    if kind == "NO":
        made.fields["num_processes"] = 1
    known = _known()
    for key, value in data.items():
        if key == "distributed_type":
            made.say(key, value, _KINDS[kind])
        elif key == "fsdp_config":
            _fsdp(value or {}, made, machines=data.get("num_machines"), is_used=kind == "FSDP")
        elif key == "parallelism_config":
            _parallelism(value or {}, made)
        elif key == "deepspeed_config":
            deepspeed.translate_section(value or {}, made, folder=Path(path).parent, is_used=kind == "DEEPSPEED")
        elif key in known:
            _general(key, value, made)
        else:
            made.say(key, value, f"left out, not known{did_you_mean(str(key), known)}")
    if made.fields.get("gpu_ids") in ("all", ""):
        del made.fields["gpu_ids"]
    return made


_KINDS = {
    "FSDP": "FSDP",
    "MULTI_GPU": "FSDP: weights, gradients and optimizer state are sharded instead of copied to each GPU",
    "MULTI_CPU": "FSDP on the CPU, over gloo",
    "NO": "FSDP in one process, with the same units, so that more processes need another number only",
    "DEEPSPEED": "FSDP, which shards what ZeRO-3 shards",
}
"""What becomes of each kind of run."""

_PLACES = {
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "gpu_ids": str,
    "use_cpu": bool,
}
"""Keys that FSDPConfig has under the same name, and the kinds of their values."""

_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "compute_environment": ("LOCAL_MACHINE", "kept"),
    "rdzv_backend": ("static", "static, the only one with which each machine knows its rank"),
    "same_network": (None, "kept"),
    "main_training_function": ("main", "left out: for TPUs only"),
    "debug": (False, "left out: ACCELERATE_DEBUG_MODE=true in the environment does the same"),
    "enable_cpu_affinity": (False, "left out: ACCELERATE_CPU_AFFINITY=1 in the environment does the same"),
    "dynamo_config": ({}, "left out: --torch_compile of the recipe, or make_accelerator(dynamo_backend=…)"),
    "dynamo_backend": ("NO", "left out: --torch_compile of the recipe, or make_accelerator(dynamo_backend=…)"),
    "fp8_config": ({}, "left out: training in fp8 is not part of this package"),
}
"""Keys that no field holds: their usual value, about which nothing is said, and what becomes of others."""


def _read(path: Path) -> dict[str, Any]:
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}; name the file to translate") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else quoted(data)
        raise ConfigError(f"{path} is no config: expected `key: value` lines, found {found}")
    keys = {str(key): value for key, value in data.items()}
    if not keys.keys() & {*_known(), "distributed_type", *deepspeed.KEYS}:
        some = ", ".join(list(keys)[:3])
        raise ConfigError(
            f"{path} is a config neither of Accelerate nor of DeepSpeed: they have none of its keys ({some}, …); name "
            "the file that --config_file of `accelerate launch`, or deepspeed_config_file, names"
        )
    for key in ("fsdp_config", "parallelism_config", "deepspeed_config", "zero_optimization", "optimizer"):
        if not isinstance(keys.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} is {quoted(keys[key])}; write `key: value` lines below it")
    return keys


def _known() -> list[str]:
    return [*(each.name for each in fields(ClusterConfig)), "fp16", "dynamo_backend"]


def _general(key: str, value: Any, made: Translation) -> None:
    if key in _PLACES:
        _keep(key, key, _PLACES[key], value, made)
    elif key in ("mixed_precision", "fp16"):
        word = {"False": "no", "True": "fp16" if key == "fp16" else "True", "None": "no"}.get(str(value), str(value))
        if word == "fp8":
            made.fields["mixed_precision"] = "bf16"
            made.say(key, value, "bf16: training in fp8 is not part of this package")
        elif word in ("no", "fp16", "bf16"):
            made.fields.setdefault("mixed_precision", word)
            made.say(key, value, f"mixed_precision {word}")
        else:
            made.say(key, value, "left out, no such precision: use no, bf16 or fp16")
    elif key in _ELSEWHERE:
        usual, became = _ELSEWHERE[key]
        if value not in (None, usual, "", {}):
            made.say(key, value, became)
    elif value not in (None, False, "no", {}, []):
        made.say(key, value, "left out: no part of FSDP on GPUs or CPUs")


def _keep(key: str, name: str, kind: Any, value: Any, made: Translation) -> Any:
    """Keep a value as a field; None where it is absent or of another kind."""
    if value is None or (name == "main_process_port" and value == 0):
        return None
    try:
        made.fields[name] = read_value(kind, value)
    except ValueError as expected:
        made.say(key, value, f"left out: {expected} is expected")
        return None
    made.say(key, value, "kept" if key.removeprefix("fsdp_") == name else f"{name} {made.fields[name]}")
    return made.fields[name]


def _fsdp(section: Mapping[str, Any], made: Translation, *, machines: Any, is_used: bool) -> None:
    if not is_used:
        if section:
            made.say("fsdp_config", dict(section), "left out: distributed_type is not FSDP")
        return
    values = {(f"fsdp_{key}" if not str(key).startswith("fsdp") else str(key)): each for key, each in section.items()}
    strategies = {key for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy") if key in values}
    freed = [_strategy(key, values[key], made, machines=machines) for key in sorted(strategies)]
    if freed:
        made.fields["reshard_after_forward"] = all(freed)
    for key, value in values.items():
        row = YAML_KEYS.get(OLD_KEYS.get(key, key))
        if row is None:
            made.say(key, value, f"left out, not known{did_you_mean(key, YAML_KEYS)}")
        elif key in strategies or value is None:
            continue
        elif key == "fsdp_version":
            made.say(key, value, "kept" if str(value) == "2" else "2: fully_shard; 1 is deprecated in PyTorch")
        elif 2 not in row.versions:
            same = _as(row.kind, value) == row.fsdp2
            made.say(key, value, "left out: FSDP2 always does so" if same else f"left out: FSDP2 has {row.fsdp2}")
        elif key in _CHANGED:
            _changed(key, value, made)
        elif key not in ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
            _keep(key, row.field, row.kind, value, made)
    if not values.keys() >= {"fsdp_version"}:
        made.say("fsdp_version", "absent", "2: fully_shard; the launcher would take 1")
    _wrapping(values, made)


def _strategy(key: str, value: Any, made: Translation, *, machines: Any) -> bool:
    """Whether a unit is freed after its forward pass."""
    word = strategy_of(value)
    if word not in HYBRID:
        meant = reshards(value)  # an error with its cure where FSDP2 has no such strategy
        made.say(key, value, "kept" if str(value).lower() in ("true", "false") else _freed(meant))
        return meant
    copies = int(machines or 1)
    if copies > 1:
        made.fields["dp_replicate_size"] = copies
    meant = reshards(HYBRID[word])
    made.say(key, value, f"{_freed(meant)}, in {copies} cop{'y' if copies == 1 else 'ies'}, one per machine")
    return meant


def _freed(meant: bool) -> str:
    return f"fsdp_reshard_after_forward {str(meant).lower()}"


_CHANGED = {
    "fsdp_cpu_ram_efficient_loading": (
        True,
        "cpu_ram_efficient_loading",
        False,
        "false: each rank reads its own shards, which needs less memory and time",
    ),
    "fsdp_state_dict_type": (
        "LOCAL_STATE_DICT",
        "state_dict_type",
        "SHARDED_STATE_DICT",
        "SHARDED_STATE_DICT: FSDP1 alone has local ones",
    ),
    "fsdp_activation_checkpointing_offload": (
        True,
        "",
        None,
        "left out: not part of this package; fsdp_offload_params saves more",
    ),
}
"""Keys with a value that is changed: the value, the field, its new value, and why."""


def _changed(key: str, value: Any, made: Translation) -> None:
    before, name, after, became = _CHANGED[key]
    if _as(YAML_KEYS[key].kind, value) == before:
        made.say(key, value, became)
        if name:
            made.fields[name] = after
    elif name:
        _keep(key, name, YAML_KEYS[key].kind, value, made)


def _wrapping(values: Mapping[str, Any], made: Translation) -> None:
    """Keep classes and sizes that the file names; without, the plan finds the same blocks."""
    policy = _as(YAML_KEYS["fsdp_auto_wrap_policy"].kind, values.get("fsdp_auto_wrap_policy", "NO_WRAP"))
    classes, size = values.get("fsdp_transformer_layer_cls_to_wrap"), values.get("fsdp_min_num_params")
    names = tuple(name.strip() for name in str(classes or "").split(",") if name.strip())
    plan = "NO_WRAP: hf_fsdp_tools finds the blocks in the model's structure"
    becomes = {"TRANSFORMER_BASED_WRAP": "kept" if names else plan, "SIZE_BASED_WRAP": "kept" if size else plan}
    if "fsdp_auto_wrap_policy" in values:
        became = "kept" if policy == "NO_WRAP" else becomes.get(str(policy), f"{plan}; no such policy is known")
        made.say("fsdp_auto_wrap_policy", values["fsdp_auto_wrap_policy"], became)
    if becomes.get(str(policy)) == "kept":
        made.fields["auto_wrap_policy"] = policy
    if classes is not None:
        uses = policy == "TRANSFORMER_BASED_WRAP" and bool(names)
        made.say("fsdp_transformer_layer_cls_to_wrap", classes, "kept" if uses else f"left out: {policy} ignores it")
        if uses:
            made.fields["transformer_layer_cls_to_wrap"] = names
    if size is not None and policy == "SIZE_BASED_WRAP":
        _keep("fsdp_min_num_params", "min_num_params", int, size, made)
    elif size is not None:
        made.say("fsdp_min_num_params", size, f"left out: {policy} ignores it")


def _parallelism(section: Mapping[str, Any], made: Translation) -> None:
    prefix = "parallelism_config_"
    known: Collection[str] = [f"{prefix}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    for key, value in section.items():
        if key == f"{prefix}dp_replicate_size":
            _keep(key, "dp_replicate_size", int, value, made)
        elif key == f"{prefix}dp_shard_size":
            made.say(key, value, "follows from num_processes and dp_replicate_size")
        elif key not in known and not str(key).startswith((f"{prefix}cp_", f"{prefix}sp_", f"{prefix}tp_")):
            made.say(key, value, f"left out, not known{did_you_mean(str(key), known)}")
        elif value not in (None, 1):
            made.say(key, value, "left out: this package shards and copies only")


def _as(kind: Any, value: Any) -> Any:
    try:
        return read_value(kind, value)
    except ValueError:
        return value
