"""The operations of a GPU that differ from those of a CPU, on fake tensors of the CPU: attention, dropout, norms."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from hf_fsdp_tools.foresight.events import Operation
from hf_fsdp_tools.modeling.linear4bit import Packing, packed_linears, packing_of

__all__ = ["AsOnCuda", "counted", "grouped_mm", "imitate_4bit", "scratch"]


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


def grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor,
    bias: object = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of a product of matrices per group: experts, whose sizes are known on the GPU alone.

    torch's own formula for tensors without data takes bf16 alone. Rows of the result are padded to 16 bytes, as by
    `create_grouped_gemm_output_tensor` in torch's `GroupedBlas.cpp`.
    """
    groups = offs.shape[:1] if left.dim() == right.dim() == 2 else ()
    if left.dim() == 3 and right.dim() == 3:
        groups = left.shape[:1]
    shape = (*groups, left.shape[-2], right.shape[-1])
    dtype = out_dtype or left.dtype
    step = 16 // dtype.itemsize
    width = -(-shape[-1] // step) * step
    strides = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)


def imitate_4bit(model: nn.Module) -> None:
    """Let layers of bitsandbytes unpack their weight in each pass, without bitsandbytes, whose kernels need data.

    As its `MatMul4Bit`: the whole weight is unpacked in the forward pass and again in the backward pass.
    """
    for module in packed_linears(model).values():
        module.forward = partial(_linear_4bit, module)


def _linear_4bit(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    dtype = layer.compute_dtype or hidden.dtype
    result: torch.Tensor = _Linear4bit.apply(hidden.to(dtype), layer.weight, packing_of(layer))  # type: ignore[no-untyped-call]
    return (result if layer.bias is None else result + layer.bias.to(dtype)).to(hidden.dtype)


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, packed: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.packing = packing
        ctx.save_for_backward(packed)
        return functional.linear(hidden, _unpacked(packed, packing, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return torch.matmul(grads[0], _unpacked(packed, ctx.packing, grads[0].dtype)), None, None


def _unpacked(packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a weight that a kernel has unpacked; nested scales are unpacked first."""
    scales = torch.zeros(packing.num_blocks, dtype=torch.float32, device=packed.device) if packing.is_nested else None
    weight = torch.zeros(packing.shape, dtype=packing.dtype, device=packed.device)
    del scales
    return weight.to(dtype)


def counted(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[Operation, float, float]:
    """What bounds an operation, the floating-point operations that a GPU does for it, and those of the usual count.

    Products of matrices and convolutions by the formulas of torch's `flop_counter`.
    """
    name = func.overloadpacket.__name__
    if "attention" in name:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        return ("attention", *_attention_flops(given, is_backward="backward" in name))
    if name == "_grouped_mm":  # rows are distributed over the groups, or summed within them
        flops = 2.0 * args[0].numel() * args[1].shape[-1]
    else:
        count = flop_registry.get(func.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    return "matmul" if flops else "memory", flops, flops


def _attention_flops(given: dict[str, Any], *, is_backward: bool) -> tuple[float, float]:
    """Operations of an attention kernel, and those of the usual count.

    Forward: scores and their products with values; backward: scores again, and the gradients of both products (Dao
    2023). The usual count leaves out what is computed again, and counts masked scores, half of which kernels skip where
    attention is causal.
    """
    query, key, value = given["query"], given["key"], given["value"]
    scores = 2.0 * query.shape[:-1].numel() * key.shape[-2]
    width, out_width = query.shape[-1], value.shape[-1]
    usual = scores * (width + out_width) * (2 if is_backward else 1)
    done = usual + scores * width if is_backward else usual
    is_causal = bool(given.get("is_causal")) and query.shape[-2] == key.shape[-2]
    return done / 2 if is_causal else done, usual


def scratch(func: Any, args: Sequence[Any], result: Any) -> Iterable[int]:
    """Bytes of the memory that a CUDA kernel takes beside its results while it runs."""
    return ()
