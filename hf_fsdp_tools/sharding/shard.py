"""Shard a model by a wrap plan with FSDP2: activation checkpointing first, then every unit, the root last."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed_steps, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend
from hf_fsdp_tools.distributed.mesh import Axes, ParallelDims, axes_of
from hf_fsdp_tools.errors import ConfigError, WrapPlanError, warn
from hf_fsdp_tools.modeling.meta import kept_in_fp32
from hf_fsdp_tools.modeling.module_tree import ModuleTree, has_forward, slots, swap
from hf_fsdp_tools.modeling.notes import add_to_note, note_of
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.rules import broken_rules
from hf_fsdp_tools.planning.stacks import find_blocks, lists_of_experts
from hf_fsdp_tools.sharding.alike import drifted
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.checks import check_first_pass, check_parameters, never_called
from hf_fsdp_tools.sharding.compile import (
    as_compile,
    as_mesh,
    as_mp_policy,
    as_offload_policy,
    check_options,
    compile_blocks,
)
from hf_fsdp_tools.sharding.context_parallel import check_rows, share_rows
from hf_fsdp_tools.sharding.float8 import check_float8, convert_to_float8, gather_float8
from hf_fsdp_tools.sharding.fsdp2_internals import (
    bytes_sharded,
    copy_released,
    gather_as_stored,
    reshard_units,
    use_own_entries,
)
from hf_fsdp_tools.sharding.habits import guard_habits
from hf_fsdp_tools.sharding.hf_interface import mark_for_transformers, turn_cache_off
from hf_fsdp_tools.sharding.hooks import add_hooks, share_buffers
from hf_fsdp_tools.sharding.injection import guard_injection
from hf_fsdp_tools.sharding.parallel import divide_by, is_parallel, parallel_parameters, placeholder
from hf_fsdp_tools.sharding.placement import check_partial_resharding, choose_placement, warn_of_padding
from hf_fsdp_tools.sharding.recompute import (
    Recompute,
    as_recompute,
    check_checkpointing,
    check_host,
    checkpoint_activations,
)
from hf_fsdp_tools.sharding.replicated import average_gradients
from hf_fsdp_tools.sharding.skipped import join_skipped
from hf_fsdp_tools.sharding.vocabulary_parallel import divide_loss
from hf_fsdp_tools.text import dtype_name, listed


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model was sharded: the arguments of `shard_model`, as a value that can be printed."""

    plan: WrapPlan
    """The units."""
    axes: Axes
    """What the axes of the whole mesh are for."""
    mp_policy: MixedPrecisionPolicy
    """The dtypes of computation and of gradient reduction."""
    offload_policy: OffloadPolicy
    """Whether the shards live on the CPU between uses."""
    activation_checkpointing: Recompute | None = None
    """Which blocks recompute their activations in the backward pass, and what they keep; None where none do."""
    compile: Mapping[str, Any] | None = None
    """Options of `torch.compile` for the blocks; None where they are not compiled."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the shards: one axis for FSDP, (replicate, shard) for HSDP."""
        return self.axes.shards

    @property
    def device(self) -> torch.device:
        """The device of the shards: the mesh's, or the CPU under CPU offload."""
        offloaded = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu" if offloaded else self.mesh.device_type)


_OF_RECURRENCES = (".A_log", ".dt_bias")
"""Parameters with which models compute in fp32, whatever the rest computes in; autocast leaves them as they are."""


