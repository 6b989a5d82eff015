"""What a loss is divided by, so that a global batch trains alike however it is split over ranks and micro-batches."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["tokens_per_rank"]

_IGNORED = -100  # the label that cross entropy leaves out, in torch and transformers


def tokens_per_rank(batches: Iterable[Mapping[str, Any]], *, causal: bool = True) -> torch.Tensor:
    """The mean number of trained tokens per rank in one optimizer step: give it to the model as `num_items_in_batch`.

        batches = iter(loader)
        while step := list(islice(batches, 8)):              # the micro-batches of one optimizer step
            items = tokens_per_rank(step)
            for batch in step:
                accelerator.backward(model(**batch, num_items_in_batch=items).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    The model then divides its summed loss by this number, and FSDP averages gradients over the ranks, so every token of the
    global batch weighs the same. Means per micro-batch would weigh tokens of short ones more. Leave the Accelerator's
    `gradient_accumulation_steps` at 1: its `backward` would divide once more. The Trainer does all this by itself
    (`average_tokens_across_devices`). The mean loss of the global batch is `accelerator.reduce(sum of losses, "mean")`.

    Args:
        batches: with `labels` (or `shift_labels`, counted as they are); tokens labelled -100 do not count.
        causal: a token is predicted from those before it, so the first label of each row does not count.

    Returns a float32 tensor of no dimension on the labels' device. Every rank of the default process group must call, with
    one micro-batch or more; one number is summed over the ranks.
    """
    count = torch.stack([_count(batch, causal=causal) for batch in batches]).sum().float()
    dist.all_reduce(count)
    return count / dist.get_world_size()


def _count(batch: Mapping[str, Any], *, causal: bool) -> torch.Tensor:
    labels: torch.Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
    if causal and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return (labels != _IGNORED).sum()
