"""The meaning of a file of `accelerate launch` (FSDP1, FSDP2, DDP, DeepSpeed), or of DeepSpeed's JSON, under FSDP2.

A mapping gives fields of LaunchConfig, arguments of the Trainer, a sentence for each key, and findings.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from hf_fsdp_tools.axes import size_names
from hf_fsdp_tools.diagnostics.findings import Finding, by_severity
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.integrations.settings import (
    DEFAULTS,
    DEGREES,
    GENERAL,
    KINDS,
    NEEDED_POLICY,
    YAML_KEYS,
    as_setting,
    contradictions,
    read_strategies,
    read_value,
)
from hf_fsdp_tools.modeling.pickles import load_yaml, read_json_object
from hf_fsdp_tools.text import did_you_mean, first_line, kind_of_file, listed, quoted


@dataclass(kw_only=True)
class Translation:
    """The meaning of a file here."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of LaunchConfig."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Options of `TrainingArguments`, which have a place for what no launch file holds."""
    sentences: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Value and meaning of each key of the file."""
    findings: list[Finding] = field(default_factory=list)
    """Problems of the file."""
    refusal: str = ""
    """The reason for which the file has no meaning here; "" where it has one."""
    is_version1: bool = False
    """Whether the file asks for FSDP1 in the words of files that know of versions; others are read as FSDP2."""

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Key, value and meaning of each key."""
        return [(key, *pair) for key, pair in self.sentences.items()]

    @property
    def words(self) -> list[str]:
        """The arguments as a command line has them."""
        return [word for name, value in self.arguments.items() for word in (f"--{name}", value)]

    def say(self, key: str, value: Any, meaning: str) -> None:
        """Note the meaning of a key."""
        shown = quoted(value) if isinstance(value, list | dict) else value
        self.sentences[key] = (json.dumps(value) if isinstance(value, bool) else str(shown), meaning)

    def find(self, severity: Literal["error", "warning", "info"], code: str, fact: str, cure: str) -> None:
        """Note a problem."""
        self.findings.append(Finding(code=code, severity=severity, problem=fact, fix=cure))

    def keep(self, key: str, value: Any, name: str) -> None:
        """Keep a value as a field, if it is there and of the field's kind."""
        if value is None or (name == "main_process_port" and value == 0):
            return
        try:
            self.fields[name] = read_value(KINDS.get(name, int), value)
            self.say(key, value, "kept" if key.removeprefix("fsdp_") == name else f"{name} {self.fields[name]}")
        except ValueError as expected:
            self.say(key, value, f"left out: {expected} is expected")
            self.find("error", "wrong-value", f"{key} is {quoted(value)}.", f"Use {expected}.")

    def unknown(self, key: str, value: Any, known: Any, *, stops: bool = False) -> None:
        """Note a key that nobody knows."""
        degree = key.removeprefix("fsdp_")
        nearest = f": did you mean parallelism_config: {{parallelism_config_{degree}: {value}}}?"
        nearest = nearest if degree in DEGREES else did_you_mean(key, known)
        self.say(key, value, f"left out, not known{nearest}")
        fact = f"{key}: the launcher {'stops at it' if stops else 'drops it without a word'}."
        self.find("error", "unknown-key", fact, f"This is no key{nearest}")


# ---- files of `accelerate launch` ----

_KINDS = {
    "FSDP": "FSDP",
    "MULTI_GPU": "FSDP: weights, gradients and optimizer state are sharded instead of copied to each GPU",
    "MULTI_CPU": "FSDP on the CPU, over gloo",
    "NO": "FSDP in one process, with the same units, so that more processes need another number only",
    "DEEPSPEED": "FSDP, which shards what ZeRO-3 shards",
}
"""The meaning of each kind of run."""

_COMPILE = "left out: --torch_compile of the recipe, or make_accelerator(dynamo_backend=…)"
_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "compute_environment": (("LOCAL_MACHINE",), "kept"),
    "rdzv_backend": (("static", ""), "static, the only one with which each machine knows its rank"),
    "same_network": (("", {}), "kept"),
    "main_training_function": (("main", ""), "left out: for TPUs only"),
    "dynamo_config": (({}, ""), _COMPILE),
    "dynamo_backend": (("NO", ""), _COMPILE),
}
_NOT_OURS: tuple[tuple[Any, ...], str] = ((False, "no", {}, []), "left out: not part of this package's files")
"""Keys that no field holds: values about which nothing is said, and the meaning of others."""


