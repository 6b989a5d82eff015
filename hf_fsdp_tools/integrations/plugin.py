"""Accelerate's FSDP plugin with a `HybridPolicy`, and with gradients reduced in fp32."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_tools.distributed.launcher import world_size
from hf_fsdp_tools.distributed.mesh import local_device, rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.fsdp1.wrap import refuse_copies
from hf_fsdp_tools.integrations.accelerator import adopt
from hf_fsdp_tools.integrations.config import SETTINGS, VARIABLES
from hf_fsdp_tools.integrations.model import LOW_PRECISION
from hf_fsdp_tools.integrations.settings import is_by_launcher, is_set, read_strategies, strategy_name, warn_on_node
from hf_fsdp_tools.integrations.version1 import prefer_possible_settings
from hf_fsdp_tools.integrations.wrapping import narrowed, policy_from_wrap, without_modules
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.text import did_you_mean


@dataclass
class HybridFSDPPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]  # accelerate is not typed
    """Accelerate's FSDP plugin with a `HybridPolicy`, for FSDP2 and FSDP1.

    It differs from the plugin that it extends:

    - Version 2 is the default.
    - The units are those of `policy`, on every model and for both versions. `TRANSFORMER_BASED_WRAP` with class names,
      `SIZE_BASED_WRAP` with a size, and torch's policies and functions are translated into it.
    - Mixed precision reduces gradients in fp32 and does not cast outputs and buffers (Accelerate's own reduces in low
      precision and casts both).
    - CPU offload works without a device to pin memory for.

    `docs/settings.md` says what becomes of every setting. Takes the arguments of `FullyShardedDataParallelPlugin`, and
    `policy`. Nothing is communicated. FSDP1 (`fsdp_version=1`, deprecated in PyTorch) shards plain models in `prepare`;
    `from_pretrained` is for FSDP2.

    Raises:
        ConfigError: torch cannot honour a setting here, or would silently honour it wrongly.

    Example:
        >>> plugin = HybridFSDPPlugin(policy=HybridPolicy(min_unit_params=2e7), activation_checkpointing=True)
        >>> accelerator = make_accelerator(fsdp_plugin=plugin, cpu=True)
        >>> model = from_pretrained("checkpoint", accelerator=accelerator, load_kwargs={"progress": False})
    """

    policy: HybridPolicy | None = field(default=None, metadata={"help": "What becomes a unit."})
    """What becomes a unit; None translates the other fields and variables, and means `HybridPolicy()` without any."""

    def __post_init__(self) -> None:
        self.is_explicit = True  # made by a script; False where variables or TrainingArguments alone made it
        for name in sorted(os.environ):
            if name.startswith("FSDP_") and name not in VARIABLES:
                warn_on_node(f"The variable {name} has no effect{did_you_mean(name, VARIABLES)}", stacklevel=3)
        self.fsdp_version, is_unversioned = _read_version(self.fsdp_version)
        self.copies: ParallelismConfig | None = None  # that the launch config asks for by HYBRID_SHARD
        on_cpu = local_device().type == "cpu"
        if self.fsdp_version == 2:
            self._read_as_fsdp2(is_unversioned=is_unversioned)
        else:
            prefer_possible_settings(self, on_cpu=on_cpu)
        if self.activation_checkpointing_offload or is_set("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
            raise ConfigError(
                "activation_checkpointing_offload is not part of this package. Leave it out; CPU offload of parameters "
                "(offload_params) saves more."
            )
        self.mixed_precision_policy = _as_policy(self.mixed_precision_policy, self.fsdp_version)
        super().__post_init__()
        self.ignored_modules = self.ignored_modules or None
        self.translated = self.policy is None
        self.policy = self.policy or self._translate_wrap()
        self.auto_wrap_policy = None  # `policy` decides, once there is a model
        if self.fsdp_version == 1:
            if on_cpu or rank_on_node()[1] == 1 < world_size(os.environ):
                refuse_copies(self.sharding_strategy or self.reshard_after_forward)
        elif isinstance(self.cpu_offload, CPUOffloadPolicy) and on_cpu:
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator

    def shard_arguments(self, accelerator: Accelerator) -> dict[str, Any]:
        """Keywords of `shard_model` beside the mesh, for an Accelerator with this plugin, which gets our `prepare`."""
        if self.fsdp_version != 2:
            raise ConfigError(
                "The accelerator runs FSDP1, which the plugin, FSDP_VERSION or the launch config asks for, and "
                "from_pretrained shards with FSDP2. Write `fsdp_version: 2` under `fsdp_config`, or pass "
                "fsdp_plugin=HybridFSDPPlugin(fsdp_version=2). Settings of FSDP1 are translated."
            )
        adopt(accelerator, sync_each_batch=False)
        return {
            "mp_policy": self.mixed_precision_policy,
            "offload_policy": self.cpu_offload,
            "activation_checkpointing": self.activation_checkpointing,
        }

    def policy_for(self, model: nn.Module) -> HybridPolicy:
        """`policy` for one model: without layer classes that the model lacks, with its `ignored_modules` kept whole.

        Raises:
            ConfigError: `ignored_modules` matches no module of the model.
        """
        assert self.policy is not None
        policy = narrowed(self.policy, model) if self.translated else self.policy
        return policy if self.fsdp_version == 1 else without_modules(policy, self.ignored_modules, model)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Set the wrap policy for FSDP1; Accelerate calls it before it wraps a model itself.

        Under FSDP2 `policy` decides, once there is a model; a call before there is an Accelerator changes nothing.

        Raises:
            ConfigError: the Accelerator has no `prepare` of this package, or FSDP1 cannot shard the model.
        """
        if self.fsdp_version == 2:
            if not AcceleratorState._shared_state:
                return
            raise ConfigError(
                f"Accelerate is about to wrap {type(model).__name__} by its own rules. In a Trainer, put "
                "FSDPTrainerMixin before the Trainer: class MyTrainer(FSDPTrainerMixin, Trainer). In a loop, make the "
                "Accelerator with make_accelerator(fsdp_plugin=…), or pass it to from_pretrained(…, "
                "accelerator=accelerator) before prepare."
            )
        policy = hybrid_auto_wrap_policy(model, policy=self.policy_for(model))
        self.auto_wrap_policy = policy  # type: ignore[assignment]  # the field takes any callable

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision`, reduce gradients in fp32, cast neither outputs nor buffers."""
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _precision(mixed_precision, self.fsdp_version)

    def _read_as_fsdp2(self, *, is_unversioned: bool) -> None:
        """Translate or drop the settings of FSDP1, in place, and say so once, on rank 0 of each machine."""
        strategy = _value(self, "sharding_strategy")
        values = (_value(self, "reshard_after_forward"), strategy)
        self.reshard_after_forward, has_copies = read_strategies(values, may_copy=is_unversioned)
        self.sharding_strategy = None
        left_out = _drop_fsdp1_settings(self)
        if not is_unversioned:
            if left_out:
                warn_on_node(
                    f"Only FSDP1 has {left_out}. FSDP2 gathers ahead, keeps original parameters and limits memory by "
                    "itself: left out.",
                    stacklevel=4,
                )
            return
        if _value(self, "state_dict_type") == "LOCAL_STATE_DICT":
            self.state_dict_type = "SHARDED_STATE_DICT"
        size = rank_on_node()[1]
        machines = world_size(os.environ) // size
        means = f"reshard_after_forward={self.reshard_after_forward}"
        if has_copies and machines > 1:
            self.copies = ParallelismConfig(dp_replicate_size=machines, dp_shard_size=size)
            means += f" in {machines} copies, one per machine"
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(
                "The launch config has no fsdp_version, as `accelerate config` wrote it for years, and is read as "
                f"FSDP2: {strategy_name(strategy or 'FULL_SHARD')} means {means}; "
                f"{f'left out: {left_out}' if left_out else 'the rest means the same'}. `hf-fsdp config --from FILE "
                "--output NEW` writes the file for FSDP2; HybridFSDPPlugin(fsdp_version=1) asks for FSDP1.",
                stacklevel=4,
            )

    def _translate_wrap(self) -> HybridPolicy:
        wrap = getattr(getattr(self.auto_wrap_policy, "func", self.auto_wrap_policy), "__name__", "")
        names, size = self.transformer_cls_names_to_wrap or (), self.min_num_params or 0
        idle = []
        if names and wrap != "transformer_auto_wrap_policy":
            idle.append(f"transformer_cls_names_to_wrap={','.join(names)} has effect only with TRANSFORMER_BASED_WRAP")
        if size and wrap != "size_based_auto_wrap_policy":
            idle.append(f"min_num_params={size} has effect only with SIZE_BASED_WRAP")
        if idle:
            warn_on_node(f"{'; '.join(idle)}. Set auto_wrap_policy so.", stacklevel=4)
        reshard = self.reshard_after_forward is not False
        return policy_from_wrap(self.auto_wrap_policy, class_names=names, min_num_params=size, reshard=reshard)


