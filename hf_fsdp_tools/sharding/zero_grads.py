"""Weights that no output depends on, as parts of the graph: they get a gradient of zeros, as on ranks that use them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def own_weights(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The weights of a unit that need a gradient, as they are registered now, and whole ones next to them."""
    own = (module for module in below(modules) if module in modules or not isinstance(module, FSDPModule))
    weights = (weight for module in own for weight in module._parameters.values())
    return list(dict.fromkeys(weight for weight in weights if weight is not None and weight.requires_grad))


def below(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a unit and those below that are in no other unit, and the outermost ones of those; each once."""
    seen: set[nn.Module] = set()
    stack = list(reversed(list(modules)))
    roots = set(stack)
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if module in roots or not isinstance(module, FSDPModule):
            stack += reversed(list(module.children()))


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
            if (changed := with_tensor(each, old, new)) is not each:
                value[key] = changed
    return value


def with_zero_grads_for_any_loss(output: Any, weights: Sequence[torch.Tensor]) -> Any:
    """An output of a model, of which every tensor that needs a gradient reaches the weights: a loss may be made of any.

    TRL's trainers take the log-probabilities next to a loss, others the logits.
    """
    tensors = list({id(tensor): tensor for tensor in in_graph(output)}.values())
    if not tensors or not weights or not torch.is_grad_enabled():
        return output
    for old, new in zip(tensors, _reach(len(tensors), *tensors, *weights), strict=True):
        output = with_tensor(output, old, new)
    return output


def in_graph(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of an output that need a gradient."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_floating_point():
            yield value
    elif isinstance(value, (dict, tuple, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from in_graph(each)


class _Reach(torch.autograd.Function):
    """The identity of its first `count` inputs, in tensors that are no views: one of which no loss is made gets no
    gradient. All others get a gradient of zeros: one zero each, seen in the shape of the weight, so that only an expert
    without a gradient takes memory."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.likes = [(weight.shape, weight.dtype, weight.device) for weight in tensors[count:]]
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.likes)
        return (None, *grads, *zeros)


_reach: Callable[..., tuple[torch.Tensor, ...]] = _Reach.apply


def with_zero_grads(tensor: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The same tensor, no view, of which weights are part, with gradients of zeros."""
    return _reach(1, tensor, *weights)[0]
