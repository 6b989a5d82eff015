"""Replicated parameters, which every rank holds whole: gradients are averaged, clipped and stepped next to shards.

Parameters that FSDP cannot shard (0-d), or that the policy keeps whole, stand next to shards in one model and in one
group of an optimizer. FSDP2 reduces the gradients of shards only. They are plain tensors, which torch's functions over
lists of tensors do not mix with DTensors.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_fsdp_tools.distributed.shards import Held, as_dtensor
from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.text import grouped

_REDUCED_ALONE = 2**22
"""Elements from which a gradient is reduced where it lies. Smaller ones are copied into one tensor, which takes 4 bytes
for each element, and reduced in one call. (assumed)"""


class WholeGradient(torch.Tensor):
    """The gradient of a whole parameter, which counts as replicated where it meets gradients of shards.

    So `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `zero_grad(set_to_none=False)` and `torch.amp.GradScaler`
    take a model's gradients as they are. In every other place it is a plain tensor, and an optimizer gets it as one.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; next to a DTensor, with a replicated DTensor of the same memory."""
        operands = (args, kwargs or {})
        mesh = next((leaf.device_mesh for leaf in tree_leaves(operands) if isinstance(leaf, DTensor)), None)
        if mesh is None:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is torch._amp_foreach_non_finite_check_and_unscale_:  # of a GradScaler
            # Where a gradient is infinite, DTensor tells the other ranks if the first gradient is that of a shard.
            gradients, *others = operands[0]
            operands = ((sorted(gradients, key=lambda each: isinstance(each, cls)), *others), operands[1])
        args, kwargs = tree_map_only(WholeGradient, lambda gradient: _replicated(gradient, mesh), operands)
        return func(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _replicated(gradient: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of the same memory. `DTensor.from_local` would move a norm of offloaded gradients to the mesh."""
    local = _plain(gradient)
    return as_dtensor(local, mesh, (Replicate(),) * mesh.ndim, local)


# ---- gradients ----


def average_gradients(parameters: Iterable[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> None:
    """Average the gradients of parameters that every rank holds whole, after each backward pass from now on, also those
    that are frozen now and trained later.

    All gradients of one backward pass are sent at its end: small ones together, in fp32 where they are in a lower
    precision. A parameter with another hook on its gradient (an optimizer that steps in the backward pass) is averaged
    before that hook runs. Averaging after every micro-batch is right under accumulation too: the average of sums that
    are equal on all ranks is the same sum.

    Nothing is communicated before the next backward pass, in which all ranks must give the same parameters a gradient.
    """
    average = _Averaging(groups)
    for parameter in parameters:
        if (parameter.is_floating_point() or parameter.is_complex()) and not is_averaged(parameter):
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)  # torch keeps the hook, but registers none on what is frozen
            step_kinds_apart()


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether `average_gradients` was called for a parameter; a user's own hooks on its gradient do not count."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, _Averaging) for hook in hooks)


class _Averaging:
    """The hook on the gradients of one model's whole parameters."""

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        self._groups = tuple(groups)
        self._pending: dict[torch.Tensor, None] = {}  # in the order of the backward pass, the same on every rank

    def __call__(self, parameter: torch.Tensor) -> None:
        """Average the gradient at the end of the backward pass, or at once for a hook that comes after this one."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        if len(hooks) > 1:
            self._average([parameter])
            return
        self._pending[parameter] = None
        # As FSDP2 and DDP do. One call of `_finish` would be enough; but a pass that fails half-way makes none.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        parameters = list(self._pending)
        self._pending.clear()
        self._average(parameters)

    @torch.no_grad()
    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        gradients = [_plain(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if (ranks := math.prod(dist.get_world_size(group) for group in self._groups)) > 1:
            alone = [gradient for gradient in gradients if gradient.is_sparse or gradient.numel() >= _REDUCED_ALONE]
            for gradient in alone:
                self._sum(gradient).div_(ranks)
            small = [gradient for gradient in gradients if not any(gradient is other for other in alone)]
            for _, same in groupby(sorted(small, key=_sort_of), key=_sort_of):
                self._average_together(list(same), ranks)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.as_subclass(WholeGradient)

    def _average_together(self, gradients: Sequence[torch.Tensor], ranks: int) -> None:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        joined = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
        parts = torch.split(self._sum(joined).div_(ranks), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        return tensor


def _sort_of(gradient: torch.Tensor) -> str:
    """What small gradients that are sent together have in common."""
    return f"{gradient.device} {torch.promote_types(gradient.dtype, torch.float32)}"


# ---- steps ----


def by_kind(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Shards of each mesh, and whole tensors, on each device, in a list of its own; empty lists are left out."""
    kinds = grouped(((t.device_mesh if isinstance(t, DTensor) else None, t.device), t) for t in tensors)
    return list(kinds.values())


_PARTED: WeakKeyDictionary[Any, tuple[list[Any], list[Any]]] = WeakKeyDictionary()
"""By optimizer, during its step: its replicated parameters, and its groups as they were made, each with its parts."""


def step_kinds_apart() -> None:
    """Let optimizers that hold replicated parameters step these and shards one after the other, from now on.

    Their groups are parted for the time of a step: a scheduler, a state dict and a user see them as they were made.
    """
    at_steps(Step.PART, _part)
    at_steps(Step.JOIN, _join)


def _part(optimizer: Any) -> None:
    """Part the groups, and give the optimizer plain gradients, so that no state of it is made of our own class."""
    _join(optimizer)  # a step that failed left them so
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = [parameter for parameter in parameters if isinstance(parameter.grad, WholeGradient)]
    if not whole and not any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    for parameter in whole:
        parameter.grad = _plain(parameter.grad)
    parts = [
        (group, [{**group, "params": kind} for kind in by_kind(group["params"])]) for group in optimizer.param_groups
    ]
    _PARTED[optimizer] = whole, parts
    optimizer.param_groups = [part for _, of_group in parts for part in of_group]


def _join(optimizer: Any) -> None:
    whole, parts = _PARTED.pop(optimizer, ([], []))
    for parameter in whole:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.as_subclass(WholeGradient)
    for group, of_group in parts:  # some optimizers count their steps in the group
        group.update({key: value for part in of_group for key, value in part.items() if key != "params"})
    if parts:
        optimizer.param_groups = [group for group, _ in parts]


# ---- clipping ----


def clip_norm(parameters: Iterable[torch.Tensor], limit: float, order: float, device: torch.device) -> torch.Tensor:
    """Scale all gradients down, in place, to a norm of at most `limit`; return the norm that they had together.

    Gradients may be shards of several meshes and whole ones, on several devices (offloaded shards are on the CPU). The
    norms of shards are summed over their mesh.

    Every rank must call.
    """
    kinds = by_kind(parameter for parameter in parameters if parameter.grad is not None)
    norms = [_norm_of([p.grad for p in kind if p.grad is not None], order) for kind in kinds]
    norms = [norm.to(device) for norm in norms]
    total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms, order).to(device)
    for kind in kinds if math.isfinite(limit) else ():  # a Trainer asks for the norm alone by an infinite limit
        nn.utils.clip_grads_with_norm_(kind, limit, total)
    return total


def _norm_of(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of gradients of one kind, the same on all ranks of their mesh."""
    first = gradients[0]
    cuts = (sum(not at.is_replicate() for at in each.placements) for each in gradients if isinstance(each, DTensor))
    if not isinstance(first, DTensor) or max(cuts) < 2:
        norm = nn.utils.get_total_norm(gradients, order)
        return norm.full_tensor() if isinstance(norm, DTensor) else _plain(norm)
    # Cut along several axes: torch would reduce one after the other too, of each gradient, and warn.
    return _over_mesh(gradients, [Held.of(each).memory for each in gradients], order)


def norm_of_parts(parts: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The norm of gradients, given that of the part which this rank holds of each parameter's. Every rank must call."""
    return nn.utils.get_total_norm([_over_mesh(kind, [parts[each] for each in kind], 2.0) for kind in by_kind(parts)])


def _over_mesh(kind: Sequence[torch.Tensor], held: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of what all ranks of a mesh hold of tensors of one kind: this rank's parts, replicas counted once."""
    parts = zip(kind, held, strict=True)
    own = [part for each, part in parts if not any(index for _, index in Held.of(each).replicated_axes)]
    total = nn.utils.get_total_norm(own, order) if own else held[0].new_zeros(())
    if not isinstance(first := kind[0], DTensor):
        return total
    is_sum = not math.isinf(order)
    total = total.pow(order) if is_sum else total
    for group in first.device_mesh.get_all_groups():
        dist.all_reduce(total, dist.ReduceOp.SUM if is_sum else dist.ReduceOp.MAX, group=group)
    return total.pow(1 / order) if is_sum else total


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` does, also where ranks share layers or experts, so that shards lie on
    several meshes, whose norms torch's own cannot add up.

    For a loop without an Accelerator, whose `clip_grad_norm_` and a Trainer do the same.

    Args:
        parameters: shards and whole tensors; those without a gradient are left out.
        max_norm: above which gradients are scaled down, in place.
        norm_type: the order of the norm; also `math.inf`.

    Every rank must call. The norm of each mesh's shards is reduced over it; the result is on the device of the first.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> clip_grad_norm_(model.parameters(), max_norm=1.0)
        tensor(0.)
    """
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    first = next((parameter for parameter in held if parameter.grad is not None), None)
    return torch.tensor(0.0) if first is None else clip_norm(held, max_norm, norm_type, first.device)


def clip_values(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip each element of all gradients to `-limit .. limit`, in place; shards by their own rank."""
    for each in by_kind(parameters):
        nn.utils.clip_grad_value_(each, limit)
