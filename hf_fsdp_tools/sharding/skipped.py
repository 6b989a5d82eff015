"""Units that this rank does not run while others do: they take part in gathering, and in reducing with zeros.

FSDP2 gathers a unit when its module runs. A rank that leaves one out (no image in its batch, a dropped layer, an early
exit) would answer with the shards of the next unit: the run hangs, or computes with wrong weights.

    stack     its blocks run in their order, once in each forward pass of the module above them, its owner. A rank that
              comes to a later block, to another unit or to the owner's end runs those that it left out empty.
    meeting   where ranks give a model different inputs (images on some ranks only), they agree before each
              stack and each other unit which one they run next, in an all-reduce; the others run it empty.

To run a unit empty is to go through FSDP2's own steps around its forward pass with a tensor that is handed on, so that
everything that follows, in the backward pass too, comes in the order of a rank that runs it.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.distributed.agreement import all_ranks, by_rank
from hf_fsdp_tools.distributed.cpu_backend import all_reduced
from hf_fsdp_tools.errors import RanksError
from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, has_forward
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.fsdp2_internals import in_backward, pass_through, unit_modules
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharded, Sharding
from hf_fsdp_tools.sharding.zero_grads import (
    below,
    first_float,
    own_weights,
    with_tensor,
    with_zero_grads,
    with_zero_grads_for_any_loss,
)

_MEDIA = ("pixel_", "image", "video", "audio", "input_features", "input_values", "speech", "spectrogram")
"""How the names of inputs other than a text begin, in transformers: a batch without them does not run their encoder."""

_NOWHERE = 2**40
"""The place of a rank that comes to no unit any more: after that of any unit."""


class SkippedUnits(Feature):
    """The units of a sharded model take part in every forward pass of it, on all ranks.

    A forward pass of a model that takes text and other inputs compares which inputs there are, in one all-reduce
    between CPUs, and does nothing more where all ranks give the same.
    """

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Ranks meet before units, and take part with a dummy input in those that others run."""
        if sharding.mesh.size() > 1:
            yield from _Passes(model, tree, sharding).hooks()


