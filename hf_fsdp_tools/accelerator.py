"""This machine's accelerator: CUDA, ROCm, XPU or NPU, all through `torch.accelerator`."""

from collections.abc import Sequence

import torch

__all__ = ["find_accelerator", "pinned_empty"]


def find_accelerator() -> torch.device | None:
    """The kind of accelerator that FSDP can use on this machine, without an index; None on a machine without one.

    MPS counts as none: it has no collectives, and FSDP2 does not run there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type == "mps" else accelerator


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised host memory that the accelerator copies from and to by itself."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