def _read_version(version: int | None) -> tuple[int, bool]:
    """The version of FSDP, and whether a config that names none was launched.

    `accelerate launch` takes a file without `fsdp_version` for version 1, and the processes see the same variables as
    for a file that says 1. Only files that know of versions give FSDP1 its strategy as `fsdp_reshard_after_forward`;
    with others the launcher leaves that at true, which FSDP1 does not have.
    """
    text = str(os.environ.get("FSDP_VERSION", "2") if version is None else version).strip()
    if text not in ("1", "2"):
        raise ConfigError(
            f"fsdp_version is {text}: use 2 (fully_shard), or 1 (FullyShardedDataParallel, deprecated in PyTorch)."
        )
    is_open = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() in ("true", "false")
    is_unversioned = version is None and text == "1" and is_open and is_by_launcher()
    return (2 if is_unversioned else int(text)), is_unversioned


def _value(plugin: Any, name: str) -> Any:
    """A setting of the plugin, else of its variable; words in upper case."""
    value = getattr(plugin, name)
    text = os.environ.get(next(row.variable for row in SETTINGS if row.argument == name) or "")
    if value is None and text:
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    value = getattr(value, "name", value)
    return value.upper() if isinstance(value, str) else value


def _drop_fsdp1_settings(plugin: Any) -> str:
    """Unset the plugin's settings of FSDP1 alone, in place; return those whose values differ from FSDP2's."""
    left_out = []
    for row in SETTINGS:
        if row.argument and row.is_old:
            if (value := _value(plugin, row.argument)) not in (None, row.fsdp2):
                shown = getattr(getattr(plugin, row.argument), "name", getattr(plugin, row.argument))
                left_out.append(f"{row.argument}={value if shown is None else shown}")
            setattr(plugin, row.argument, True if row.argument == "limit_all_gathers" else None)
    return ", ".join(left_out)


def _as_policy(policy: Any, version: int) -> Any:
    """`mixed_precision_policy` as a policy object: Accelerate also takes a name, or a mapping of dtypes."""
    if isinstance(policy, str):
        return _precision(policy, version)
    if not isinstance(policy, Mapping):
        return policy
    kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(policy) - known):
        raise ConfigError(
            f"mixed_precision_policy has no {', '.join(unknown)}; FSDP{version} takes {', '.join(sorted(known))}."
        )
    values: dict[str, Any] = {n: _dtype(v) if n.endswith("dtype") else v for n, v in policy.items()}
    return kind(**values)


def _precision(name: Any, version: int) -> MixedPrecisionPolicy | MixedPrecision:
    dtype = None if name in (None, "no") else _dtype(name)
    if version == 1:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)  # for bf16 weights without a policy too


def _dtype(name: Any) -> torch.dtype | None:
    dtype = (LOW_PRECISION | {"fp32": torch.float32}).get(name, name)
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"mixed precision {name!r} is not supported. Use no, bf16, fp16 or fp32.")
    return dtype
