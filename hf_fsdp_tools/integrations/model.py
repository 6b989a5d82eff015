"""A plain model sharded where Accelerate would wrap it, and what must hold for a model before it is trained."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.peft_view import base_of
from hf_fsdp_tools.pretrained import shard_arguments
from hf_fsdp_tools.sharding.adapter_plan import plan_with_adapters
from hf_fsdp_tools.sharding.adapters import shard_added
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.fsdp2_internals import count_units
from hf_fsdp_tools.sharding.hf_interface import turn_cache_off
from hf_fsdp_tools.sharding.shard import compile_sharded, shard_model, sharding_of
from hf_fsdp_tools.text import listed

__all__ = [
    "LOW_PRECISION",
    "check_managed",
    "check_native",
    "check_optimizers",
    "check_precision",
    "prepare_for_training",
    "send_weights",
    "shard_additions",
    "shard_in_place",
    "weights_to_send",
]

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Accelerate's names of the precisions in which trainable weights are kept in fp32 beside the computation."""

_SAMPLES = 64
"""Values of each tensor that are compared between ranks (chosen): weights drawn differently differ everywhere."""

_NO_SHARDS = ("bitsandbytes", "transformers.optimization", "torch.optim.Adafactor")
"""Optimizers that fail on DTensors, both Adafactors too. Measured: bitsandbytes 0.50, transformers 5.23, torch 2.13."""


# ---- a plain model, and what was added to a sharded one ----


def shard_in_place(model: nn.Module, accelerator: Accelerator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Shard a plain model (of a PEFT model: its base, with the adapters), and hand its new parameters to the optimizers
    that hold the old ones."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "The model is compiled as a whole, which FSDP2's gathering of one unit after another would break up. "
            "Pass the plain model, and make_accelerator(dynamo_backend=…) or TrainingArguments(torch_compile=True): "
            "blocks are compiled then."
        )
    others = weights_to_send(model)
    if accelerator.mixed_precision in LOW_PRECISION:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # master weights, as Accelerate keeps them
    names = {parameter: name for name, parameter in model.named_parameters()}
    base = base_of(model)
    shard_model(
        base,
        plan_with_adapters(base, accelerator.state.fsdp_plugin.policy_for(base)),
        **shard_arguments(accelerator),
    )
    send_weights(model, others)
    shard_added(model)  # what PEFT keeps outside the base
    sharded = dict(model.named_parameters())
    for optimizer in optimizers:
        _hand_over(optimizer, {old: sharded[name] for old, name in names.items()})


def shard_additions(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Shard what was added to a model after it was sharded (`get_peft_model` in a script or a trainer of TRL)."""
    replaced = shard_added(model)
    for optimizer in optimizers:
        _hand_over(optimizer, replaced)


def _hand_over(optimizer: torch.optim.Optimizer, sharded: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Give an optimizer the sharded parameters for the whole ones, with what state it has for these (Adagrad makes its
    own at construction) cut alike: every rank has it whole, so nothing travels."""
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in sharded]:
        new = sharded[old]
        optimizer.state[new] = {key: _cut_like(new, value) for key, value in optimizer.state.pop(old).items()}


def _cut_like(parameter: nn.Parameter, value: Any) -> Any:
    """One entry of a parameter's optimizer state, sharded as the parameter is; steps and the like as they are."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    cut = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.to(device=parameter.device, dtype=parameter.dtype if value.is_floating_point() else None)


# ---- weights that only rank 0 has, or that differ between ranks ----


def weights_to_send(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers that are not what rank 0 has, by name; the same names on every rank.

    Sharding takes each rank's slice of its own copy, so weights must be equal. With `fsdp_cpu_ram_efficient_loading`
    transformers leaves them on meta (5.23) or at zero (5.17) on all ranks but the first; heads and adapters that each
    rank drew by its own seed differ too. Every rank must call; a digest of a few values of each tensor is gathered.

    Raises:
        ConfigError: parameters are on meta on rank 0 too: nobody loaded the model.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ranks = all_ranks({name: _digest(tensor) for name, tensor in tensors.items()})
    first = ranks[0]
    _check_loaded(model, [name for name, digest in first.items() if digest == "meta"])
    other = [name for name in first if any(rank.get(name, first[name]) != first[name] for rank in ranks)]
    drawn = [name for name in other if any(rank.get(name) not in ("meta", first[name]) for rank in ranks)]
    if drawn and dist.get_rank() == 0:
        warnings.warn(
            f"{len(drawn)} of {len(first)} tensors of {type(model).__name__} differ between ranks (first: "
            f"{drawn[0]}); rank 0's are used on all. Set the same seed on every rank before the model is made.",
            stacklevel=5,
        )
    return {name: tensors[name].detach() for name in other if name in tensors}


def send_weights(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Fill the shards of those tensors from rank 0's whole ones, in place, one tensor at a time.

    Args:
        model: sharded since `weights_to_send` looked at it; what is on meta gets storage here.
        whole: what `weights_to_send` gave; values count on rank 0 only.

    Every rank must call; each tensor is broadcast whole, and no rank but the first ever holds more than one.
    """
    sharding = sharding_of(model)
    if not whole or sharding is None:
        return
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        allocate(model, device=sharding.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    device = torch.device(sharding.mesh.device_type)
    with torch.no_grad():
        for name, mine in whole.items():
            tensor = tensors[name]
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if dist.get_rank() == 0:
                full.copy_(mine)
            dist.broadcast(full, src=0)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
                tensor = tensor.to_local()
            tensor.copy_(full)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().flatten()
    few = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].cpu().contiguous()
    return hashlib.sha256(few.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# ---- before training ----


def check_native(model: nn.Module) -> None:
    """What transformers sharded while loading (`DistributedConfig`) is taken if that was FSDP2 and nothing else."""
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    if not sharded or sharding_of(model) is not None:
        return
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    other = [name for name in ("tp_size", "ep_size", "pp_size") if (getattr(config, name, None) or 1) > 1]
    if other or not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} is sharded already, and not by FSDP2 alone "
            f"({', '.join(other) or 'no FSDP2 module'}). Load it with from_pretrained(..., accelerator=accelerator), "
            "or with DistributedConfig(fsdp_size=…) only."
        )
    alone = [n for n, p in model.named_parameters() if config and p.requires_grad and not isinstance(p, DTensor)]
    if alone:
        raise ConfigError(
            f"{len(alone)} trainable parameter(s) were added after transformers sharded the model ({listed(alone)}): "
            "each rank would train its own. Load it with from_pretrained(..., accelerator=accelerator); prepare() "
            "shards additions to that."
        )


