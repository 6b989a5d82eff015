"""Offloaded shards: what travels is in the dtype of computation, and the CPU works while the device computes.

FSDP2 sends shards to the device as they are stored (fp32 for bf16), on one rank only when a unit needs them; it waits
for each gradient that it adds to one of an earlier micro-batch; and the optimizer steps while nothing else runs. Here

    up       a copy in the dtype of computation lies in host memory next to each shard, and travels in its place; on
             one rank, one unit ahead, on a stream of its own
    down     gradients are added up by a thread of the CPU while the backward pass goes on
    step     `optimizer.step()` returns at once: the thread steps unit by unit, in the order of the forward pass, and
             renews the copies; the next forward pass waits for each unit alone

Whoever uses a weight, its gradient or its moments before then waits for the unit, and a copy is made anew after a
weight was touched: see `extensions.watched`.
"""

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import nn, optim
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.accelerator import find_accelerator, pinned_empty, side_stream_for
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.last_norm import LastNorm
from hf_fsdp_tools.extensions.watched import Watched
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.sharding.fsdp2_internals import Entry, Group, entries_of, gathered_dtype, groups_of, is_custom
from hf_fsdp_tools.sharding.phases import Hook
from hf_fsdp_tools.sharding.sharding import Feature, Sharding

__all__ = ["steps_in_backward"]

ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.SGD,
)  # fmt: skip
"""Optimizers whose steps on a part of their parameters do what the step on all does to these."""

_SUMS_AHEAD = 2
"""Units whose gradients may wait in host memory to be added to those of earlier passes. (assumed)"""


