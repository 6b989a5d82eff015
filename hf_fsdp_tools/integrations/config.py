"""The settings of a run as one frozen value, which writes Accelerate's YAML and checks users' own files.

Its fields are the table of all settings too: an `fsdp_*` key is one field with `metadata=_key(…)`, and is then written,
checked, translated, and known as a variable and as a key of `TrainingArguments.fsdp_config`. The names are those of
accelerate 1.15 (`utils.launch`, `utils.dataclasses`) and transformers 5.23 (`TrainingArguments._process_fsdp_args`);
`tests/unit/test_settings.py` reads both libraries and fails when their names differ. docs/settings.md says what becomes
of each. Imports neither torch nor Accelerate before a machine or a file is looked at.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from hf_fsdp_tools.axes import OfAxes, size_names, with_degrees
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.settings import (
    AutoWrapPolicy,
    BackwardPrefetch,
    MixedPrecision,
    Setting,
    StateDictType,
    contradictions,
    launched,
)
from hf_fsdp_tools.text import comment

if TYPE_CHECKING:
    from hf_fsdp_tools.diagnostics.findings import Finding
    from hf_fsdp_tools.integrations.interpret import Translation


CPU_PROCESSES = 2
"""Processes on a machine without GPUs: the fewest that shard anything. (assumed)"""


def _key(kind: type | tuple[str, ...] = str, **other: Any) -> dict[str, Any]:
    """Makes a field an `fsdp_*` key; the arguments are those of `settings.launched`."""
    return {"kind": kind, **other}


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(OfAxes):
    """The settings of a run. Immutable and checked; `dataclasses.replace` gives a changed copy, checked again.

    Raises:
        ConfigError: settings contradict each other; the message lists every contradiction with its cure.

    Example:
        >>> config = LaunchConfig(num_processes=8, mixed_precision="bf16", dp_replicate_size=2)
        >>> config.dp_shard_size
        4
        >>> yaml = config.to_accelerate_yaml()  # for `accelerate launch --config_file`
        >>> "parallelism_config_dp_shard_size: 4" in yaml
        True
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
    dp_replicate_size: int = 1
    """Copies of the sharded model (HSDP): each copy is sharded over `num_processes / dp_replicate_size` processes."""
    cp_size: int = 1
    """Processes with the same rows, each with a part of every sequence (context parallelism)."""
    tp_size: int = 1
    """Processes that share each layer and the rows (tensor parallelism): neighbours, best on one machine."""
    ep_size: int = field(default=1, metadata=_key(int))
    """Neighbouring processes that share the experts (expert parallelism)."""
    fsdp_version: Literal[2] = field(default=2, metadata=_key(int, name="version", argument="fsdp_version"))
    """2 is `fully_shard`; a run of version 1, deprecated upstream, is made by `FSDPPlugin(fsdp_version=1)`."""
    reshard_after_forward: bool = field(default=True, metadata=_key())
    """Free a unit's weights after its forward (less memory); False keeps them for its backward (less traffic)."""
    offload_params: bool = field(
        default=False, metadata=_key(bool, argument="cpu_offload", training=("offload_params", "cpu_offload"))
    )
    """Keep shards, gradients and optimizer state in host memory, and move a unit to the GPU for its compute."""
    activation_checkpointing: bool = field(default=False, metadata=_key(bool))
    """Recompute each block's activations in the backward pass instead of keeping them."""
    activation_checkpointing_offload: bool = field(default=False, metadata=_key(bool))
    """Keep what checkpointed blocks keep, their inputs, in host memory until their backward pass."""
    activation_checkpointing_every_n_layers: int = field(default=1, metadata=_key(int))
    """Checkpoint the first of every n blocks; the others keep their activations."""
    activation_checkpointing_save_ops: tuple[str, ...] = field(default=(), metadata=_key())
    """Operators whose results checkpointed blocks keep: matmul, attention, or torch's names (aten::mm)."""
    state_dict_type: StateDictType = field(default="SHARDED_STATE_DICT", metadata=_key(get_args(StateDictType)))
    """How training checkpoints are written: every rank writes its shards, or rank 0 gathers and writes all."""
    cpu_ram_efficient_loading: bool = field(default=False, metadata=_key(bool))
    """Rank 0 reads the whole checkpoint and broadcasts it. False: this package lets each rank read its own shards."""
    auto_wrap_policy: AutoWrapPolicy = field(default="NO_WRAP", metadata=_key(get_args(AutoWrapPolicy)))
    """The modules that Accelerate wraps by itself. NO_WRAP, because this package shards the model before Accelerate
    sees it; Accelerate would look for block classes by names that sharding has changed."""
    transformer_layer_cls_to_wrap: tuple[str, ...] = field(
        default=(), metadata=_key(argument="transformer_cls_names_to_wrap", variable="FSDP_TRANSFORMER_CLS_TO_WRAP")
    )
    """Class names of blocks, for TRANSFORMER_BASED_WRAP; empty uses the model's own `_no_split_modules`."""
    min_num_params: int | None = field(default=None, metadata=_key(int))
    """Parameters that make a unit, for SIZE_BASED_WRAP only."""
    ignored_modules: str | None = field(default=None, metadata=_key())
    """Regular expression of whole module names that stay whole on every rank."""

    def __post_init__(self) -> None:
        problems = [f"{fact}; {cure}" for fact, cure in contradictions(self)]
        if len(problems) == 1:
            raise ConfigError(f"the configuration cannot be used: {problems[0]}")
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise ConfigError(f"the configuration cannot be used, in {len(problems)} places:{lines}")

    @property
    def dp_shard_size(self) -> int:
        """Processes that share one replica, in addition to those of context parallelism."""
        return self.num_processes // (self.num_copies * self.ranks_per_row)

    @property
    def launch_variables(self) -> list[str]:
        """What stands before `accelerate launch`, which drops the keys of this package: "FSDP_EP_SIZE=8"."""
        values = ((key, getattr(self, key.removeprefix("fsdp_"))) for key in OWN_KEYS)
        return [
            f"{key.upper()}={','.join(value) if isinstance(value, tuple) else value}"
            for key, value in values
            if value not in (1, ())
        ]

    def to_accelerate_yaml(self, *, command: str | None = None, notes: Sequence[str] = ()) -> str:
        """Text for `accelerate launch --config_file`, the same for the same config.

        Every FSDP key is written out: the defaults differ between the launcher, the plugin and `TrainingArguments`.

        Args:
            command: named in the first line as the command that generated the file; None leaves the line out.
            notes: further lines of comment, such as the predicted memory.
        """
        header = [f"Generated by: {command}"] if command else []
        if self.auto_wrap_policy == "NO_WRAP":
            header.append("NO_WRAP: hf_fsdp_tools shards the model by its own plan before Accelerate sees it.")
        body: str = yaml.safe_dump(_to_accelerate(self), sort_keys=True)
        return "".join(comment(line) + "\n" for line in (*header, *notes)) + body

    @classmethod
    def for_machine(cls, gpu_count: int | None = None) -> tuple["LaunchConfig", dict[str, str]]:
        """The config that fits one machine, and the reason for each field that was chosen.

        Args:
            gpu_count: GPUs of that machine, assumed to compute in bf16; None asks torch what this machine has.

        Starts and communicates nothing.
        """
        bf16, device, precision = True, "asked for", "assumed: GPUs since 2020 compute in bf16"
        if gpu_count is None:
            import torch

            from hf_fsdp_tools.accelerator import computes_bfloat16, find_accelerator

            accelerator = find_accelerator()
            gpu_count = torch.accelerator.device_count() if accelerator is not None else 0
            bf16 = accelerator is not None and computes_bfloat16(accelerator)
            device = f"this machine has {gpu_count or 'no'} GPU{'s' * (gpu_count > 1)}"
            precision = "the GPUs compute in bf16; trained weights stay float32" if bf16 else "no bf16 on these GPUs"
        if gpu_count > 0:
            config = cls(num_processes=gpu_count, mixed_precision="bf16" if bf16 else "no")
            return config, {"use_cpu": device, "num_processes": "one for each GPU", "mixed_precision": precision}
        return cls(num_processes=CPU_PROCESSES, use_cpu=True), {
            "use_cpu": device,
            "num_processes": "the fewest that really shard",
            "mixed_precision": "float32 on CPU, so that runs can be compared",
        }

    @staticmethod
    def check_file(path: str | os.PathLike[str]) -> "tuple[Finding, ...]":
        """Findings about a user's own Accelerate config, errors first; empty if every setting will be honoured.

        docs/settings.md lists what is found. Starts and communicates nothing. Imports Accelerate, for its own lists of
        general keys.

        Raises:
            ConfigError: the file cannot be read, or holds no YAML mapping.
        """
        from hf_fsdp_tools.integrations.interpret import check_file

        return check_file(path, YAML_KEYS, {each.name: each.default for each in fields(with_degrees(LaunchConfig))})

    @staticmethod
    def translate_file(path: str | os.PathLike[str]) -> "Translation":
        """The meaning of a user's own file: fields of this class, arguments of the Trainer, a sentence for each key.

        Reads files of `accelerate launch` for FSDP, DDP and DeepSpeed (with the JSON that they point to), and the JSON
        of DeepSpeed alone. Starts and communicates nothing. Imports Accelerate, for its own list of general keys.

        Raises:
            ConfigError: the file cannot be read, or asks for a thing that has no meaning here.
        """
        from hf_fsdp_tools.integrations.interpret import translate_file

        return translate_file(path, YAML_KEYS)


