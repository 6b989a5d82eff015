"""Add PEFT adapters to sharded models, and shard them in the units of the base.

The order is the same for this package, a user's script and a trainer of TRL: the base is sharded and loaded, PEFT adds
small whole tensors to it, and `shard_added` shards them. Plans are made of the base without adapters, so that a model
has the same units with and without them.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from hf_fsdp_tools.distributed.agreement import agreed, opened, same_on_all_ranks, shared_rng_state
from hf_fsdp_tools.distributed.shards import as_dtensor, cut, fill_from_first, gather_on_device, local_tensor
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.given import as_flag, as_model, as_path, taking
from hf_fsdp_tools.modeling.linear4bit import mark_weights, packed_linears, refuse_cast_weights
from hf_fsdp_tools.modeling.peft_view import is_wrapper
from hf_fsdp_tools.sharding.adapter_files import open_adapter
from hf_fsdp_tools.sharding.adapter_plan import laid_over
from hf_fsdp_tools.sharding.allocate import renew
from hf_fsdp_tools.sharding.fsdp2_internals import make_root, managed_parameters, release
from hf_fsdp_tools.sharding.hf_interface import answer_for_shards
from hf_fsdp_tools.sharding.settings import as_peft_config
from hf_fsdp_tools.sharding.shard import Sharding, apply_again, sharded_module, sharding_of
from hf_fsdp_tools.sharding.whole import average_gradients, is_averaged
from hf_fsdp_tools.text import first_line, first_lines

__all__ = ["add_adapter", "add_lora", "load_adapter", "shard_added"]

_NEEDS_BASE = ("corda", "eva", "loftq", "lora_ga", "mica", "olora", "pissa")
"""Values of LoRA's `init_lora_weights` that need whole weights of the base (PEFT 0.21); all but EVA change them too."""

_OF_SHARDS = ("DTensor", "sharding strategy", "size mismatch", "size of tensor", "shape")
"""Words in torch's errors about whole tensors and shards in one operation."""


@taking(model=as_model, peft_config=as_peft_config)
def add_adapter(model: nn.Module, peft_config: Any, *, adapter_name: str = "default", seed: int | None = None) -> Any:
    """Add a PEFT adapter to a sharded, loaded model; return the `PeftModel`, sharded in the units of its base.

    The adapter's values are those that `get_peft_model` gives on one process from rank 0's random state, for any number
    of ranks. Adapters are fp32, as PEFT makes them; the frozen base keeps its dtype. Each rank holds the whole adapter
    for a moment (LoRA of rank 16 on all linear layers of an 8B model: 170 MB), and its shards of the base.

    Args:
        model: sharded by `shard_model` and loaded; changed in place. Modules that PEFT trains whole (`modules_to_save`)
            are copied shard by shard.
        peft_config: of PEFT, for example `LoraConfig(r=16, target_modules="all-linear")`, or a dict of its arguments
            (`{"r": 16}`; LoRA where it names no `peft_type`).
        adapter_name: name of the adapter in PEFT.
        seed: of the adapter's initial values, as in `torch.manual_seed`; None takes the random state of rank 0.

    Every rank must call, with equal arguments. The ranks exchange errors, and digests of the arguments and the plan;
    rank 0 sends the adapter's values.

    Raises:
        ConfigError: the adapter needs whole weights of the base, PEFT cannot make it (it fits no module, …), or
            arguments differ between ranks; the same on every rank. The model is then as it was.

    Example:
        >>> from peft import LoraConfig
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> adapted = add_adapter(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), seed=0)
        >>> sum(parameter.requires_grad for parameter in adapted.parameters())
        8
    """
    same_on_all_ranks("adding an adapter", peft_config=peft_config, adapter_name=adapter_name, seed=seed)
    _refuse_whole_base(peft_config, model)
    with _undone_if_it_fails(model):
        with _seeded(seed), _one_axis(model), _made_alike(peft_config), _on_shards(peft_config):
            adapted = _peft().get_peft_model(model, peft_config, adapter_name)
        shard_added(adapted)
    return adapted.eval()


