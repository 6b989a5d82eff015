"""Accelerate's YAML keys, and what they say in the words of FSDPConfig.

    read_accelerate_keys(mapping)  ->  keywords for FSDPConfig, and all problems: what cannot be kept is never dropped

Names of keys, and what their absence means: accelerate 1.15, `commands/launch.py` and `commands/config/config_args.py`.
"""

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["STRATEGIES", "read_accelerate_keys"]

STRATEGIES = {
    (True, False): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (False, True): "HYBRID_SHARD_ZERO2",
}
"""(reshard_after_forward, several copies) -> FSDP1's name for it. NO_SHARD, the fifth, is not sharding."""

_NUMBERED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Old files number the strategies from 1."""

_TOP_KEYS: dict[str, tuple[str, type]] = {
    "num_processes": ("num_processes", int),
    "num_machines": ("num_machines", int),
    "machine_rank": ("machine_rank", int),
    "main_process_ip": ("main_process_ip", str),
    "main_process_port": ("main_process_port", int),
    "gpu_ids": ("gpu_ids", str),
    "use_cpu": ("use_cpu", bool),
    "mixed_precision": ("mixed_precision", str),
}
_FSDP_KEYS: dict[str, tuple[str, type]] = {
    "fsdp_version": ("fsdp_version", int),
    "fsdp_offload_params": ("offload_params", bool),
    "fsdp_activation_checkpointing": ("activation_checkpointing", bool),
    "fsdp_state_dict_type": ("state_dict_type", str),
    "fsdp_cpu_ram_efficient_loading": ("cpu_ram_efficient_loading", bool),
    "fsdp_auto_wrap_policy": ("auto_wrap_policy", str),
    "fsdp_transformer_layer_cls_to_wrap": ("transformer_layer_cls_to_wrap", str),
    "fsdp_min_num_params": ("min_num_params", int),
    "fsdp_ignored_modules": ("ignored_modules", str),
    "fsdp_reshard_after_forward": ("reshard_after_forward", str),
    "fsdp_sharding_strategy": ("sharding_strategy", str),
    "fsdp_backward_prefetch": ("backward_prefetch", str),
    "fsdp_forward_prefetch": ("forward_prefetch", bool),
    "fsdp_use_orig_params": ("use_orig_params", bool),
    "fsdp_sync_module_states": ("sync_module_states", bool),
}
_PARALLELISM_KEYS: dict[str, tuple[str, type]] = {
    "parallelism_config_dp_replicate_size": ("dp_replicate_size", int),
    "parallelism_config_dp_shard_size": ("dp_shard_size", int),
}
_FSDP1_ONLY = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
_ABSENT_FSDP2 = {"cpu_ram_efficient_loading": True, "reshard_after_forward": "true"}
_ABSENT_FSDP1 = _ABSENT_FSDP2 | {
    "state_dict_type": "FULL_STATE_DICT",
    "backward_prefetch": "NO_PREFETCH",
    "sync_module_states": True,
}
"""What the launcher does when a key is absent, where that differs from FSDPConfig's default."""
_WITHOUT_FIELD: dict[str, tuple[object, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "debug": (False,),
    "distributed_type": ("FSDP",),
    "downcast_bf16": ("no", False),
    "dynamo_config": ({},),
    "enable_cpu_affinity": (False,),
    "main_training_function": ("main",),
    "rdzv_backend": ("static",),
    "same_network": (True,),
    "tpu_env": ([],),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "fsdp_activation_checkpointing_offload": (False,),
    "parallelism_config_tp_size": (1,),
    "parallelism_config_cp_size": (1,),
    "parallelism_config_sp_size": (1,),
}
"""Keys of Accelerate that no field holds, with the values that change nothing and may therefore be left out."""


def read_accelerate_keys(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keywords for FSDPConfig from the mapping of a YAML file, and every reason why they would not say the same."""
    problems: list[str] = []
    top = {key: value for key, value in data.items() if key not in ("fsdp_config", "parallelism_config")}
    if top.get("num_machines", 1) == 1:  # how machines find each other does not matter to one
        top = {key: value for key, value in top.items() if key not in ("rdzv_backend", "same_network")}
    if top.setdefault("distributed_type", None) != "FSDP":
        problems.append(f"distributed_type is {top['distributed_type']!r}, not FSDP; make a file with `hf-fsdp config`")
        del top["distributed_type"]
    if top.get("num_processes") is None:
        problems.append("num_processes is absent; say how many processes there are over all machines")
    fields = _read_section(top, _TOP_KEYS, "", problems)
    fields |= _read_section(data.get("fsdp_config") or {}, _FSDP_KEYS, "fsdp_", problems)
    fields |= _read_section(data.get("parallelism_config") or {}, _PARALLELISM_KEYS, "parallelism_config_", problems)
    absent = _ABSENT_FSDP2 if fields.setdefault("fsdp_version", 1) == 2 else _ABSENT_FSDP1
    fields = absent | fields
    _translate(fields, problems)
    _translate_strategy(fields, problems)
    return fields, problems


def _read_section(
    section: object, known: Mapping[str, tuple[str, type]], prefix: str, problems: list[str]
) -> dict[str, Any]:
    """Fields of one mapping, whose keys may lack the prefix as in Accelerate; adds what is wrong to `problems`."""
    if not isinstance(section, Mapping):
        problems.append(f"{prefix.rstrip('_')} section is {section!r}; expected `key: value` lines")
        return {}
    fields: dict[str, Any] = {}
    for short, value in section.items():
        key = str(short) if str(short).startswith(prefix) else prefix + str(short)
        if key in known:
            if value is not None:
                name, kind = known[key]
                fields[name] = _read_value(key, value, kind, problems)
        elif key in _WITHOUT_FIELD:
            if value is not None and value not in _WITHOUT_FIELD[key]:
                problems.append(
                    f"{key} is {value!r}, which no field of FSDPConfig holds; use {_WITHOUT_FIELD[key][0]!r}, or "
                    "launch with this file as it is"
                )
        else:
            near = difflib.get_close_matches(key, [*known, *(k for k in _WITHOUT_FIELD if k.startswith(prefix))], n=3)
            problems.append(f"unknown key {key}; " + (f"did you mean {' or '.join(near)}?" if near else "remove it"))
    return fields


def _read_value(key: str, value: object, kind: type, problems: list[str]) -> Any:
    """The value as `kind`. YAML reads a bare `no` as false, and the launcher takes booleans and numbers as text."""
    text = str(value).strip()
    if kind is bool and text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    if kind is int and text.lstrip("-").isdigit():
        return int(text)
    if kind is str and not isinstance(value, list | dict):
        return text
    expected = {bool: "true or false", int: "a whole number", str: "text"}[kind]
    problems.append(f"{key} is {value!r}; expected {expected}")
    return None


def _translate(fields: dict[str, Any], problems: list[str]) -> None:
    """Turn Accelerate's way of saying things into ours, in place."""
    for name in ("auto_wrap_policy", "backward_prefetch", "state_dict_type"):
        if isinstance(fields.get(name), str):
            fields[name] = fields[name].upper()
    if fields.get("mixed_precision") == "False":  # a bare `no` in YAML
        fields["mixed_precision"] = "no"
    if fields.get("gpu_ids") == "all" or (fields.get("gpu_ids") == "" and fields.get("use_cpu")):
        del fields["gpu_ids"]
    fields["main_process_port"] = fields.get("main_process_port") or None
    classes = fields.get("transformer_layer_cls_to_wrap") or ""
    fields["transformer_layer_cls_to_wrap"] = tuple(name.strip() for name in classes.split(",") if name.strip())
    if fields.get("auto_wrap_policy") != "SIZE_BASED_WRAP" and fields.get("min_num_params") == 0:
        del fields["min_num_params"]  # the launcher's own questions write 0 for "not used"
    fields["ignored_modules"] = fields.get("ignored_modules") or None
    shard = fields.pop("dp_shard_size", None)
    copies = fields.get("dp_replicate_size", 1)
    if shard is not None and fields.get("num_processes") != shard * copies:
        problems.append(
            f"dp_replicate_size {copies} times dp_shard_size {shard} is not num_processes {fields.get('num_processes')}"
            "; set dp_shard_size to num_processes / dp_replicate_size"
        )
    foreign = [name for name in _FSDP1_ONLY if name in fields]
    if fields["fsdp_version"] == 2 and foreign:
        fields.pop("sharding_strategy", None)
        problems.append(
            f"fsdp_version is 2, and only FSDP1 has {', '.join('fsdp_' + name for name in foreign)}; remove "
            f"{'them' if len(foreign) > 1 else 'it'} (fsdp_reshard_after_forward replaces the sharding strategy)"
        )


def _translate_strategy(fields: dict[str, Any], problems: list[str]) -> None:
    """FSDP2's boolean, or FSDP1's strategy under either key, becomes `reshard_after_forward` and HSDP copies."""
    said = str(fields.pop("sharding_strategy", None) or fields["reshard_after_forward"])
    if said.lower() in ("true", "false"):
        fields["reshard_after_forward"] = said.lower() == "true"
        return
    name = _NUMBERED[int(said) - 1] if said in ("1", "2", "3", "4", "5") else said.upper()
    known = {strategy: meaning for meaning, strategy in STRATEGIES.items()} if fields["fsdp_version"] == 1 else {}
    if name not in known:
        allowed = f"one of {', '.join(known)}" if known else "true or false"
        problems.append(f"the sharding is {said!r}; FSDP{fields['fsdp_version']} takes {allowed}")
        return
    fields["reshard_after_forward"], copies = known[name]
    if copies:
        fields["dp_replicate_size"] = fields.get("num_machines", 1)
