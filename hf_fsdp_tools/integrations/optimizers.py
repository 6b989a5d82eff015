"""Optimizers of sharded models: what cannot step shards is refused, and shards are stepped apart from whole tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import ConfigError

__all__ = ["by_kind", "check_optimizers", "clip_values", "step_kinds_apart"]

_NOT_FOR_SHARDS = (
    "bitsandbytes",
    "transformers.optimization",
    "torch.optim.Adafactor",
    "torch.optim.rprop.Rprop",
)
"""Modules and classes of optimizers that fail on DTensors (measured: a step with bitsandbytes 0.50, with the Adafactors
of transformers 5.23 and torch 2.13, and with torch 2.13's Rprop)."""

_NOT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused step DTensors lack (measured: torch 2.13); Adam's and AdamW's they have."""


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer of tensors that are not the models' parameters, and one that cannot step sharded parameters.

    The first would step without effect; the second fails in its first step, with a message that does not say why.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        _check_kind(getattr(optimizer, "optimizer", optimizer))
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in held)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(held)} parameters of {type(optimizer).__name__} belong to no prepared model: "
                "it was made before the model was sharded, or between a forward and its backward pass. Make it from "
                "model.parameters() right before prepare(model, optimizer)."
            )


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__name__}".startswith(_NOT_FOR_SHARDS):
        raise ConfigError(
            f"{kind.__name__} of {kind.__module__} cannot step sharded parameters (DTensor). Use "
            "torch.optim.AdamW, or torchao.optim.AdamW8bit, whose state is small too (in TrainingArguments: "
            "optim='adamw_torch_8bit')."
        )
    if isinstance(optimizer, _NOT_FUSED) and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            f"{kind.__name__}(fused=True) cannot step sharded parameters (DTensor). Leave fused out; foreach=True "
            "works."
        )


def step_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step shards and whole parameters of one group one after the other, from now on.

    Parameters that FSDP cannot shard (0-d), or that the policy keeps whole, stand beside shards in one group. torch's
    fused and foreach steps take a group in one call, which cannot mix the two kinds. Here the groups are parted for the
    time of a step only: a scheduler, a state dict and a user see the groups as they were made.

    Args:
        optimizer: of torch, one that extends its class, or Accelerate's around it; called again, nothing changes.
    """
    while (within := getattr(optimizer, "optimizer", None)) is not None:  # a second `train()` wraps Accelerate's again
        optimizer = within
    if getattr(optimizer, "_steps_kinds_apart", False):
        return
    optimizer._steps_kinds_apart = True  # type: ignore[attr-defined]  # a plain attribute of our own
    parted: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    def part(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        join(optimizer, args, kwargs)  # a step that failed left them parted
        kinds = [by_kind(group["params"]) for group in optimizer.param_groups]
        if any(len(lists) > 1 for lists in kinds):
            for group, lists in zip(optimizer.param_groups, kinds, strict=True):
                parted.append((group, [{**group, "params": parameters} for parameters in lists]))
            optimizer.param_groups = [each for _, parts in parted for each in parts]

    def join(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if parted:
            for group, parts in parted:  # some optimizers count their steps in the group
                group.update({key: value for each in parts for key, value in each.items() if key != "params"})
            optimizer.param_groups = [group for group, _ in parted]
            parted.clear()

    optimizer.register_step_pre_hook(part)
    optimizer.register_step_post_hook(join)


def by_kind(parameters: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Shards of each mesh, and whole parameters, each in a list of its own; empty lists are left out."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(kinds.values())


def clip_values(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip each element of all gradients to `-limit .. limit`, in place; shards by their own rank.

    Nothing is communicated.
    """
    for each in by_kind(parameters):
        nn.utils.clip_grad_value_(each, limit)
