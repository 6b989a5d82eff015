"""Show an FSDP1 model as the plain model that it was, each parameter with the run of its elements on this rank."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from hf_fsdp_tools.distributed.shards import Boxes, Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.symbolic import boxes_of_run
from hf_fsdp_tools.modeling.module_tree import way_inside
from hf_fsdp_tools.modeling.tree_copy import copy_tree
from hf_fsdp_tools.text import grouped, listed


class FlatShare(torch.Tensor):
    """A parameter of which this rank holds a run: the elements from `start` on of its row-major order.

    It has the shape of the whole parameter, and the run's `memory` in the flat parameter's storage. It supports `copy_`
    from a whole tensor and `as_strided` views of boxes inside the run. `is_first_replica` tells who saves.
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

    held_as = property(lambda self: HeldRun)

    # Always True, so that transformers' initialisers, which fill whole tensors, leave the parameter alone.
    _is_hf_initialized = property(lambda self: True, lambda self, mark: None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the supported operations; refuse all others, which would need elements of other ranks."""
        share = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            memory, first = func(share.memory), share.is_first_replica
            return FlatShare(share.shape, memory, share.start, requires_grad=False, is_first_replica=first)
        if func is torch.ops.aten.as_strided.default:
            _, size, stride, offset = args
            return share.memory.as_strided(size, stride, share.memory.storage_offset() + offset - share.start)
        if func is torch.ops.aten.copy_.default:
            run = args[1].contiguous().view(-1)[share.start : share.start + share.memory.numel()]
            share.memory.copy_(run)
            return share
        raise ConfigError(
            f"{func} needs whole parameters, of which a plain view holds this rank's part alone. Compute with the live "
            "model, inside FullyShardedDataParallel.summon_full_params."
        )


class HeldRun(Held):
    """What this rank holds of a parameter of a flat one."""

    is_derived = False

    @property
    def boxes(self) -> Boxes:
        count = self.tensor.memory.numel()
        boxes = boxes_of_run(self.tensor.start, 0, count, 1, self.tensor.shape) if count else ()
        return tuple((box, box.start) for box, _ in boxes)

    @property
    def replica(self) -> tuple[int, int] | None:
        return (0, 1) if self.tensor.is_first_replica else None

    def cut(
        self, whole: torch.Tensor, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        own: torch.Tensor = self.tensor.detach().clone()
        return own.copy_(whole)

    def gather(self) -> torch.Tensor:
        whole = torch.zeros(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
        for box, memory in self.parts() if self.tensor.is_first_replica else ():
            whole[box.slices].copy_(memory)
        dist.all_reduce(whole.view(-1).view(torch.uint8))  # bytes, to which all others add zeros
        return whole


def flat_shares(wrapper: FullyShardedDataParallel) -> Iterator[tuple[list[tuple[nn.Module, str]], FlatShare]]:
    """Yield each parameter that one FSDP1 unit gathers, with the modules that registered it and its name there."""
    handle: Any = wrapper._handle
    if handle is None:
        return
    flat, is_first = handle.flat_param, _is_first_replica(wrapper)
    others = flat._shared_param_infos
    tied = grouped(((each.prim_module, each.prim_param_name), (each.module, each.param_name)) for each in others)
    for i, (info, shard) in enumerate(zip(flat._param_infos, flat._shard_param_infos, strict=True)):
        offset, count = (shard.offset_in_shard, shard.numel_in_shard) if shard.in_shard else (0, 0)
        memory, start = flat.data[offset : offset + count], shard.intra_param_start_idx or 0
        grad = (flat if flat._params is None else flat._params[i]).requires_grad
        share = FlatShare(flat._shapes[i], memory, start, requires_grad=grad, is_first_replica=is_first)
        place = (info.module, info.param_name)
        yield [place, *tied.get(place, ())], share


def plain_view(model: nn.Module) -> nn.Module:
    """The model below the FSDP1 wrappers, under its own names, every parameter a `FlatShare`; it cannot run."""
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    if not wrappers:
        raise ConfigError(f"{type(model).__name__} has no FSDP1 module. Wrap it with wrap_fsdp1 first.")
    shares: dict[nn.Module, dict[str, Any]] = {}
    for wrapper in wrappers:
        _refuse_unreadable(wrapper)
        for places, share in flat_shares(wrapper):
            for module, name in places:
                shares.setdefault(module, {})[name] = share

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        own = {name: p for name, p in module._parameters.items() if not isinstance(p, FlatParameter)}
        return {**own, **shares.get(module, {})}

    return copy_tree(model, parameters=parameters, way_inside=way_inside).model


def _is_first_replica(wrapper: FullyShardedDataParallel) -> bool:
    """Whether this rank saves its shards: rank 0 under NO_SHARD, the first replica under hybrid strategies."""
    replicas = getattr(wrapper, "_inter_node_pg", None)
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
