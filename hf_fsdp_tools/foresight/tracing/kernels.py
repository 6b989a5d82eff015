"""The operations of a GPU that differ from those of a CPU, on fake tensors of the CPU: attention, dropout, norms; and a
loss that never holds all logits."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import Operation
from hf_fsdp_tools.foresight.tracing.delta_rule import NAMES, delta_rule_flops
from hf_fsdp_tools.modeling.four_bits import left_as_floats

# Operations without a kernel
MAKES_NOTHING = ("wait_tensor", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class AsOnCuda(TorchFunctionMode):
    """While active, functions choose the kernels that they choose for CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ON_CUDA.get(func, func)(*args, **(kwargs or {}))


def _rms_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """One kernel, where inputs and weight have one dtype."""
    if weight is None or weight.dtype != input.dtype:
        return functional.rms_norm(input, normalized_shape, weight, eps)
    return torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One kernel, with a mask of one byte per element (`native_dropout`)."""
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, **_: Any
) -> Any:  # fmt: skip
    """The kernel that torch 2.14 chooses on CUDA (`sdp_utils.cpp`): flash without a mask in 16 bits, else efficient."""
    ops: Any = torch.ops.aten
    low = query.dtype in (torch.bfloat16, torch.float16)
    if low and attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
        return ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    keep = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    mask = None if attn_mask is None else _additive(attn_mask, query, key)
    efficient = ops._scaled_dot_product_efficient_attention
    return efficient(query, key, value, mask, keep, dropout_p, is_causal, scale=scale)[0]


_ON_CUDA: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    functional.dropout: _dropout,
}


def _additive(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the efficient kernel takes it: added to the scores, rows of a multiple of 8 elements."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype), torch.full((), -torch.inf, dtype=query.dtype))
    if rest := -mask.shape[-1] % 8:
        mask = functional.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _efficient_backward(_: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **__: Any) -> tuple[Any, ...]:
    """The gradients of efficient attention, of keys and values with fewer heads too (torch 2.14), laid out by token."""
    made = [torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype) for t in (query, key, value)]
    wanted = rest[5][3] if len(rest) > 5 and mask is not None else False
    return (*made, torch.empty_like(mask) if wanted else None)


def _layer_norm(hidden: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
    """A layer norm, whose saved statistics are fp32 on CUDA."""
    rows = [*hidden.shape[: hidden.dim() - len(shape)], *(1 for _ in shape)]
    statistics = (torch.empty(rows, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), *statistics


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, bias: object = None, out_dtype: Any = None
) -> torch.Tensor:
    """A product of matrices per group (experts), which torch computes without data in bf16 alone; rows are padded to 16
    bytes, as by `create_grouped_gemm_output_tensor` in `GroupedBlas.cpp`."""
    groups = {(2, 2): offs.shape[:1], (3, 3): left.shape[:1]}.get((left.dim(), right.dim()), ())
    shape, dtype = (*groups, left.shape[-2], right.shape[-1]), out_dtype or left.dtype
    width = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    return torch.empty_strided(shape, (shape[-2] * width, width, 1)[-len(shape) :], dtype=dtype, device=left.device)


def notes_of(model: nn.Module) -> Iterator[str]:
    """Yield what a reader should know of kernels: those that are estimated where a GPU may run others."""
    kinds, title = {type(module): module for module in model.modules()}, type(model).__name__
    convolved = [kind for kind, one in kinds.items() if any(isinstance(child, nn.Conv1d) for child in one.children())]
    files = {kind: sys.modules[kind.__module__] for kind in convolved}
    if ruled := [(kind, NAMES[name]) for kind, file in files.items() for name in NAMES if hasattr(file, name)]:
        title, library = ruled[0][0].__name__, ruled[0][1]
        yield f"{title} is estimated with the kernels of {library}; without them, transformers keeps far more."
    elif mixer := next((kind for kind, file in files.items() if hasattr(file, "causal_conv1d_fn")), None):
        kept = "the kernels for it (mamba_ssm, causal_conv1d, fla) keep far fewer activations."
        yield f"{mixer.__name__} is estimated as transformers computes it in PyTorch; {kept}"
    yield from left_as_floats(model)
    if not getattr(model, "_supports_sdpa", True) and any(kind.__name__.endswith("Attention") for kind in kinds):
        yield f"{title} attends by the eager function of transformers, as without a flash kernel; scores take memory."
    if getattr(model, "main_input_name", "input_ids") != "input_ids" and kinds.keys() & {nn.Conv1d, nn.Conv2d}:
        yield "Scratch memory of convolutions, which cuDNN chooses, is not estimated."


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def counted(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[Operation, float, float]:
    """What bounds an operation, the floating-point operations that a GPU does for it, and those of the usual count."""
    name = func.overloadpacket.__name__
    if func.namespace.startswith("_c10d_functional"):
        kinds: tuple[Operation, ...] = ("all_to_all", "all_gather")
        return next((kind for kind in kinds if name.startswith(kind)), "all_reduce"), 0.0, 0.0
    if "attention" in name:
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        return ("attention", *_attention_flops(arguments, is_backward="backward" in name))
    if "delta_rule" in name:
        flops = delta_rule_flops(args[1].shape, args[2].shape, is_backward="backward" in name)
    elif name == "_grouped_mm":  # rows are distributed over the groups, or summed within them
        flops = 2.0 * args[0].numel() * args[1].shape[-1]
    else:
        count = flop_registry.get(func.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    return "matmul" if flops else "memory", flops, flops


def _attention_flops(arguments: dict[str, Any], *, is_backward: bool) -> tuple[float, float]:
    """Operations of an attention kernel (Dao 2023: backward, scores again, and gradients of both products), and those
    of the usual count: nothing that is recomputed, and all masked scores, half of which kernels skip."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    scores = 2.0 * query.shape[:-1].numel() * key.shape[-2]
    width, out_width = query.shape[-1], value.shape[-1]
    usual = scores * (width + out_width) * (2 if is_backward else 1)
    done = usual + scores * width if is_backward else usual
    is_causal = bool(arguments.get("is_causal")) and query.shape[-2] == key.shape[-2]
    return done / 2 if is_causal else done, usual