@taking(model=as_model, name_or_path=as_path, is_trainable=as_flag)
def load_adapter(
    model: nn.Module, name_or_path: str | PathLike[str], *, is_trainable: bool = False, **hub_kwargs: Any
) -> Any:
    """Add a saved PEFT adapter to a sharded, loaded model; return the `PeftModel`, sharded in the units of its base.

    PEFT reads the adapter; each rank holds all of it for a moment, then its shards.

    Args:
        model: as for `add_adapter`.
        name_or_path: hub name, or a folder with `adapter_config.json`.
        is_trainable: whether the adapter is trainable; it is frozen otherwise, as in `PeftModel.from_pretrained`.
        hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`.

    Every rank must call, with equal arguments but for the name of a folder. The ranks exchange errors, and digests of
    the adapter's config and of the plan; rank 0 sends the adapter's values.

    Raises:
        CheckpointError: there is no such adapter, the hub does not give it, or it is damaged; the same on every rank.
        ConfigError: the adapter cannot be added (see `add_adapter`), or the configs of ranks differ; the same on every
            rank. The model is then as it was.

    Example:
        >>> from peft import LoraConfig
        >>> plain = {"load_kwargs": {"progress": False}}
        >>> adapted = from_pretrained("checkpoint", peft_config=LoraConfig(target_modules=["q_proj"]), **plain)
        >>> report = save_pretrained(adapted, "adapter")
        >>> model = load_adapter(from_pretrained("checkpoint", **plain), "adapter", is_trainable=True)
        >>> model.active_adapter
        'default'
    """
    peft = _peft()
    names = [name for name, _ in model.named_modules()]
    read = partial(open_adapter, peft, fspath(name_or_path), names)
    folder, config = opened("opening the adapter", name_or_path, read, hub_kwargs)
    if getattr(config, "init_lora_weights", None) == "eva":
        config.init_lora_weights = True  # the files hold the values
    same_on_all_ranks("adding an adapter", peft_config=config, is_trainable=is_trainable)
    _refuse_whole_base(config, model)
    with _undone_if_it_fails(model):
        with _one_axis(model), _made_alike(config), _on_shards(config):
            adapted = peft.PeftModel.from_pretrained(
                model, folder, config=config, is_trainable=is_trainable, torch_device="cpu"
            )
        shard_added(adapted)
    return adapted.eval()


@taking(model=as_model)
def shard_added(model: nn.Module) -> dict[torch.Tensor, nn.Parameter]:
    """Shard adapters and heads that were added to a sharded model, in place, in the units of its plan.

    Added trainable weights become fp32 where computation is in a lower precision (master weights) or where their dtypes
    differ; on a 4-bit base, whose adapters TRL casts to bf16, they become fp32 with the rounded values. Parameters that
    PEFT keeps outside the base (prompt encoders) stay whole on every rank, with averaged gradients.

    Args:
        model: a model that `shard_model` sharded, or a model around it; nothing is done for any other model. Do not
            call between a forward and its backward pass.

    Returns:
        The new parameter for each parameter that was replaced, for an optimizer that was made before.

    Every rank must call. The ranks exchange the plan's digest; rank 0 sends the added values.

    Raises:
        ConfigError: PEFT made adapters of a wrong shape, because it took FSDP's mesh for tensor parallelism; or 4-bit
            weights were cast.
        WrapPlanError: the ranks added different modules.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        >>> len(shard_added(adapted))
        4
    """
    base, sharding = sharded_module(model), sharding_of(model)
    if base is None or sharding is None:
        return {}
    if packed_linears(base):
        refuse_cast_weights(base)
        _undo_casts(base)
    managed = set(managed_parameters(base))
    known = dict(base.named_parameters(remove_duplicate=False))
    whole = {known[name] for name in sharding.plan.replicated if name in known}
    outside = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor) and not is_averaged(p)]
    inside = any(parameter not in managed and parameter not in whole for parameter in base.parameters())
    # PEFT may have run the embedding alone for a prompt encoder, and FSDP2 then takes it for the root: shard again.
    replaced = _shard_again(base, sharding, managed) if inside or outside else {}
    outside = [parameter for parameter in outside if parameter not in replaced]
    _bring_to_device(model, base, torch.device(sharding.mesh.device_type))
    for parameter in outside:
        fill_from_first(parameter, parameter, sharding.mesh)
    average_gradients(outside, sharding.mesh.get_all_groups())
    if outside:
        make_root(base)
    answer_for_shards(model)  # PEFT's, like transformers'
    return replaced