class _Passes:
    """The forward passes of one model, one after the other."""

    def __init__(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        self._model, self._tree, self._sharding = model, tree, sharding
        self._taken = taken = tuple(inspect.signature(model.forward).parameters)
        self._media = [name for name in taken if name.startswith(_MEDIA)] if "input_ids" in taken else []
        outer = list(_units_below([model]))
        self._owners: dict[int, nn.Module] = {}
        self._steps: list[list[FSDPModule]] = []
        """What runs one after the other: the units of a stack, or one unit."""
        stacks = [(blocks, owner) for blocks in find_blocks(tree) if (owner := _owner(blocks)) is not None]
        stacks = [s for s in stacks if any(isinstance(block.module, FSDPModule) for block in s[0])]
        owned = Counter(owner for _, owner in stacks)  # of several, any may run between blocks of another
        stack_of = {b.module: s for s in stacks if owned[s[1]] == 1 for b in s[0]}
        step_of: dict[nn.Module, int] = {}
        self._place: dict[nn.Module, tuple[int, int]] = {}
        """The step of each module of a unit, and the unit's place in it."""
        for unit in outer:
            owner = stack_of.get(unit, (None, None))[1]  # type: ignore[call-overload]  # a module, too
            step = len(self._steps) if owner is None else step_of.setdefault(owner, len(self._steps))
            if step == len(self._steps):
                self._steps.append([])
            if owner is not None:
                self._owners[step] = owner
            for module in unit_modules(unit):
                self._place[module] = step, len(self._steps[step])
            self._steps[step].append(unit)
        self._forget()

    def _forget(self) -> None:
        self._runs = self._meets = False
        self._count = 0
        """The number of inputs other than the text that this rank has."""
        self._open: dict[int, int] = {}
        """How many units have taken part, of the stacks whose owner runs."""
        self._pending: list[torch.Tensor] = []
        """Results of units that ran empty, until something that is computed with takes them into its graph."""
        self._alone: tuple[int, int] | None = None
        """The last unit of what this rank runs now, in which others take part with a dummy input."""
        self._results: list[torch.Tensor] = []
        """What such units gave. Nothing may depend on it (LLaVA's last block); where they ran empty, something does."""

    def hooks(self) -> Iterator[Hook]:
        """All hooks."""
        yield Hook(self._model, Phase.MEET, self._begin)
        if self._sharding.is_divided:  # within a unit, these ranks would wait for the others
            return
        yield Hook(self._model, Phase.CONTEXT, self._pass)
        for step, owner in self._owners.items():
            yield Hook(owner, Phase.STACK, partial(self._opened, step))
            yield Hook(owner, Phase.JOIN, partial(self._closed, step))
        yield Hook(self._model, Phase.JOIN, self._end)  # after the end of a stack that the root runs
        for module in self._place:
            yield Hook(module, Phase.MEET, self._enter)
            yield Hook(module, Phase.KEEP, self._leave)

    # ---- hooks ----

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """A forward pass; of one that raised, nothing is left for units next to it."""
        try:
            yield
        finally:
            self._forget()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget()
        if in_backward() or Sharded.of(model).gathered:  # then nothing is gathered, and ranks run passes of their own
            return
        self._runs = True
        if self._media:
            given = dict(zip(self._taken, args, strict=False)) | kwargs
            there = (name for name in self._media if given.get(name) is not None)
            present = [name for name in there if not isinstance(given[name], torch.Tensor) or given[name].numel()]
            self._count = len(present)
            mask = sum(2**i for i, name in enumerate(self._media) if name in present)
            least, negated = self._least([mask, -mask])
            self._meets = least != -negated
            if self._meets and self._sharding.is_divided:
                ranks = sorted(self._sharding.mesh.mesh.flatten().tolist())
                everywhere = all_ranks(present, "comparing the inputs of a forward pass", ranks=ranks)
                raise RanksError(
                    f"The ranks give {type(model).__name__} different inputs: "
                    f"{by_rank([', '.join(names) or 'text alone' for names in everywhere], ranks)}. Where ranks "
                    "share layers or experts, all run the same encoders: give every rank an image (a row of which no "
                    "token counts in the loss), or use tp_size 1 and ep_size 1."
                )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a unit runs: those that this rank left out, and those that other ranks run first."""
        if not self._runs or in_backward():
            return None
        step, index = self._place[module]
        tensor = hidden = first_float((*args, *kwargs.values()))
        for other in [other for other in reversed(self._open) if other != step]:
            if self._open[other] or step > other:
                hidden = self._finish(other, hidden)
        done = self._open.get(step)
        if done is None:
            self._meet((step, index), hidden)
        elif index < done - 1:  # not in this order: a unit at a time from now on
            self._open.pop(step), self._owners.pop(step)
            self._meet((step, index), hidden)
        elif index >= done:
            if not done:
                self._meet((step, -1), hidden)
            hidden = self._join(self._steps[step][done:index], hidden)
            self._open[step] = index + 1
        hidden = self._attach(hidden)
        return None if hidden is tensor else with_tensor((args, kwargs), tensor, hidden)

    def _leave(self, module: nn.Module, args: object, output: Any) -> None:
        if self._alone == self._place[module] and not in_backward():
            self._alone, result = None, first_float(output)
            if result is not None and result.requires_grad:
                self._results.append(result)

    def _opened(self, step: int, *_: object) -> None:
        if self._runs and step in self._owners and not in_backward():
            self._open[step] = 0

    def _closed(self, step: int, owner: nn.Module, args: object, output: Any) -> Any:
        if not self._runs or step not in self._open or in_backward():
            return None
        tensor = first_float(output)
        hidden = self._attach(self._finish(step, tensor))
        del self._open[step]
        return None if hidden is tensor else with_tensor(output, tensor, hidden)

    def _end(self, model: nn.Module, args: object, output: Any) -> Any:
        """At the end of the model's forward pass: what other ranks still run, and zeros for what the root holds."""
        if not self._runs:
            return None
        self._meet(None, None)
        reached = [result for result in self._pending if result.requires_grad]
        if self._meets:
            reached += [*own_weights([model]), *self._results]
        self._forget()
        return with_zero_grads_for_any_loss(output, reached)

    # ---- units that run on a dummy input ----

    def _finish(self, step: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Run the units of a stack empty that have not taken part."""
        done, units = self._open[step], self._steps[step]
        if not done:
            self._meet((step, -1), hidden)
        self._open[step] = len(units)
        return self._join(units[done:], hidden)

    def _meet(self, wanted: tuple[int, int] | None, hidden: torch.Tensor | None) -> None:
        """Run empty what other ranks run before the unit or the stack that this rank is about to run."""
        while self._meets:
            place = _NOWHERE if wanted is None else wanted[0] * 2**20 + wanted[1] + 1
            modes = 2 * torch.is_grad_enabled() + (hidden is not None and hidden.requires_grad)
            # those with the most inputs first: encoders run before what reads their results
            own = 2**62 if wanted is None else 4 * (place - 2 * _NOWHERE * self._count) + modes
            asked, least, negated = self._least([own, place, -place])
            if asked == 2**62:
                return
            first, (is_grad, needs_grad) = asked // 4 % (2 * _NOWHERE), divmod(asked % 4, 2)
            step, index = first // 2**20, first % 2**20 - 1
            if (step, index) == wanted:
                is_alone = least != -negated
                self._alone = (step, index if index >= 0 else len(self._steps[step]) - 1) if is_alone else None
                return
            units = self._steps[step] if index < 0 else self._steps[step][index : index + 1]
            with torch.set_grad_enabled(bool(is_grad)):
                self._join(units, None, needs_grad=bool(needs_grad))

    def _least(self, values: Sequence[int]) -> list[int]:
        """The least of all ranks' values, each by itself."""
        groups = self._sharding.mesh.get_all_groups()
        least: list[int] = all_reduced(torch.tensor(values, device="cpu"), groups, dist.ReduceOp.MIN).tolist()
        return least

    def _join(
        self, units: Sequence[FSDPModule], hidden: torch.Tensor | None, *, needs_grad: bool = False
    ) -> torch.Tensor | None:
        """Run units empty with a tensor, which is handed on; without one, with one that later results take up."""
        if hidden is not None or not units:
            return hidden if hidden is None else self._join_with(units, hidden)
        device = Sharded.of(self._model).sharding.mesh.device_type
        self._pending.append(self._join_with(units, torch.zeros((), device=device, requires_grad=needs_grad)))
        return None

    def _join_with(self, units: Sequence[FSDPModule], hidden: torch.Tensor) -> torch.Tensor:
        for unit in units:
            hidden = self._empty(unit, hidden)
        return hidden

    def _empty(self, unit: FSDPModule, hidden: torch.Tensor) -> torch.Tensor:
        members = unit_modules(unit)

        def inside(hidden: torch.Tensor) -> torch.Tensor:
            hidden = self._join_with(list(_units_below(members)), hidden)
            return with_zero_grads(hidden, *own_weights(members)) if torch.is_grad_enabled() else hidden

        return pass_through(unit, hidden, inside)

    def _attach(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Take the results of units that ran empty into the graph of a tensor."""
        if hidden is None or not self._pending:
            return hidden
        pending = [result for result in self._pending if result.requires_grad]
        self._pending.clear()
        return with_zero_grads(hidden, *pending) if pending and torch.is_grad_enabled() else hidden


def _owner(blocks: Sequence[ModuleNode]) -> nn.Module | None:
    """The module whose forward pass runs all of these blocks."""
    others = [set(block.ancestors()) for block in blocks[1:]]
    above = (node for node in blocks[0].ancestors() if has_forward(node.module))
    return next((node.module for node in above if all(node in each for each in others)), None)


def _units_below(modules: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    """The outermost units within a unit, each by the first of its modules."""
    seen: set[nn.Module] = set(modules)
    for module in below(modules):
        if isinstance(module, FSDPModule) and module not in seen:
            seen.update(unit_modules(module))
            yield module
