"""A plain model sharded where Accelerate would wrap it, and what must hold for a model before it is trained."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.mesh import ParallelDims
from hf_fsdp_tools.shard import shard_model, sharding_of
from hf_fsdp_tools.wrap import make_wrap_plan

from .plugin import LOW_PRECISION

__all__ = ["check_managed", "check_optimizers", "check_precision", "shard_in_place"]


def shard_in_place(model: nn.Module, accelerator: Accelerator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Shard a plain model, equal on every rank, and hand its new parameters to the optimizers that hold the old ones."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters of {type(model).__name__} are on meta (first: {on_meta[0]}): it was never loaded. "
            "Load it with from_pretrained(..., accelerator=accelerator), or call load_weights after shard_model."
        )
    plugin = accelerator.state.fsdp_plugin
    if accelerator.mixed_precision in LOW_PRECISION:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # master weights, as Accelerate keeps them
    names = {parameter: name for name, parameter in model.named_parameters()}
    config = accelerator.parallelism_config
    shard_model(
        model,
        make_wrap_plan(model, policy=plugin.policy),
        mesh=(
            accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
            if config is not None
            else ParallelDims().build_mesh(accelerator.device.type)
        ),
        mp_policy=plugin.mixed_precision_policy,
        offload_policy=plugin.cpu_offload,
        activation_checkpointing=plugin.activation_checkpointing,
    )
    sharded = dict(model.named_parameters())
    for optimizer in optimizers:
        _hand_over(optimizer, {old: sharded[name] for old, name in names.items()})


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


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """An optimizer of other tensors than the models' parameters would step without any effect."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in held)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(held)} parameters of {type(optimizer).__name__} belong to no prepared model: it was made "
                "before the model was sharded, or between a forward and its backward pass. Make it from "
                "model.parameters() right before prepare(model, optimizer)."
            )


def check_managed(model: nn.Module) -> None:
    """A trainable parameter outside FSDP's care would be trained by each rank for itself, without a word."""
    sharding = sharding_of(model)
    if sharding is None:
        return  # sharded by someone else, who answers for it
    averaged = {id(p) for p in model.parameters() if p._post_accumulate_grad_hooks}
    alone = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and id(p) not in averaged
    ]
    if alone:
        raise ConfigError(
            f"{len(alone)} trainable parameter(s) are not sharded and their gradients would not be averaged: "
            f"{', '.join(alone[:4])}{', …' if len(alone) > 4 else ''}. They were added after sharding. Add adapters or heads to "
            "the plain model, and let prepare() shard the whole."
        )


def check_precision(model: nn.Module, mixed_precision: str) -> None:
    """A model sharded without a precision policy would compute in fp32 however the Accelerator is set."""
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