def interpret(data: Mapping[str, Any], folder: Path) -> Translation:
    """The meaning of a file's content; in `folder` lies the JSON that a DeepSpeed section points to."""
    result, kind = Translation(), str(data.get("distributed_type", "NO"))
    if is_deepspeed(data):
        _deepspeed(data, result, folder)
        return result
    place = data.get("compute_environment", "LOCAL_MACHINE")
    if kind not in _KINDS or place != "LOCAL_MACHINE":
        result.refusal = f"distributed_type {kind}, compute_environment {place} has no meaning here; known are "
        result.refusal += f"{', '.join(_KINDS)} on LOCAL_MACHINE"
        return result
    if kind in ("NO", "MULTI_CPU"):
        result.fields["use_cpu"] = kind == "MULTI_CPU" or bool(data.get("use_cpu"))
    result.fields |= {"num_processes": 1} if kind == "NO" else {}
    sections: dict[str, tuple[str, Callable[..., None]]] = {
        "fsdp_config": ("FSDP", partial(_fsdp, machines=data.get("num_machines"))),
        "parallelism_config": (kind, _parallelism),
        "deepspeed_config": ("DEEPSPEED", partial(_deepspeed, folder=folder)),
    }
    known = general_keys()
    if kind == "FSDP" and "fsdp_config" not in data:
        data = {"fsdp_config": {}, **data}
    for key, value in data.items():
        if key == "distributed_type":
            result.say(key, kind, _KINDS[kind])
        elif key not in sections:
            _general(key, value, result) if key in known else result.unknown(key, value, known, stops=True)
        elif not isinstance(value or {}, Mapping):
            result.refusal = f"{key} is {quoted(value)}; write `key: value` lines below it"
            result.find("error", "wrong-value", f"{key} is {quoted(value)}.", "Write `key: value` lines below it.")
        elif kind == (user := sections[key][0]):
            sections[key][1](value or {}, result)
        else:
            result.say(key, value, f"left out: distributed_type is not {user}")
    return result


def general_keys() -> list[str]:
    """The keys of a file that stand in no section."""
    # Accelerate still reads the first two, which are old names.
    return ["fp16", "dynamo_backend", *(each.name for each in fields_of(ClusterConfig))]


def _general(key: str, value: Any, result: Translation) -> None:
    silent, meaning = _ELSEWHERE.get(key, _NOT_OURS)
    if key == "mixed_precision" and value is not None:
        result.fields[key] = word = "no" if value is False else str(value).lower()
        result.say(key, value, f"mixed_precision {word}")
        if value is False:
            fact = "mixed_precision is no, which YAML reads as false: the launcher stops at it."
            result.find("error", "wrong-value", fact, "Write 'no', in quotes.")
    elif key in GENERAL:
        result.keep(key, value, key)
    elif key == "fp8_config" and value:
        backend = str(value.get("backend", "AO") if isinstance(value, Mapping) else value)
        if backend.upper() == "AO":
            result.say(key, value, "torchao's; other values than its defaults are options of the launcher (--fp8_…)")
        else:
            result.say(key, value, f"left out: FP8 is torchao's here, and not {backend}'s")
            result.find("error", "refused", f"The FP8 backend is {backend}.", "Write backend: AO (torchao).")
    elif value is not None and value not in silent:
        result.say(key, value, meaning)


