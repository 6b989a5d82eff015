"""Shard a model by a wrap plan with FSDP2: activation checkpointing first, then every unit, the root last."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from hf_fsdp_tools.distributed.mesh import ParallelDims, axes_of
from hf_fsdp_tools.doors import features_asked_for
from hf_fsdp_tools.errors import ConfigError, WrapPlanError, warn
from hf_fsdp_tools.modeling.module_tree import ModuleTree, slots, swap
from hf_fsdp_tools.modeling.notes import Chosen, Divided
from hf_fsdp_tools.modeling.packed import compute_in
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.rules import broken_rules
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.checks import ParameterChecks
from hf_fsdp_tools.sharding.compile import (
    CompiledBlocks,
    as_compile,
    as_mesh,
    as_mp_policy,
    as_offload_policy,
    check_options,
    compile_blocks,
)
from hf_fsdp_tools.sharding.fsdp2_internals import bytes_sharded, copy_released, reshard_units, use_own_entries
from hf_fsdp_tools.sharding.hf_interface import mark_for_transformers
from hf_fsdp_tools.sharding.hooks import Buffers, Units
from hf_fsdp_tools.sharding.injection import refuse_other_injection
from hf_fsdp_tools.sharding.patches import guard_habits
from hf_fsdp_tools.sharding.phases import Installed, install, remove_hooks
from hf_fsdp_tools.sharding.placement import (
    check_partial_resharding,
    choose_placement,
    parallel_parameters,
    placeholder,
    warn_of_padding,
)
from hf_fsdp_tools.sharding.precision import Precision
from hf_fsdp_tools.sharding.recompute import Checkpointing, as_recompute, checkpoint_activations
from hf_fsdp_tools.sharding.replica_checks import differing_weights
from hf_fsdp_tools.sharding.replicated import average_gradients
from hf_fsdp_tools.sharding.sharding import (
    Feature,
    Sharded,
    Sharding,
    asked_by,
    is_divided,
    sharded_modules,
    sharding_of,
)
from hf_fsdp_tools.sharding.skipped import SkippedUnits
from hf_fsdp_tools.text import dtype_name, listed

ALWAYS: list[Feature] = [
    ParameterChecks(), Checkpointing(), CompiledBlocks(), Precision(), Units(), SkippedUnits(), Buffers(),
]  # fmt: skip
"""What is done to every model in addition to gathering and reducing its units."""


def features_of(model: nn.Module, sharding: Sharding) -> list[Feature]:
    """What is done to this model: by `extensions/` where it was asked for, then what is done to every model."""
    return [*features_asked_for(sharding.asked | Chosen.of(model).features), *ALWAYS]


def parallelize_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tp_plan: Mapping[str, str] | None = None,
    ep_plan: Mapping[str, str] | None = None,
    ep_implementation: str = "auto",
    sequence_parallel: bool = False,
) -> nn.Module:
    """Divide layers and experts of a model among the ranks of a mesh's `tp` and `ep` axes, in place; return the model.

    Call it between `build_meta_model` and `make_wrap_plan`; `from_pretrained` does. Without these axes it does nothing.

    Args:
        model: of transformers, on meta or with real weights that are equal on every rank, not sharded yet.
        mesh: of `ParallelDims`.
        tp_plan: rules for names of modules or parameters (`{"layers.*.mlp.up_proj": "colwise"}`), which take the place
            of rules of the model's own plan (`model.tp_plan`); an empty one leaves every layer whole.
        ep_plan: the same for experts (`model.ep_plan`).
        ep_implementation: how tokens reach their experts: "all_to_all", "all_reduce" (`ep_size` equal to `tp_size`),
            "auto", or a name that was registered in transformers.
        sequence_parallel: between divided layers, each rank of a `tp` group holds its own tokens of the hidden states
            alone, (batch, tokens / tp_size, width): less memory for activations, and as many bytes exchanged. Rows that
            `tp_size` does not divide, and passes with a cache, stay whole.

    Every rank must call with equal arguments. Nothing is communicated now; in each pass, the styles of transformers
    exchange activations between the ranks of a group.

    Raises:
        ConfigError: the model has no plan for an axis, a rule names what is not there, sizes of layers do not divide
            by the ranks, or this transformers is older than 5.21; the same on every rank, before anything is changed.

    Example:
        >>> mesh = ParallelDims(tp_size=1).build_mesh("cpu")  # with `torchrun --nproc-per-node=8`: tp_size=2, ep_size=4
        >>> model = parallelize_model(build_meta_model("checkpoint"), mesh)
        >>> model = shard_model(model, make_wrap_plan(model), mesh=mesh)
    """
    axes = axes_of(mesh)
    rules = {"tp_plan": tp_plan, "ep_plan": ep_plan, "ep_implementation": ep_implementation}
    asked = asked_by(axes) | ({"sequence_parallel"} if sequence_parallel else set())
    for feature in features_asked_for(asked) if is_divided(axes) or sequence_parallel else ():
        feature.divide(model, axes, rules)
    return model


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

    A model on meta stays on meta, with DTensor parameters, which `load_weights` then fills. On one rank without CPU
    offload and FP8 it stays a plain model, with nothing to gather, which computes in the same dtypes. From a model with
    real weights, equal on every rank, each rank keeps its slices, contiguous whatever the strides were. Make the
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
            whose results they keep and do not recompute: "matmul", "attention", or torch's names: "aten::mm").
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
    axes = axes_of(mesh)
    mesh = axes.shards
    for name in plan.blocks:
        Chosen.put(model.get_submodule(name), is_block=True)
    if sharding_of(model) is not None or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} is sharded already. Build a new model, or use this one as it is.")
    check_partial_resharding(tree, plan, mesh.shape[-1])
    if rank_and_size()[0] == 0:
        warn_of_padding(tree, plan, mesh.shape[-1], (axes.expert_shards or mesh).shape[-1])
    offload_policy = as_offload_policy(offload_policy) or OffloadPolicy()
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":
        offload_policy = CPUOffloadPolicy(pin_memory=False)
    sharding = Sharding(
        plan=plan,
        axes=replace(axes, shards=_without_names(mesh)),
        mp_policy=as_mp_policy(mp_policy) or MixedPrecisionPolicy(reduce_dtype=torch.float32),
        offload_policy=offload_policy,
        activation_checkpointing=as_recompute(activation_checkpointing),
        compile=as_compile(compile),
    )
    for feature in features_of(model, sharding):
        feature.check(model, tree, sharding)
    same_on_all_ranks(
        "sharding the model",
        ranks=sorted(mesh.mesh.flatten().tolist()),
        parameters=Counter(dtype_name(parameter.dtype) for parameter in model.parameters()),
        dims=axes.dims,
        **{name: value for name, value in vars(sharding).items() if name != "axes"},
    )
    return sharding


def shard_checked(model: nn.Module, sharding: Sharding, tree: ModuleTree) -> nn.Module:
    """Shard a model, of whose modules this is the tree, as `checked_sharding` found right, in place."""
    mesh = sharding.mesh
    if isinstance(sharding.offload_policy, CPUOffloadPolicy) or mesh.device_type == "cpu":
        for group in sharding.axes.process_groups():
            add_cpu_backend(group)  # clipping sums the norms of offloaded gradients between CPUs
    for parameter in model.parameters():  # transposed, sliced and expanded ones; FSDP2 takes none of these
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    for feature in features_of(model, sharding):
        feature.before_units(model, tree, sharding)
    apply_sharding(model, sharding, tree)
    return model


def warn_of_drift(model: nn.Module) -> None:
    """Say on rank 0 which weights have drifted apart on ranks that each hold them whole, of which a save writes one
    rank's. Every rank must call."""
    sharding = sharding_of(model)
    meshes = [] if sharding is None else [*sharding.axes.sharing(of_rows=False), sharding.mesh]
    for mesh in meshes:
        words = f" of {mesh.mesh_dim_names[0]}_size" if mesh is not meshes[-1] and mesh.mesh_dim_names else ""
        if (names := differing_weights(model, mesh)) and dist.get_rank() == 0:
            warn(
                f"{len(names)} weights that each rank{words} holds whole differ: {listed(names)}. "
                "They saw other rows, or drew other random numbers, and one rank's are saved."
            )


