"""Apply a wrap plan to a model with FSDP2: activation checkpointing first, then every unit, the root last."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import ConfigError, WrapPlanError
from hf_fsdp_tools.mesh import ParallelDims
from hf_fsdp_tools.sizes import show_bytes
from hf_fsdp_tools.wrap import WrapPlan, check_wrap_plan

__all__ = ["Sharding", "agree_on_plan", "apply_sharding", "describe_sharding", "shard_model", "sharding_of"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model was sharded: what `shard_model` was given, as a value that can be printed."""

    plan: WrapPlan
    """What is gathered together."""

    mesh: DeviceMesh
    """The mesh over which it is sharded, and replicated where the mesh has two axes."""

    mp_policy: MixedPrecisionPolicy
    """The dtypes of computation and of gradient reduction."""

    offload_policy: OffloadPolicy
    """Whether the shards live on the CPU between uses."""

    activation_checkpointing: bool
    """Whether the blocks recompute their activations in the backward pass."""

    @property
    def device(self) -> torch.device:
        """Where the shards live: the mesh's device, or the CPU under CPU offload."""
        offloaded = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu" if offloaded else self.mesh.device_type)


def shard_model(
    model: nn.Module,
    plan: WrapPlan,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool = False,
) -> nn.Module:
    """Shard `model` by `plan` with FSDP2, in place, and return the same model.

    A model on meta stays on meta, with DTensor parameters that know their shards (`load_weights` then fills them); a
    model with real weights, equal on every rank, keeps each rank's slices. Make the optimizer afterwards.

    Args:
        plan: from `make_wrap_plan` of this model or of one of the same structure.
        mesh: one axis for FSDP, two (replicate, shard) for HSDP; None means FSDP over all processes.
        mp_policy: dtypes of computation and reduction; None computes in each parameter's own dtype.
        offload_policy: `CPUOffloadPolicy()` keeps shards on the CPU; None keeps them on the device.
        activation_checkpointing: recompute each block's activations in the backward pass (non-reentrant), which saves
            memory for about a third more computation. Turns `use_cache` off.

    Every rank of the mesh must call. The ranks exchange the plan's digest (64 bytes each) before anything is sharded.

    Raises:
        WrapPlanError: the plan breaks a rule for this model, or differs between ranks.
        ConfigError: the model is sharded already, or cannot checkpoint activations.
    """
    if isinstance(model, FSDPModule):
        raise ConfigError(f"{type(model).__name__} is sharded already. Build a new model, or use this one as it is.")
    if problems := check_wrap_plan(model, plan):
        raise WrapPlanError(f"The plan does not fit {type(model).__name__}: " + "; ".join(problems))
    mesh = _without_names(mesh if mesh is not None else ParallelDims().build_mesh())
    agree_on_plan(plan, mesh)
    if activation_checkpointing:
        _checkpoint_activations(model)
    sharding = Sharding(
        plan=plan,
        mesh=mesh,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
        activation_checkpointing=activation_checkpointing,
    )
    apply_sharding(model, sharding)
    return model


def sharding_of(model: nn.Module) -> Sharding | None:
    """How `shard_model` sharded this model (looked for below PEFT and compile wrappers too); None if it did not."""
    for module in model.modules():
        sharding = module.__dict__.get("_fsdp_sharding")
        if isinstance(sharding, Sharding):
            return sharding
    return None