class Streamed(Feature):
    """Copies, sums and steps on the CPU, for units that FSDP2 offloads."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterable[Hook]:
        """Nothing around forward passes: units say when they gather. What has a way of its own is left to it."""
        of_model = _Pass()
        for entry in entries_of(model):
            if type(entry) is Entry and not is_custom(entry):
                entry.become(HostCopy)
        for unit in groups_of(model):
            unit.__class__, unit.of_model = StreamedUnit, of_model
            _UNITS[next(_NUMBERS)] = unit
        _step_away()
        return ()


FEATURE = Streamed()


@contextmanager
def _outside_of_graphs() -> Iterator[None]:
    """A block, or the body of a function, whose tensors are plain ones, also in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class HostCopy(Entry):
    """FSDP2's record of an offloaded shard. What travels is the shard, or its copy in the dtype of computation."""

    _copy: torch.Tensor | None = None
    _watch: Watched | None = None
    _of = (0, 0)  # where the shard was that was copied or sent, and how often written to
    _sent: tuple[torch.Tensor, torch.Event] | None = None
    _leaving: torch.Event | None = None

    @property
    def is_another(self) -> bool:
        """Whether the dtype is another than that of the shard, so that there is a copy."""
        return self.memory.dtype != gathered_dtype(self)

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """What is gathered, on the device."""
        return [self.on_device()] if self.is_free else super().all_gather_inputs

    @_outside_of_graphs()
    def on_device(self) -> torch.Tensor:
        """The values on the device of the unit, for the caller's stream."""
        if self._sent is not None:
            (memory, arrived), self._sent = self._sent, None
            torch.accelerator.current_stream(memory.device).wait_event(arrived)
            if self._is_current():
                return memory
        values = self._values()
        moved = values.to(self.device, non_blocking=True)
        if moved.device != values.device:
            self._leaving = torch.accelerator.current_stream(moved.device).record_event()
        return moved

    @_outside_of_graphs()
    def send(self) -> None:
        """Begin to copy the values into the memory of a unit of one rank, on a stream of its own."""
        if self._sent is None and self.is_free and self.ranks.size() == 1 and self.device.type != "cpu":
            values = self._values()
            self.init_all_gather_outputs([values.numel()], [gathered_dtype(self)], 1, self.device)
            self.alloc_all_gather_outputs()  # FSDP2 frees it with the unit
            memory = self.all_gather_outputs[0]
            if not self._is_current():
                self._of = self._version()
                self.watch(_nothing)
            stream = side_stream_for([memory])
            assert stream is not None, "units of a CPU are not sent"
            with _unsafe_preserve_version_counter(memory):  # the graph of a pass may know it
                self._leaving = stream.copy_after_current(memory, values)
            self._sent = memory, self._leaving

    def leave(self) -> None:
        """Wait until nothing is copied out of host memory any more."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None

    def watch(self, wait: Callable[[], None]) -> None:
        """Take what was copied or sent for current until somebody touches the shard."""
        self._watch = Watched(self.sharded_param, wait)

    def renew(self) -> None:
        """Copy the shard in host memory."""
        data = self.memory
        if self._copy is None or self._copy.numel() != data.numel():
            empty = pinned_empty if self.pin_memory else torch.empty
            self._copy = empty(data.shape, dtype=gathered_dtype(self))
        self._copy.copy_(data)
        self._of = self._version()

    def _values(self) -> torch.Tensor:
        if not self.is_another:
            return self.memory
        if self._copy is None or not self._is_current():
            self.leave()
            self.renew()
            self.watch(_nothing)
        assert self._copy is not None
        return self._copy

    def _is_current(self) -> bool:
        of: Any = self.sharded_param
        return self._watch is not None and of._local_tensor is self._watch and self._of == self._version()

    def _version(self) -> tuple[int, int]:
        data = self.memory
        return data.data_ptr(), 0 if data.is_inference() else data._version


def _nothing() -> None:
    """What a watched shard waits for that nobody steps on."""


@dataclass
class _Pass:
    """What the units of one model know of each other."""

    gathered: "StreamedUnit | None" = None
    """The unit that was gathered last in a forward pass."""
    sums: deque[Future[None]] = field(default_factory=deque)
    """The units whose gradients are being added to those of earlier passes."""


class StreamedUnit(Group):
    """FSDP2's record of an offloaded unit, which knows when shards travel and gradients are added up."""

    of_model: _Pass
    stepped_by: Any = None
    """The optimizer whose step on the unit began in the backward pass."""
    _following: "StreamedUnit | None" = None  # what a forward pass gathered next
    _sum: Future[None] | None = None
    _step: Future[None] | None = None
    _away: Sequence[Watched] = ()

    def copies(self) -> dict[torch.Tensor, HostCopy]:
        """What travels in the place of each shard."""
        return {entry.sharded_param: entry for entry in self.fsdp_params if isinstance(entry, HostCopy)}

    def leave(self) -> None:
        """End the step on the unit, which no step of an optimizer finds any more, as long as it may be in memory."""
        self.wait()
        self.fsdp_params = []

    def unshard(self, async_op: bool = False) -> None:
        """As FSDP2's, which begins nothing on one rank: send this unit, and the next of a forward pass, unless a step
        on it is under way."""
        self.wait()
        super().unshard(async_op)
        if not self.is_gathering:
            return
        self._send()
        if self.stage != "FORWARD":
            return
        if self.of_model.gathered is not None:
            self.of_model.gathered._following = self
        self.of_model.gathered, following = self, self._following
        if following is not None and (following._step is None or following._step.done()):
            following.wait()
            following._send()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def post_backward(self, *unused: Any) -> None:
        """As FSDP2's, which waits for each gradient that it adds to one of an earlier pass; here the thread adds them.
        Where it is late, the backward pass waits, so that host memory holds the gradients of few units twice."""
        is_over = self.stage == "IDLE"  # torch 2.11 comes again at the end for each of its modules
        sums: dict[Any, Any] = {entry: entry.sharded_param.grad for entry in self.fsdp_params if self.reduce_grads}
        watched = {entry for entry in sums if entry.sharded_param._post_accumulate_grad_hooks}  # who reads at once
        sums = {entry: total for entry, total in sums.items() if total is not None and entry not in watched}
        for entry in sums:
            entry.sharded_param.grad = None
        super().post_backward(*unused)
        parts = []
        for entry, total in sums.items():
            gradient, entry.sharded_param.grad = entry.sharded_param.grad, total
            if gradient is not None:
                parts.append((Held.of(total).memory, Held.of(gradient).memory, entry.grad_offload_event))
                entry.grad_offload_event = None
        if parts:
            if len(pending := self.of_model.sums) == _SUMS_AHEAD:
                pending.popleft().result()
            self._sum = _thread().submit(_add, parts)
            pending.append(self._sum)
        if self.is_gone_back and not is_over:
            self.end([entry.grad_offload_event for entry in self.fsdp_params if entry.grad_offload_event])

    def finalize_backward(self) -> None:
        """As FSDP2's, after which gradients of this pass are read: they are added up."""
        super().finalize_backward()  # type: ignore[no-untyped-call]  # torch's own
        if (sums := self._sum) is not None:
            self._sum = None
            sums.result()

    def _send(self) -> None:
        for each in self.copies().values():
            each.send()

    def end(self, arrivals: list[torch.Event]) -> None:
        """The backward pass of the unit is over: step on it, once its gradients have arrived, if that was asked for."""
        for optimizer, clipping in _EARLY.items():
            if clipping is not None and not clipping.has_begun:
                settle()
                clipping.begin(optimizer)
            if clipping is not None and clipping.norm is None:
                continue  # the first step is clipped by its own norm
            shards = self.copies().keys()
            parts = [(group, [p for p in group["params"] if p in shards]) for group in optimizer.param_groups]
            trained = {p for _, own in parts for p in own if p.grad is not None}
            if not trained or not all(optimizer.state.get(p) for p in trained):
                continue  # the first step is the optimizer's own
            if self.stepped_by is not None:
                raise ConfigError(
                    "A unit was stepped in two backward passes with one optimizer.step(). Enter steps_in_backward for "
                    "the last micro-batch alone."
                )
            self.stepped_by = optimizer
            run, used = _step_on(optimizer, [(_now(group), [p for p in own if p in trained]) for group, own in parts])
            clips = clipping and [partial(clipping.clip, [(p, Held.of(p.grad).memory) for p in trained])]
            self.step([*(event.synchronize for event in arrivals), *(clips or ()), run], used, trained)

    def step(self, calls: list[Callable[[], None]], used: Iterable[Any], trained: Iterable[Any]) -> None:
        """Run a step on the thread, and renew the copies of what it trains; DTensors that it uses wait for it."""
        copies = [each for shard, each in self.copies().items() if shard in trained and each.is_another]
        self._away = [Watched(each, self.wait) for each in used]
        for each in copies:
            each.watch(self.wait)
        self._step = _thread().submit(_run, [*calls, *(each.renew for each in copies)])

    def wait(self) -> None:
        """Return once the step on the unit is done."""
        if (step := self._step) is None:
            return
        try:
            step.result()
        finally:
            self._step, away, self._away = None, self._away, ()
            for each in away:
                each.touched()


