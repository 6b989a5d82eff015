"""What the user wants of a run, as one frozen value: to and from an Accelerate YAML file, to `TrainingArguments` keys.

    detect_config()                  ->  a FSDPConfig that fits this machine, with the reasons
    FSDPConfig(...)                  ->  checked: all contradictions at once
    .to_accelerate_yaml()            ->  text that `accelerate launch --config_file` takes
    FSDPConfig.from_accelerate_yaml  ->  back again; a setting that cannot be kept is an error, never dropped
    .to_training_arguments()         ->  keywords for transformers.TrainingArguments

The keys are those of accelerate 1.15 (`commands/launch.py`) and transformers 5.23 (`_process_fsdp_args`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.accelerate_keys import STRATEGIES, read_accelerate_keys

__all__ = ["FSDPConfig", "detect_config", "suggest_config"]

AutoWrapPolicy = Literal["NO_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
MixedPrecision = Literal["no", "bf16", "fp16"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"]

CPU_PROCESSES = 2
"""Processes where there is no GPU: the fewest that really shard (chosen, not measured)."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """What the user wants of a run. Immutable and checked; `dataclasses.replace` gives a changed copy, checked again.

    Raises:
        ConfigError: settings contradict each other; the message lists every contradiction with its cure.
    """

    num_processes: int
    """Processes over all machines: one per GPU, or any number on CPU."""
    num_machines: int = 1
    """Machines, with the same number of processes on each."""
    machine_rank: int = 0
    """Which of the machines this file is for, from 0."""
    main_process_ip: str | None = None
    """Address of machine 0 as the others see it; None is right for one machine only."""
    main_process_port: int | None = None
    """Port on machine 0; None lets one machine look for a free port at each launch."""
    gpu_ids: str | None = None
    """GPUs to use on this machine, such as "0,1"; None is all of them."""
    use_cpu: bool = False
    """Run on CPU with gloo, also where there are GPUs (they are hidden from the processes)."""
    mixed_precision: MixedPrecision = "no"
    """Compute dtype while the trained weights stay float32; "no" computes in the dtype of the weights."""
    fsdp_version: Literal[1, 2] = 2
    """2 is `fully_shard`; 1 is `FullyShardedDataParallel`, deprecated upstream."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward (less memory); False keeps them for its backward (less traffic)."""
    dp_replicate_size: int = 1
    """Copies of the sharded model (HSDP): each copy is sharded over `num_processes / dp_replicate_size` processes."""
    offload_params: bool = False
    """Keep shards, gradients and optimizer state in host memory, and move a unit to the GPU for its compute."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    """How training checkpoints are written: each rank its own part, or gathered on rank 0."""
    cpu_ram_efficient_loading: bool = False
    """Rank 0 reads the whole checkpoint and broadcasts it. False: this package lets each rank read its own shards."""
    auto_wrap_policy: AutoWrapPolicy = "NO_WRAP"
    """What Accelerate wraps by itself. NO_WRAP, because our plan has sharded the model before Accelerate sees it, and
    Accelerate would then look for block classes by names that sharding has changed."""
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    """Class names of blocks, for TRANSFORMER_BASED_WRAP; empty uses the model's own `_no_split_modules`."""
    min_num_params: int | None = None
    """Parameters that make a unit, for SIZE_BASED_WRAP only."""
    ignored_modules: str | None = None
    """Regular expression of whole module names that stay whole on every rank."""
    backward_prefetch: BackwardPrefetch | None = None
    """FSDP1 only: when the next unit is gathered in the backward pass; None is BACKWARD_PRE, PyTorch's default."""
    forward_prefetch: bool | None = None
    """FSDP1 only: gather the next unit early in the forward pass; None is False."""
    use_orig_params: bool | None = None
    """FSDP1 only: show the original parameters to the optimizer; None is True, which frozen weights need."""
    sync_module_states: bool | None = None
    """FSDP1 only: broadcast rank 0's weights at wrapping; None follows `cpu_ram_efficient_loading`, which needs it."""

    def __post_init__(self) -> None:
        problems = [*_type_problems(self)]
        if not problems:  # the rules below compare numbers
            problems = [*_process_problems(self), *_sharding_problems(self), *_version_problems(self)]
        if problems:
            raise ConfigError(_listed("the configuration cannot be used", problems))

    @property
    def dp_shard_size(self) -> int:
        """Processes that share one copy of the model."""
        return self.num_processes // self.dp_replicate_size

    def to_accelerate_yaml(self, *, command: str | None = None) -> str:
        """Text for `accelerate launch --config_file`, the same for the same config; its first line names `command`.

        Every FSDP key is written out: the defaults differ between the launcher, the plugin and `TrainingArguments`.
        """
        header = [f"# Generated by: {command}"] if command else []
        if self.auto_wrap_policy == "NO_WRAP":
            header.append("# NO_WRAP: hf_fsdp_tools shards the model by its own plan before Accelerate sees it.")
        body: str = yaml.safe_dump(_to_accelerate(self), sort_keys=True)
        return "".join(line + "\n" for line in header) + body

    @classmethod
    def from_accelerate_yaml(cls, source: str | os.PathLike[str]) -> "FSDPConfig":
        """Read what `accelerate config`, `hf-fsdp config` or a hand wrote; `source` is the file's path or its text.

        Absent keys get the value that `accelerate launch` gives them (FSDP version 1, for one).

        Raises:
            ConfigError: no YAML mapping, not FSDP, unknown keys (with the nearest names), values that no field holds.
        """
        text, name = _read_source(source)
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{name} is not an Accelerate config: expected `key: value` lines, found {text[:60]!r}")
        fields, problems = read_accelerate_keys(data)
        if problems:
            raise ConfigError(_listed(f"{name} cannot be used", problems))
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def to_training_arguments(self) -> dict[str, Any]:
        """Keywords for `transformers.TrainingArguments(**...)`: `fsdp`, `fsdp_config`, the precision, and `use_cpu`.

        Raises:
            ConfigError: HSDP, which TrainingArguments takes as an Accelerate object that this room does not make.
        """
        if self.dp_replicate_size > 1 and self.fsdp_version == 2:
            raise ConfigError(
                f"dp_replicate_size {self.dp_replicate_size} has no TrainingArguments key; launch with the YAML file, "
                "or use dataclasses.replace(config, dp_replicate_size=1) and add parallelism_config="
                f"ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size})"
            )
        keys = {key.removeprefix("fsdp_"): value for key, value in _fsdp_section(self).items()}
        keys["cpu_offload"] = keys.pop("offload_params")
        if self.fsdp_version == 1:
            keys["reshard_after_forward"] = keys.pop("sharding_strategy").lower()
        if self.transformer_layer_cls_to_wrap:
            keys["transformer_layer_cls_to_wrap"] = list(self.transformer_layer_cls_to_wrap)
        return {
            "fsdp": True,
            "fsdp_config": keys,
            "bf16": self.mixed_precision == "bf16",
            "fp16": self.mixed_precision == "fp16",
            "use_cpu": self.use_cpu,
        }


