"""All that this package replaces in torch and PEFT for the life of a process, from the first model on that it shards.

Habits of scripts that would do something else on shards, in silence, work as on one process, or say what does:

    drawing     `nn.init.normal_(weight)`, `weight.data.uniform_()`, `torch.randn_like(weight)`: what one process draws
    deciding    `if p.grad.isnan().any():`, `float(p.norm())`: an error, for each rank would answer for its own part
    writing     `weight.grad[:n].zero_()`: an error, for what an index gives of shards is a copy
    asking      `torch.autograd.grad(loss, model.parameters())`: an error, for shards are in no graph
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Box, Held, HeldShard, memory_view
from hf_fsdp_tools.errors import ConfigError

aten = torch.ops.aten
_DRAWING = (aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float, aten.exponential_.default)
_DRAWING_LIKE = (aten.randn_like.default, aten.rand_like.default)


_SHARDED: WeakSet[nn.Module] = WeakSet()
"""The models whose shards are known to be in no graph."""


def guard_habits(model: nn.Module) -> None:
    """Let torch call the functions below, in this process, of which the last looks at sharded models alone. Nothing is
    communicated."""
    _SHARDED.add(model)
    _guard_habits()


@cache
def _guard_habits() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[aten._local_scalar_dense.default] = _answer
    handlers.update(dict.fromkeys(_DRAWING, _draw))
    handlers.update(dict.fromkeys(_DRAWING_LIKE, _draw_like))
    _look_before(dispatcher, "_propagate_op_sharding_dispatch_slow_path", _refuse_lost_write)  # once for equal shards
    _look_before(torch.autograd, "_engine_run_backward", _refuse_shards)
    init: Any = nn.init
    draw = init._no_grad_trunc_normal_  # it decides, by a part of the answer

    def drawn(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_sharded = isinstance(tensor, DTensor)
        return _draw(draw, (tensor, *args), kwargs) if is_sharded else draw(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = drawn


def _look_before(owner: Any, name: str, look: Callable[..., None]) -> None:
    own = getattr(owner, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        look(*args)
        return own(*args, **kwargs)

    setattr(owner, name, seen)


def _answer(operator: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if any(not p.is_replicate() and tensor.device_mesh.size(i) > 1 for i, p in enumerate(tensor.placements)):
        raise ConfigError(
            "A number or a decision (if, float(), .item()) is taken of a DTensor, of which this rank holds a part of "
            "the answer. On every rank, take that of the whole: p.grad.isnan().any().full_tensor(), "
            "p.norm().full_tensor(). This rank's part is x.to_local()."
        )
    return tensor.to_local().item()


def _draw(operator: Any, args: Any, kwargs: Any) -> Any:
    tensor, whole = args[0], torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].to_local().device)
    operator(whole, *args[1:], **kwargs)
    Held.of(tensor).memory.copy_(Held.of(tensor).part_of(whole))
    return _as_first_replica(tensor)


def _draw_like(operator: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    own = HeldShard(tensor)
    return _as_first_replica(own.around(own.part_of(operator(empty, *args[1:], **kwargs)).contiguous()))


def _as_first_replica(drawn: DTensor) -> DTensor:
    """Let replicas, whose ranks may have their own seeds, have what the first one drew; all of them must draw."""
    own = Held.of(drawn).memory
    for axis, at in enumerate(drawn.placements):
        if at.is_replicate() and drawn.device_mesh.size(axis) > 1 and own.numel() and not own.is_meta:
            dist.broadcast(own, group=drawn.device_mesh.get_group(axis), group_src=0)
    return drawn


def _refuse_lost_write(operator: Any, args: Any, *others: Any) -> None:
    written: Any = args[0] if operator._schema.is_mutable and args else None
    base = written._base if isinstance(written, DTensor) else None
    if isinstance(base, DTensor) and len({Held.of(t).memory.untyped_storage()._cdata for t in (written, base)}) > 1:
        raise ConfigError(
            f"{operator.__name__.split('.')[0]} writes to a copy of shards ({list(written.shape)} of "
            f"{list(base.shape)}), which would stay as they are: an index of a sharded tensor (weight.grad[:n], "
            "weight.data[-3:]) copies. On every rank, multiply by a mask of all rows, or change x.full_tensor() and "
            "put it back (docs/guide.md)."
        )


def _refuse_shards(losses: Any, grads: Any, retain: Any, create: Any, inputs: Any, *others: Any) -> None:
    known = {id(each) for model in _SHARDED if inputs for each in model.parameters() if isinstance(each, DTensor)}
    if shards := sum(id(each) in known for each in inputs):
        raise ConfigError(
            f"Gradients are asked for by {shards} shards (torch.autograd.grad, or inputs= of backward), which are in "
            "no graph: a pass computes with gathered weights. Call accelerator.backward(loss) on every rank and read "
            "p.grad; of several losses one after the other, with p.grad copied and set to None between them."
        )


@cache
def let_dcp_see_boxes() -> None:
    """From now on, let DCP save and load each box of a DTensor of which this rank holds several, in this process.

    torch (2.13) takes a shard for one box from the first to the last index: of fused weights that tensor parallelism
    cuts in two ranges, ranks would overlap, and what is read into them would be wrong. DTensors with one box are left
    to torch.
    """
    names = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    former = {name: getattr(DTensor, name) for name in names}

    def write_items(tensor: DTensor, fqn: str, value: Any) -> Any:
        if len(boxes := Held.of(tensor).boxes) < 2:
            return former["__create_write_items__"](tensor, fqn, value)
        properties = dcp.TensorProperties.create_from_tensor(tensor.to_local())
        chunks = [_chunk(box) for box, _ in boxes]
        return [
            WriteItem(
                index=dcp.MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
            )
            for chunk in chunks
        ]

    def chunk_list(tensor: DTensor) -> Any:
        boxes = Held.of(tensor).boxes
        return former["__create_chunk_list__"](tensor) if len(boxes) < 2 else [_chunk(box) for box, _ in boxes]

    def shard(tensor: DTensor, index: dcp.MetadataIndex) -> Any:
        if len(boxes := Held.of(tensor).boxes) < 2:
            return former["__get_tensor_shard__"](tensor, index)
        box, start = next(each for each in boxes if each[0].start == tuple(index.offset or ()))
        return memory_view(Held.of(tensor).memory, start, box.length)

    for name, own in zip(names, (write_items, chunk_list, shard), strict=True):
        setattr(DTensor, name, own)


def _chunk(box: Box) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.length))
