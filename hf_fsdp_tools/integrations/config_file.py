"""Users' own config files: check one as it is, or translate it into a config that can be used."""

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
import yaml

from hf_fsdp_tools.diagnostics.findings import Finding, by_severity
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.integrations.interpret import Translation, general_keys, interpret, is_deepspeed
from hf_fsdp_tools.integrations.settings import MixedPrecision, Setting, contradictions
from hf_fsdp_tools.modeling.pickles import load_yaml
from hf_fsdp_tools.text import listed, quoted

_MIN_NUM_PARAMS = 100_000_000
"""The launcher's value where a file has no fsdp_min_num_params; source: accelerate 1.15, commands/launch.py."""


def check_file(
    path: str | os.PathLike[str], keys: Mapping[str, Setting], defaults: Mapping[str, Any]
) -> tuple[Finding, ...]:
    """The findings of `FSDPConfig.check_file`, errors first."""
    data = _read(Path(path))
    result = interpret(data, keys, Path(path).parent)
    findings = [*result.findings, *_problems(data, result, keys, dict(defaults) | result.fields)]
    return by_severity(findings)


def translate_file(path: str | os.PathLike[str], keys: Mapping[str, Setting]) -> Translation:
    """The meaning of a file of `accelerate launch` (YAML or JSON), or of DeepSpeed's JSON, for FSDP2."""
    data = _read(Path(path))
    is_launch_file = is_deepspeed(data) or "distributed_type" in data
    if other := [] if is_launch_file else [key for key in data if key not in general_keys()]:
        raise ConfigError(
            f"{path} is a config neither of Accelerate nor of DeepSpeed, which have no {listed(other, 3)}; name the "
            "file that --config_file of `accelerate launch`, or deepspeed_config_file, names"
        )
    result = interpret(data, keys, Path(path).parent)
    wrong = (f"{key} is {value}: {end[10:]}" for key, value, end in result.rows if end.endswith(" is expected"))
    if refusal := result.refusal or next(wrong, ""):
        raise ConfigError(f"{path}: {refusal}")
    _mend(result)
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        data = load_yaml(path)  # JSON is YAML
    except (CheckpointError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error} `hf-fsdp config` makes a file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        content = "nothing" if data is None else quoted(data)
        raise ConfigError(f"{path} is no config: expected `key: value` lines, found {content}")
    return {str(key): value for key, value in data.items()}


# ---- a file as it is ----


def _problems(
    data: Mapping[str, Any], result: Translation, keys: Mapping[str, Setting], fields: dict[str, Any]
) -> Iterator[Finding]:
    """Yield the problems of the file as a whole."""
    error, warning = partial(Finding, severity="error"), partial(Finding, severity="warning")
    if (kind := data.get("distributed_type")) != "FSDP":
        cure = "Write distributed_type: FSDP, or make a file with `hf-fsdp config`."
        yield error(code="not-fsdp", fact=f"distributed_type is {kind}: no setting of FSDP is passed on.", cure=cure)
        return
    if fields["use_cpu"] and "gpu_ids" not in result.fields:
        fact = "use_cpu alone does not reach the processes that the launcher starts for FSDP: they would use GPUs."
        yield warning(code="use-cpu", fact=fact, cure='Add gpu_ids: "", which hides the GPUs.')
    if data.get("num_processes") in (None, -1):
        fact = "num_processes is absent: the launcher stops unless it is told."
        yield warning(code="num-processes", fact=fact, cure="Write num_processes, counted over all machines.")
        return
    if fields["gpu_ids"] == "all" or (fields["gpu_ids"] == "" and fields["use_cpu"]):
        fields["gpu_ids"] = None
    if fields["auto_wrap_policy"] == "SIZE_BASED_WRAP":
        fields["min_num_params"] = fields["min_num_params"] or _MIN_NUM_PARAMS
    fields["min_num_params"] = fields["min_num_params"] or None  # some files write 0 for "not used"
    if result.is_version1 and fields["state_dict_type"] == "LOCAL_STATE_DICT":
        fields["state_dict_type"] = "SHARDED_STATE_DICT"  # version 1 has both
    if "num_processes" not in result.fields:  # found above
        return
    processes, machines, shards = fields["num_processes"], fields["num_machines"], fields.get("dp_shard_size")
    copies, shared = fields["dp_replicate_size"], {name: fields[name] for name in ("cp_size", "tp_size")}
    shared = {name: size for name, size in shared.items() if size != 1}
    if shards is not None and shards * copies * math.prod(shared.values()) != processes:
        further = "".join(f" times {name} {size}" for name, size in shared.items())
        fact = f"dp_replicate_size {copies} times dp_shard_size {shards}{further} is not num_processes "
        cure = f"Set dp_shard_size to num_processes / dp_replicate_size{''.join(f' / {name}' for name in shared)}."
        yield error(code="contradiction", fact=f"{fact}{processes}.", cure=cure)
    for fact, cure in contradictions(SimpleNamespace(**fields), keys):
        yield error(code="contradiction", fact=f"{fact}.", cure=f"{cure[0].upper()}{cure[1:]}.")
    wanted, devices = processes // max(machines, 1), torch.accelerator.device_count()
    if not fields["use_cpu"] and devices < wanted:
        fact = f"{wanted} processes on each machine, and this one has {devices} device(s): every process needs its own."
        yield warning(code="few-devices", fact=fact, cure="Launch it where it belongs, or lower num_processes.")


# ---- a config that can be used ----


def _mend(result: Translation) -> None:
    """Replace fields that FSDP2 with this package does otherwise, in place."""
    fields = result.fields
    fields.pop("fsdp_version", None)
    fields.pop("dp_shard_size", None)
    if fields.get("gpu_ids") in ("all", ""):
        del fields["gpu_ids"]
    if (precision := fields.get("mixed_precision", "no")) not in get_args(MixedPrecision):
        del fields["mixed_precision"]
        result.say("mixed_precision", precision, "left out, no such precision: use no, bf16, fp16 or fp8")
    if fields.get("cpu_ram_efficient_loading"):
        fields["cpu_ram_efficient_loading"] = False
        reason = "false: each rank reads its own shards, which needs less memory and time"
        result.say("fsdp_cpu_ram_efficient_loading", True, reason)
    if fields.get("state_dict_type") == "LOCAL_STATE_DICT":
        fields["state_dict_type"] = "SHARDED_STATE_DICT"
        result.say("fsdp_state_dict_type", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT: version 1 alone has local ones")
    policy = fields.get("auto_wrap_policy", "NO_WRAP")
    needs = {"TRANSFORMER_BASED_WRAP": "transformer_layer_cls_to_wrap", "SIZE_BASED_WRAP": "min_num_params"}
    for needing, name in needs.items():
        if not fields.get(name) or policy != needing:
            if name in fields:
                result.say(f"fsdp_{name}", result.sentences[f"fsdp_{name}"][0], f"left out: {policy} ignores it")
            fields.pop(name, None)
            if policy == needing:
                del fields["auto_wrap_policy"]
                plan = "NO_WRAP: hf_fsdp_tools finds the blocks in the model's structure"
                result.say("fsdp_auto_wrap_policy", policy, plan)
