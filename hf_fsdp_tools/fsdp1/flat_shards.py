"""Show an FSDP1 model as the plain model that it was.

Each parameter has its own name and shape, and holds the run of its elements that lies in this rank's flat shard.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import way_inside
from hf_fsdp_tools.modeling.tree_copy import copy_tree
from hf_fsdp_tools.text import listed


class FlatShare(torch.Tensor):
    """A parameter of which this rank holds a run: the elements from `start` on of its row-major order.

    It has the shape and dtype of the whole parameter, and the run's `memory` in the flat parameter's own storage. It
    supports what filling and saving a shard need: `copy_` from a whole tensor (elements outside the run are dropped),
    and `as_strided` views of boxes inside the run. Of ranks with one run, `is_first_replica` saves it.
    """

    memory: torch.Tensor
    start: int
    is_first_replica: bool

    @staticmethod
    def __new__(
        cls, shape: torch.Size, memory: torch.Tensor, start: int, *, requires_grad: bool, is_first_replica: bool
    ) -> Any:
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=memory.dtype, device=memory.device, requires_grad=requires_grad
        )
        self.memory, self.start, self.is_first_replica = memory, start, is_first_replica
        self._is_param = True  # what makes isinstance(…, nn.Parameter) true
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's names differ
        stop = self.start + self.memory.numel()
        return f"FlatShare({tuple(self.shape)}, {self.dtype}, elements {self.start}..{stop})"

    # Always True, so that transformers' initialisers, which fill whole tensors, leave the parameter alone.
    _is_hf_initialized = property(lambda self: True, lambda self, mark: None)

    def local_boxes(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """The boxes that this rank holds, each with its start for `as_strided`; none for an empty run."""
        boxes = flat_boxes(self.shape, self.start, self.start + self.memory.numel())
        return tuple((box, box.start) for box in boxes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the supported operations; refuse all others, which would need elements of other ranks."""
        share = args[0]
        if func is torch.ops.aten.detach.default:
            first = share.is_first_replica
            return FlatShare(share.shape, share.memory, share.start, requires_grad=False, is_first_replica=first)
        if func is torch.ops.aten.as_strided.default:
            _, size, stride, offset = args
            return share.memory.as_strided(size, stride, share.memory.storage_offset() + offset - share.start)
        if func is torch.ops.aten.copy_.default:
            run = args[1].contiguous().view(-1)[share.start : share.start + share.memory.numel()]
            share.memory.copy_(run)
            return share
        raise ConfigError(
            f"{func} needs whole parameters, but a plain view holds only this rank's part ({args!r}). Compute with the "
            "live model, inside FullyShardedDataParallel.summon_full_params."
        )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements `start .. stop` of a row-major tensor as boxes, in order, each contiguous in the tensor.

    There are fewer than two boxes per dimension.
    """
    if start >= stop:
        return
    if not shape:
        yield Box(start=(), length=())
        return
    inner = math.prod(shape[1:])
    while start < stop:
        index, rest = divmod(start, inner)
        if rest == 0 and stop - start >= inner:
            count = (stop - start) // inner
            yield Box(start=(index, *(0 for _ in shape[1:])), length=(count, *shape[1:]))
            start += count * inner
        else:
            end = min(stop - index * inner, inner)
            for box in flat_boxes(shape[1:], rest, end):
                yield Box(start=(index, *box.start), length=(1, *box.length))
            start = index * inner + end


class FlatPart(NamedTuple):
    """One parameter inside the flat parameter of an FSDP1 unit."""

    places: tuple[tuple[nn.Module, str], ...]  # each module that registered it, with its name there
    shape: torch.Size
    requires_grad: bool  # without original parameters, that of its unit
    registered: nn.Parameter | None  # by the live module in its place; None without original parameters
    memory: torch.Tensor  # this rank's run of its elements, 1-D, in the flat parameter's own storage
    start: int  # index of the run's first element


def flat_parts(wrapper: FullyShardedDataParallel) -> Iterator[FlatPart]:
    """The parameters that one FSDP1 unit gathers, each once; may be called while they are gathered."""
    handle: Any = wrapper._handle
    if handle is None:
        return
    flat = handle.flat_param
    tied: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]] = {}
    for other in flat._shared_param_infos:
        tied.setdefault((other.prim_module, other.prim_param_name), []).append((other.module, other.param_name))
    for i, (info, shard) in enumerate(zip(flat._param_infos, flat._shard_param_infos, strict=True)):
        offset, count = (shard.offset_in_shard, shard.numel_in_shard) if shard.in_shard else (0, 0)
        place = (info.module, info.param_name)
        registered = flat._params[i] if flat._params is not None else None
        yield FlatPart(
            places=(place, *tied.get(place, ())),
            shape=flat._shapes[i],
            requires_grad=(flat if registered is None else registered).requires_grad,
            registered=registered,
            memory=flat.data[offset : offset + count],
            start=shard.intra_param_start_idx or 0,
        )


def plain_view(model: nn.Module) -> nn.Module:
    """The model below the FSDP1 wrappers, under its own names, every parameter a `FlatShare` of this rank's memory.

    The view is a new tree of modules that shares all else with the live ones, and cannot run. No rank communicates.
    """
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    if not wrappers:
        raise ConfigError(f"{type(model).__name__} has no FSDP1 module. Wrap it with wrap_fsdp1 first.")
    shares: dict[nn.Module, dict[str, Any]] = {}
    for wrapper in wrappers:
        _refuse_unreadable(wrapper)
        first = _is_first_replica(wrapper)
        for part in flat_parts(wrapper):
            share = FlatShare(
                part.shape, part.memory, part.start, requires_grad=part.requires_grad, is_first_replica=first
            )
            for module, name in part.places:
                shares.setdefault(module, {})[name] = share

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {**unflattened(module), **shares.get(module, {})}

    return copy_tree(model, parameters=parameters, way_inside=way_inside).model


def unflattened(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module registers, without flat parameters."""
    return {name: p for name, p in module._parameters.items() if not isinstance(p, FlatParameter)}


def replicas_of(wrapper: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """Under a hybrid strategy, the group of the ranks that hold the same shards as this rank; otherwise None."""
    return getattr(wrapper, "_inter_node_pg", None)


def _is_first_replica(wrapper: FullyShardedDataParallel) -> bool:
    """Whether this rank saves its shards: under NO_SHARD rank 0 does, under hybrid strategies the first replica."""
    replicas = replicas_of(wrapper)
    if wrapper._handle is not None and not wrapper._handle.uses_sharded_strategy:
        replicas = wrapper.process_group
    return replicas is None or dist.get_rank(replicas) == 0


def _refuse_unreadable(wrapper: FullyShardedDataParallel) -> None:
    handle: Any = wrapper._handle
    if handle is None:
        return
    flat = handle.flat_param
    if not all(flat._contiguities):
        raise ConfigError(f"Not contiguous among {listed(flat._fqns)}: make all contiguous before wrapping.")
    if handle.uses_sharded_strategy and flat.size() != flat._sharded_size:
        raise ConfigError(
            f"The flat parameter of {listed(flat._fqns)} is gathered at the moment. Call this outside "
            "summon_full_params and between training steps."
        )
