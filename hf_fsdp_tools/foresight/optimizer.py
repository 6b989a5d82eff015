"""Clipping and the optimizer's step: torch's own code on shards without data, recorded as the model's code is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Kind, Work
from hf_fsdp_tools.foresight.recorder import Recorder
from hf_fsdp_tools.foresight.setup import TrainingSetup

__all__ = ["OPTIMIZERS", "OptimizerStep", "Updated", "optimizer_step"]

_Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, _Make | None] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, foreach=True),
    "adamw_8bit": None,
}
"""Names that `TrainingSetup.optimizer` may have; `adamw_8bit` is bitsandbytes', by formula."""

_SMALLEST_8BIT = 4096
"""Elements below which bitsandbytes keeps the state of a parameter in fp32 (`min_8bit_size` of its optimizers)."""
_BLOCK_8BIT = 256
"""Elements with one fp32 scale (`blocksize` of its `optimizer_update_8bit_blockwise`)."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A tensor that the optimizer updates on this rank."""

    shape: tuple[int, ...]
    """Of the shard."""
    dtype: torch.dtype
    """Of the shard and of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of an optimizer that has its state."""

    events: tuple[Event, ...]
    """Temporary memory, and work."""
    state: tuple[int, ...]
    """Bytes of each tensor of its state on the device."""
    num_bytes: float
    """Bytes that its work reads and writes."""


def optimizer_step(updated: Sequence[Updated], setup: TrainingSetup) -> OptimizerStep:
    """Clipping and one step of the optimizer of a setup.

    Args:
        updated: the shards of this rank.
        setup: `optimizer` and `max_grad_norm` are read.

    Raises:
        ConfigError: the optimizer is unknown.
    """
    if setup.optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {setup.optimizer!r}; it must be one of {', '.join(map(repr, OPTIMIZERS))}.")
    return _record(tuple(updated), setup.optimizer, setup.max_grad_norm)


@cache
def _record(updated: tuple[Updated, ...], name: str, max_grad_norm: float | None) -> OptimizerStep:
    updated = tuple(each for each in updated if torch.Size(each.shape).numel())
    if not updated:
        return OptimizerStep(events=(), state=(), num_bytes=0.0)
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in updated]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        clipping = _clip(parameters, max_grad_norm) if max_grad_norm is not None else ()
        make = OPTIMIZERS[name]
        state, events = _step_8bit(updated) if make is None else _step(parameters, make)
    events = (*clipping, *events)
    return OptimizerStep(
        events=events, state=state, num_bytes=sum(event.num_bytes for event in events if isinstance(event, Work))
    )


def _recorder(parameters: Sequence[nn.Parameter]) -> Recorder:
    recorder = Recorder({"": ""})
    recorder.ignore(parameters)
    recorder.ignore([parameter.grad for parameter in parameters if parameter.grad is not None])
    return recorder


def _clip(parameters: Sequence[nn.Parameter], max_grad_norm: float) -> tuple[Event, ...]:
    recorder = _recorder(parameters)
    recorder.phase = "clip"
    with recorder:
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=True)
    return _temporary(recorder.finish(), "temporaries")


def _step(parameters: Sequence[nn.Parameter], make: _Make) -> tuple[tuple[int, ...], tuple[Event, ...]]:
    optimizer = make(parameters)
    first = _recorder(parameters)
    with first:
        optimizer.step()
    is_fused = bool(optimizer.param_groups[0].get("fused"))
    state = [
        tensor for each in optimizer.state.values() for tensor in each.values() if isinstance(tensor, torch.Tensor)
    ]
    # Unless the optimizer is fused, its counters of steps are on the host.
    on_device = [tensor for tensor in state if tensor.dim() or is_fused]
    recorder = _recorder(parameters)
    recorder.ignore(state)
    recorder.phase = "optimizer"
    with recorder:
        optimizer.step()
    return tuple(tensor.nbytes for tensor in on_device), _temporary(recorder.finish(), "temporaries")


def _step_8bit(updated: Sequence[Updated]) -> tuple[tuple[int, ...], tuple[Event, ...]]:
    """bitsandbytes' AdamW8bit: two states of a byte per element with a scale for each block, and two tables of 256."""
    state = [4 * 256, 4 * 256]
    num_bytes = 0.0
    for each in updated:
        numel = torch.Size(each.shape).numel()
        scales = 4 * -(-numel // _BLOCK_8BIT)
        own = [4 * numel] * 2 if numel < _SMALLEST_8BIT else [numel, numel, scales, scales]
        state += own
        num_bytes += 2 * sum(own) + 3 * numel * each.dtype.itemsize
    work = Work("memory", 0.0, num_bytes, "", "optimizer", dtype_bytes=1)
    return tuple(state), (work,)


def _temporary(events: Sequence[Event], kind: Kind) -> tuple[Event, ...]:
    """The events with all memory of one kind, and freed at the end where it was not."""
    left: dict[int, None] = {}
    result: list[Event] = []
    for event in events:
        if isinstance(event, Alloc):
            left[event.block] = None
            event = replace(event, kind=kind)
        elif isinstance(event, Free):
            left.pop(event.block)
        result.append(event)
    return (*result, *map(Free, left))