def suggest_config(*, gpu_count: int, bf16: bool) -> tuple[FSDPConfig, dict[str, str]]:
    """The config for one machine with `gpu_count` GPUs (`bf16`: do they compute in it), and the reasons by field."""
    if gpu_count < 1:
        return FSDPConfig(num_processes=CPU_PROCESSES, use_cpu=True), {
            "num_processes": "the fewest that really shard",
            "mixed_precision": "float32 on CPU, so that runs can be compared",
        }
    return FSDPConfig(num_processes=gpu_count, mixed_precision="bf16" if bf16 else "no"), {
        "num_processes": "one for each GPU",
        "mixed_precision": "the GPUs compute in bf16; trained weights stay float32"
        if bf16
        else "no bf16 on these GPUs",
    }


def detect_config() -> tuple[FSDPConfig, dict[str, str]]:
    """The config for this machine, and the reasons by field. Asks torch.cuda; starts and communicates nothing."""
    import torch

    gpu_count = torch.cuda.device_count()
    bf16 = gpu_count > 0 and torch.cuda.is_bf16_supported(including_emulation=False)
    config, reasons = suggest_config(gpu_count=gpu_count, bf16=bf16)
    return config, {"use_cpu": f"this machine has {gpu_count or 'no'} CUDA GPU{'s' * (gpu_count > 1)}", **reasons}


