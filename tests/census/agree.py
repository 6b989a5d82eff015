"""The census' own part of a comparison: how many units are gathered at a time, and how many may be.

`hf_fsdp_tools.proof.compare` says what else is compared, and with what.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_fsdp_tools.proof import compare
from hf_fsdp_tools.proof.plain import Figures, outputs_of
from tests.api import Case, Tensors, evaluate, forward, loss_of, parameters_of_unit, sharding_of, unit_modules


def examine_sharded(case: Case, precision: str, plain: Figures, state: Tensors) -> dict[str, Any]:
    """Outcome and largest difference of each check, and units gathered, on this rank; every rank must call."""
    model = compare.load_sharded(case, precision)
    row: dict[str, Any] = {"units": len(sharding_of(model).plan.units)}
    seen = compare.examine(case, model, precision, plain, state)
    seen.pop("module")
    gathered, batch = Gathered(), case.batches_of("rows", "fp32")[dist.get_rank() // case.dims.ranks_per_row]
    with gathered.counted():
        evaluate(model, batch)
        left_gathered = len(gathered.now)
        with first_units(model) as first:
            loss = loss_of(forward(model, batch))
        loss.backward()
    row["gathered"], row["allowed"] = gathered.most, most_allowed(model, first)
    row["resharded"] = "" if not left_gathered else f"{left_gathered} units stay gathered after an evaluation"
    return row | {check: compare.worst(found) if isinstance(found, dict) else found for check, found in seen.items()}


class Gathered:
    """How many units are gathered at a time."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.most = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which every unit that FSDP2 gathers or frees is noted."""
        with ExitStack() as stack:
            for name in ("unshard", "_to_unsharded", "_to_sharded"):
                stack.enter_context(patch.object(FSDPParamGroup, name, self._noting(getattr(FSDPParamGroup, name))))
            yield

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(group, *args, **kwargs)
            if group.is_unsharded or group._all_gather_result is not None:
                self.now.add(id(group.modules[0]))
                self.most = max(self.most, len(self.now))
            else:
                self.now.discard(id(group.modules[0]))
            return result

        return call


def most_allowed(model: nn.Module, first: set[int]) -> int:
    """The units that may be gathered at a time, after a backward pass.

    The root, the units around each other where they are nested, the next one, the kept tail; and those that FSDP2 frees
    only at the end of the backward pass: units whose inputs need no gradient (`first`), and units that are fetched for
    a backward pass which does not reach them.
    """
    plan = sharding_of(model).plan
    units = [fqn for unit in plan.units for fqn in unit.modules if fqn]
    depth = max((sum(fqn == other or fqn.startswith(f"{other}.") for other in units) for fqn in units), default=0)
    kept = sum(unit.reshard_after_forward is False for unit in plan.units)
    unreached = {
        id(unit_modules(module)[0])
        for module in model.modules()
        if isinstance(module, FSDPModule)
        and module is not model
        and all(shard.grad is None for shard, _ in parameters_of_unit(module))
    }
    return 2 + depth + kept + len(first | unreached)


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
