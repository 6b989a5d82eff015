"""An FSDP1 model seen as the plain model that it was: each parameter with its own name and shape, and the run of its elements
that this rank holds in a flat parameter.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from hf_fsdp_tools.checkpoint.regions import Box
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import listed

__all__ = ["FlatShare", "flat_boxes", "plain_view"]

# Attributes under which FSDP1 and activation checkpointing keep the module that they wrap; neither is part of a name.
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class FlatShare(torch.Tensor):
    """A parameter of which this rank holds the elements `start .. start + memory.numel()` of its row-major order.

    It has the whole parameter's shape and dtype, and can do what filling and saving a shard need: be copied into (the
    rest of the source is dropped), and give views of boxes that lie in this rank's run.
    """

    memory: torch.Tensor
    """This rank's run, 1-D, in the flat parameter's own storage."""

    start: int
    """Index of its first element in the whole parameter."""

    is_first_replica: bool
    """Whether this rank is the first of those that hold the same run, and so the one that saves it."""

    @staticmethod
    def __new__(
        cls, shape: torch.Size, memory: torch.Tensor, start: int, *, requires_grad: bool, is_first_replica: bool
    ) -> "FlatShare":
        """Make one over memory that stays where it is."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=memory.dtype, device=memory.device, requires_grad=requires_grad
        )
        self.memory, self.start, self.is_first_replica = memory, start, is_first_replica
        self._is_param = True  # what makes isinstance(…, nn.Parameter) true
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's names differ
        """Shape, dtype and the run."""
        stop = self.start + self.memory.numel()
        return f"FlatShare({tuple(self.shape)}, {self.dtype}, elements {self.start}..{stop})"

    @property
    def _is_hf_initialized(self) -> bool:
        """transformers' mark, always set: its initialisers, which reach into neighbouring modules, fill whole tensors only."""
        return True

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, mark: bool) -> None:
        """Nothing to note."""

    def local_boxes(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """The boxes that this rank holds, each with where `as_strided` finds it; none for an empty run."""
        boxes = flat_boxes(self.shape, self.start, self.start + self.memory.numel())
        return tuple((box, box.start) for box in boxes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only the operations named above; anything else would compute with values that are not here."""
        aten = torch.ops.aten
        if func is aten.detach.default:
            (share,) = args
            first = share.is_first_replica
            return FlatShare(share.shape, share.memory, share.start, requires_grad=False, is_first_replica=first)
        if func is aten.as_strided.default:
            share, size, stride, offset = args
            return share.memory.as_strided(size, stride, share.memory.storage_offset() + offset - share.start)
        if func is aten.copy_.default:
            share, source = args[:2]
            run = source.contiguous().view(-1)[share.start : share.start + share.memory.numel()]
            share.memory.copy_(run)
            return share
        raise ConfigError(
            f"{func} needs whole parameters, but a plain view holds only this rank's part ({args!r}). Compute with the live "
            "model, inside FullyShardedDataParallel.summon_full_params."
        )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements `start .. stop` of a row-major tensor as boxes, in that order, each contiguous in the tensor.

    Fewer than two per dimension, whatever the range.
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


def plain_view(model: nn.Module) -> nn.Module:
    """The model below the FSDP1 wrappers, under its own names, every parameter a `FlatShare` of this rank's memory.

    A new tree of modules that shares buffers, memory and everything else with the live one; it follows no later change of
    the tree and cannot run. Parameters that FSDP1 ignores are the live ones. No rank communicates.

    Raises:
        ConfigError: the model has no FSDP1 module, or some of it is gathered at the moment.
    """
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    if not wrappers:
        raise ConfigError(f"{type(model).__name__} has no FSDP1 module. Wrap it with wrap_fsdp1 first.")
    shares: dict[nn.Module, dict[str, FlatShare]] = {}
    for wrapper in wrappers:
        if handle := wrapper._handle:
            for module, name, share in _shares_of(handle, _is_first_replica(wrapper)):
                shares.setdefault(module, {})[name] = share
    return _view(model, shares, {})


def _is_first_replica(wrapper: FullyShardedDataParallel) -> bool:
    """Under NO_SHARD every rank holds everything, under hybrid strategies one rank of every shard group the same."""
    replicas = getattr(wrapper, "_inter_node_pg", None)
    if wrapper._handle is not None and not wrapper._handle.uses_sharded_strategy:
        replicas = wrapper.process_group
    return replicas is None or dist.get_rank(replicas) == 0


def _shares_of(handle: Any, is_first_replica: bool) -> Iterator[tuple[nn.Module, str, FlatShare]]:
    """Every parameter of one flat parameter: the module that registers it, its name there, and its share."""
    flat = handle.flat_param
    if handle.uses_sharded_strategy and flat.size() != flat._sharded_size:
        raise ConfigError(
            f"The flat parameter of {listed(flat._fqns)} is gathered at the moment. Call this outside "
            "summon_full_params and between training steps."
        )
    made: dict[tuple[nn.Module, str], FlatShare] = {}
    trainable = _requires_grad(handle)
    for i, (info, shape, place) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        if not flat._contiguities[i]:
            raise ConfigError(f"{flat._fqns[i]} is not contiguous. Make it contiguous before wrapping.")
        offset, count = (place.offset_in_shard, place.numel_in_shard) if place.in_shard else (0, 0)
        memory = flat.data[offset : offset + count]
        start = place.intra_param_start_idx or 0
        share = FlatShare(shape, memory, start, requires_grad=trainable[i], is_first_replica=is_first_replica)
        made[info.module, info.param_name] = share
        yield info.module, info.param_name, share
    for tied in flat._shared_param_infos:
        yield tied.module, tied.param_name, made[tied.prim_module, tied.prim_param_name]


def _requires_grad(handle: Any) -> list[bool]:
    flat = handle.flat_param
    if flat._params is None:  # without original parameters all of a flat parameter is trained, or nothing
        return [flat.requires_grad] * len(flat._param_infos)
    return [parameter.requires_grad for parameter in flat._params]


def _view(module: nn.Module, shares: dict[nn.Module, dict[str, FlatShare]], made: dict[nn.Module, Any]) -> nn.Module:
    """A copy of one module and all below it, with the wrappers left out."""
    inner = next((module._modules[name] for name in _WRAPPED if name in module._modules), None)
    if inner is not None:
        return _view(inner, shares, made)
    if module in made:
        copy: nn.Module = made[module]
        return copy
    copy = made[module] = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    children = module._modules.items()
    copy.__dict__["_modules"] = {name: child and _view(child, shares, made) for name, child in children}
    own = {name: p for name, p in module._parameters.items() if not isinstance(p, FlatParameter)}
    copy.__dict__["_parameters"] = {**own, **shares.get(module, {})}
    copy.__dict__["_buffers"] = dict(module._buffers)
    for name in shares.get(module, {}):
        copy.__dict__.pop(name, None)  # without original parameters FSDP1 leaves a view of the last gather there
    return copy