def shard_model(
    model: nn.Module,
    plan: WrapPlan,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool | Mapping[str, Any] = False,
    compile: bool | str | Mapping[str, Any] | None = False,
) -> nn.Module:
    """Shard `model` by `plan` with FSDP2, in place, and return the same model.

    A model on meta stays on meta, with DTensor parameters, which `load_weights` then fills. Of a model with real
    weights, equal on every rank, each rank keeps its slices, which are contiguous whatever the strides were. Make the
    optimizer afterwards.

    Args:
        model: not sharded yet, on meta or with real weights on any device.
        plan: from `make_wrap_plan` of this model or of one of the same structure.
        mesh: one axis for FSDP, two (replicate, shard) for HSDP, and those named "cp", "tp" and "dp_shard_in_ep", as
            `ParallelDims` makes them; with "tp" or "ep", the model is one of `parallelize_model`. None means FSDP over
            all processes.
        mp_policy: dtypes of computation and reduction; None computes in each parameter's own dtype and reduces in fp32,
            a dtype or its name ("bf16") computes in it and reduces in fp32. "fp8" is `Float8Policy()`.
        offload_policy: `CPUOffloadPolicy()` keeps shards on the CPU between uses, pinned where the mesh is on a device;
            None keeps them on the device.
        activation_checkpointing: recompute each block's activations in the backward pass (non-reentrant), which saves
            memory for about a third more computation. Turns `use_cache` off. A mapping says more: `every_n_layers`
            (every n-th block of each stack alone), `offload` (what these blocks keep, their inputs, lies in host
            memory, pinned where the mesh is on a device, and is copied while blocks compute), `save_ops` (operators
            whose results they keep and do not compute again: "matmul", "attention", or torch's names: "aten::mm").
        compile: compile each block in place, True or with options for `torch.compile`
            (`{"mode": "max-autotune-no-cudagraphs"}`).

    Every rank of the mesh must call, with equal arguments. The ranks exchange errors, and one digest of the plan, the
    other arguments and the dtypes of the parameters, before anything is sharded.

    Raises:
        WrapPlanError: the plan breaks a rule for this model.
        ConfigError: the model or a part of it is sharded already, an argument does not fit it, trained parameters are
            complex or share memory, or plan, arguments or dtypes differ between ranks. As every error, the same on
            every rank.

    Example:
        >>> model = build_meta_model("checkpoint")
        >>> model = shard_model(model, make_wrap_plan(model), activation_checkpointing=True)
        >>> report = load_weights(model, "checkpoint", progress=False)
    """
    mesh = as_mesh(mesh) or ParallelDims().build_mesh()
    ranks = sorted(mesh.mesh.flatten().tolist())
    with agreed_steps("checking the plan", ranks=ranks):
        tree = ModuleTree(model)
        if problems := broken_rules(tree, find_blocks(tree), plan):
            raise WrapPlanError(f"The plan does not fit {type(model).__name__}: " + "; ".join(problems))
        sharding = checked_sharding(
            model,
            plan,
            tree,
            mesh=mesh,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
        )
    return shard_checked(model, sharding, tree)


def checked_sharding(
    model: nn.Module,
    plan: WrapPlan,
    tree: ModuleTree,
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool | Mapping[str, Any] = False,
    compile: bool | str | Mapping[str, Any] | None = False,
) -> Sharding:
    """The arguments of `shard_model` as a value, which fit the model and are the same on all ranks.

    The plan must keep its rules. Every rank of the mesh must call, within `agreed_steps`.
    """
    mp_policy, options, recompute = as_mp_policy(mp_policy), as_compile(compile), as_recompute(activation_checkpointing)
    axes = axes_of(mesh)
    mesh, dims = axes.shards, axes.dims
    for name in plan.blocks:
        add_to_note(model.get_submodule(name), is_block=True)
    if axes.rows is not None:
        check_rows(model, dims.cp_size)
    if max(dims.tp_size, dims.ep_size) > 1 and not is_parallel(model):
        raise ConfigError(
            f"The mesh has tp_size {dims.tp_size} and ep_size {dims.ep_size}, and {type(model).__name__} is not "
            "divided. Call parallelize_model(model, mesh) before make_wrap_plan."
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} is sharded already. Build a new model, or use this one as it is.")
    check_partial_resharding(tree, plan, mesh.size(-1))
    if rank_and_size()[0] == 0:
        warn_of_padding(tree, plan, mesh.size(-1), (axes.expert_shards or mesh).size(-1))
    offload_policy = as_offload_policy(offload_policy) or OffloadPolicy()
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":
        offload_policy = CPUOffloadPolicy(pin_memory=False)
    if options is not None:
        check_options(options, mesh.device_type, recompute)
    check_parameters(model, plan.replicated)
    check_float8(tree, plan, mp_policy, mesh.device_type, tp_size=dims.tp_size, ep_size=dims.ep_size)
    if recompute is not None:
        check_checkpointing(model, recompute)
    same_on_all_ranks(
        "sharding the model",
        ranks=sorted(mesh.mesh.flatten().tolist()),
        plan=plan,
        parameters=Counter(dtype_name(parameter.dtype) for parameter in model.parameters()),
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        activation_checkpointing=recompute,
        compile=options,
        dims=dims,
    )
    return Sharding(
        plan=plan,
        axes=replace(axes, shards=_without_names(mesh)),
        mp_policy=mp_policy or MixedPrecisionPolicy(reduce_dtype=torch.float32),
        offload_policy=offload_policy,
        activation_checkpointing=recompute,
        compile=options,
    )


