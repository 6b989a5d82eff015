"""A batch of the right shapes for any architecture."""

from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.foresight.setup import TrainingSetup

__all__ = ["make_batch"]


def make_batch(model: nn.Module, setup: TrainingSetup) -> dict[str, Any]:
    """Arguments of the model's forward pass for one micro-step of training. Tensors are on the CPU, with any values.

    Args:
        model: its forward takes `labels` and gives a loss.
        setup: batch and sequence.
    """
    shape = (setup.batch_size, setup.seq_len)
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": torch.zeros(shape, dtype=torch.int64), "use_cache": False}