def compile_sharded(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the blocks of a sharded model, as `shard_model(..., compile=options)` does, unless they are compiled."""
    for module, sharding in sharded_modules(model):
        if sharding.compile is None:
            check_options(options, sharding.mesh.device_type, sharding.activation_checkpointing)
            compile_blocks(module, sharding.plan, options)
            Sharded.put(module, sharding=replace(sharding, compile=dict(options)))


def keep_after_backward(model: nn.Module, is_kept: bool) -> None:
    """Let a model whose units all stay gathered after forward keep them after backward passes too, or not any more.

    While units are kept, no optimizer may step. Nothing is communicated.
    """
    for module, sharding in sharded_modules(model):
        # FSDP2 decides of the root, where the plan says None: it keeps it.
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


def apply_sharding(model: nn.Module, sharding: Sharding, tree: ModuleTree | None = None) -> None:
    """Shard `model` as `sharding` says, in place and without the checks of `shard_model`. Nothing is communicated."""
    tree = tree or ModuleTree(model)
    if sharding.is_whole:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(sharding.mesh.device_type)
        model.__deepcopy__ = partial(copy_sharded, model)  # type: ignore[assignment]  # mypy takes it for a submodule
    else:
        _apply_fsdp2(model, sharding)
    compute_in(model, sharding.mp_policy.param_dtype)
    mark_for_transformers(model, is_whole=sharding.is_whole)
    Sharded.put(model, sharding=sharding)
    remove_hooks(model)
    install(model, (made for feature in features_of(model, sharding) for made in feature.hooks(model, tree, sharding)))
    refuse_other_injection()


def _apply_fsdp2(model: nn.Module, sharding: Sharding) -> None:
    """Call `fully_shard` for each unit of the plan."""
    guard_habits(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replicated = {parameters[fqn] for fqn in sharding.plan.replicated}
    # FSDP2 would cast what enters the root; `precision` casts what enters the modules that compute with weights.
    mp_policy = replace(sharding.mp_policy, cast_forward_inputs=False)
    for unit in sharding.plan.units:
        members = [modules[fqn] for fqn in unit.modules]
        is_shared = Divided.of(members[0]).is_dispatched
        mesh = sharding.axes.expert_shards if is_shared else sharding.mesh
        assert mesh is not None
        with bytes_sharded():
            fully_shard(
                members[0] if len(members) == 1 else members,
                mesh=mesh,
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=mp_policy,
                offload_policy=sharding.offload_policy,
                shard_placement_fn=partial(choose_placement, ranks=mesh.shape[-1]),
                ignored_params=replicated or None,
            )
        if is_shared:  # the gradients of its experts hold the tokens of all ranks, not of those of `mesh` alone
            experts: Any = members[0]
            experts.set_gradient_divide_factor(float(sharding.mesh.size()))
            # NCCL's PREMUL_SUM, in which FSDP2 would divide, other backends lack; in bf16 it is wrong (pytorch#190747)
            experts.set_force_sum_reduction_for_comms(mesh.shape[-1] > 1)
        for module in members:
            module.__deepcopy__ = partial(copy_sharded if module is model else copy_released, module)
    use_own_entries(model)
    for parameter in replicated:
        if not parameter.is_meta:  # FSDP2 moves only what it shards
            parameter.data = parameter.data.to(sharding.mesh.device_type)
    average_gradients(replicated, sharding.mesh.get_all_groups())


def recompute_activations(model: nn.Module, sharding: Sharding) -> None:
    """Turn activation checkpointing on in a sharded model as `sharding` says. Nothing is communicated."""
    checkpoint_activations(model, sharding.activation_checkpointing)
    install(model, [*Installed.of(model).hooks, *Checkpointing().hooks(model, ModuleTree(model), sharding)])


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
    for feature in features_of(twin, sharding):
        feature.again(twin, sharding)
    if sharding.is_whole:
        apply_sharding(twin, sharding)
    else:
        apply_again(twin, sharding, lambda old, made: old, dtypes={})
    if "_require_grads_hook" in vars(model):  # transformers' setting, kept as hooks
        twin.enable_input_require_grads()  # type: ignore[operator]  # mypy takes it for a submodule
    return twin