# ---- the table of settings ----


def rows_of(config: type[LaunchConfig]) -> tuple[Setting, ...]:
    """The settings that are fields of a config."""
    names = [(each.name, {"name": each.name, **each.metadata}) for each in fields(config) if each.metadata]
    return tuple(launched(**{"field": name, **metadata}) for name, metadata in names)


SETTINGS = (
    *rows_of(LaunchConfig),
    launched("sharding_strategy"),
    launched("backward_prefetch", get_args(BackwardPrefetch), is_old=True, fsdp2="BACKWARD_PRE"),
    launched("forward_prefetch", bool, is_old=True, fsdp2=False),
    launched("sync_module_states", bool, is_old=True, fsdp2=True),
    launched("use_orig_params", bool, is_old=True, fsdp2=True),
    Setting(argument="mixed_precision_policy", training=("mixed_precision_policy",)),
    Setting(argument="limit_all_gathers", training=("limit_all_gathers",), kind=bool, is_old=True, fsdp2=True),
    Setting(argument="param_init_fn", is_old=True),
    Setting(argument="state_dict_config", is_old=True),
    Setting(argument="optim_state_dict_config", is_old=True),
    *(Setting(training=(name,)) for name in ("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2")),
)
"""Fields of LaunchConfig, and what it has no field for: a check of the file, the plugin or one line answers these."""