def describe_sharding(model: nn.Module) -> str:
    """The plan of a sharded model, its mesh, its precisions, and what this rank holds, as a short text.

    No rank communicates.

    Raises:
        ConfigError: `shard_model` did not shard this model.
    """
    sharding = sharding_of(model)
    if sharding is None:
        raise ConfigError(f"{type(model).__name__} was not sharded by shard_model, so there is no plan to describe.")
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    weights = sorted({_dtype_name(p.dtype) for p in parameters})
    compute = sharding.mp_policy.param_dtype
    reduce = sharding.mp_policy.reduce_dtype or compute
    held = sum(_local_bytes(p) for p in parameters)
    axes = zip(sharding.mesh.mesh_dim_names or ("dp_shard",), sharding.mesh.shape, strict=True)
    lines = [
        str(sharding.plan),
        f"mesh         {', '.join(f'{name} {size}' for name, size in axes)} on {sharding.mesh.device_type}",
        f"weights      {' and '.join(weights)}, {show_bytes(held)} on this rank"
        + (" (kept on the CPU between uses)" if sharding.device.type != sharding.mesh.device_type else ""),
        f"computation  {_dtype_name(compute) if compute else 'in the dtype of the weights'}",
        f"reduction    {_dtype_name(reduce) if reduce else 'in the dtype of the weights'}",
        f"activations  {'recomputed block by block' if sharding.activation_checkpointing else 'kept'}",
    ]
    return "\n".join(lines)


def _without_names(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh, of the same process group, with no name for its axis where it spans all processes.

    PEFT (0.21) takes a Linear on a mesh with a name other than "fsdp" for tensor parallel, and would give its adapter the
    shape of this rank's shard. Two axes must keep their names, for FSDP2.
    """
    if mesh.ndim > 1 or mesh.mesh_dim_names is None or mesh.size() != dist.get_world_size():
        return mesh
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh=mesh.mesh)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def agree_on_plan(plan: WrapPlan, mesh: DeviceMesh) -> None:
    """Ranks with different plans would call unequal collectives and hang: stop them all with one message instead."""
    if dist.get_backend() == "fake" or mesh.size() == 1:
        return
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise WrapPlanError(
            f"The wrap plan differs between ranks: rank 0 has {digests[0][:12]}, "
            + ", ".join(f"rank {rank} has {digests[rank][:12]}" for rank in odd[:8])
            + ". Build the same model with the same policy on every rank; compare `plan.to_json()` of each."
        )


def _checkpoint_activations(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} cannot checkpoint activations (supports_gradient_checkpointing is not set). "
            "Turn activation_checkpointing off, or wrap its blocks with torch's checkpoint_wrapper before sharding."
        )
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # transformers' own
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # transformers' own
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a cache would keep what is to be recomputed


def apply_sharding(model: nn.Module, sharding: Sharding) -> None:
    """Shard `model` as `sharding` says, in place: what `shard_model` does once all is checked. Nothing is communicated."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replicated = {parameters[fqn] for fqn in sharding.plan.replicated}
    for unit in sharding.plan.units:
        members = [modules[fqn] for fqn in unit.modules]
        fully_shard(
            members[0] if len(members) == 1 else members,
            mesh=sharding.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=sharding.mp_policy,
            offload_policy=sharding.offload_policy,
            ignored_params=replicated or None,
        )
    for parameter in replicated:
        if parameter.requires_grad:
            hook = partial(_average_gradient, mesh=sharding.mesh)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    for module in model.modules():
        # transformers' own mark: `generate` goes on until every rank has finished, and layer drop runs each layer
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    model.register_forward_hook(_reshard_after_evaluation)
    made = _count_units(model.modules())
    assert made == len(sharding.plan.units), f"planned {len(sharding.plan.units)} units, FSDP2 made {made}"
    model._fsdp_sharding = sharding  # type: ignore[assignment]  # a plain attribute of our own


def _reshard_after_evaluation(model: nn.Module, args: object, output: object) -> None:
    """After a forward pass without gradients, shard what FSDP2 keeps gathered for a backward pass (the tail, the root).

    None comes, and until then `model.parameters()` would be the gathered tensors: an optimizer made after an evaluation
    would train copies that FSDP2 throws away.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _average_gradient(parameter: torch.Tensor, *, mesh: DeviceMesh) -> None:
    """FSDP2 does not reduce what it does not shard. Averaging after every micro-batch is right under accumulation too:
    what was averaged before is equal on all ranks, and averaging equals leaves them as they are."""
    assert parameter.grad is not None
    for axis in range(mesh.ndim):
        dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
    parameter.grad /= mesh.size()


def _count_units(modules: Iterable[nn.Module]) -> int:
    return len({module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)})
