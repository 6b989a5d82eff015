"""What is saved where."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.loading.job import Job as Load

__all__ = ["STORED", "Job"]

STORED = torch.bfloat16
"""Dtype of the files."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, the same on every rank."""

    load: Load
    """The checkpoint from which the model comes, the dtype of its parameters, where its shards are."""

    target: Path
    """The folder to save to."""

    file_bytes: int
    """Largest weight file, so that there are as many as the checkpoint has."""

    @property
    def cast(self) -> torch.dtype | None:
        """What floating-point tensors are to be cast to; None if the model has that dtype."""
        return None if self.load.dtype == STORED else STORED