def shard_checked(model: nn.Module, sharding: Sharding, tree: ModuleTree) -> nn.Module:
    """Shard a model, of whose modules this is the tree, as `checked_sharding` found right, in place."""
    mesh = sharding.mesh
    guard_habits()
    if isinstance(sharding.offload_policy, CPUOffloadPolicy) or mesh.device_type == "cpu":
        for group in sharding.axes.groups():
            add_cpu_backend(group)  # clipping sums the norms of offloaded gradients between CPUs
    for parameter in model.parameters():  # transposed, sliced and expanded ones; FSDP2 takes none of these
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if dist.get_rank() == mesh.mesh.min() and (problem := never_called(model, is_sharded=False)):
        warn(problem)
    convert_to_float8(tree, sharding.mp_policy, mesh.device_type)
    if sharding.activation_checkpointing is not None:
        turn_cache_off(model)  # a cache would keep activations that are to be recomputed
        checkpoint_activations(model, sharding.activation_checkpointing)
    if sharding.compile is not None:
        compile_blocks(model, sharding.plan, sharding.compile)
    apply_sharding(model, sharding, tree)
    check_first_pass(model, sharding.device, sharding.axes)
    return model


def sharding_of(model: nn.Module) -> Sharding | None:
    """How `shard_model` sharded a model; None if it did not. Any rank may call; nothing is communicated.

    Args:
        model: also inside PEFT's wrapper or that of `torch.compile`.
    """
    return next((sharding for _, sharding in _remembered(model)), None)


def warn_of_drift(model: nn.Module) -> None:
    """Say on rank 0 which weights have drifted apart on the ranks of a layer, of which a save writes one rank's. Every
    rank must call."""
    sharding = sharding_of(model)
    names = [] if sharding is None else drifted(model, sharding.axes.layers)
    if names and dist.get_rank() == 0:
        warn(
            f"{len(names)} weights that each rank of a layer (tp_size) holds whole differ: {listed(names)}. "
            "They saw other rows, or drew other random numbers, and one rank's are saved."
        )


def sharded_module(model: nn.Module) -> nn.Module | None:
    """The module at or below `model` that `shard_model` sharded, in which the plan's names are; None without one."""
    return next((module for module, _ in _remembered(model)), None)


def _remembered(model: nn.Module) -> Iterator[tuple[nn.Module, Sharding]]:
    for module in model.modules():
        if (sharding := note_of(module).sharding) is not None:
            yield module, sharding


def compile_sharded(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the blocks of a sharded model, as `shard_model(..., compile=options)` does, unless they are compiled."""
    for module, sharding in _remembered(model):
        if sharding.compile is None:
            check_options(options, sharding.mesh.device_type, sharding.activation_checkpointing)
            compile_blocks(module, sharding.plan, options)
            add_to_note(module, sharding=replace(sharding, compile=dict(options)))


def keep_after_backward(model: nn.Module, is_kept: bool) -> None:
    """Let a model whose units all stay gathered after forward keep them after backward passes too, or not any more.

    While units are kept, no optimizer may step. Nothing is communicated.
    """
    for module, sharding in _remembered(model):
        # Of the root, FSDP2 decides where the plan says None: it keeps it.
        is_whole = all(u.reshard_after_forward is False or u.modules == ("",) for u in sharding.plan.units)
        if is_whole and isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not is_kept)


def _without_names(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh without a name for its axis, if it has one axis over all processes; the process group is the same.

    PEFT (0.21) takes a Linear on a mesh with a name other than "fsdp" for tensor parallel.
    """
    if mesh.ndim > 1 or mesh.mesh_dim_names is None or mesh.size() != dist.get_world_size():
        return mesh
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh=mesh.mesh)


