"""How many units of a sharded model are gathered at a time, and how many may be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.fsdp2_internals import parameters_of_unit, unit_modules
from hf_fsdp_tools.sharding.shard import sharding_of

SKIPPED = ("past_key_values", "cache", "encoder_outputs", "decoder_past_key_values")


def outputs_of(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model's output by name, caches left out."""
    if isinstance(output, torch.Tensor):
        yield prefix, output
    elif isinstance(output, dict):
        for key, value in output.items():
            if key not in SKIPPED and "cache" not in str(key):
                yield from outputs_of(value, f"{prefix}.{key}")
    elif isinstance(output, list | tuple):
        for i, value in enumerate(output):
            yield from outputs_of(value, f"{prefix}.{i}")


class Gathered:
    """How many units are gathered at a time: the units themselves, and the bytes of their parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.now: set[int] = set()
        self.most = 0
        self.model = model

    @contextmanager
    def counted(self) -> Iterator[None]:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group

        counter = self
        kept = {name: getattr(Group, name) for name in ("unshard", "_to_unsharded", "_to_sharded")}

        def begins(name: str) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = kept[name](self, *args, **kwargs)
                if self.is_unsharded or self._all_gather_result is not None:
                    counter.now.add(id(self.modules[0]))
                    counter.most = max(counter.most, len(counter.now))
                return result

            return call

        def ends(self: Any) -> Any:
            counter.now.discard(id(self.modules[0]))
            return kept["_to_sharded"](self)

        Group.unshard, Group._to_unsharded = begins("unshard"), begins("_to_unsharded")
        Group._to_sharded = ends
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(Group, name, function)


def most_allowed(model: nn.Module, first: set[int]) -> int:
    """The units that may be gathered at a time.

    The root, the units around each other where they are nested, the next one, the kept tail; and those that FSDP2 frees
    only at the end of the backward pass: units whose inputs need no gradient (embeddings), and units that are fetched
    for a backward pass which does not reach them.

    Args:
        model: after a backward pass.
        first: units whose inputs needed no gradient.
    """
    plan = plan_of(model)
    units = [fqn for unit in plan.units for fqn in unit.modules if fqn]
    depth = max((sum(fqn == other or fqn.startswith(f"{other}.") for other in units) for fqn in units), default=0)
    kept = sum(unit.reshard_after_forward is False for unit in plan.units)
    return 2 + depth + kept + len(first | unreached(model))


def unreached(model: nn.Module) -> set[int]:
    """Units without a gradient."""
    return {
        id(unit_modules(module)[0])
        for module in model.modules()
        if isinstance(module, FSDPModule)
        and module is not model
        and all(entry.shard.grad is None for entry in parameters_of_unit(module))
    }


@contextmanager
def first_units(model: nn.Module) -> Iterator[set[int]]:
    """The units whose inputs need no gradient in a forward pass."""
    found: set[int] = set()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        if not any(t.requires_grad for _, t in outputs_of([args, dict(kwargs)])):
            found.add(id(unit_modules(module)[0]))

    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in units]
    yield found
    for handle in handles:
        handle.remove()


def plan_of(model: nn.Module) -> WrapPlan:
    found = sharding_of(model)
    assert found is not None
    return found.plan
