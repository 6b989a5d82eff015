"""Accelerate's FSDP plugin with a `HybridPolicy`, and with gradients reduced in fp32."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_tools.distributed.launcher import world_size
from hf_fsdp_tools.distributed.mesh import ParallelDims, local_device, rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.fsdp1.under_accelerate import check_settings
from hf_fsdp_tools.integrations.accelerator import adopt
from hf_fsdp_tools.integrations.launched import read_unversioned, read_version
from hf_fsdp_tools.integrations.model import LOW_PRECISION
from hf_fsdp_tools.integrations.settings import (
    drop_fsdp1_settings,
    is_set,
    reshard_after_forward,
    warn_of_fsdp1_settings,
    warn_of_idle_wrap_settings,
    warn_of_unknown_variables,
    warn_on_node,
)
from hf_fsdp_tools.integrations.wrapping import narrowed, policy_from_wrap, without_modules
from hf_fsdp_tools.planning.policy import HybridPolicy


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
        self.is_given = True  # by a script; False where variables or TrainingArguments alone made it
        warn_of_unknown_variables()
        self.fsdp_version, unversioned = read_version(self.fsdp_version)
        self.copies: ParallelismConfig | None = None  # that the launch config asks for by HYBRID_SHARD
        on_cpu = local_device().type == "cpu"
        if unversioned:
            self.copies = read_unversioned(self)
        elif self.fsdp_version == 2:
            self.reshard_after_forward = reshard_after_forward(self)
            self.sharding_strategy = None
            warn_of_fsdp1_settings(drop_fsdp1_settings(self))
        else:
            self._prefer_what_fsdp1_can(on_cpu=on_cpu)
        if self.activation_checkpointing_offload or is_set("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
            raise ConfigError(
                "activation_checkpointing_offload is not part of this package. Leave it out; CPU offload of parameters "
                "(offload_params) saves more."
            )
        self.mixed_precision_policy = _as_given(self.mixed_precision_policy, self.fsdp_version)
        super().__post_init__()
        self.ignored_modules = self.ignored_modules or None
        self.translated = self.policy is None
        self.policy = self.policy or self._translate_wrap()
        self.auto_wrap_policy = None  # `policy` decides, once there is a model
        if self.fsdp_version == 1:
            alone = rank_on_node()[1] == 1 < world_size(os.environ)
            check_settings(self, on_cpu=on_cpu, alone_on_node=alone)
        elif isinstance(self.cpu_offload, CPUOffloadPolicy) and on_cpu:
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator

    def adopt(self, accelerator: Accelerator) -> None:
        """Give an `Accelerator(fsdp_plugin=HybridFSDPPlugin())` our `prepare`, in place."""
        adopt(accelerator, sync_each_batch=False)

    def shard_arguments(self, accelerator: Accelerator, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """Keywords of `shard_model` for an Accelerator with this plugin, which gets our `prepare`, in place.

        Every rank must call: a mesh may be made. `mesh` stands in for the Accelerator's own, which is FSDP over all
        processes where it has no parallelism config.

        Raises:
            ConfigError: the plugin runs FSDP1.
        """
        if self.fsdp_version != 2:
            raise ConfigError(
                "The accelerator runs FSDP1, which the plugin, FSDP_VERSION or the launch config asks for, and "
                "from_pretrained shards with FSDP2. Write `fsdp_version: 2` under `fsdp_config`, or pass "
                "fsdp_plugin=HybridFSDPPlugin(fsdp_version=2). Settings of FSDP1 are translated."
            )
        adopt(accelerator, sync_each_batch=False)
        if mesh is None and (config := accelerator.parallelism_config):
            mesh = accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
        return {
            "mesh": mesh if mesh is not None else ParallelDims().build_mesh(accelerator.device.type),
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
        if policy.ignored:
            raise ConfigError(
                f"FSDP1 cannot shard {', '.join(policy.ignored)}, and Accelerate cannot leave single parameters out. "
                "Use fsdp_version 2, or wrap_fsdp1(model, plan) in place of prepare."
            )
        self.auto_wrap_policy = policy  # type: ignore[assignment]  # the field takes any callable

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision`, reduce gradients in fp32, cast neither outputs nor buffers."""
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _precision(mixed_precision, self.fsdp_version)

    def _translate_wrap(self) -> HybridPolicy:
        warn_of_idle_wrap_settings(self)
        return policy_from_wrap(
            self.auto_wrap_policy,
            class_names=self.transformer_cls_names_to_wrap or (),
            min_num_params=self.min_num_params or 0,
            reshard=self.reshard_after_forward is not False,
        )

    def _prefer_what_fsdp1_can(self, *, on_cpu: bool) -> None:
        """Turn off RAM-efficient loading, and change defaults with which FSDP1 crashes on CPUs."""
        if self.cpu_ram_efficient_loading or is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            warn_on_node(
                "cpu_ram_efficient_loading is off under FSDP1: every rank reads the model. FSDP2 honours it.",
                stacklevel=4,
            )
        self.cpu_ram_efficient_loading = False
        if on_cpu and (self.sync_module_states or is_set("FSDP_SYNC_MODULE_STATES")):
            warn_on_node(
                "sync_module_states is off on CPUs, where torch's FSDP1 cannot send weights: each rank trains the "
                "weights that it loaded itself.",
                stacklevel=4,
            )
        if on_cpu:
            self.sync_module_states = False
        if on_cpu and "FSDP_STATE_DICT_TYPE" not in os.environ:
            self.state_dict_type = self.state_dict_type or "SHARDED_STATE_DICT"  # FULL_STATE_DICT crashes on CPUs


def _as_given(policy: Any, version: int) -> Any:
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
