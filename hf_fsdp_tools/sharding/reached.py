"""Weights that no output depends on, as parts of the graph: they get a gradient of zeros, as on ranks that use them."""

from collections.abc import Callable
from typing import Any

import torch


def first_float(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor of an output, or of arguments; one that needs a gradient before others."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    floats = [each for each in members if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return next((each for each in floats if each.requires_grad), floats[0] if floats else None)


def with_tensor(value: Any, old: torch.Tensor | None, new: Any) -> Any:
    """An output, or arguments, with one tensor in the place of another; outputs of transformers are changed."""
    if value is old:
        return new
    if type(value) in (tuple, list):
        return type(value)(with_tensor(each, old, new) for each in value)
    if isinstance(value, dict):
        for key, each in value.items():
            if each is old:
                value[key] = new
    return value


class _ReachAll(torch.autograd.Function):
    """The identity of its first input, which gives all others a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return output.detach()  # no view: FSDP2 warns of outputs that are

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # One zero, seen in the shape of the weight: only an expert without a gradient takes memory.
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.likes)
        return (*grads, *zeros)


reach_all: Callable[..., torch.Tensor] = _ReachAll.apply