def add_lora(model: nn.Module, *, r: int, target_modules: str | list[str]) -> nn.Module:
    """Add LoRA to a plain model, in place, and freeze its base; return the `PeftModel`. Nothing is communicated.

    Args:
        model: not sharded; on meta, the adapter is on meta too.
        r: rank of the adapter.
        target_modules: as in `LoraConfig`.

    Raises:
        ConfigError: PEFT is not installed, or refuses.
    """
    peft = _peft()
    config = peft.LoraConfig(r=r, target_modules=target_modules)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with _on_shards(config), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it
        adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=is_meta)
    return adapted


# ---- PEFT on shards ----


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("Adapters need PEFT, which is not installed: pip install 'peft>=0.19'.") from None
    return peft


def _refuse_whole_base(config: Any, model: nn.Module) -> None:
    if getattr(config, "use_dora", False) and packed_linears(model):
        raise ConfigError(
            "DoRA takes norms over whole rows of the base, and a shard of 4-bit weights holds runs of bytes. Use "
            "use_dora=False, or load the base without quantization_config."
        )
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.lower().startswith(_NEEDS_BASE):
        raise ConfigError(
            f"init_lora_weights={start!r} decomposes whole weights of the base, and no rank has them. Use True, "
            "'gaussian' or 'orthogonal'; or make the adapter on the plain model and let prepare() shard the whole. "
            "Convert a saved one with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    state = shared_rng_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(state)
        yield


def _made_alike(config: Any) -> AbstractContextManager[None]:
    """A block in which PEFT makes an adapter on all ranks or on none.

    DoRA's norms are computed by collectives, which must not run in such a block: there a rank that fails alone leaves
    the others waiting for as long as the process group does.
    """
    return nullcontext() if getattr(config, "use_dora", False) else agreed("making the adapter")


@contextmanager
def _on_shards(config: Any) -> Iterator[None]:
    """Let PEFT compute with whole adapters and shards of the base together (DoRA's norms); translate its errors.

    Errors of the device and of communication pass unchanged; gloo and the CPU's allocator raise plain `RuntimeError`s,
    so that of these only those that speak of shards or shapes are PEFT's.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    try:
        with implicit_replication():
            yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"PEFT cannot make this {kind} adapter: {error}") from None
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        # PEFT's own code on tensors that it does not expect, or DTensor's for operations that it lacks
        if type(error) is RuntimeError and not any(word in str(error) for word in _OF_SHARDS):
            raise
        if "size mismatch" in str(error):
            raise ConfigError(
                f"The adapter does not fit the model: {first_lines(error)}. Load the base that it was trained on."
            ) from error
        raise ConfigError(
            f"PEFT cannot make a {kind} adapter on a sharded model ({type(error).__name__}: {first_line(error)}). "
            "Make it on the plain model and let prepare() shard the whole."
        ) from error


@contextmanager
def _undone_if_it_fails(model: nn.Module) -> Iterator[None]:
    """Put the modules, parameters, hooks and attributes of a model back if the block fails: no half of an adapter."""
    before = [
        (module, dict(vars(module)), {name: dict(v) for name, v in vars(module).items() if isinstance(v, dict)})
        for module in model.modules()
    ]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
        for parameter, was_trainable in trainable:
            parameter.requires_grad_(was_trainable)
        renew(model)
        raise


@contextmanager
def _one_axis(model: nn.Module) -> Iterator[None]:
    """Show the shards on a nameless mesh of one axis for a block: of others, PEFT assumes tensor parallelism."""
    mark_weights(model)
    sharding = sharding_of(model)
    mesh = sharding.mesh if sharding else None
    if sharding is None or mesh is None or mesh.mesh_dim_names is None:
        yield
        return
    axis = DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    views: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in managed_parameters(model):
        shard = parameter.detach()
        assert isinstance(shard, DTensor)
        view = as_dtensor(local_tensor(shard), shard, mesh=axis, placements=shard.placements[-1:])
        views[parameter] = nn.Parameter(view, requires_grad=parameter.requires_grad)
    _replace_parameters(model, views)
    mark_weights(model)
    try:
        yield
    finally:
        for parameter, shown in views.items():
            parameter.requires_grad_(shown.requires_grad)
        _replace_parameters(model, {shown: parameter for parameter, shown in views.items()})
        renew(model)


def _replace_parameters(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in new:
                module._parameters[name] = new[parameter]


# ---- sharding again ----


def _shard_again(base: nn.Module, sharding: Sharding, managed: set[nn.Parameter]) -> dict[torch.Tensor, nn.Parameter]:
    """Take FSDP2 off, and apply it again with the added modules; parameters that were sharded keep their shards."""
    _check_shapes(base)
    plan = laid_over(sharding.plan, base)
    same_on_all_ranks("sharding what was added", ranks=sorted(sharding.mesh.mesh.flatten().tolist()), plan=plan)
    release(base)
    _make_buffers_whole(base)
    kept = {base.get_parameter(name) for name in plan.replicated}
    dtypes = _dtypes(set(base.parameters()) - kept - managed, sharding)

    def fill(old: nn.Parameter, made: nn.Parameter) -> nn.Parameter:
        return old if old in managed else _shard_of(old, made, sharding.device)

    shards = apply_again(base, replace(sharding, plan=plan), fill, dtypes=dtypes)
    return {old: shard for old, shard in shards.items() if old is not shard}


def _bring_to_device(model: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Bring what PEFT keeps outside the base to the device of the computation; PEFT puts it beside the base's shards.

    Under CPU offload these are on the CPU, and a prompt encoder would compute there.
    """
    inside = set(base.modules())
    for module in model.modules():
        if module not in inside:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(device)


def _make_buffers_whole(base: nn.Module) -> None:
    """Put whole tensors in the place of buffers that are shards, which PEFT makes of rows of an embedding's shard.

    FSDP2 would have to move them to its device, and refuses. Every rank must call; each buffer is gathered.
    """
    for module in base.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                module._buffers[name] = gather_on_device(buffer)


def _undo_casts(base: nn.Module) -> None:
    """Cast trainable shards back to fp32.

    TRL casts the adapters of a quantised model to bf16 by `parameter.data`. FSDP2 does not notice and goes on gathering
    the fp32 shards, so the optimizer would step tensors that no forward pass uses.
    """
    cast = [p for p in base.parameters() if p.requires_grad and isinstance(p, DTensor) and p.dtype != torch.float32]
    for parameter in cast:
        parameter.data = parameter.data.to(torch.float32)
    if cast:
        renew(base)


def _check_shapes(base: nn.Module) -> None:
    wrong = []
    for name, module in base.named_modules():
        linear = module._modules.get("base_layer") if is_wrapper(module) else None
        if isinstance(linear, nn.Linear) and {module.in_features, module.out_features} != {
            linear.in_features,
            linear.out_features,
        }:
            wrong.append(name)
    if wrong:
        raise ConfigError(
            f"PEFT took the mesh for tensor parallel and gave {len(wrong)} adapters the shape of one shard "
            f"(first: {wrong[0]}). On a mesh of several axes give peft_config to from_pretrained, or add the adapter "
            "before the model is sharded."
        )


def _dtypes(added: set[nn.Parameter], sharding: Sharding) -> dict[nn.Parameter, torch.dtype]:
    """New dtypes of added trainable weights: fp32 where computation is in a lower precision, or their dtypes differ."""
    trained = [parameter for parameter in added if parameter.requires_grad and parameter.is_floating_point()]
    low = sharding.mp_policy.param_dtype not in (None, torch.float32)
    if low or len({parameter.dtype for parameter in trained}) > 1:
        return dict.fromkeys(trained, torch.float32)
    return {}


def _shard_of(old: nn.Parameter, like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """This rank's shard, like `like`, of rank 0's whole parameter, or of a parameter that is sharded otherwise."""
    shard, value = like.data, old.data
    assert isinstance(shard, DTensor)
    if not isinstance(value, DTensor):
        memory = torch.empty(local_tensor(shard).shape, dtype=like.dtype, device=device)
        made = as_dtensor(memory, shard)
        fill_from_first(made, value, shard.device_mesh)
    elif value.device_mesh != shard.device_mesh or value.placements != shard.placements:
        made = cut(gather_on_device(value), shard, device=device, dtype=like.dtype)
    else:
        made = value.detach().to(device=device, dtype=like.dtype)  # type: ignore[assignment]  # a DTensor
    new = nn.Parameter(made, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
