"""Optimizers of sharded models: what cannot step shards is refused; and clipping of all of a model's gradients."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.sharding.replicated import by_kind

_NOT_FOR_SHARDS = (
    "apollo_torch",
    "bitsandbytes",
    "peft.optimizers.lorafa",
    "transformers.optimization",
    "torch.optim.Adafactor",
    "torch.optim.rprop.Rprop",
)
"""Modules and classes of optimizers that fail on DTensors (measured: a step with bitsandbytes 0.50, with APOLLO, with
LoRA-FA of PEFT 0.21, with the Adafactors of transformers 5.23 and torch 2.13, and with torch 2.13's Rprop)."""

_NOT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused step DTensors lack (measured: torch 2.13); Adam's and AdamW's they have."""


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer of other tensors than the models' parameters, and one that cannot step shards."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        own = getattr(optimizer, "optimizer", optimizer)
        check_kind(type(own))
        if isinstance(own, _NOT_FUSED) and any(group.get("fused") for group in own.param_groups):
            raise ConfigError(
                f"{type(own).__name__}(fused=True) cannot step sharded parameters (DTensor). Leave fused out; "
                "foreach=True works."
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in parameters)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(parameters)} parameters of {type(optimizer).__name__} belong to no prepared "
                "model: it was made before the model was sharded, or between a forward and its backward pass. Make it "
                "from model.parameters() right before prepare(model, optimizer)."
            )


def check_kind(kind: type) -> None:
    """Refuse a class of optimizers that cannot step sharded parameters."""
    if f"{kind.__module__}.{kind.__name__}".startswith(_NOT_FOR_SHARDS):
        raise ConfigError(
            f"{kind.__name__} of {kind.__module__} cannot step sharded parameters (DTensor). Use "
            "torch.optim.AdamW, or torchao.optim.AdamW8bit, whose state is small too (in TrainingArguments: "
            "optim='adamw_torch_8bit')."
        )


def clip_norm(parameters: Iterable[torch.Tensor], limit: float, order: float, device: torch.device) -> torch.Tensor:
    """Scale all gradients down, in place, to a norm of at most `limit`; return the norm that they had together.

    Gradients may be shards of several meshes and whole ones, on several devices (offloaded shards are on the CPU). The
    norms of shards are summed over their mesh.

    Every rank must call.
    """
    kinds = by_kind(parameter for parameter in parameters if parameter.grad is not None)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None], order) for kind in kinds]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm.as_subclass(torch.Tensor) for norm in norms]
    norms = [norm.to(device) for norm in norms]
    total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms, order).to(device)
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, limit, total)
    return total


def clip_values(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip each element of all gradients to `-limit .. limit`, in place; shards by their own rank."""
    for each in by_kind(parameters):
        nn.utils.clip_grad_value_(each, limit)