def run_on(func: Any, args: Any, kwargs: Any, *, on_cuda: bool) -> Any:
    """The result of an operation: by the kernel's rule where torch has none, or one of the CPU alone."""
    name = func.overloadpacket.__name__
    if name == "_grouped_mm":
        return _grouped_mm(*args, **kwargs)
    if on_cuda and name == "native_layer_norm" and args[0].element_size() < 4:
        return _layer_norm(*args, **kwargs)
    if name == "_scaled_dot_product_efficient_attention_backward":
        return _efficient_backward(*args, **kwargs)
    return func(*args, **kwargs)


def scratch(func: Any, args: Sequence[Any], *, on_cuda: bool) -> Sequence[int]:
    """Bytes of each piece of memory that a kernel takes next to its results, and gives back when it ends.

    As in `attention_backward.cu` and `flash_api.cpp`, checked against the log of PyTorch's allocator (2.14): of flash
    attention, a product per row and the gradient of queries in fp32, rows rounded to 128, and the gradients of keys and
    values for each head of the queries; of efficient attention, the product, and the gradients of 64 queries at a time
    with a lock; of `masked_scatter`, a running sum of the mask, and the mask, if expanded; of indices, 64-bit copies.
    """
    name = func.overloadpacket.__name__
    if name == "index":
        return [8 * each.numel() for each in args[1] if each is not None and each.dtype == torch.int32]
    if not on_cuda:
        return ()
    if name == "masked_scatter":
        numel = args[0].numel()
        return [8 * numel, 0 if args[1].shape == args[0].shape and args[1].is_contiguous() else numel]
    if "attention_backward" not in name:
        return ()
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    grouped = key.shape[1] != heads
    per_head = [batch * heads * key.shape[2] * t.shape[-1] * t.element_size() if grouped else 0 for t in (key, value)]
    if "flash" in name:
        rounded = batch * heads * (-(-length // 128) * 128)
        wide = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
        return [4 * rounded, 4 * rounded * wide, *per_head]
    tiles = batch * heads * -(-length // 64)
    wide = -(-width // 64) * 64
    product = [4 * rows * width] if query.element_size() == 4 else []
    return [*per_head, 4 * rows, *product, tiles * (64 * wide * 4 + 16)]


# ---- a chunked loss: TRL's (1.16, `ChunkedLogProbFunction`), which Liger's resembles ----

TOKENS, _WORDS = 4096, 32768
"""Tokens of one chunk of logits: TRL's `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE`."""


def predicts_words(model: nn.Module) -> bool:
    """Whether a model is a decoder that predicts the next word, whose loss the recipes' trainers compute in chunks."""
    is_alone = getattr(model, "base_model", model) is model
    return getattr(model, "can_generate", bool)() and _has_head(model) and not is_alone


def _has_head(model: Any) -> bool:
    find = getattr(model, "get_output_embeddings", lambda: None)
    return find() is not None and not getattr(model.config, "is_encoder_decoder", False)


def chunk_loss(model: nn.Module, recorder: Any) -> None:
    """Let a model compute a chunked loss, in place, as TRL's `add_fused_lm_head` does."""
    if not _has_head(model):
        raise ConfigError(
            f"{type(model).__name__} has no decoder with a head for words, whose loss could be computed in chunks. "
            'Use loss="full".'
        )

    def forward(self: Any, *args: Any, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        is_shifted = kwargs.pop("shift_labels", None) is not None  # of ranks with the same rows
        kwargs.pop("num_items_in_batch", None)
        hidden = self.base_model(*args, **kwargs)[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: setattr(recorder, "in_loss", False))
        recorder.in_loss = True
        labels = labels if is_shifted else labels[:, 1:]
        mask = labels != -100
        hidden = (hidden if is_shifted else hidden[:, :-1]).reshape(-1, hidden.shape[-1])
        head = self.get_output_embeddings()
        log_probs: torch.Tensor = _LogProbs.apply(hidden, head.weight, head.bias, recorder)  # type: ignore[no-untyped-call]
        log_probs = log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs)
        return {"loss": -log_probs.sum() / mask.sum().clamp(min=1)}

    model.forward = MethodType(forward, model)


class _LogProbs(torch.autograd.Function):
    """Logarithms of the probabilities of labels, in the memory and with the products of TRL's function."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, recorder: Any) -> torch.Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(hidden, weight, bias)
        log_z = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        with _all_pieces(hidden, weight, recorder) as (part, rows, columns):
            torch.mm(hidden[rows], weight[columns].t(), out=part)
            torch.sum(part, dim=-1, dtype=torch.float32, out=log_z[rows])  # all statistics in one kernel
        return log_z.log()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        with _all_pieces(hidden, weight, ctx.recorder) as (part, rows, columns):
            ctx.recorder.again = True
            torch.mm(hidden[rows], weight[columns].t(), out=part)
            ctx.recorder.again = False
            part.neg_()  # logits become their gradients in place
            if of_hidden is not None:
                _add_product(of_hidden[rows], part, weight[columns])
            if of_weight is not None:
                _add_product(of_weight[columns], part.t(), hidden[rows])
        gradients = ((of_hidden, hidden), (of_weight, weight), (of_bias, bias))
        return (*(None if grad is None else grad.to(like.dtype) for grad, like in gradients), None)


@contextmanager
def _all_pieces(
    hidden: torch.Tensor, weight: torch.Tensor, recorder: Any
) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """The memory of one piece of logits with its tokens and its words, whose work counts as that of all pieces."""
    tokens, words = min(hidden.shape[0], TOKENS), min(weight.shape[0], _WORDS)
    tile = hidden.new_empty(tokens, _WORDS)
    recorder.times = hidden.shape[0] * weight.shape[0] / (tokens * words)
    yield tile[:, :words], slice(0, tokens), slice(0, words)
    recorder.times = 1


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to a sum in fp32 without memory next to it, as cuBLAS does."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])
