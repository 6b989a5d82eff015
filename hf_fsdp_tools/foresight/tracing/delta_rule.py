"""The gated delta rule and Mamba's scan as libraries compute them on a GPU, in place of transformers' loops.

A loop, which runs where the library is not installed, keeps many tensors of each chunk or token, and would be followed
one by one: a row of 131,072 tokens has 2,048 chunks.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.modeling.module_tree import replaced

NAMES = {"torch_chunk_gated_delta_rule": "fla", "chunk_kimi_delta_attention": "fla"}
NAMES |= {"mamba_selective_scan": "mamba_ssm"}
"""What transformers' files call them (5.24), and the library of each."""

CHUNK = 64
"""Tokens of a chunk, as of transformers' loop. What is kept: inputs, the decay summed up in a chunk, the inverse of
its system; states are made again. (assumed, of the library)"""


def delta_rule_flops(keys: torch.Size, values: torch.Size, *, is_backward: bool) -> float:
    """Floating-point operations of a pass: scores of keys and queries in each chunk, the solution of its triangular
    system, products with values and with the state. The backward pass makes the states again, and two gradients of each
    product."""
    (*_, key_dim), (batch, tokens, heads, value_dim) = keys, values
    products = CHUNK * (5 * key_dim + 3 * value_dim) + 6 * key_dim * value_dim
    return float(batch * tokens * heads * products * (2.5 if is_backward else 1))


@torch.library.custom_op("hf_fsdp_tools::delta_rule", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("It is followed without data.")  # a trace runs the rule for shapes below alone


@_forward.register_fake
def _made(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> tuple[torch.Tensor, ...]:
    """Outputs, the inverse of each chunk's system, and the decay summed up in it."""
    inverse = value.new_empty((*value.shape[:-1], CHUNK), dtype=query.dtype)
    return torch.empty_like(value, dtype=query.dtype), inverse, torch.empty_like(decay, dtype=torch.float32)


@torch.library.custom_op("hf_fsdp_tools::delta_rule_backward", mutates_args=())
def _backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, inverse: torch.Tensor,
    summed: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:  # fmt: skip
    raise NotImplementedError("It is followed without data.")  # a trace runs the rule for shapes below alone


@_backward.register_fake
def _gradients(query: Any, key: Any, value: Any, beta: Any, inverse: Any, summed: Any, *rest: Any) -> Any:
    return [torch.empty_like(each) for each in (query, key, value, summed, beta)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, _, beta = inputs
    ctx.save_for_backward(query, key, value, beta, *output[1:])


def _back(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, *rest = ctx.saved_tensors
    chunks = -(-value.shape[1] // CHUNK)  # whose states are made again
    states = value.new_empty((value.shape[0], chunks, value.shape[2], key.shape[-1], value.shape[-1]))
    made = torch.ops.hf_fsdp_tools.delta_rule_backward(query, key, value, *rest, states, gradient)
    return tuple(made)


_forward.register_autograd(_back, setup_context=_keep)


class _Scan(torch.autograd.Function):
    """Mamba's scan, bounded by memory: as `SelectiveScanFn` of mamba_ssm it keeps inputs, the output before the gate,
    and two states of each chunk of 2,048 tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, dt: Any, A: Any, *rest: Any) -> torch.Tensor:
        chunks = -(-hidden.shape[2] // 2048)
        states = hidden.new_empty((*hidden.shape[:2], chunks, 2 * A.shape[-1]), dtype=torch.float32)
        out, gate = torch.add(hidden, dt, out=torch.empty_like(hidden)), rest[3]
        ctx.save_for_backward(hidden, dt, A, *rest, out, states)
        return out if gate is None else torch.mul(out, gate, out=torch.empty_like(out))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = [None if each is None else torch.empty_like(each) for each in ctx.saved_tensors[:-2]]
        for at, like in enumerate(made):
            if like is not None and like.shape == grads[0].shape:
                torch.mul(grads[0], ctx.saved_tensors[at], out=like)
        return tuple(made)


def as_kernels(model: nn.Module) -> Iterator[AbstractContextManager[Any]]:
    """Yield blocks in which the files of a model call the kernels."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[name]
        if found := {each: _scanned if "scan" in each else _computed for each in NAMES if hasattr(file, each)}:
            yield replaced(file, **found)


def _computed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """The outputs; in training no state is asked for."""
    made: torch.Tensor = _forward(query, key, value, g, beta)[0]
    return made, None


def _scanned(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None, **_: Any
) -> Any:
    """The same of Mamba's scan."""
    return _Scan.apply(hidden_states, dt, A, B, C, D, z, delta_bias)  # type: ignore[no-untyped-call]
