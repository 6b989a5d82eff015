"""Check a user's own Accelerate config: keys that the launcher drops, settings that this package does not honour."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from hf_fsdp_tools.diagnostics.findings import Finding
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.contradictions import contradictions
from hf_fsdp_tools.integrations.settings import HYBRID, OLD_KEYS, YAML_KEYS, read_value, reshards, strategy_of
from hf_fsdp_tools.modeling.untrusted import load_yaml
from hf_fsdp_tools.text import did_you_mean, quoted, reason_of

_MIN_NUM_PARAMS = 100_000_000
"""The launcher's value where a file has no fsdp_min_num_params; source: accelerate 1.15, commands/launch.py."""

_error = partial(Finding, severity="error")
_warning = partial(Finding, severity="warning")
_info = partial(Finding, severity="info")


def check_config_file(path: str | os.PathLike[str], defaults: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of `FSDPConfig.check_file`, errors first."""
    try:
        data = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}; make a file with `hf-fsdp config`") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        found = "nothing" if data is None else quoted(data)
        raise ConfigError(f"{path} is not an Accelerate config: expected `key: value` lines, found {found}")
    said: dict[str, Any] = {}
    findings = [*_read(data, said), *_check(data, said, defaults)]
    return tuple(sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity)))


def _read(data: Mapping[str, Any], said: dict[str, Any]) -> Iterator[Finding]:
    """Fill `said` with values by the full names of their keys; yield keys and values that cannot be read."""
    axes = [name for name in vars(launch_command_parser().parse_args(["_"])) if name.startswith("parallelism_config_")]
    general = {field.name: field.type for field in fields(ClusterConfig)}
    plain: dict[Any, type] = {int: int, int | None: int, str: str, str | None: str, bool: bool, bool | None: bool}
    kinds: dict[str, Any] = {name: plain[kind] for name, kind in general.items() if kind in plain}
    kinds |= {key: row.kind for key, row in YAML_KEYS.items()} | {name: int for name in axes if name.endswith("_size")}
    # Accelerate still reads the first two, which are old names.
    top = ["fp16", "dynamo_backend", *general]
    sections: dict[str, Collection[str]] = {"": top, "fsdp_config": YAML_KEYS, "parallelism_config": axes}
    for section, known in sections.items():
        values = (data.get(section) or {}) if section else data
        if not isinstance(values, dict):
            yield _error(code="wrong-value", fact=f"{section} is {quoted(values)}.", cure="Write `key: value` lines.")
            continue
        for key, value in values.items():
            # The launcher adds the prefix, in this section alone.
            name = f"fsdp_{key}" if section == "fsdp_config" and not str(key).startswith("fsdp") else str(key)
            name = OLD_KEYS.get(name, name)
            if name not in known:
                fact = f"{name}: the launcher {'drops it without a word' if section else 'stops at it'}."
                yield _error(code="unknown-key", fact=fact, cure=f"This is no key{did_you_mean(name, known)}")
            elif name in kinds and value is not None:
                try:
                    said[name] = read_value(kinds[name], value)
                except ValueError as expected:
                    yield _error(code="wrong-value", fact=f"{name} is {quoted(value)}.", cure=f"Use {expected}.")


def _check(data: Mapping[str, Any], said: dict[str, Any], defaults: Mapping[str, Any]) -> Iterator[Finding]:
    kind, version = data.get("distributed_type"), said.get("fsdp_version")
    if kind != "FSDP":
        cure = "Write distributed_type: FSDP, or make a file with `hf-fsdp config`."
        yield _error(code="not-fsdp", fact=f"distributed_type is {kind}: no setting of FSDP is passed on.", cure=cure)
        return
    if is_fsdp1(said):
        yield _warning(code="fsdp1", fact="fsdp_version is 1: deprecated in PyTorch.", cure="Write fsdp_version: 2.")
    elif version in (1, 2, None):
        said["fsdp_version"] = 2
        if version != 2:
            fact = f"fsdp_version is {version or 'absent'} and the keys are of old files: read as FSDP2."
            yield _warning(code="fsdp1", fact=fact, cure="Write fsdp_version: 2.")
            _read_hybrid(said)
        yield from _check_fsdp2(said)
    if data.get("mixed_precision") is False:
        said["mixed_precision"] = "no"
        fact = "mixed_precision is no, which YAML reads as false: the launcher stops at it."
        yield _error(code="wrong-value", fact=fact, cure="Write 'no', in quotes.")
    if said.get("use_cpu") and "gpu_ids" not in said:
        fact = "use_cpu alone does not reach the processes that the launcher starts for FSDP: they would use GPUs."
        yield _warning(code="use-cpu", fact=fact, cure='Add gpu_ids: "", which hides the GPUs.')
    if data.get("num_processes") in (None, -1):
        fact = "num_processes is absent: the launcher stops unless it is told."
        yield _warning(code="num-processes", fact=fact, cure="Write num_processes, counted over all machines.")
    elif "num_processes" in said:
        yield from _check_axes(said)
        config = _as_config(said, defaults)
        for fact, cure in contradictions(config):
            yield _error(code="contradiction", fact=f"{fact}.", cure=f"{cure[0].upper()}{cure[1:]}.")
        yield from _check_devices(config)


def is_fsdp1(said: Mapping[str, Any]) -> bool:
    """Whether a file asks for FSDP1 in the words of files that know of versions; others are read as FSDP2."""
    word = said.get("fsdp_reshard_after_forward")
    return said.get("fsdp_version") == 1 and word is not None and str(word).lower() not in ("true", "false")


def _read_hybrid(said: dict[str, Any]) -> None:
    """Replace FSDP1's strategies with a copy per machine, in place, by what they do within one."""
    word = strategy_of(said.get("fsdp_sharding_strategy", "FULL_SHARD"))
    if word in HYBRID:
        said["fsdp_sharding_strategy"] = HYBRID[word]
        said.setdefault("parallelism_config_dp_replicate_size", said.get("num_machines", 1))


def _check_fsdp2(said: dict[str, Any]) -> Iterator[Finding]:
    """Yield settings that FSDP2 lacks or names differently, and take them out of `said`."""
    foreign = {key: said.pop(key) for key, row in YAML_KEYS.items() if key in said and 2 not in row.versions}
    if foreign:
        done = all(value == YAML_KEYS[key].fsdp2 for key, value in foreign.items())
        yield Finding(
            code="only-fsdp1",
            severity="info" if done else "warning",
            fact=f"Only FSDP1 has {', '.join(foreign)}: {'FSDP2 does so anyway' if done else 'left out'}.",
            cure="Remove the line." if len(foreign) == 1 else "Remove the lines.",
        )
    for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy"):
        value = said.pop(key, "true")
        try:
            meant = reshards(value)
        except ConfigError as error:
            fact, _, cure = str(error).partition(". ")
            yield _error(code="refused", fact=f"{key}: {fact}.", cure=cure)
        else:
            if value.lower() not in ("true", "false"):
                cure = f"Write fsdp_reshard_after_forward: {str(meant).lower()}."
                yield _info(code="translated", fact=f"{key} is {value}, a word of FSDP1's for {meant}.", cure=cure)
    if said.get("fsdp_activation_checkpointing_offload"):
        fact = "fsdp_activation_checkpointing_offload is not part of this package: its plugin stops at it."
        yield _error(code="refused", fact=fact, cure="Remove the line. fsdp_offload_params saves more.")


def _check_axes(said: dict[str, Any]) -> Iterator[Finding]:
    sizes = {key.removeprefix("parallelism_config_"): size for key, size in said.items() if key.endswith("_size")}
    copies, shards = sizes.pop("dp_replicate_size", 1), sizes.pop("dp_shard_size", None)
    if others := [f"{name} is {size}" for name, size in sizes.items() if size > 1]:
        fact = f"{', '.join(others)}: this package shards and copies only."
        yield _error(code="refused", fact=fact, cure="Leave all but dp_replicate_size and dp_shard_size out.")
    elif shards is not None and shards * copies != said["num_processes"]:
        fact = f"dp_replicate_size {copies} times dp_shard_size {shards} is not num_processes {said['num_processes']}."
        yield _error(code="contradiction", fact=fact, cure="Set dp_shard_size to num_processes / dp_replicate_size.")


def _as_config(said: dict[str, Any], defaults: Mapping[str, Any]) -> Any:
    """The file's settings as attributes with the names and values of FSDPConfig."""
    config = dict(defaults)
    for key, value in said.items():
        name = YAML_KEYS[key].field if key in YAML_KEYS else key.removeprefix("parallelism_config_")
        if name in defaults:
            config[name] = value
    if config["gpu_ids"] == "all" or (config["gpu_ids"] == "" and config["use_cpu"]):
        config["gpu_ids"] = None
    classes = config["transformer_layer_cls_to_wrap"] or ""
    config["transformer_layer_cls_to_wrap"] = tuple(name.strip() for name in classes.split(",") if name.strip())
    if config["auto_wrap_policy"] == "SIZE_BASED_WRAP":
        config["min_num_params"] = config["min_num_params"] or _MIN_NUM_PARAMS
    elif config["min_num_params"] == 0:  # some files write 0 for "not used"
        config["min_num_params"] = None
    return SimpleNamespace(**config)


def _check_devices(config: Any) -> Iterator[Finding]:
    wanted, there = config.num_processes // max(config.num_machines, 1), torch.accelerator.device_count()
    if not config.use_cpu and there < wanted:
        fact = f"{wanted} processes on each machine, and this one has {there} device(s): every process needs its own."
        yield _warning(code="few-devices", fact=fact, cure="Launch it where it belongs, or lower num_processes.")