_UNITS: weakref.WeakValueDictionary[int, StreamedUnit] = weakref.WeakValueDictionary()
"""The units of all models of this process, those of each in the order of its modules."""
_NUMBERS = count()


def settle() -> None:
    """Return once no step is under way."""
    for unit in list(_UNITS.values()):
        unit.wait()


# ---- the thread ----


@cache
def _thread() -> ThreadPoolExecutor:
    """The one thread of this process that adds and steps, in the order in which it is asked to."""
    return ThreadPoolExecutor(1, "offloaded-steps", _use_all_cores)


def _use_all_cores() -> None:
    """Let this thread compute on all cores of its rank, where others compute on a device and nobody has chosen a
    number: torchrun says one."""
    if find_accelerator() is not None and torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank_on_node()[1]))


@torch.no_grad()
def _run(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


@torch.no_grad()
def _add(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Event | None]]) -> None:
    while parts:  # what was added is freed
        total, gradient, arrived = parts.pop()
        if arrived is not None:
            arrived.synchronize()
        total += gradient


# ---- steps ----

_TAKEN: weakref.WeakKeyDictionary[Any, list[tuple[dict[str, Any], list[Any]]]] = weakref.WeakKeyDictionary()
"""By optimizer, during its own step: its groups, each with the parameters that it has."""


@cache
def _step_away() -> None:
    at_steps(Step.AWAY, _take)
    at_steps(Step.BACK, _step_units)


def _take(optimizer: Any) -> None:
    """Take what the thread is to step out of the groups for the time of the optimizer's own step: the first step, which
    makes the moments, is the optimizer's own."""
    _restore(optimizer)  # a step that failed left them so
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    held = {each for _, parameters in groups for each in parameters}
    copies = dict[torch.Tensor, HostCopy]()
    for unit in _with_shards_of(held):
        if unit.stepped_by is not optimizer:
            unit.wait()
        copies |= unit.copies()
    for each in copies.values():
        each.leave()
    if type(optimizer) in ELEMENTWISE and copies:
        if optimizer not in _TAKEN:
            optimizer.register_state_dict_pre_hook(lambda _: settle())
        _TAKEN[optimizer] = groups
        for group, own in groups:
            group["params"] = [p for p in own if p not in copies or p.grad is None or not optimizer.state.get(p)]


def _with_shards_of(held: set[torch.Tensor]) -> list[StreamedUnit]:
    """The units with any of these shards, in the order of the forward pass."""
    return [unit for unit in _UNITS.values() if not held.isdisjoint(unit.copies())]


def _restore(optimizer: Any) -> list[tuple[dict[str, Any], list[Any]]]:
    """Give the groups their parameters again; each group's settings of now, with what was taken out of it."""
    taken = []
    for group, held in _TAKEN.get(optimizer, ()):
        rest = set(group["params"])
        taken.append((_now(group), [each for each in held if each not in rest]))
        group["params"] = held
    if optimizer in _TAKEN:
        _TAKEN[optimizer] = []
    return taken


