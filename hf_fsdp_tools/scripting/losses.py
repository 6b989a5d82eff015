"""The loss of recipes whose models would average over the tokens of their own rows alone."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy


def mean_over_tokens(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Cross-entropy as a mean over all tokens of a step, whatever ranks and micro-batches they are in.

    T5, BART and classifiers of words return the mean over the tokens of one micro-batch (transformers 5.23), which the
    Trainer multiplies by the number of processes: a step would depend on how rows are divided.

    For `compute_loss_func` of a Trainer: the sum over labels that are not -100, at their own place, by
    `num_items_in_batch`, those of the whole step over all ranks. Logits are made fp32. Nothing is communicated.

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]])
        >>> whole, part = mean_over_tokens({"logits": logits}, labels), mean_over_tokens({"logits": logits}, labels, 4)
        >>> round(whole.item(), 4), round(part.item(), 4)  # the step has four tokens, and these rows two of them
        (0.6931, 0.3466)
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    logits, flat = logits.flatten(0, 1).float(), labels.flatten()
    total = cross_entropy(logits, flat, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
    return total / (num_items_in_batch if num_items_in_batch is not None else (flat != -100).sum().clamp(min=1))
