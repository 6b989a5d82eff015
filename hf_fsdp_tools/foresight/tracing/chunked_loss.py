"""A loss that never holds all logits: memory and work of TRL's, which Liger's fused loss resembles.

TRL (1.16, `ChunkedLogProbFunction`) makes the pieces again in the backward pass and sums gradients in fp32. Its kernels
are Triton's, which do not run without data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.tracing.recorder import Recorder

TOKENS, _WORDS = 4096, 32768
"""Tokens of one chunk of logits: TRL's `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE`."""


def predicts_words(model: nn.Module) -> bool:
    """Whether a model is a decoder that predicts the next word, whose loss the recipes' trainers make in pieces."""
    return (
        getattr(model, "can_generate", bool)() and _has_head(model) and getattr(model, "base_model", model) is not model
    )


def _has_head(model: Any) -> bool:
    find = getattr(model, "get_output_embeddings", None)
    return find is not None and find() is not None and not getattr(model.config, "is_encoder_decoder", False)


def chunk_loss(model: nn.Module, recorder: Recorder) -> None:
    """Let a model compute its loss in pieces, in place, as TRL's `add_fused_lm_head` does."""
    if not _has_head(model):
        raise ConfigError(
            f"{type(model).__name__} has no decoder with a head for words, whose loss could be computed in chunks. "
            'Use loss="full".'
        )

    def forward(self: Any, *args: Any, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        is_shifted = kwargs.pop("shift_labels", None) is not None  # of ranks that share rows
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
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, recorder: Recorder) -> torch.Tensor:
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
    hidden: torch.Tensor, weight: torch.Tensor, recorder: Recorder
) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """The memory of one piece of logits with its tokens and its words, whose work counts as that of all pieces."""
    tokens, words = min(hidden.shape[0], TOKENS), min(weight.shape[0], _WORDS)
    tile = hidden.new_empty(tokens, _WORDS)
    recorder.times = hidden.shape[0] * weight.shape[0] / (tokens * words)
    yield tile[:, :words], slice(0, tokens), slice(0, words)
    recorder.times = 1


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to a sum in fp32 without memory beside it, as cuBLAS does."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])
