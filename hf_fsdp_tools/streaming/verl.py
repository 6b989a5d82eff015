"""Weights for verl: what an engine yields as its shards, and as what has changed of them."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import ConfigError, library_errors
from hf_fsdp_tools.streaming.changes import Changes
from hf_fsdp_tools.streaming.live import LiveWeights
from hf_fsdp_tools.streaming.pieces import pieces
from hf_fsdp_tools.streaming.vllm import refuse_unpatchable
from hf_fsdp_tools.text import dtype_name, listed


def shard_specs(weights: LiveWeights) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """What verl's `BaseEngine.get_per_tensor_param_shard` yields: (name, this rank's part, flat, `ShardSpec`).

    One entry for each tensor of the checkpoint, in the same order on every rank; every type is verl's identity case. A
    rank that gives nothing of a tensor yields an empty part and does not contribute. A tensor of which a rank holds
    several boxes is gathered in a bucket, and one rank contributes all of it.

    Every rank must call, and iterate to the end. verl is imported here.

    Raises:
        ConfigError: verl cannot be imported; the weights are those of an adapter alone.
    """
    weights.of_a_model("verl")
    with agreed("importing verl"), library_errors("verl's ShardSpec cannot be imported", "Install verl 0.9."):
        from verl.workers.engine.spec import BlockPlacement, ShardSpec
    rank, size = rank_and_size()
    spread = weights.spread()
    boxes: dict[str, Box | None] = {}
    for name, tensor in weights.tensors.items():
        turn = zlib.crc32(name.encode())
        givers = [(ranks[turn % len(ranks)], box) for box, ranks in spread(name)]
        if tensor.symbol.look is None and len(dict(givers)) == len(givers):
            boxes[name] = dict(givers).get(rank)

    def specs() -> Iterator[tuple[str, torch.Tensor, Any]]:
        for name, part in pieces(weights, boxes):
            shape = weights.tensors[name].shape
            box = boxes.get(name, Box.whole(shape) if zlib.crc32(name.encode()) % size == rank else None)
            place = 0 if box is None else BlockPlacement(box.length, box.start, shape)
            group: dict[str, Any] = {"gather_group": _group(), "place": place, "contributes": box is not None}
            local = part.reshape(-1) if box is not None else part.new_empty(0)
            yield name, local, ShardSpec(full_shape=shape, **(group if size > 1 else {}))

    return specs()


def delta_entries(weights: LiveWeights, changes: Changes) -> Iterator[tuple[Any, ...]]:
    """What verl's `BaseEngine.get_per_tensor_param_delta_shard` yields: (slots, dtype, counts, indices, values, group).

    `changes` is `weights.changes()`, made where verl calls `prime_delta_snapshots`. Indices are int32, in the whole
    tensor; indices and values lie on the device of the mesh. One entry for each tensor of the checkpoint, in the same
    order on every rank. Every rank must call, and iterate to the end; verl gathers.

    Raises:
        ConfigError: floating-point tensors of several dtypes, which verl joins; a tensor has too many elements for
            int32; weights stay quantised, or are those of an adapter alone.
    """
    weights.of_a_model("verl")
    refuse_unpatchable(weights, "verl", "use another of its checkpoint engines than delta_sharded.")
    floats = {dtype_name(t.dtype) for t in weights.tensors.values() if t.dtype.is_floating_point}
    if len(floats) > 1:
        raise ConfigError(
            f"The weights go out as {listed(sorted(floats))}, and verl joins the changes of several tensors in one "
            'dtype: give live_weights(model, dtype="bfloat16").'
        )

    def entries() -> Iterator[tuple[Any, ...]]:
        for change in changes:
            counts = torch.tensor([len(change.indices)])
            indices = change.indices.to(weights.device, torch.int32)
            yield (
                [(change.name, change.shape)],
                dtype_name(change.values.dtype),
                counts,
                indices,
                change.values.to(weights.device),
                _group(),
            )

    return entries()


def _group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None