def _fsdp(section: Mapping[str, Any], result: Translation, *, machines: Any) -> None:
    values = {(f"fsdp_{key}" if not str(key).startswith("fsdp") else str(key)): each for key, each in section.items()}
    version, word = str(values.get("fsdp_version")), str(values.get("fsdp_reshard_after_forward", True)).lower()
    result.is_version1, before = version == "1" and word not in ("true", "false"), len(result.findings)
    shown, is_old = "absent" if version == "None" else version, version in ("1", "None")
    meaning = "the launcher would take 1, deprecated in PyTorch" if is_old else "no such version is known"
    result.say("fsdp_version", shown, "kept" if version == "2" else f"2: fully_shard; {meaning}")
    if is_old:
        fact = (
            "1: deprecated in PyTorch"
            if result.is_version1
            else f"{shown} and the keys are of old files: read as FSDP2"
        )
        result.find("warning", "fsdp1", f"fsdp_version is {fact}.", "Write fsdp_version: 2.")
    elif version != "2":
        result.fields["fsdp_version"] = values["fsdp_version"]
    _strategies(values, result, machines=machines, may_copy=version != "2")
    for key, value in values.items():
        # `accelerate config` wrote the first until 2023, and the launcher drops it now (accelerate#2288)
        row = YAML_KEYS.get("fsdp_backward_prefetch" if key == "fsdp_backward_prefetch_policy" else key)
        if row is None:
            result.unknown(key, value, YAML_KEYS)
        elif row.is_old and value is not None:
            is_same = as_setting(row, value) == row.fsdp2
            result.say(key, value, "left out: FSDP2 always does so" if is_same else f"left out: FSDP2 has {row.fsdp2}")
            fact = f"Only FSDP1 has {key}: {'FSDP2 does so anyway' if is_same else 'left out'}."
            result.find("info" if is_same else "warning", "only-fsdp1", fact, "Remove the line.")
        elif row.field not in ("", "fsdp_version", "reshard_after_forward"):
            result.keep(key, value, row.field)
    if result.is_version1:  # which has what FSDP2 has not
        others = ("refused", "translated", "only-fsdp1")
        result.findings[before:] = [each for each in result.findings[before:] if each.code not in others]


def _strategies(values: Mapping[str, Any], result: Translation, *, machines: Any, may_copy: bool) -> None:
    keys = ("fsdp_reshard_after_forward", "fsdp_sharding_strategy")
    strategies = {key: values[key] for key in keys if values.get(key) is not None}
    try:
        freed, has_copies = read_strategies(strategies.values(), may_copy=may_copy)
    except ConfigError as error:
        result.refusal = str(error)
        fact, _, cure = result.refusal.partition(". ")
        result.find("error", "refused", f"{fact}.", cure)
        return
    copies = int(machines or 1) if has_copies else 1
    result.fields |= {"dp_replicate_size": copies} if copies > 1 else {}
    for key, value in strategies.items():
        result.fields["reshard_after_forward"] = freed
        is_word = str(value).lower() not in ("true", "false")
        meaning = f"fsdp_reshard_after_forward {str(freed).lower()}" if is_word else "kept"
        result.say(key, value, f"{meaning}, in {copies} copies, one per machine" if copies > 1 else meaning)
        if is_word:
            cure = f"Write fsdp_reshard_after_forward: {str(freed).lower()}."
            result.find("info", "translated", f"{key} is {value}, a word of FSDP1's for {freed}.", cure)


def _parallelism(section: Mapping[str, Any], result: Translation) -> None:
    known = [name for name in vars(launch_command_parser().parse_args(["_"])) if name.startswith("parallelism_config_")]
    for key, value in section.items():
        name = str(key).removeprefix("parallelism_config_")
        if key not in known:
            result.unknown(str(key), value, known)
        elif name in DEGREES:
            result.keep(key, value, name)
            if name == "dp_shard_size":
                result.say(key, value, "follows from num_processes and the other sizes")
        elif value not in (None, 1):
            result.say(key, value, "left out: not part of this package")
            if name.endswith("_size"):
                result.find("error", "refused", f"{key} is {value}: not part of this package.", "Leave it out.")


# ---- DeepSpeed ----

_ARGUMENTS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "optimizer.type": "optim",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
}
"""Arguments of TrainingArguments by DeepSpeed's key."""

_Meaning = tuple[str, Any, str]
_SHARDED = "weights are sharded, "
_GATHERED: _Meaning = ("reshard_after_forward", False, f"false: {_SHARDED}and gathered from forward to backward")
_FREED: _Meaning = ("reshard_after_forward", True, f"true: {_SHARDED}units are freed after their forward")
_ON_HOST: _Meaning = ("offload_params", True, "true: shards, gradients and optimizer state, to host memory")
_DEVICES = ("offload_optimizer.device", "offload_param.device", "offload_optimizer_device", "offload_param_device")
_MEANINGS: dict[tuple[str, ...], dict[str, _Meaning]] = {
    ("zero_optimization.stage", "zero_stage"): {**dict.fromkeys("012", _GATHERED), "": _FREED},
    _DEVICES: {"cpu": _ON_HOST, "nvme": _ON_HOST},
    ("bf16.enabled",): {"True": ("mixed_precision", "bf16", "bf16")},
    ("fp16.enabled",): {"True": ("mixed_precision", "fp16", "fp16")},
}
"""A field, its value and a sentence, by ends of keys of DeepSpeed and of Accelerate, and the value; "" is any other."""