def _listed(fact: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{fact}: {problems[0]}"
    return f"{fact}, in {len(problems)} places:" + "".join(f"\n  - {problem}" for problem in problems)


def _read_source(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The YAML text and what to call it in errors. A string with a line break or `: ` in it is the text itself."""
    if isinstance(source, str) and ("\n" in source or ": " in source):
        return source, "the YAML text"
    try:
        return Path(source).read_text(encoding="utf-8"), str(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the Accelerate config {source} cannot be read: {error}; make one with `hf-fsdp config`"
        ) from error


# What can be wrong with a config. Each check gives all its problems: fact, value, cure.


def _type_problems(config: FSDPConfig) -> list[str]:
    choices = {
        "mixed_precision": get_args(MixedPrecision),
        "fsdp_version": (1, 2),
        "state_dict_type": get_args(StateDictType),
        "auto_wrap_policy": get_args(AutoWrapPolicy),
        "backward_prefetch": (None, *get_args(BackwardPrefetch)),
    }
    problems = [
        f"{name} is {getattr(config, name)!r}; use one of {', '.join(str(value) for value in allowed if value)}"
        for name, allowed in choices.items()
        if getattr(config, name) not in allowed
    ]
    lowest = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "dp_replicate_size": 1}
    for name, least in lowest.items():
        value = getattr(config, name)
        if type(value) is not int or value < least:
            problems.append(f"{name} is {value!r}; use a whole number from {least}")
    return problems


def _process_problems(config: FSDPConfig) -> list[str]:
    problems = []
    if config.num_processes % config.num_machines:
        problems.append(
            f"num_processes {config.num_processes} counts all machines and is not a multiple of num_machines "
            f"{config.num_machines}; every machine runs the same number"
        )
    if config.machine_rank >= config.num_machines:
        problems.append(
            f"machine_rank {config.machine_rank} counts from 0 and must be below num_machines {config.num_machines}"
        )
    if config.num_machines > 1 and not (config.main_process_ip and config.main_process_port):
        problems.append("several machines need main_process_ip and main_process_port, where they meet on machine 0")
    if config.use_cpu and config.gpu_ids is not None:
        problems.append(f"gpu_ids {config.gpu_ids!r} picks GPUs and use_cpu hides them; drop one of the two")
    elif config.gpu_ids is not None and len(config.gpu_ids.split(",")) < config.num_processes // config.num_machines:
        problems.append(
            f"gpu_ids {config.gpu_ids!r} has fewer GPUs than a machine has processes "
            f"({config.num_processes // config.num_machines}); each process needs its own"
        )
    if config.use_cpu and config.mixed_precision == "fp16":
        problems.append('mixed_precision "fp16" needs a GPU for its loss scaling; on CPU use "bf16" or "no"')
    if config.use_cpu and config.offload_params:
        problems.append("offload_params moves weights to the CPU, where use_cpu already has them; drop offload_params")
    return problems


def _sharding_problems(config: FSDPConfig) -> list[str]:
    problems = []
    copies = config.dp_replicate_size
    if config.num_processes % copies:
        problems.append(f"dp_replicate_size {copies} does not divide num_processes {config.num_processes}")
    elif copies > 1 and config.dp_shard_size == 1:
        problems.append(
            f"dp_replicate_size {copies} leaves one process per copy, so nothing is sharded; use a smaller divisor of "
            f"{config.num_processes}"
        )
    if config.transformer_layer_cls_to_wrap and config.auto_wrap_policy != "TRANSFORMER_BASED_WRAP":
        problems.append(
            f"transformer_layer_cls_to_wrap {', '.join(config.transformer_layer_cls_to_wrap)} has no effect with "
            f"auto_wrap_policy {config.auto_wrap_policy}; use TRANSFORMER_BASED_WRAP or drop it"
        )
    if (config.min_num_params is not None) != (config.auto_wrap_policy == "SIZE_BASED_WRAP"):
        problems.append(
            f"min_num_params is {config.min_num_params} with auto_wrap_policy {config.auto_wrap_policy}; "
            "SIZE_BASED_WRAP needs it and nothing else uses it"
        )
    return problems


def _version_problems(config: FSDPConfig) -> list[str]:
    if config.fsdp_version == 2:
        names = ["backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"]
        set_names = [name for name in names if getattr(config, name) is not None]
        problems = []
        if set_names:
            problems.append(f"{', '.join(set_names)}: only FSDP1 has this; drop it, or use fsdp_version 1")
        if config.state_dict_type == "LOCAL_STATE_DICT":
            problems.append(
                "state_dict_type LOCAL_STATE_DICT: only FSDP1 has this; use SHARDED_STATE_DICT or FULL_STATE_DICT"
            )
        return problems
    problems = []
    if config.dp_replicate_size not in (1, config.num_machines):
        problems.append(
            f"dp_replicate_size {config.dp_replicate_size}: FSDP1 shards within a machine and copies between machines, "
            f"so it can only be 1 or num_machines ({config.num_machines}); use fsdp_version 2"
        )
    if config.cpu_ram_efficient_loading and config.sync_module_states is False:
        problems.append("cpu_ram_efficient_loading under FSDP1 needs sync_module_states; leave it unset")
    if config.use_cpu and (config.sync_module_states or config.cpu_ram_efficient_loading):
        problems.append(
            "use_cpu: without a GPU, Accelerate's FSDP1 stops at sync_module_states, and cpu_ram_efficient_loading "
            "needs that; set both to false"
        )
    return problems


# To Accelerate's keys.


def _to_accelerate(config: FSDPConfig) -> dict[str, Any]:
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": _fsdp_section(config),
        "machine_rank": config.machine_rank,
        # 0 makes the launcher look for a free port, so that two runs on a machine do not collide on 29500
        "main_process_port": config.main_process_port or 0,
        "mixed_precision": config.mixed_precision,
        "num_machines": config.num_machines,
        "num_processes": config.num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": config.use_cpu,
    }
    if config.main_process_ip:
        data["main_process_ip"] = config.main_process_ip
    if config.use_cpu:
        # use_cpu itself reaches no process that the launcher starts for FSDP; this does, as CUDA_VISIBLE_DEVICES=
        data["gpu_ids"] = ""
    elif config.gpu_ids is not None:
        data["gpu_ids"] = config.gpu_ids
    if config.dp_replicate_size > 1 and config.fsdp_version == 2:
        data["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": config.dp_replicate_size,
            "parallelism_config_dp_shard_size": config.dp_shard_size,
        }
    return data


def _fsdp_section(config: FSDPConfig) -> dict[str, Any]:
    section: dict[str, Any] = {
        "fsdp_version": config.fsdp_version,
        "fsdp_offload_params": config.offload_params,
        "fsdp_activation_checkpointing": config.activation_checkpointing,
        "fsdp_state_dict_type": config.state_dict_type,
        "fsdp_cpu_ram_efficient_loading": config.cpu_ram_efficient_loading,
        "fsdp_auto_wrap_policy": config.auto_wrap_policy,
    }
    if config.transformer_layer_cls_to_wrap:
        section["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.transformer_layer_cls_to_wrap)
    if config.min_num_params is not None:
        section["fsdp_min_num_params"] = config.min_num_params
    if config.ignored_modules:
        section["fsdp_ignored_modules"] = config.ignored_modules
    if config.fsdp_version == 2:
        return section | {"fsdp_reshard_after_forward": config.reshard_after_forward}
    sync = config.cpu_ram_efficient_loading if config.sync_module_states is None else config.sync_module_states
    return section | {
        "fsdp_sharding_strategy": STRATEGIES[config.reshard_after_forward, config.dp_replicate_size > 1],
        "fsdp_backward_prefetch": config.backward_prefetch or "BACKWARD_PRE",
        "fsdp_forward_prefetch": bool(config.forward_prefetch),
        "fsdp_use_orig_params": config.use_orig_params is not False,
        "fsdp_sync_module_states": sync,
    }
