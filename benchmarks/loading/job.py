"""What is loaded how, and what a loader gives back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .storage import Storage

__all__ = ["DTYPES", "Job", "Loaded", "synchronize"]

DTYPES = {"stored": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One load, the same on every rank."""

    folder: Path
    """The checkpoint."""

    dtype: torch.dtype
    """What its bf16 becomes."""

    device: str = "cpu"
    """Where the shards go: "cpu", or "cuda", a GPU per rank."""

    replicas: int = 1
    """Copies of the model that the ranks hold together; above 1 this is HSDP."""

    storage: Storage | None = None
    """Slow storage to simulate."""

    @property
    def torch_device(self) -> torch.device:
        """This rank's own."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


@dataclass(kw_only=True)
class Loaded:
    """What a loader made, kept until the clock has stopped."""

    model: nn.Module | None = None
    """The model, if there is one."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """What takes the place of its parameters where there is none."""

    seconds: float | None = None
    """What is to be reported instead of the time from start to end."""

    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping."""

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter once."""
        return [t.detach() for t in (self.tensors if self.model is None else self.model.parameters())]


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
