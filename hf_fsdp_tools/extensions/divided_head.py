"""A head whose words are divided among ranks, and the loss of the parts.

No rank ever holds all logits. In training with labels, each rank keeps the logits of its own words. Three numbers of
each token are summed over the group: the largest logit, the sum of exponentials, and the logit of the label
(Megatron-LM, arXiv 1909.08053, 3). In evaluation, and without labels, logits are whole.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_fsdp_tools.modeling.notes import install_style
from hf_fsdp_tools.sharding.replica_checks import IGNORED
from hf_fsdp_tools.sharding.zero_grads import with_zero_grads


class DividedHead:
    """A divided head of a model and its loss, until it is removed."""

    def __init__(self, model: Any, head: Any, group: DeviceMesh, divide: Callable[[Any, DeviceMesh], None]) -> None:
        """`divide` lets the head give this rank's part."""
        self._model, self._head, self._group = model, head, group
        self._is_part = False
        self._former = model.__dict__.get("_loss_function")
        if isinstance(getattr(getattr(self._former, "func", None), "__self__", None), DividedHead):
            model.loss_function = self._former = self._former.args[0]  # this model is a copy of one with a divided head
        head.__dict__.pop("forward", None)
        divide(head, group)
        head.forward = partial(self._run_head, head.forward)
        model.loss_function = partial(self._loss, model.loss_function)

    def remove(self) -> None:
        """Give the model its own loss and the head its own style back."""
        self._model.__dict__.pop("_loss_function", None)
        if self._former is not None:
            self._model.loss_function = self._former
        install_style(self._head)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look whether this pass computes a loss of parts."""
        given = dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False)) | kwargs
        labels = given.get("labels") if given.get("labels") is not None else given.get("shift_labels")
        self._is_part = model.training and labels is not None

    def _run_head(self, inner: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        part = inner(hidden)
        if part.requires_grad and self._is_part:
            part = with_zero_grads(part)
        return part if self._is_part else self._whole(part)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self._as_dtensor(part).redistribute(placements=[Replicate()]).to_local()
        return with_zero_grads(whole) if whole.requires_grad else whole

    def _as_dtensor(self, part: torch.Tensor) -> DTensor:
        return DTensor.from_local(part, self._group, [Shard(-1)], run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedHead":
        return self  # a copied model is given one of its own, see `DividedLayers`

    def _loss(
        self, inner: Callable[..., torch.Tensor], logits: torch.Tensor, labels: Any, vocab_size: int, **kwargs: Any
    ) -> Any:
        if not self._is_part:
            return inner(logits, labels, vocab_size, **kwargs)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        ignored = kwargs.get("ignore_index", IGNORED)
        targets = targets.reshape(-1).to(logits.device)
        words = logits.shape[-1] * self._group.size()
        torch._assert_async(  # as torch's own cross entropy; each rank would take the word for another rank's
            ((targets == ignored) | ((targets >= 0) & (targets < words))).all(), f"a label is none of the {words} words"
        )
        first = self._group.get_local_rank() * logits.shape[-1]
        losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
            logits.float().view(-1, logits.shape[-1]), targets, targets == ignored, first, self._group.get_group()
        )
        count = kwargs.get("num_items_in_batch")
        count = (targets != ignored).sum() if count is None else count
        return losses.sum() / (count.to(losses.device) if torch.is_tensor(count) else count)

    def after(self, model: nn.Module, args: object, output: Any) -> Any:
        """Let the logits of a part be a DTensor, of which `full_tensor()` gives all."""
        if self._is_part and isinstance(output, dict) and isinstance(output.get("logits"), torch.Tensor):
            output["logits"] = self._as_dtensor(output["logits"])
        self._is_part = False
        return output


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy of each token, of logits of which this rank has those of some words; 0 where it is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any, ignored: Any, first: int, group: dist.ProcessGroup) -> Any:
        """From logits (tokens, words of this rank) in fp32, and targets among the words of all ranks."""
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        exponentials = logits - most[:, None]
        is_own = (targets >= first) & (targets < first + logits.shape[-1])
        places = torch.where(is_own, targets - first, 0)[:, None]
        sums = torch.stack([torch.where(is_own, exponentials.gather(1, places)[:, 0], 0.0), most])
        sums[1] = exponentials.exp_().sum(-1)
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[1][:, None]), places, is_own & ~ignored, ignored)
        return torch.where(ignored, 0.0, sums[1].log() - sums[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """The gradient of this rank's logits: probabilities, less 1 at the target."""
        softmax, places, is_own, ignored = ctx.saved_tensors
        gradient = torch.where(ignored, 0.0, gradient)
        of_logits = softmax * gradient[:, None]
        of_logits.scatter_add_(1, places, -torch.where(is_own, gradient, 0.0)[:, None])
        return of_logits, None, None, None, None
