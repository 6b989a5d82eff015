"""Wrap a model by plan with FSDP1, on meta or with weights, and fill it from a checkpoint."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from hf_fsdp_tools.distributed.agreement import all_ranks, same_on_all_ranks
from hf_fsdp_tools.distributed.mesh import ensure_process_group, local_device
from hf_fsdp_tools.errors import ConfigError, WrapPlanError, frames_of_package
from hf_fsdp_tools.fsdp1.flat_shards import plain_view, replicas_of
from hf_fsdp_tools.fsdp1.policy import HybridAutoWrapPolicy, hybrid_auto_wrap_policy
from hf_fsdp_tools.fsdp1.precision import cast_where_computed
from hf_fsdp_tools.loading.conversion import copy_conversions
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.report import LoadReport, MemoryWatch
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.allocate import with_storage
from hf_fsdp_tools.sharding.replicated import average_gradients
from hf_fsdp_tools.text import listed

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The group to shard over; for hybrid strategies (shard group, replicate group)."""

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard within a group and replicate between groups."""


def wrap_fsdp1(
    model: nn.Module,
    plan: WrapPlan,
    *,
    process_group: ProcessGroups | None = None,
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    device_id: torch.device | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    initialize: bool = True,
    seed: int = 0,
) -> FullyShardedDataParallel:
    """Wrap `model` by `plan` with FSDP1, on meta or with real weights, and return the wrapper.

    A meta model gets storage unit by unit, so that a rank never holds more than its shards and one unit (twice, while
    FSDP1 flattens it), and then the model's own initialisation: values depend on `seed` only, not on the number of
    ranks, and tied parameters stay tied. Make the optimizer afterwards.

    Args:
        model: not wrapped yet, in evaluation or training mode.
        plan: from `make_wrap_plan` of this model.
        process_group: over which to shard; None means all processes. Hybrid strategies: (shard group, replicate group).
        sharding_strategy, mixed_precision, cpu_offload, backward_prefetch, forward_prefetch, limit_all_gathers: as in
            FSDP1; but mixed precision casts inputs where modules compute with weights, and no labels, counts or masks
            that enter the root.
        device_id: this rank's device; None means its accelerator, or the CPU where there is none (gloo).
        use_orig_params: keep the original parameters, which LoRA and parameter groups need.
        sync_module_states: broadcast the weights of rank 0, which alone must be real; accelerators only.
        param_init_fn: gives a module's own meta tensors storage and values; None means as described above.
        initialize: False leaves the storage of a meta model uninitialised, to be filled by `load_weights_fsdp1`.
        seed: of the initialisation.

    Every rank must call. The ranks exchange a digest of plan and arguments; with `sync_module_states`, rank 0
    broadcasts the weights.

    Raises:
        WrapPlanError: the plan does not fit the model or FSDP1.
        ConfigError: plan or arguments differ between ranks; or torch cannot honour a setting here, or would silently
            honour it wrongly.
        CheckpointError: the model's own code leaves a parameter uninitialised; pass `initialize=False` and load a
            checkpoint.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> mesh = ParallelDims().build_mesh("cpu")  # starts a process group where there is none
        >>> wrapped = wrap_fsdp1(model, make_wrap_plan(model), seed=0)
        >>> type(wrapped).__name__
        'FullyShardedDataParallel'
    """
    _warn_deprecated()
    device = device_id or local_device()
    if process_group is None:
        ensure_process_group(device.type)
    _refuse_settings(device, process_group, sharding_strategy, cpu_offload, sync_module_states)
    policy = hybrid_auto_wrap_policy(model, plan=plan)
    _check_requires_grad(policy, model, use_orig_params)
    meta_keys = _meta_keys(model)
    same_on_all_ranks(
        "wrapping the model",
        plan=plan,
        sharding_strategy=sharding_strategy,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        use_orig_params=use_orig_params,
        sync_module_states=sync_module_states,
        initialize=initialize,
        seed=seed,
    )
    _agree_on_storage(has_meta=bool(meta_keys), sync_module_states=sync_module_states)
    ignored = _place_ignored(model, policy, device)
    with warnings.catch_warnings():  # torch says per unit what _check_requires_grad said once
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad", category=UserWarning)
        wrapped = FullyShardedDataParallel(
            model,
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=policy.as_custom_policy(sharding_strategy),
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn or _storage_giver(policy, device),
            device_id=device,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored or None,
        )
    cast_where_computed(wrapped)
    if meta_keys and initialize and param_init_fn is None and not sync_module_states:
        initialize_missing(plain_view(wrapped), missing_keys=meta_keys, seed=seed)
    groups = (wrapped.process_group, replicas_of(wrapped))
    average_gradients(ignored, [group for group in groups if group is not None])
    return wrapped


def load_weights_fsdp1(
    model: nn.Module, path_or_repo: str | PathLike[str] | CheckpointIndex, **options: Any
) -> LoadReport:
    """Fill a model wrapped with FSDP1 from a Hugging Face checkpoint, in place; each rank reads its own flat shards.

    The result equals `from_pretrained` bit for bit. Nothing is gathered.

    Args:
        model: wrapped by `wrap_fsdp1(…, initialize=False)`, or by FSDP1 in any other way; dtypes stay as they are.
        path_or_repo: as in `load_weights`.
        options: as in `load_weights`, without `dtype` and `device`: the flat shards have storage already.

    Every rank must call. The ranks exchange errors and the figures of the report.

    Raises:
        CheckpointError: as in `load_weights`.
        ConfigError: the model is not wrapped with FSDP1, a unit is gathered at the moment, or `options` holds `dtype`
            or `device`.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> mesh = ParallelDims().build_mesh("cpu")  # starts a process group where there is none
        >>> wrapped = wrap_fsdp1(model, make_wrap_plan(model), initialize=False)
        >>> load_weights_fsdp1(wrapped, "checkpoint", progress=False).missing_keys
        ()
    """
    if needless := sorted({"dtype", "device"} & options.keys()):
        raise ConfigError(
            f"{' and '.join(needless)} cannot be changed: the flat parameters have storage already. Build the meta "
            "model with build_meta_model(dtype=…) and wrap it with wrap_fsdp1(device_id=…)."
        )
    view = plain_view(model)
    watch = MemoryWatch()
    report = load_weights(view, path_or_repo, **options)
    copy_conversions(view, next(module for module in model.modules() if type(module) is type(view)))
    return replace(report, peak_host_bytes=watch.above(0))  # the shards had storage before


# ---- checks ----


@functools.cache  # once per process
def _warn_deprecated() -> None:
    warnings.warn(
        "FSDP1 (FullyShardedDataParallel) is deprecated in PyTorch. It works here, but FSDP2 (shard_model) is the "
        "default and the only one that gets new features.",
        FutureWarning,
        stacklevel=frames_of_package(),
    )


def _refuse_settings(
    device: torch.device,
    process_group: ProcessGroups | None,
    strategy: ShardingStrategy,
    cpu_offload: CPUOffload | None,
    sync_module_states: bool,
) -> None:
    problems = []
    if device.type == "meta" or (device.type == "cpu" and device.index is not None):
        problems.append(f"device_id is {device}: FSDP1 knows the CPU as torch.device('cpu'), without an index.")
    if strategy in _HYBRID and dist.get_world_size() > 1:
        # Without groups, torch shards over the devices of one machine; it counts one for the CPU.
        count = 1 if device.type == "cpu" else torch.accelerator.device_count()
        size = dist.get_world_size(process_group[0]) if isinstance(process_group, tuple) else count
        if size == 1:
            problems.append(
                f"sharding_strategy {strategy.name} with a shard group of {size}: torch then stops averaging gradients "
                "without a word (pytorch issue 154888). Give process_group=(shard group of 2 or more, replicate "
                "group), use FULL_SHARD, or FSDP2 with ParallelDims(dp_replicate_size=…)."
            )
    if sync_module_states and device.type == "cpu":
        problems.append(
            "sync_module_states is True on the CPU, where torch cannot broadcast the weights. Build the model on meta "
            "on every rank (the initialisation is the same on all), or load the same checkpoint on every rank, and "
            "leave it False."
        )
    if cpu_offload is not None and cpu_offload.offload_params and device.type == "cpu":
        problems.append(
            "cpu_offload is on, but the model computes on the CPU already, and torch cannot pin memory without an "
            "accelerator. Leave cpu_offload None."
        )
    if problems:
        raise ConfigError("wrap_fsdp1: " + "\n".join(problems))


def _check_requires_grad(policy: HybridAutoWrapPolicy, model: nn.Module, use_orig_params: bool) -> None:
    """Check units that hold trainable and frozen parameters: warn, or refuse without `use_orig_params`."""
    mixed = policy.mixed_requires_grad()
    if not mixed:
        return
    if not use_orig_params:
        rows = [
            f"{unit or '(root)'} ({len(trained)} trainable, as {trained[0]}; {len(frozen)} frozen, as {frozen[0]})"
            for unit, (trained, frozen) in mixed.items()
        ]
        raise WrapPlanError(
            f"use_orig_params is False, but {len(mixed)} units mix trainable and frozen parameters: {listed(rows)}. "
            "Pass use_orig_params=True, freeze or train each unit as a whole, give the trainable modules units of "
            "their own (HybridPolicy(units=…)), or use FSDP2 (shard_model)."
        )
    frozen = sum(model.get_parameter(name).numel() for _, names in mixed.values() for name in names)
    warnings.warn(
        f"{len(mixed)} units hold trainable beside frozen parameters. FSDP1 reduces the gradient of a unit as a whole, "
        f"so {frozen:,} frozen parameters take gradient memory too while their unit runs backward. FSDP2 (shard_model) "
        "does not.",
        UserWarning,
        stacklevel=frames_of_package(),
    )


def _agree_on_storage(*, has_meta: bool, sync_module_states: bool) -> None:
    """Refuse ranks of which some have the model on meta and others not; the same on every rank."""
    told = all_ranks(has_meta, "wrapping the model")
    on_meta = [rank for rank, is_on_meta in enumerate(told) if is_on_meta]
    if sync_module_states and told[0]:
        raise ConfigError(
            "sync_module_states is True, but the model of rank 0, whose weights all ranks would get, is on meta "
            "itself. Leave it False: each rank then initialises the same values."
        )
    if not sync_module_states and on_meta and len(on_meta) < len(told):
        raise ConfigError(
            f"The model is on meta on ranks {listed(on_meta)} and has weights on the others. Pass "
            "sync_module_states=True to take those of rank 0 (accelerators only), or build it on meta on every rank."
        )


# ---- storage ----


def _meta_keys(model: nn.Module) -> set[str]:
    """One state-dict key of every distinct tensor on meta."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            first.setdefault(id(tensor), name)
    return set(first.values())


def _storage_giver(policy: HybridAutoWrapPolicy, device: torch.device) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives a module's own meta tensors uninitialised storage; tied tensors stay one tensor."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def give_storage(module: nn.Module) -> None:
        if policy.begins_unit(module):  # FSDP1 asks for a unit's own module first, and ties never leave a unit
            made.clear()  # otherwise whole tensors would stay alive here after they are sharded
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = with_storage(tensor, device=device)
                        made[tensor].data = made[tensor].data.contiguous()  # flat parameters know row-major order only
                    store[name] = made[tensor]

    return give_storage


def _place_ignored(model: nn.Module, policy: HybridAutoWrapPolicy, device: torch.device) -> list[nn.Parameter]:
    """Move the parameters that FSDP1 ignores to the device, and give them; before FSDP1 notes their identities."""
    for parameter in policy.ignored_states:
        placed = with_storage(parameter, device=device) if parameter.is_meta else None
        for module in model.modules():
            for name, other in module._parameters.items():
                if other is parameter and placed is not None:
                    module._parameters[name] = placed  # type: ignore[assignment]  # holds a Parameter
        if placed is None:
            parameter.data = parameter.data.to(device)
    return policy.ignored_states
