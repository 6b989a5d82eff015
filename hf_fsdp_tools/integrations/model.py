"""Shard a plain model where Accelerate would wrap it, and check a model before it is trained."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.mesh import mesh_of, ranks_per_row
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.extensions.muon.muon import Muon
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.sharding.added import plan_with_adapters, shard_added
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.fsdp2_internals import count_units
from hf_fsdp_tools.sharding.hf_interface import turn_cache_off
from hf_fsdp_tools.sharding.replicated import is_averaged
from hf_fsdp_tools.sharding.shard import compile_sharded, parallelize_model, shard_model
from hf_fsdp_tools.sharding.sharding import Float8Policy, sharded_module, sharding_of
from hf_fsdp_tools.text import listed

LOW_PRECISION = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Accelerate's names of the precisions in which trainable weights are kept in fp32, apart from the computation."""

_HASHING_THREADS, _HASHED_ELEMENTS = 8, 2**24
"""Tensors that are hashed at a time, for which no lock of Python's is kept (assumed), and elements of one on a GPU that
are copied to the host at a time."""


def shard_in_place(model: nn.Module, accelerator: Accelerator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Shard a plain model (of a PEFT model, its base with the adapters), and give its new parameters to its optimizers.

    Every rank must call. The ranks compare a few values of each tensor, and get rank 0's where they differ.
    """
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "The model is compiled as a whole, which FSDP2's gathering of one unit after another would break up. Pass "
            "the plain model, and make_accelerator(dynamo_backend=…) or TrainingArguments(torch_compile=True): blocks "
            "are compiled then."
        )
    if getattr(model, "hf_device_map", None):  # its hooks would move the inputs of rank 1 to GPU 0
        remove_hook_from_module(model, recurse=True)
        del model.hf_device_map
    differing = weights_to_send(model)
    if accelerator.mixed_precision in LOW_PRECISION:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # master weights, as Accelerate keeps them
    names = {parameter: name for name, parameter in model.named_parameters()}
    base, plugin, mesh = base_of(model), accelerator.state.fsdp_plugin, mesh_of(accelerator)
    parallelize_model(base, mesh, sequence_parallel=plugin.sequence_parallel)
    plan = plan_with_adapters(base, plugin.policy_for(base))
    shard_model(base, plan, mesh=mesh, **plugin.shard_arguments(accelerator))
    send_weights(model, differing)
    shard_added(model)  # prompt encoders, which PEFT keeps outside the base
    sharded = dict(model.named_parameters())
    for optimizer in optimizers:
        hand_over(optimizer, {old: sharded[name] for old, name in names.items()})


def hand_over(optimizer: torch.optim.Optimizer, sharded: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Put sharded parameters in the place of whole ones in an optimizer, and shard the state that it has for them.

    Adagrad makes its state at construction. Every rank has the state whole, so nothing is communicated.
    """
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in sharded]:
        new, state = sharded[old], optimizer.state.pop(old)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and isinstance(new, DTensor) and value.shape == new.shape:
                state[key] = Held.of(new).cut(value, dtype=new.dtype if value.is_floating_point() else None)
        optimizer.state[new] = state
    if isinstance(optimizer, Muon):
        optimizer.hand_over(sharded)


# ---- weights that only rank 0 holds, or that differ between ranks ----


def weights_to_send(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers that differ from rank 0's on some rank, by name; the same names on every rank.

    Sharding takes each rank's slice of its own copy. With `fsdp_cpu_ram_efficient_loading` transformers leaves weights
    on meta (5.23) or at zero (5.17) on all ranks but the first; what each rank drew by its own seed differs too. Every
    rank must call and reads all of its own weights once; one digest is gathered, or one for each tensor.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))
    doing = "comparing the weights of all ranks"
    same = len(set(all_ranks(hashlib.sha256(repr(digests).encode()).hexdigest(), doing))) == 1
    ranks = [digests] if same else all_ranks(digests, doing)
    first = ranks[0]
    _check_loaded(model, [name for name, digest in first.items() if digest == "meta"])
    other = [name for name in first if any(rank.get(name, first[name]) != first[name] for rank in ranks)]
    drawn = [name for name in other if any(rank.get(name) not in ("meta", first[name]) for rank in ranks)]
    if drawn and dist.get_rank() == 0:
        warn(
            f"{len(drawn)} of {len(first)} tensors of {type(model).__name__} differ between ranks (first: "
            f"{drawn[0]}); rank 0's are used on all. Set the same seed on every rank before the model is made."
        )
    return {name: tensors[name].detach() for name in other if name in tensors}


