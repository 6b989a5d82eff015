"""Loss scaling for fp16 over sharded and whole parameters."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["ShardedScaler"]


class ShardedScaler(torch.amp.GradScaler):
    """torch's `GradScaler` for an optimizer that holds both sharded parameters and whole ones (0-d ones, for instance).

    torch (2.13) divides all gradients of a device in one call, which takes no mix of the two. Here each kind has its call;
    if a gradient of either is infinite on one rank, every rank skips the step: those of shards are compared between ranks
    by torch, those of whole parameters are averages, and so the same on all.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        for sharded in (True, False):
            groups = [
                {"params": [p for p in group["params"] if isinstance(p.grad, DTensor) is sharded]}
                for group in optimizer.param_groups
            ]
            part: Any = SimpleNamespace(param_groups=groups)
            for device, infinite in super()._unscale_grads_(part, inv_scale, found_inf.clone(), allow_fp16).items():
                found[device] = torch.maximum(found[device], infinite) if device in found else infinite
        return found
