"""Wrap a model by plan with FSDP1, on meta or with weights, and fill it from a checkpoint."""

import functools
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.distributed.agreement import same_on_all_ranks
from hf_fsdp_tools.distributed.mesh import ensure_process_group, local_device
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.extensions.fsdp1.flat_shards import flat_shares, plain_view
from hf_fsdp_tools.extensions.fsdp1.policy import HybridAutoWrapPolicy, hybrid_auto_wrap_policy
from hf_fsdp_tools.loading.conversion import copy_conversions
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.report import LoadReport, MemoryWatch
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.module_tree import swap
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.allocate import with_storage
from hf_fsdp_tools.sharding.precision import cast_inputs


def wrap_fsdp1(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device_id: torch.device | None = None,
    use_orig_params: bool = True,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    initialize: bool = True,
    seed: int = 0,
    **options: Any,
) -> FullyShardedDataParallel:
    """Wrap `model` by `plan` with FSDP1, on meta or with real weights, and return the wrapper.

    A meta model gets storage unit by unit (a rank holds its shards and one unit, twice while FSDP1 flattens it), and
    then the model's own initialisation, which depends on `seed` only. Make the optimizer afterwards.

    Args:
        plan: from `make_wrap_plan` of this model, which is not wrapped yet.
        device_id: this rank's device; None means its accelerator, or the CPU.
        use_orig_params: keep the original parameters, which LoRA and parameter groups need.
        param_init_fn: gives a module's own meta tensors storage and values; None means as described above.
        initialize: False leaves the storage of a meta model uninitialised, to be filled by `load_weights_fsdp1`.
        options: of `FullyShardedDataParallel`; mixed precision casts inputs where modules compute, and no labels.

    Every rank must call. The ranks compare arguments; with `sync_module_states`, rank 0 broadcasts the weights.

    Raises:
        WrapPlanError: the plan does not fit the model or FSDP1.
        ConfigError: plan or arguments differ between ranks, or torch would silently average no gradients.
        CheckpointError: the model's own code leaves a parameter uninitialised.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> mesh = ParallelDims().build_mesh("cpu")  # starts a process group where there is none
        >>> wrapped = wrap_fsdp1(model, make_wrap_plan(model), seed=0)
        >>> type(wrapped).__name__
        'FullyShardedDataParallel'
    """
    _warn_deprecated()
    device, group = device_id or local_device(), options.get("process_group")
    broadcasts = options.get("sync_module_states", False)
    if group is None:
        ensure_process_group(device.type)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()  # torch shards over those of one machine
    shard_ranks = dist.get_world_size(group[0]) if isinstance(group, tuple) else count
    if shard_ranks == 1 < dist.get_world_size():
        refuse_copies(options.get("sharding_strategy"))
    policy = hybrid_auto_wrap_policy(model, plan=plan)
    state = reversed(model.state_dict(keep_vars=True).items())  # of tied tensors, the first name counts
    on_meta = {id(value): key for key, value in state if isinstance(value, torch.Tensor) and value.is_meta}
    values = {name: value for name, value in options.items() if name != "process_group"}
    values |= {"plan": plan, "use_orig_params": use_orig_params, "initialize": initialize, "seed": seed}
    same_on_all_ranks("wrapping the model", is_on_meta=None if broadcasts else bool(on_meta), **values)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        param_init_fn=param_init_fn or _storage_giver(policy, device),
        device_id=device,
        use_orig_params=use_orig_params,
        **options,
    )
    cast_where_computed(wrapped)
    if on_meta and initialize and param_init_fn is None and not broadcasts:
        initialize_missing(plain_view(wrapped), missing_keys=set(on_meta.values()), seed=seed)
    return wrapped


def load_weights_fsdp1(
    model: nn.Module, path_or_repo: str | PathLike[str] | CheckpointIndex, **options: Any
) -> LoadReport:
    """Fill a model wrapped with FSDP1 from a Hugging Face checkpoint, in place; each rank reads its own flat shards.

    The result equals `from_pretrained` bit for bit. Nothing is gathered.

    Args:
        model: wrapped by `wrap_fsdp1(…, initialize=False)`, or by FSDP1 in any other way; dtypes stay as they are.
        options: as in `load_weights`, as is `path_or_repo`; without `dtype` and `device`.

    Every rank must call. The ranks exchange errors and the figures of the report.

    Raises:
        CheckpointError: as in `load_weights`.
        ConfigError: the model is not wrapped with FSDP1, or a unit is gathered; `options` holds `dtype` or `device`.

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


def refuse_copies(strategy: Any) -> None:
    """Refuse HYBRID_SHARD over shard groups of one rank, where torch stops averaging gradients."""
    if "HYBRID" in getattr(strategy, "name", "").upper():
        raise ConfigError(
            f"FSDP1: sharding strategy {strategy.name} with a shard group of 1 stops averaging gradients (pytorch "
            "issue 154888). Use FULL_SHARD, larger shard groups, or FSDP2 with dp_replicate_size."
        )


@functools.cache  # once per process
def _warn_deprecated() -> None:
    warn(
        "FSDP1 (FullyShardedDataParallel) is deprecated in PyTorch. It works here, but FSDP2 (shard_model) is the "
        "default and the only one that gets new features.",
        FutureWarning,
    )


def _storage_giver(policy: HybridAutoWrapPolicy, device: torch.device) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives a module's own meta tensors uninitialised storage; tied tensors stay one tensor."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def give_storage(module: nn.Module) -> None:
        if policy.begins_unit(module):  # FSDP1 asks for a unit's own module first, and ties never leave a unit
            made.clear()  # otherwise whole tensors would stay alive here after they are sharded
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_meta and tensor not in made:
                made[tensor] = with_storage(tensor, device=device)
                made[tensor].data = made[tensor].data.contiguous()  # flat parameters know row-major order only
        swap(module, made)

    return give_storage


def cast_where_computed(root: FullyShardedDataParallel) -> None:
    """Let units and modules of the root cast their inputs; FSDP1 casts each float that enters the root, labels too."""
    dtype = root.mixed_precision.param_dtype
    if dtype is None or not root.mixed_precision.cast_root_forward_inputs:
        return
    root.mixed_precision = replace(root.mixed_precision, cast_root_forward_inputs=False)
    dtypes = {module: dtype for places, _ in flat_shares(root) for module, _ in places}
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    dtypes |= {unit: unit.mixed_precision.param_dtype for unit in units}
    for module, dtype in dtypes.items():
        if module is not root and dtype is not None:
            module.register_forward_pre_hook(functools.partial(cast_inputs, dtype=dtype), with_kwargs=True)