def is_deepspeed(data: Mapping[str, Any]) -> bool:
    """Whether this is DeepSpeed's JSON: other trainers have keys of the same names, and no sections below them."""
    is_section = any(isinstance(data.get(key), Mapping) for key in ("zero_optimization", "bf16", "fp16"))
    return "distributed_type" not in data and (is_section or "train_micro_batch_size_per_gpu" in data)


def _deepspeed(section: Mapping[str, Any], result: Translation, folder: Path) -> None:
    """Interpret DeepSpeed's JSON, or Accelerate's section, which may point to one."""
    for key, value in _flat(section):
        meanings = next((meanings for end, meanings in _MEANINGS.items() if key.endswith(end)), None)
        if key == "deepspeed_config_file":
            result.say(key, value, "read, see below")
            _deepspeed(_read_json(folder, str(value)), result, folder)
        elif meanings is not None and (meaning := meanings.get(str(value), meanings.get(""))):
            field, result.fields[meaning[0]], sentence = meaning
            result.say(key, value, f"{'' if field == 'mixed_precision' else 'fsdp_'}{field} {sentence}")
        elif meanings is not None:
            result.say(key, value, "so without it too")
        elif key in _ARGUMENTS:
            result.say(key, value, f"--{_ARGUMENTS[key]} of the script: no launch file holds it")
            if value != "auto" and key != "optimizer.type":
                result.arguments[_ARGUMENTS[key]] = str(value)
        else:
            names = ("zero_optimization", "bf16", "fp16", "optimizer", *chain(*_MEANINGS), *_ARGUMENTS)
            known = {name.rpartition(".")[2] for name in names}
            nearest = did_you_mean(key.rpartition(".")[2], known, otherwise="")
            result.say(key, value, f"left out: means nothing here{nearest}")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """DeepSpeed's JSON, which names no further file."""
    path = folder / name if (folder / name).is_file() else Path(name)
    try:
        return {key: value for key, value in read_json_object(path).items() if key != "deepspeed_config_file"}
    except CheckpointError as error:
        raise ConfigError(
            f"deepspeed_config_file {name} cannot be read: {error} Put DeepSpeed's own JSON next to the file."
        ) from None


# ---- users' own files: checked as they are, or made a config that can be used ----

_MIN_NUM_PARAMS = 100_000_000
"""The launcher's value where a file has no fsdp_min_num_params; source: accelerate 1.15, commands/launch.py."""


