"""Choose the dimension along which a parameter is sharded: 0, unless it has too few indices for the ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.notes import Divided
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.rules import units_by_node
from hf_fsdp_tools.planning.steps import SHARED_EXPERTS
from hf_fsdp_tools.text import show_bytes

_MOST_PADDING = 1.25
"""Padded bytes over bytes up to which a parameter is split along dimension 0. Padding costs bandwidth between ranks;
another dimension costs FSDP2 one more copy of the gathered parameter and of its gradient, so memory bandwidth, of which
there is more. (assumed)"""

_MOST_PADDING_BYTES = 2**20
"""Bytes of padding up to which a parameter (a gate of one row, a small adapter) is split along dimension 0 whatever its
ratio. Sending them takes as long as starting a few kernels: 20 µs at 50 GB/s. (assumed)"""

_LEAST_RUN, _FEW_RUNS = 4096, 8
"""Bytes that stand together in a file, in a shard along another dimension, of more than so many such runs. Shorter ones
mean reads of a few bytes: 503 times the share of DeepSeek-V3's down projections on 2,048 ranks, or 394,503 requests for
1.8 MB. (a page; what is above is a few disk requests or one of a store for each expert)"""


_MOST_HELD, _MOST_HELD_BYTES = 1.5, 2**30  # Times the share of a rank, and bytes above it, from which it is said


def choose_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The placement of a parameter, for `fully_shard(shard_placement_fn=…)`; None leaves it to FSDP2."""
    is_parallel = isinstance(parameter, DTensor)
    dim = 0 if is_parallel else split_dim(parameter.shape, parameter.nbytes, ranks)
    return Shard(dim) if dim else None


def split_dim(shape: Sequence[int], num_bytes: int, ranks: int) -> int:
    """The dimension to split: 0, or, where that pads much, the first one that `ranks` divide; the same on every rank.

    Fused experts have one index of dimension 0 per expert: 8 experts on 64 ranks would be whole on 8 ranks, and every
    all-gather would carry 8 times their bytes. FSDP2 splits other dimensions only evenly. Early ones load faster, in
    longer runs of the file; where runs would be too short, shards are padded after all.
    """
    if len(shape) < 2 or not num_bytes:
        return 0
    ratio = padded_ratio(shape[0], ranks)
    if ratio <= _MOST_PADDING or not is_much_padding(num_bytes, ratio):
        return 0
    for dim in range(1, len(shape)):
        runs = math.prod(shape[:dim])
        if shape[dim] % ranks == 0 and (runs <= _FEW_RUNS or num_bytes // runs // ranks >= _LEAST_RUN):
            return dim
    return 0


def is_much_padding(num_bytes: int, ratio: float) -> bool:
    """Whether padding costs more than it costs to avoid it."""
    return num_bytes * (ratio - 1) > _MOST_PADDING_BYTES


def padded_ratio(size: int, ranks: int) -> float:
    """The number of indices that FSDP2, which pads every shard to the longest, stores for a dimension over its size."""
    return -(-size // ranks) * ranks / size if size else 1.0


def warn_of_padding(tree: ModuleTree, plan: WrapPlan, ranks: int, ranks_of_experts: int) -> None:
    """Say where padding makes the first rank hold much more than its share of the model."""
    unit_of, share, held = units_by_node(tree, plan), 0.0, 0.0
    for weight in tree.weights:
        is_dispatched = plan.units[unit_of[weight.owners[0]]].reason == SHARED_EXPERTS
        over = ranks_of_experts if is_dispatched else ranks
        is_even = not weight.shape or split_dim(weight.shape, weight.nbytes, over)
        share += weight.nbytes / over
        held += weight.nbytes / over * (1.0 if is_even else padded_ratio(weight.shape[0], over))
    if held > _MOST_HELD * share and held - share > _MOST_HELD_BYTES:
        warn(
            f"The first of {ranks} ranks holds {show_bytes(round(held))} of weights, where its share is "
            f"{show_bytes(round(share))}: some weights have too few rows for so many ranks, and FSDP2 pads all "
            "shards to the longest. Shard over fewer ranks (dp_replicate_size), or divide experts first (ep_size)."
        )


def check_partial_resharding(tree: ModuleTree, plan: WrapPlan, ranks: int) -> None:
    """Refuse a unit that is to be resharded over fewer ranks with a parameter that is split along another dimension.

    FSDP2's backward pass would fail (torch 2.13: an IndexError in `foreach_all_gather_copy_out`).
    """
    unit_of = units_by_node(tree, plan)
    replicated = {tree.weight(name) for name in plan.replicated}
    for weight in tree.weights:
        unit = plan.units[unit_of[weight.owners[0]]]
        is_partial = not isinstance(unit.reshard_after_forward, bool | None)
        if weight not in replicated and is_partial and (dim := split_dim(weight.shape, weight.nbytes, ranks)):
            raise ConfigError(
                f"Unit {unit.modules[0] or 'root'!r} has reshard_after_forward={unit.reshard_after_forward}, and "
                f"{weight.names[0]!r} of shape {weight.shape} is split along dimension {dim}, having too few rows for "
                f"{ranks} ranks: FSDP2 reshards over fewer ranks along dimension 0 only. Use True or False for this "
                "unit: WrapPolicy(reshard_after_forward={…: True})."
            )


# ---- what was divided before it was sharded ----


def parallel_parameters(model: nn.Module) -> dict[nn.Parameter, tuple[DeviceMesh, Any]]:
    """(mesh, placements) of each parameter that was divided before it was sharded."""
    return {
        parameter: way
        for module in model.modules()
        for name, way in Divided.of(module).parallel.items()
        if (parameter := module._parameters.get(name)) is not None
    }


def placeholder(parameter: torch.Tensor, parallel: tuple[DeviceMesh, Any] | None) -> torch.Tensor:
    """A tensor on meta, divided as `parallelize_model` divided the parameter in whose place it stands."""
    return parameter if parallel is None else distribute_tensor(parameter, *parallel, src_data_rank=None)