def check_managed(model: nn.Module) -> None:
    """A trainable parameter outside FSDP's care would be trained by each rank for itself, without a word; weights on
    meta would fail in the first forward pass, and other units than the plan's gather more, or hang."""
    _check_loaded(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    sharding = sharding_of(model)
    if sharding is None:
        return  # sharded by someone else, who answers for it
    if (made := count_units(model)) != (planned := len(sharding.plan.units)):
        raise ConfigError(
            f"{type(model).__name__} has {made} FSDP units and a plan of {planned}: parts of it were sharded beside "
            "the plan. Give shard_model or prepare a model of which nothing is sharded."
        )
    averaged = {id(p) for p in model.parameters() if p._post_accumulate_grad_hooks}
    alone = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and id(p) not in averaged
    ]
    if alone:
        raise ConfigError(
            f"{len(alone)} trainable parameter(s) are not sharded and their gradients would not be averaged: "
            f"{listed(alone)}. They were added after prepare(). Add adapters "
            "or heads before it."
        )


def _check_loaded(model: nn.Module, on_meta: list[str]) -> None:
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters of {type(model).__name__} are on meta (first: {on_meta[0]}): it was never "
            "loaded. Load it with from_pretrained(..., accelerator=accelerator), or call load_weights after "
            "shard_model."
        )


def check_precision(model: nn.Module, accelerator: Accelerator) -> None:
    """A model sharded without a precision policy would compute in fp32 however the Accelerator is set, and fp16 without
    loss scaling would lose small gradients."""
    mixed_precision = accelerator.mixed_precision
    if mixed_precision == "fp16" and accelerator.scaler is None and any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "mixed_precision 'fp16' needs a scaled loss, which Accelerate has for GPUs and not for "
            f"{accelerator.device.type}. Use 'bf16', which needs none, or 'no'."
        )
    sharding = sharding_of(model)
    wanted = LOW_PRECISION.get(mixed_precision)
    if sharding is None or wanted is None or sharding.mp_policy.param_dtype == wanted:
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if sharding.mp_policy.param_dtype is None and dtypes == {wanted}:
        return  # pure low precision, on purpose
    raise ConfigError(
        f"The Accelerator computes in {mixed_precision}, but the model was sharded to compute in "
        f"{sharding.mp_policy.param_dtype or 'the dtype of its weights'}. Pass accelerator= (or the same mp_policy) to "
        "from_pretrained, made with the same mixed_precision as the Trainer's arguments."
    )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """An optimizer of other tensors than the models' parameters would step without any effect; some libraries' cannot
    step sharded parameters, which they say in the first step and not why."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        kind = type(getattr(optimizer, "optimizer", optimizer))
        if f"{kind.__module__}.{kind.__name__}".startswith(_NO_SHARDS):
            raise ConfigError(
                f"{kind.__name__} of {kind.__module__} cannot step sharded parameters (DTensor). Use "
                "torch.optim.AdamW, or torchao.optim.AdamW8bit, whose state is small too (in TrainingArguments: "
                "optim='adamw_torch_8bit')."
            )
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in held)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(held)} parameters of {type(optimizer).__name__} belong to no prepared model: "
                "it was made before the model was sharded, or between a forward and its backward pass. Make it from "
                "model.parameters() right before prepare(model, optimizer)."
            )


def prepare_for_training(model: nn.Module, accelerator: Accelerator) -> None:
    """Compile the plan's blocks if the Accelerator is to compile; let a model that is trained keep no cache of keys and
    values (`generate` asks for its own)."""
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO:
        compile_sharded(model, dynamo.to_kwargs())
    if any(parameter.requires_grad for parameter in model.parameters()):
        turn_cache_off(base_of(model))
