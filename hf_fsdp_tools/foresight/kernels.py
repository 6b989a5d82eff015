"""The operations of a GPU that differ from those of a CPU, on fake tensors of the CPU: attention, dropout, norms."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["AsOnCuda", "scratch"]


class AsOnCuda(TorchFunctionMode):
    """While active, functions choose the kernels that they choose for CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the kernel of CUDA in the place of that of the CPU."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One kernel, with a mask of one byte per element (`native_dropout`)."""
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch chooses on CUDA (`sdp_utils.cpp`): flash, else efficient, else plain operations."""
    ops: Any = torch.ops.aten
    result: tuple[torch.Tensor, ...]
    low = query.dtype in (torch.bfloat16, torch.float16)
    alike = query.shape[-1] == value.shape[-1]
    if low and attn_mask is None and alike and query.shape[-1] <= 256:
        result = ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif not enable_gqa:
        needs_backward = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        result = ops._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_backward, dropout_p, is_causal, scale=scale
        )
    else:
        result = ops._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return result[0]


def scratch(func: Any, args: Sequence[Any], result: Any) -> Iterable[int]:
    """Bytes of the memory that a CUDA kernel takes beside its results while it runs."""
    return ()