def check_file(path: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """The findings of `LaunchConfig.check_file`, errors first."""
    data = _read(Path(path))
    result = interpret(data, Path(path).parent)
    _find_problems(data, result)
    return by_severity(result.findings)


def translate_file(path: str | os.PathLike[str]) -> Translation:
    """The meaning of a file of `accelerate launch` (YAML or JSON), or of DeepSpeed's JSON, for FSDP2."""
    data = _read(Path(path))
    is_launch_file = is_deepspeed(data) or "distributed_type" in data
    if other := [] if is_launch_file else [key for key in data if key not in general_keys()]:
        raise ConfigError(
            f"{path} is a config neither of Accelerate nor of DeepSpeed, which have no {listed(other, 3)}; name the "
            "file that --config_file of `accelerate launch`, or deepspeed_config_file, names"
        )
    result = interpret(data, Path(path).parent)
    wrong = (f"{key} is {value}: {end[10:]}" for key, value, end in result.rows if end.endswith(" is expected"))
    if refusal := result.refusal or next(wrong, ""):
        raise ConfigError(f"{path}: {refusal}")
    _mend(result)
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        kind = kind_of_file(path) if path.is_file() else None
        data = None if kind else load_yaml(path)  # JSON is YAML
    except CheckpointError as error:
        raise ConfigError(f"{path} cannot be read: {error} `hf-fsdp init` makes a file.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path} is neither YAML nor JSON{where}: {problem}") from None
    if kind is not None:
        raise ConfigError(f"{path} is {kind}, and no config of a launch. `hf-fsdp init` makes one")
    if not isinstance(data, dict):
        content = "nothing" if data is None else quoted(data)
        raise ConfigError(f"{path} is no config: expected `key: value` lines, found {content}")
    return {str(key): value for key, value in data.items()}


def _find_problems(data: Mapping[str, Any], result: Translation) -> None:
    """Note the problems of the file as a whole."""
    fields = DEFAULTS | dict.fromkeys(size_names(), 1) | result.fields
    if (kind := data.get("distributed_type")) != "FSDP":
        cure = "Write distributed_type: FSDP, or make a file with `hf-fsdp init`."
        result.find("error", "not-fsdp", f"distributed_type is {kind}: no setting of FSDP is passed on.", cure)
        return
    if fields["use_cpu"] and "gpu_ids" not in result.fields:
        fact = "use_cpu alone does not reach the processes that the launcher starts for FSDP: they would use GPUs."
        result.find("warning", "use-cpu", fact, 'Add gpu_ids: "", which hides the GPUs.')
    if data.get("num_processes") in (None, -1):
        fact = "num_processes is absent: the launcher stops unless it is given."
        result.find("warning", "num-processes", fact, "Write num_processes, counted over all machines.")
    if "num_processes" not in result.fields or data["num_processes"] == -1:  # found above, or of a wrong kind
        return
    if fields["gpu_ids"] == "all" or (fields["gpu_ids"] == "" and fields["use_cpu"]):
        fields["gpu_ids"] = None
    usual = _MIN_NUM_PARAMS if fields["auto_wrap_policy"] == "SIZE_BASED_WRAP" else None
    fields["min_num_params"] = fields["min_num_params"] or usual  # some files write 0 for "not used"
    if result.is_version1 and fields["state_dict_type"] == "LOCAL_STATE_DICT":
        fields["state_dict_type"] = "SHARDED_STATE_DICT"  # version 1 has both
    processes, machines = fields["num_processes"], fields["num_machines"]
    names = ["dp_replicate_size", *(name for name in size_names(of_rows=True) if fields[name] != 1)]
    if (shards := fields.get("dp_shard_size")) and shards * math.prod(fields[name] for name in names) != processes:
        product = " times ".join(f"{name} {fields[name]}" for name in (names[0], "dp_shard_size", *names[1:]))
        cure = f"Set dp_shard_size to {' / '.join(('num_processes', *names))}."
        result.find("error", "contradiction", f"{product} is not num_processes {processes}.", cure)
    for fact, cure in contradictions(SimpleNamespace(**fields)):
        result.find("error", "contradiction", f"{fact}.", f"{cure[0].upper()}{cure[1:]}.")
    wanted, devices = processes // max(machines, 1), torch.accelerator.device_count()
    if not fields["use_cpu"] and devices < wanted:
        fact = f"{wanted} processes on each machine, and this one has {devices} device(s): every process needs its own."
        result.find("warning", "few-devices", fact, "Launch it where it belongs, or lower num_processes.")


def _mend(result: Translation) -> None:
    """Replace fields that FSDP2 with this package does otherwise, in place."""
    fields = result.fields
    for name in ("fsdp_version", "dp_shard_size"):
        fields.pop(name, None)
    if fields.get("gpu_ids") in ("all", ""):
        del fields["gpu_ids"]
    if (precision := fields.get("mixed_precision", "no")) not in KINDS["mixed_precision"]:
        del fields["mixed_precision"]
        result.say("mixed_precision", precision, "left out, no such precision: use no, bf16, fp16 or fp8")
    if fields.pop("cpu_ram_efficient_loading", False):
        meaning = "false: each rank reads its own shards, which needs less memory and time"
        result.say("fsdp_cpu_ram_efficient_loading", True, meaning)
    if fields.get("state_dict_type") == "LOCAL_STATE_DICT":
        fields["state_dict_type"] = "SHARDED_STATE_DICT"
        result.say("fsdp_state_dict_type", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT: version 1 alone has local ones")
    policy = fields.get("auto_wrap_policy", "NO_WRAP")
    for name, needing in NEEDED_POLICY.items():
        if policy == needing and not fields.get(name):
            del fields["auto_wrap_policy"]
            meaning = "NO_WRAP: hf_fsdp_tools finds the blocks in the model's structure"
            result.say("fsdp_auto_wrap_policy", policy, meaning)
        if (policy != needing or not fields.get(name)) and fields.pop(name, None) is not None:
            result.say(f"fsdp_{name}", result.sentences[f"fsdp_{name}"][0], f"left out: {policy} ignores it")