OWN_KEYS = ("fsdp_ep_size", "fsdp_activation_checkpointing_every_n_layers", "fsdp_activation_checkpointing_save_ops")
"""Keys of this package, which `accelerate launch` drops: their variables are set for it, as `hf-fsdp RECIPE` does."""

_UNUSUAL = (*OWN_KEYS, "fsdp_activation_checkpointing_offload")
"""Keys that a file has where they say something; their defaults are the same everywhere."""

VARIABLES = {row.variable: row for row in SETTINGS if row.variable}
YAML_KEYS = {row.key: row for row in SETTINGS if row.key}
TRAINING_KEYS = {name: row for row in SETTINGS for name in row.training}


# ---- the YAML ----


def _to_accelerate(config: LaunchConfig) -> dict[str, Any]:
    section: dict[str, Any] = {}
    usual = {each.name: each.default for each in fields(config)}
    for row in YAML_KEYS.values():
        value = getattr(config, row.field) if row.field else None
        if value not in (None, "", ()) and not (row.key in _UNUSUAL and value == usual[row.field]):
            section[str(row.key)] = ",".join(value) if isinstance(value, tuple) else value
    known = {each.name for each in fields(LaunchConfig)}
    further = {name: getattr(config, name) for name in size_names() if name not in known}
    if given := [f"{name}={size}" for name, size in further.items() if size > 1]:
        raise ConfigError(
            f"{given[0]} cannot stand in a launch file: Accelerate knows no such size. Leave it out, and give it to "
            f"the model: from_pretrained(…, mesh=ParallelDims({', '.join(given)}))."
        )
    names = sorted((known & {*size_names()} | {"dp_shard_size"}) - {row.field for row in YAML_KEYS.values()})
    parallelism = {f"parallelism_config_{name}": getattr(config, name) for name in names}
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": section,
        # The launcher does not pass use_cpu on to FSDP's processes; gpu_ids "" sets CUDA_VISIBLE_DEVICES= for them.
        "gpu_ids": "" if config.use_cpu else config.gpu_ids,
        "machine_rank": config.machine_rank,
        "main_process_ip": config.main_process_ip or None,
        # With 0 the launcher looks for a free port, so that two runs on a machine do not collide on 29500.
        "main_process_port": config.main_process_port or 0,
        "mixed_precision": config.mixed_precision,
        "num_machines": config.num_machines,
        "num_processes": config.num_processes,
        "parallelism_config": parallelism if config.num_processes > config.dp_shard_size else None,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": config.use_cpu,
    }
    return {key: value for key, value in data.items() if value is not None}
