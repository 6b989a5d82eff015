"""Weights for vLLM: a `WeightSource` for its trainer engines, and patches of what has changed."""

from collections.abc import Collection, Iterator
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import agreed, announced, rank_and_size
from hf_fsdp_tools.distributed.rounds import StoppedElsewhere
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError, library_errors
from hf_fsdp_tools.streaming.changes import Changes
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights
from hf_fsdp_tools.streaming.pieces import pieces
from hf_fsdp_tools.streaming.routes import Holders
from hf_fsdp_tools.text import first_lines

Layout = tuple[tuple[int, int], int, int]
"""Shape of a mesh over all ranks, the axis of it along which a tensor is cut, and the tensor's dimension that is."""


def weight_source(weights: LiveWeights, *, to: Collection[int] | None = (0,), bucket_bytes: int = BUCKET_BYTES) -> Any:
    """A vLLM `WeightSource`, for `trainer_init(…, source=…)` of its engines: `metadata`, `iter_full`, `iter_local`.

    Names, shapes and dtypes are the checkpoint's. `iter_full` yields whole tensors, gathered in buckets. `iter_local`
    yields a rank's own part, without communication, where the ranks hold equal parts along one dimension, in their
    order (replicas too): what nccl_m2n can describe. Other tensors, such as experts that are cut out of a stack, are
    declared replicated, and are gathered.

    Args:
        weights: of a model; of a PEFT model, with its adapters merged.
        to: ranks that get whole tensors. Rank 0 for the engine `nccl`, None (every rank) for `ipc`, `sharded_rdt` and
            `nccl_m2n`, which has no use for `to` beside that.
        bucket_bytes: as in `LiveWeights.buckets`.

    Every rank must call, and iterate each pass to the end, as vLLM's engines do; `update_vllm` sees to that. vLLM is
    imported here.

    Raises:
        ConfigError: vLLM cannot be imported; the weights are those of an adapter alone.
    """
    weights.of_a_model("vLLM")
    with agreed("importing vLLM"), library_errors("vLLM's WeightSource cannot be imported", "Install vLLM 0.33."):
        from vllm.distributed.weight_transfer import base
    rank, size = rank_and_size()
    owners = tuple(range(size)) if to is None else tuple(sorted(to))
    if not owners or not 0 <= owners[0] <= owners[-1] < size:
        raise ConfigError(f"to={to}: weights go to some of the ranks 0 to {size - 1}, or to all of them with None.")
    spread = weights.spread()
    holders = {n: spread(n) for n, t in weights.tensors.items() if t.symbol.look is None and len(owners) == size}
    layouts = {name: _layout(some, size) for name, some in holders.items()}
    boxes: dict[str, Box | None] = {
        name: next(box for box, ranks in some if rank in ranks)
        for name, some in holders.items()
        if layouts[name] or some == [(Box.whole(weights.tensors[name].shape), owners)]
    }

    def meta(name: str) -> Any:
        mesh: dict[str, Any] = {"owners": owners}
        if (layout := layouts.get(name)) is not None:
            axes = [base.Shard(layout[2]) if axis == layout[1] else base.Replicate() for axis in (0, 1)]
            mesh |= {"mesh_shape": layout[0], "placements": tuple(axes)}
        return base.ParamMeta(name, weights.tensors[name].dtype, weights.tensors[name].shape, **mesh)

    class LiveSource(base.WeightSource):  # type: ignore[misc]
        @cached_property
        def metadata(self) -> list[Any]:
            return [meta(name) for name in weights.tensors]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in weights.buckets(bucket_bytes, to=owners):
                yield from bucket.items()

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return pieces(weights, boxes, bucket_bytes) if len(owners) == size else self.iter_full()

    return LiveSource()


def _layout(holders: Holders, size: int) -> Layout | None:
    """How equal parts along one dimension lie over all ranks, and over replicas; None where they do not."""
    count, length = len(holders), holders[0][0].length
    dims = [d for d, start in enumerate(max(box.start for box, _ in holders)) if start]
    if len(dims) != 1 or size % count:
        return None
    starts = [tuple(i * n if d == dims[0] else 0 for d, n in enumerate(length)) for i in range(count)]
    found = {box: set(ranks) for box, ranks in holders}
    for axis, shape in ((1, (size // count, count)), (0, (count, size // count))):
        lines = torch.arange(size).reshape(shape).unbind(axis)
        pairs = zip(starts, lines, strict=True)
        if found == {Box(start=start, length=length): set(line.tolist()) for start, line in pairs}:
            return shape, axis, dims[0]
    return None


def sparse_patches(weights: LiveWeights, changes: Changes) -> list[Any]:
    """What has changed since the last pass, on rank 0 as vLLM's `SparseWeightPatch` objects; none elsewhere.

    `changes` is `weights.changes()`, made when vLLM had these weights. `indices` (int32) and `values`, 1-d, lie on the
    device of the mesh, and only they travel. vLLM takes floating-point tensors alone. Every rank must call.

    Raises:
        ConfigError: vLLM cannot be imported; a tensor has too many elements for int32; weights stay quantised.
    """
    weights.of_a_model("vLLM")
    rank, size = rank_and_size()
    with announced("gathering what has changed"):
        refuse_unpatchable(weights, "vLLM", "weight_source sends it whole.")
        with library_errors("vLLM's SparseWeightPatch cannot be imported", "Install vLLM 0.33."):
            from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch
        own = {each.name: (each.indices.to(torch.int32), each.values) for each in changes if len(each.indices)}
        every = [own] * size if rank == 0 else None
        if size > 1:
            dist.gather_object(own, every)
    patches = []
    for name in weights.tensors if every else ():
        if parts := [some[name] for some in every or () if name in some]:
            indices, values = (torch.cat(each).to(weights.device) for each in zip(*parts, strict=True))
            patches.append(SparseWeightPatch(name, indices, values, weights.tensors[name].shape))
    return patches


def refuse_unpatchable(weights: LiveWeights, consumer: str, cure: str) -> None:
    """Refuse weights whose elements a consumer cannot be told by int32 numbers."""
    for name, tensor in weights.tensors.items():
        if tensor.symbol.look is not None:
            raise ConfigError(f"{name!r} stays quantised, and {consumer} patches elements of floats alone: {cure}")
        if prod(tensor.shape) >= 2**31:
            raise ConfigError(f"{name!r} has {prod(tensor.shape)} elements, too many for {consumer}'s int32: {cure}")


def update_vllm(engine: Any, *payload: Any) -> None:
    """`engine.send_weights(*payload)` of one of vLLM's trainer engines; what fails on one rank stops all.

    Every rank must call. A sparse engine's payload is `sparse_patches(…)`; others have none.

    Raises:
        ConfigError: vLLM's engine failed on this rank.
        RanksError: it failed on another, which is named.
    """
    with announced("sending weights to vLLM"):
        try:
            engine.send_weights(*payload)
        except (FSDPToolsError, StoppedElsewhere):
            raise
        except Exception as error:
            raise ConfigError(
                f"vLLM has not taken the weights: {first_lines(error)}. Its server is to be there, with the same "
                "model, and to take updates: look at its log, and make the engine anew. Training can go on."
            ) from error