def runners_of_experts(tree: ModuleTree) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each list of experts after the module that runs it."""
    for node in lists_of_experts(tree.root):
        runner = next((above for above in (node, *node.ancestors()) if has_forward(above.module)), None)
        if runner is not None:
            yield runner.module, node.module


def apply_sharding(model: nn.Module, sharding: Sharding, tree: ModuleTree | None = None) -> None:
    """Shard `model` as `sharding` says, in place and without the checks of `shard_model`. Nothing is communicated."""
    tree = tree or ModuleTree(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replicated = {parameters[fqn] for fqn in sharding.plan.replicated}
    # FSDP2 would cast what enters the root; `add_hooks` casts what enters the modules that compute with weights.
    mp_policy = replace(sharding.mp_policy, cast_forward_inputs=False)
    for unit in sharding.plan.units:
        members = [modules[fqn] for fqn in unit.modules]
        is_shared = note_of(members[0]).is_dispatched
        mesh = sharding.axes.expert_shards if is_shared else sharding.mesh
        assert mesh is not None
        with bytes_sharded():
            fully_shard(
                members[0] if len(members) == 1 else members,
                mesh=mesh,
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=mp_policy,
                offload_policy=sharding.offload_policy,
                shard_placement_fn=partial(choose_placement, ranks=mesh.size(-1)),
                ignored_params=replicated or None,
            )
        if is_shared:  # the gradients of its experts hold the tokens of all ranks, not of those of `mesh` alone
            divide_by(members[0], sharding.mesh.size(), is_reduced=mesh.size(-1) > 1)
        for module in members:
            module.__deepcopy__ = partial(copy_sharded if module is model else copy_released, module)
    use_own_entries(model)
    for parameter in replicated:
        if not parameter.is_meta:  # FSDP2 moves only what it shards
            parameter.data = parameter.data.to(sharding.mesh.device_type)
    average_gradients(replicated, sharding.mesh.get_all_groups())
    for module in model.modules():
        if note_of(module).packed:
            add_to_note(module, compute_dtype=sharding.mp_policy.param_dtype)
    mark_for_transformers(model)
    in_fp32 = {tensor for _, _, tensor in kept_in_fp32(model, sharding.mp_policy.param_dtype)}
    in_fp32 |= {tensor for name, tensor in model.named_parameters() if name.endswith(_OF_RECURRENCES)}
    gather_as_stored(model, in_fp32)
    add_hooks(
        model,
        param_dtype=sharding.mp_policy.param_dtype if sharding.mp_policy.cast_forward_inputs else None,
        output_dtype=sharding.mp_policy.output_dtype,
        device_type=sharding.mesh.device_type,
        kept={modules[fqn] for unit in sharding.plan.units if unit.kept_for == "user" for fqn in unit.modules},
        experts=dict(runners_of_experts(tree)),
        in_fp32=in_fp32,
        is_one_rank=sharding.mesh.size(-1) == 1,
    )
    hooks = [*note_of(model).hooks, *gather_float8(model), *divide_loss(model, sharding.axes.layers)]
    if sharding.mesh.size() > 1:
        hooks += [*join_skipped(model, tree, sharding.mesh), *share_buffers(model, sharding.mesh)]
    if sharding.axes.rows is not None:
        hooks += share_rows(model, sharding.axes.rows)
    add_to_note(model, hooks=tuple(hooks), sharding=sharding)
    _check_host(model, sharding)
    guard_injection()


def recompute_activations(model: nn.Module, sharding: Sharding) -> None:
    """Turn activation checkpointing on in a sharded model as `sharding` says. Nothing is communicated."""
    checkpoint_activations(model, sharding.activation_checkpointing)
    _check_host(model, sharding)


def _check_host(model: nn.Module, sharding: Sharding) -> None:
    if sharding.activation_checkpointing is not None and sharding.activation_checkpointing.offload:
        ranks, dtype = sorted(sharding.mesh.mesh.flatten().tolist()), sharding.mp_policy.param_dtype
        checks = check_host(model, ranks, dtype=dtype, ranks_per_row=sharding.axes.dims.cp_size)
        add_to_note(model, hooks=(*note_of(model).hooks, *checks))


def apply_again(
    model: nn.Module,
    sharding: Sharding,
    fill: Callable[[nn.Parameter, nn.Parameter], nn.Parameter],
    *,
    dtypes: Mapping[nn.Parameter, torch.dtype],
) -> dict[nn.Parameter, nn.Parameter]:
    """Shard a model whose parameters are shards already, which no unit gathers (see `release`), in place.

    Nothing is communicated, unless `fill` does.
    """
    kept = {model.get_parameter(name) for name in sharding.plan.replicated}
    places = [(s, name, old) for s, name, old in slots(model) if isinstance(old, nn.Parameter) and old not in kept]
    divided = parallel_parameters(model)
    on_meta = {
        old: placeholder(torch.empty(old.shape, dtype=dtypes.get(old, old.dtype), device="meta"), divided.get(old))
        for _, _, old in places
    }
    swap(model, {old: nn.Parameter(new, requires_grad=old.requires_grad) for old, new in on_meta.items()})
    apply_sharding(model, sharding)
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for store, name, old in places:
        if old not in shards:
            shards[old] = fill(old, store[name])
        store[name] = shards[old]
    renew(model)
    return shards


def copy_sharded(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A second sharded model with the values of `model` and shards of its own: what `copy.deepcopy(model)` gives.

    For a moving average of the weights, or a frozen reference. Gradients, and hooks that a user registered on units,
    are not copied. Nothing is communicated.
    """
    sharding = sharding_of(model)
    assert sharding is not None
    reshard_units(model)
    twin = copy_released(model, memo)
    if sharding.compile is not None:
        compile_blocks(twin, sharding.plan, sharding.compile)
    apply_again(twin, sharding, lambda old, made: old, dtypes={})
    return twin