def send_weights(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Fill shards from rank 0's whole tensors, in place.

    Every rank must call; rank 0 broadcasts one tensor after another, 64 MiB of it at a time.
    """
    sharding = sharding_of(model)
    if not values or sharding is None:
        return
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        allocate(model, device=sharding.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        Held.of(tensors[name]).fill_from_first(value, sharding.mesh)


def digest_of_shards(model: nn.Module) -> str:
    """sha256 of all ranks' shards, parameters and buffers, the same on every rank; every rank must call."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    digests = [(name, _digest(t.to_local() if isinstance(t, DTensor) else t)) for name, t in tensors]
    own = hashlib.sha256(repr(digests).encode()).hexdigest()
    return hashlib.sha256(repr(all_ranks(own, "hashing the weights of all ranks")).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    """sha256 of all bytes of a tensor, "meta" for one without storage."""
    if tensor.is_meta:
        return "meta"
    digest = hashlib.sha256()
    for part in torch.split(tensor.detach().flatten(), _HASHED_ELEMENTS):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- before training ----


def refuse_sharded_elsewhere(model: nn.Module) -> None:
    """Refuse a model that transformers (`DistributedConfig`) or a script has sharded; nothing is communicated."""
    if sharding_of(model) is None and (
        any(isinstance(parameter, DTensor) for parameter in model.parameters())
        or any(isinstance(module, FSDPModule) for module in model.modules())
    ):
        raise ConfigError(
            f"{type(model).__name__} is sharded already, and not by hf_fsdp_tools. Load it with "
            "hf_fsdp_tools.from_pretrained(..., accelerator=accelerator), or pass the plain model."
        )


def refuse_under_version1(model: nn.Module) -> None:
    """Refuse a model that FSDP2 has sharded where version 1 would wrap it."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} is sharded by FSDP2 already, and this Accelerator would wrap it by version 1. Set "
            "fsdp_version 2 (FSDP_VERSION=2, fsdp_config {'version': 2}), or give the plain model."
        )


def check_managed(model: nn.Module) -> None:
    """Refuse a model with weights on meta, with units outside its plan, or with trainable parameters outside all units,
    of which each rank would silently train its own copy."""
    _check_loaded(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    sharding = sharding_of(model)
    assert sharding is not None, "sharded here or refused before"
    if (shared := sharding.axes.dims.ranks_per_row) != ranks_per_row():
        raise ConfigError(
            f"{type(model).__name__} is sharded with {sharding.axes.dims}, so that {shared} neighbouring process(es) "
            f"need the same rows, and this Accelerator gives the same rows to {ranks_per_row()}. Give the sizes to it "
            "alone, make_accelerator(parallelism_config=ParallelismConfig(tp_size=…, cp_size=…)), and leave mesh and "
            "distributed_config out of from_pretrained(…, accelerator=accelerator)."
        )
    names = {name for name, _ in (sharded_module(model) or model).named_modules(remove_duplicate=False)}
    if gone := [name for unit in sharding.plan.units for name in unit.modules if name not in names]:
        raise ConfigError(
            f"{len(gone)} modules were taken out of {type(model).__name__} after it was sharded: {listed(gone)}. Load "
            "fewer layers, from_pretrained(..., num_hidden_layers=N); or take them out of the plain model and let "
            "prepare() shard it."
        )
    if (made := count_units(model)) != (planned := 0 if sharding.is_whole else len(sharding.plan.units)):
        raise ConfigError(
            f"{type(model).__name__} has {made} FSDP units and a plan of {planned}: parts of it were sharded outside "
            "the plan. Give shard_model or prepare a model of which nothing is sharded."
        )
    alone = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and not is_averaged(p)
    ]
    if alone and not sharding.is_whole:
        raise ConfigError(
            f"{len(alone)} trainable parameter(s) are not sharded and their gradients would not be averaged: "
            f"{listed(alone)}. They were added after prepare(). Add adapters or heads before it."
        )


def _check_loaded(model: nn.Module, on_meta: list[str]) -> None:
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters of {type(model).__name__} are on meta (first: {on_meta[0]}): it was never "
            "loaded. Load it with from_pretrained(..., accelerator=accelerator), or call load_weights after "
            "shard_model."
        )


def check_precision(model: nn.Module, accelerator: Accelerator) -> None:
    """Refuse a model that computes in another precision than the Accelerator, and fp16 without loss scaling."""
    mixed_precision = accelerator.mixed_precision
    if mixed_precision == "fp16" and accelerator.scaler is None and any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "mixed_precision 'fp16' needs a scaled loss, which Accelerate has for GPUs and not for "
            f"{accelerator.device.type}. Use 'bf16', which needs none, or 'no'."
        )
    sharding = sharding_of(model)
    wanted = LOW_PRECISION.get(mixed_precision)
    if sharding is None or wanted is None:
        return
    is_float8 = isinstance(sharding.mp_policy, Float8Policy)
    if sharding.mp_policy.param_dtype == wanted and (is_float8 or mixed_precision != "fp8"):
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if sharding.mp_policy.param_dtype is None and dtypes == {wanted} and mixed_precision != "fp8":
        return  # pure low precision, on purpose
    raise ConfigError(
        f"The Accelerator computes in {mixed_precision}, but the model was sharded to compute in "
        f"{sharding.mp_policy.param_dtype or 'the dtype of its weights'}. Pass accelerator= (or the same mp_policy) to "
        "from_pretrained; for a Trainer, make the Accelerator of its arguments: make_accelerator(arguments)."
    )


def prepare_for_training(model: nn.Module, accelerator: Accelerator) -> None:
    """Compile the plan's blocks if the Accelerator asks for it, and turn off the cache of a model that is trained."""
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO:
        compile_sharded(model, dynamo.to_kwargs())
    if any(parameter.requires_grad for parameter in model.parameters()):
        turn_cache_off(base_of(model))


# ---- what a script saves by itself ----


def refuse_parts(obj: Any, where: Any) -> None:
    """Refuse an object with DTensors of which this rank holds a part only, at any depth of mappings and sequences."""
    named = [(keystr(path), value) for path, value in tree_flatten_with_path(obj)[0] if isinstance(value, DTensor)]
    if shards := [(name, value) for name, value in named if value.to_local().numel() < value.numel()]:
        name, first = shards[0]
        raise ConfigError(
            f"{str(where)!r} would hold rank 0's shards of {len(shards)} tensors (first: {name}, "
            f"{first.to_local().numel()} of {first.numel()} values on this rank). On every rank call "
            "accelerator.save_model(model, folder), or accelerator.get_state_dict(model) and save its result; for "
            "optimizers too, accelerator.save_state(folder)."
        )
