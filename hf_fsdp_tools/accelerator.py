"""This machine's accelerator: CUDA, ROCm, XPU or NPU, all through `torch.accelerator`."""

import torch

__all__ = ["find_accelerator"]


def find_accelerator() -> torch.device | None:
    """The kind of accelerator that FSDP can use on this machine, without an index; None on a machine without one.

    MPS counts as none: it has no collectives, and FSDP2 does not run there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type == "mps" else accelerator
