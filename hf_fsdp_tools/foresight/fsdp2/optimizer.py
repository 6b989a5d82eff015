"""Clipping and the optimizer's step: torch's own code on shards without data, recorded as the model's code is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import Alloc, Event, EventWriter, Free, Phase, TensorSize, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.recorder import Recorder
from hf_fsdp_tools.sharding.checks import check_kind
from hf_fsdp_tools.sharding.matrices import BUCKET_BYTES, NEWTON_SCHULZ_STEPS, newton_schulz_flops

_Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[str, _Make | None]] = {
    "adamw": ("adamw_torch_fused", lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    "adamw_foreach": ("adamw_torch", lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    "adamw_8bit": ("adamw_torch_8bit", None),
    "muon": ("muon", None),
    "sgd": ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=True)),
    "sgd_momentum": (
        "sgd --optim_args momentum=0.9",
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True),
    ),
}
"""By name in `TrainingSetup.optimizer`: `--optim` of transformers' `TrainingArguments`, and how the optimizer is made.
`adamw_8bit` is torchao's, by formula; `muon` is this package's: AdamW, momentum as of SGD, and `write_muon`.
To the others the shape of a parameter is all the same: they are run once for a
model, with stand-ins."""

# Elements of the first stand-in; each has one more than the one before, so that memory tells whose it is.
_STAND_IN = 10**6 + 3
_SMALLEST_8BIT = 4096  # Elements below which torchao keeps its state in the shard's dtype (`_AdamBase._new_buffer`)
_BLOCK_8BIT = 256  # Elements with one fp32 scale (`block_size`); shards of other multiples stay whole too


_Step = tuple[tuple[Event, ...], tuple[int, ...]]  # Its events, and the bytes of each tensor of its state on the device


def optimizer_step(updated: Sequence[TensorSize], setup: TrainingSetup) -> _Step:
    """Clipping and one step of the optimizer of a setup, which has its state; of Muon, what each rank does alone."""
    if setup.optimizer == "muon":
        matrices = [each for each in updated if matrices_in(each) is not None]
        steps = [
            optimizer_step([each for each in updated if each not in matrices], replace(setup, optimizer="adamw")),
            optimizer_step(matrices, replace(setup, optimizer="sgd_momentum")),
        ]
        return tuple(event for each in steps for event in each[0]), tuple(size for each in steps for size in each[1])
    name, clips = setup.optimizer, setup.max_grad_norm is not None
    if name == "adafactor":
        check_kind(torch.optim.Adafactor)
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {name!r}; it must be one of {', '.join(map(repr, OPTIMIZERS))}.")
    updated = [each for each in updated if each.numel]
    if OPTIMIZERS[name][1] is None:
        return _record(tuple(TensorSize(shape=each.shape, dtype=each.dtype) for each in updated), name, clips)
    stand_ins = tuple(TensorSize(shape=(_STAND_IN + at,), dtype=each.dtype) for at, each in enumerate(updated))
    return _resized(_record(stand_ins, name, clips), stand_ins, updated)


def matrices_in(updated: TensorSize) -> tuple[int, int, int] | None:
    """(number, rows, columns) of the hidden matrices of a shard, or of a whole parameter, that an optimizer updates."""
    found: tuple[int, int, int] | None = getattr(getattr(updated, "parameter", updated), "matrices", None)
    return found


def write_muon(writer: EventWriter, updated: Sequence[TensorSize], setup: TrainingSetup) -> None:
    """What the ranks do of Muon's step together: matrices travel to their owners, which have about as many operations
    each, are orthogonalised, and travel back, a bucket after the other."""
    ranks = setup.num_gpus
    sizes: dict[tuple[int, int], float] = {}
    travelling = 0.0
    for each in updated:
        if (matrices := matrices_in(each)) is None:
            continue
        count, rows, columns = matrices
        sizes[rows, columns] = sizes.get((rows, columns), 0.0) + count / ranks
        stacked, over = getattr(each, "parameter", each).shape[0] * (len(each.shape) > 2), getattr(each, "ranks", ranks)
        is_home = getattr(each, "dim", None) == 0 and stacked and stacked % over == 0 and over == ranks
        travelling += 0.0 if is_home else 2.0 * count * rows * columns / ranks
    num_buckets = max(1, math.ceil(travelling / BUCKET_BYTES))
    largest = max((2 * rows * columns for rows, columns in sizes), default=0)
    back = travelling * max(setup.dp_replicate_size, 1)
    writer.phase = "optimizer"
    for at in range(num_buckets if sizes else 0):
        block = writer.take(int(4 * travelling / num_buckets) + 3 * largest, "temporaries")
        if at == 0 and ranks > 1:
            writer.work("all_to_all", travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        if at + 1 < num_buckets and ranks > 1:
            writer.work("all_to_all", travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        for (rows, columns), number in sizes.items():
            own, short = number / num_buckets, min(rows, columns)
            flops = own * newton_schulz_flops(rows, columns)
            moved = own * NEWTON_SCHULZ_STEPS * 2 * (5 * rows * columns + 5 * short**2)
            writer.events.append(Work("matmul", flops, moved, "", "optimizer"))
        if ranks > 1:
            writer.work("all_to_all", back / num_buckets, "all_gather", ranks=ranks, axis="all")
        writer.free(block)
    writer.phase = "forward"


def _resized(step: _Step, stand_ins: Sequence[TensorSize], updated: Sequence[TensorSize]) -> _Step:
    """The step of an optimizer that treats all elements alike, for tensors of other sizes."""
    sizes = {stand_in.num_bytes: each.num_bytes for stand_in, each in zip(stand_ins, updated, strict=True)}
    ratio = sum(sizes.values()) / max(sum(sizes), 1)
    events: list[Event] = []
    for event in step[0]:
        if isinstance(event, Alloc):
            event = replace(event, num_bytes=sizes.get(event.num_bytes, event.num_bytes))
        elif isinstance(event, Work):
            event = replace(event, num_bytes=event.num_bytes * ratio)
        events.append(event)
    return tuple(events), tuple(sizes.get(num_bytes, num_bytes) for num_bytes in step[1])


@cache
def _record(updated: tuple[TensorSize, ...], name: str, clips: bool) -> _Step:
    if not updated:
        return (), ()
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in updated]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        clipping: tuple[Event, ...] = ()
        if clips:
            with _recorder(parameters, "clip") as recorder:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            clipping = _temporary(recorder.events)
        make = OPTIMIZERS[name][1]
        events, state = _step_8bit(updated) if make is None else _step(parameters, make)
    return (*clipping, *events), state


def _recorder(parameters: Sequence[nn.Parameter], phase: Phase) -> Recorder:
    recorder = Recorder({"": ""})
    recorder.phase = phase
    recorder.ignore(parameters)
    recorder.ignore([parameter.grad for parameter in parameters if parameter.grad is not None])
    return recorder


def _step(parameters: Sequence[nn.Parameter], make: _Make) -> _Step:
    optimizer = make(parameters)
    optimizer.step()
    is_fused = bool(optimizer.param_groups[0].get("fused"))
    state = [
        tensor for each in optimizer.state.values() for tensor in each.values() if isinstance(tensor, torch.Tensor)
    ]
    # Unless the optimizer is fused, its counters of steps are on the host.
    on_device = [tensor for tensor in state if tensor.dim() or is_fused]
    recorder = _recorder(parameters, "optimizer")
    recorder.ignore(state)
    with recorder:
        optimizer.step()
    return _temporary(recorder.events), tuple(tensor.nbytes for tensor in on_device)


def _step_8bit(updated: Sequence[TensorSize]) -> _Step:
    """torchao's AdamW8bit: two states of a byte per element, each with a scale for each block and a table of 256."""
    state: list[int] = []
    num_bytes = 0.0
    for each in updated:
        numel = each.numel
        is_whole = numel < _SMALLEST_8BIT or numel % _BLOCK_8BIT
        own = 2 * ([each.num_bytes] if is_whole else [numel, 4 * numel // _BLOCK_8BIT, 4 * 256])
        state += own
        num_bytes += 2 * sum(own) + 3 * numel * each.dtype.itemsize
    return (Work("memory", 0.0, num_bytes, "", "optimizer", dtype_bytes=1),), tuple(state)


def _temporary(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events with all memory as temporaries, and freed at the end where it was not."""
    left: dict[int, None] = {}
    result: list[Event] = []
    for event in events:
        if isinstance(event, Alloc):
            left[event.block] = None
            event = replace(event, kind="temporaries")
        elif isinstance(event, Free):
            left.pop(event.block)
        result.append(event)
    return (*result, *map(Free, left))
