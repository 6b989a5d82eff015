"""Clipping by the norm that gradients had in the step before, which is known before a backward pass begins."""

from collections.abc import Iterable
from typing import Any

import torch

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.sharding.replicated import clip_norm, norm_of_parts


class LastNorm:
    """Clips one step of an optimizer by the norm of the step before; the first step by its own."""

    def __init__(self, limit: float, before: "LastNorm | None") -> None:
        self.limit = limit
        self.norm: torch.Tensor | None = None
        """The norm that is clipped by, the same on all ranks, on the CPU; a first step knows it at its end."""
        self.has_begun = False
        self._before = before
        self._parts: dict[torch.Tensor, torch.Tensor] = {}  # norms of what this rank has of each parameter's gradient
        self._factor = torch.ones(())

    def begin(self, optimizer: Any) -> None:
        """Take the norm of the step before, for which every rank must call: norms of shards are summed over meshes."""
        before, self._before, self.has_begun = self._before, None, True
        if before is None:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        parts = {each: before._parts[each] for each in parameters if each in before._parts}
        norms = (norm_of_parts(parts).cpu() if parts else None, before.norm)  # an infinite one says nothing of a step
        self.norm = next((norm for norm in norms if norm is not None and norm.isfinite()), None)
        if self.norm is not None:
            self._factor = (self.limit / (self.norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_

    @torch.no_grad()
    def clip(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Scale gradients in place, given as (parameter, this rank's part), and note what norms they had."""
        for parameter, gradient in parts:
            self._parts[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            if self._factor < 1:
                gradient.mul_(self._factor.to(gradient.device, gradient.dtype))

    def end(self, optimizer: Any, clipped: set[torch.Tensor]) -> None:
        """Clip what was not clipped in the backward pass: in the first step all of it, by its own norm. Every rank must
        call."""
        if not self.has_begun:
            self.begin(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if self.norm is None:
            self.norm = clip_norm(parameters, self.limit, 2.0, torch.device("cpu")) if parameters else None
        else:
            self.clip((each, Held.of(each.grad).memory) for each in parameters if each not in clipped)
