"""A model that one rank holds whole on its device: no unit is gathered, and parameters stay plain tensors.

Under mixed precision FSDP2 gathers copies of weights in the dtype of computation. Here weights are cast: those of a
block when it runs, others when the module that has them runs. The copies are what autograd keeps, as under autocast,
and gradients reach the weights through the cast.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.sharding.hooks import hooks_of_experts, hooks_of_precision, kept_as_stored
from hf_fsdp_tools.sharding.phases import Hook, Installed, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float
from hf_fsdp_tools.text import grouped

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


class CastWeights:
    """Weights whose copies in the dtype of computation stand in their place while they are used."""

    def __init__(self, places: Sequence[Place], dtype: torch.dtype) -> None:
        self._places, self._dtype = places, dtype
        self._own: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def _others(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield the weights that have another dtype, each with where it is registered."""
        for module, name in self._places:
            weight = module._parameters.get(name)
            if weight is not None and weight.is_floating_point() and weight.dtype != self._dtype:
                yield module._parameters, name, weight

    def sizes(self) -> dict[int, int]:
        """Bytes of the copies, by the `id` of their weights."""
        return {id(weight): weight.numel() * self._dtype.itemsize for _, _, weight in self._others()}

    def cast(self) -> None:
        """Put copies in the place of weights, unless they are there; a tied weight has one."""
        if self._own:
            return
        self._own = list(self._others())
        weights = {id(weight): weight for _, _, weight in self._own}
        copies = {key: weight.to(self._dtype) for key, weight in weights.items()}
        for store, name, weight in self._own:
            copy = copies[id(weight)]
            # PEFT puts what it adds to frozen stacks of experts around a parameter, for the time of a pass.
            store[name] = copy if weight.requires_grad else nn.Parameter(copy, requires_grad=False)

    def restore(self) -> None:
        """Put the weights back."""
        for store, name, weight in self._own:
            store[name] = weight
        self._own = []

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """A block, a forward pass, in which the copies are there; copies of several passes stay."""
        if self._own:
            yield
            return
        self.cast()
        try:
            yield
        finally:
            self.restore()

    def cast_again(self, module: Any, args: object, kwargs: object) -> None:
        """Let the copies be made once more where a module's pass is recomputed: transformers' blocks checkpoint their
        `forward`, around which no hook runs then. A hook before each pass, as scripts turn checkpointing on later."""
        run = getattr(module, "_gradient_checkpointing_func", None)
        if run is not None and not (isinstance(run, _CastAgain) and run.cast is self):
            module._gradient_checkpointing_func = _CastAgain(run, self)


class LentWeights(CastWeights):
    """Weights of a head of which attributes give copies after a pass of the base alone, until its backward pass:
    chunked losses, as TRL's, read them without a call of the model. Modules register the weights all the time."""

    def keep_until_backward(self, base: nn.Module, args: object, output: object) -> None:
        """Let attributes give copies, unless a pass of the whole model goes on, which has its own."""
        hidden = first_float(output)
        if not torch.is_grad_enabled() or hidden is None or not hidden.requires_grad:
            return
        self.cast()
        lent = [(vars(module), name, module._parameters[name]) for module, name in self._places] if self._own else []
        super().restore()
        for store, name, copy in lent:
            store[name] = copy
        if lent:
            hidden.register_hook(lambda gradient: self._end(lent))  # type: ignore[no-untyped-call]  # torch's own

    def _end(self, lent: Iterable[tuple[dict[str, Any], str, object]]) -> None:
        """Let attributes give weights again, unless a later pass has lent others."""
        if all(store.get(name) is copy for store, name, copy in lent):
            self.restore()

    def give_back(self, module: object, args: object, kwargs: object) -> None:
        """Let attributes give weights again before a pass: the backward pass of the one before may never have come."""
        self.restore()

    def restore(self) -> None:
        """Let attributes give weights again."""
        super().restore()
        for module, name in self._places:
            vars(module).pop(name, None)


@dataclass(frozen=True)
class _CastAgain:
    """What checkpoints a pass, with weights in the dtype of computation when it is recomputed."""

    run: Callable[..., Any]
    cast: CastWeights

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run(partial(self._inside, function), *args, **kwargs)

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.cast.in_pass():
            return function(*args, **kwargs)


class Whole(Feature):
    """Weights and inputs get the dtypes of `mp_policy` without units."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Casts of weights, then those of inputs and outputs, which are the same as those of gathered units."""
        if not sharding.is_whole:
            return
        policy, modules = sharding.mp_policy, dict(model.named_modules(remove_duplicate=False))
        replicated = {model.get_parameter(name) for name in sharding.plan.replicated}
        in_fp32 = kept_as_stored(model, policy.param_dtype)
        names = sorted(name for unit in sharding.plan.units for name in unit.modules)
        units = dict.fromkeys(modules[name] for name in names)
        if policy.param_dtype is not None:
            yield from hooks_of_weights(model, units, policy.param_dtype, stay={*replicated, *in_fp32})
        yield from hooks_of_precision(model, sharding, units=units, replicated=replicated, in_fp32=in_fp32)
        if policy.output_dtype is not None:
            yield from (Hook(unit, Phase.OUTPUT, partial(_all_in, dtype=policy.output_dtype)) for unit in units)
        yield from hooks_of_experts(tree)


def _all_in(module: nn.Module, args: object, output: Any, *, dtype: torch.dtype) -> Any:
    """Cast an output as FSDP2 does for `output_dtype`."""
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, output)


def hooks_of_weights(
    model: nn.Module, units: Iterable[nn.Module], dtype: torch.dtype, stay: Collection[torch.Tensor] = ()
) -> Iterator[Hook]:
    """Yield the hooks that cast weights, and note what they cast: those of a checkpointed block together, or of a unit
    with children, and others of each module."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    caster: dict[nn.Module, nn.Module] = {}
    for block in (*blocks, *(unit for unit in units if unit is not model and any(unit.children()))):
        block = getattr(block, "_checkpoint_wrapped_module", block)  # inside of torch's own wrapper
        for module in block.modules():  # outer ones come before those inside them
            caster.setdefault(module, block)
    places = [
        (caster.get(module, module), (module, name))
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point() and weight not in stay
    ]
    casts = {module: CastWeights(own, dtype) for module, own in grouped(places).items()}
    for module, cast in casts.items():
        Installed.put(module, casts=(cast,))
        yield Hook(module, Phase.CONTEXT, cast.in_pass)
        if hasattr(module, "gradient_checkpointing"):
            yield Hook(module, Phase.CAST, cast.cast_again)
    base, head = getattr(model, "base_model", model), getattr(model, "get_output_embeddings", lambda: None)()
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    inside = set(head.modules()) if isinstance(head, nn.Module) else set()  # PEFT's wrapper has children
    of_head = [place for _, place in places if place[0] in inside]
    # Once for all that use them in a pass, so that gradients are added up in the dtype of computation, as in a unit;
    # and for chunked losses, which do not call the head.
    shared = [(m, key) for block, (m, key) in places if block is m and names[id(m._parameters[key])] > 1]
    together = [*dict.fromkeys([*shared, *of_head])]
    if together:
        in_pass, lent = CastWeights(together, dtype), LentWeights(of_head, dtype)
        Installed.put(model, casts=(in_pass, lent, *Installed.of(model).casts))
        yield Hook(model, Phase.CONTEXT, in_pass.in_pass)
        if base is not model:
            yield from (Hook(module, Phase.CAST, lent.give_back) for module in (model, base))
            yield Hook(base, Phase.KEEP, lent.keep_until_backward)