def _now(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group, which a scheduler will change."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def _step_units(optimizer: Any) -> None:
    """Let the thread step unit by unit, in the order of the forward pass, and renew the copies of what is trained."""
    taken = _restore(optimizer)
    held = {each for group in optimizer.param_groups for each in group["params"]}
    for unit in _with_shards_of(held):
        trained = unit.copies().keys() & held
        if unit.stepped_by is optimizer:
            unit.stepped_by = None
        else:
            run, used = _step_on(optimizer, [(now, [each for each in own if each in trained]) for now, own in taken])
            unit.step([run], used, trained)


def _step_on(optimizer: Any, parts: list[tuple[dict[str, Any], list[Any]]]) -> tuple[Callable[[], None], list[Any]]:
    """The step of an optimizer on some of its parameters, with settings of now, as a function that takes their
    gradients from where these are now; and the DTensors that it uses."""
    twin, used = object.__new__(type(optimizer)), list[Any]()
    twin.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[])
    for settings, parameters in parts:
        memory = []
        for parameter in parameters:
            local, state = Held.of(parameter).memory, optimizer.state[parameter]
            local.grad = Held.of(parameter.grad).memory
            used += [parameter, parameter.grad, *(value for value in state.values() if isinstance(value, DTensor))]
            twin.state[local] = {k: Held.of(v).memory if isinstance(v, DTensor) else v for k, v in state.items()}
            memory.append(local)
        if memory:
            twin.param_groups.append({**settings, "params": memory})
    own_step = type(optimizer).step.__wrapped__  # without the hooks of steps
    return partial(own_step, twin), used


_EARLY: dict[Any, LastNorm | None] = {}
"""The optimizers that step in the backward pass that runs now, and what they clip by."""
_CLIPPING: weakref.WeakKeyDictionary[Any, LastNorm] = weakref.WeakKeyDictionary()
"""By optimizer, the norms of its last step."""


def last_norm_of(optimizer: Any) -> torch.Tensor | None:
    """What the last step of an optimizer in `steps_in_backward` with `max_norm` was clipped by."""
    return _CLIPPING[getattr(optimizer, "optimizer", optimizer)].norm


@contextmanager
def steps_in_backward(optimizer: Any, max_norm: float | None = None) -> Iterator[LastNorm | None]:
    """Let an optimizer step each offloaded unit as soon as the backward pass of the unit is done, in a block.

    The CPU then works while the device goes on with the units below, and `optimizer.step()`, which must follow, does
    the rest. Numbers are those of a step after the pass. Nothing may change gradients in between: do not clip by a
    norm, which is known only when all gradients are, nor scale losses for fp16. Without CPU offload nothing is stepped.
    A Trainer with `max_grad_norm: 0` enters it by itself.

    With `max_norm`, gradients are clipped by the norm that those of the step before had, so that a sudden large
    gradient is clipped one step late. The first step, also of a run that is resumed, is clipped by its own norm and
    taken after the pass. Norms and steps are the same without CPU offload.

    Args:
        optimizer: one of torch that steps each element by itself (AdamW, SGD), also as Accelerate has prepared it.
        max_norm: of all gradients together, above which they are scaled down; None does not clip.

    Yields:
        With `max_norm`, an object whose `norm` is, after the block, what was clipped by (a scalar on the CPU).

    Enter for the last micro-batch before `optimizer.step()` alone. Every rank should; with `max_norm` every rank must,
    and one number for each mesh is reduced.

    Raises:
        ConfigError: the optimizer is another, or a second pass comes before `optimizer.step()`; `max_norm` is not
            above 0.

    Example:
        >>> model = from_pretrained("checkpoint", offload_policy=True, load_kwargs={"progress": False})
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> with steps_in_backward(optimizer, max_norm=1.0):
        ...     model(input_ids=ids, labels=ids).loss.backward()
        >>> optimizer.step()
    """
    own = getattr(optimizer, "optimizer", optimizer)
    if type(own) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ConfigError(
            f"{type(own).__name__} cannot step in the backward pass. Leave steps_in_backward (of a Trainer, "
            f"clip_by_last_norm) out, or take {known}."
        )
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}; give more than 0, or leave it out.")
    before = _CLIPPING.pop(own, None)
    clipping = None if max_norm is None else _CLIPPING.setdefault(own, LastNorm(max_norm, before))
    _EARLY[own] = clipping
    try:
        yield clipping
    finally:
        del _EARLY[own]
    if clipping is not None:
        stepped = [unit.copies() for unit in _UNITS.values() if unit.stepped_by is own]
        clipping.end(own, {shard for copies in stepped for shard in copies})
