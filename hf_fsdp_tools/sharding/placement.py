"""Which dimension of a parameter is split among ranks: the first, unless it has too few indices for them."""

import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Shard

__all__ = ["choose_placement", "is_much_padding", "padded_ratio", "sharded_dim"]

_MOST_PADDING = 1.25
"""Padded bytes ÷ bytes up to which dimension 0 stays split. Splitting another costs FSDP2 one more copy of what it
gathers and of the gradients (memory bandwidth), padding costs bandwidth between ranks, of which there is less (assumed,
not measured)."""

_MOST_PADDING_BYTES = 2**20
"""Padding of one parameter up to which it stays so, whatever the ratio: a gate of one row, a small adapter. Sending
that much takes as long as starting a few more kernels (20 µs at 50 GB/s; assumed, not measured)."""


def choose_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """For `fully_shard(shard_placement_fn=…)`: how one parameter is split; None leaves it to FSDP2.

    Only shapes and dtypes are read, so every rank answers alike. Parameters of tensor parallelism are left to FSDP2.

    Args:
        parameter: not sharded yet, on any device.
        ranks: over how many it is split, replicas not counted.
    """
    if isinstance(parameter, DTensor) or not parameter.dim():
        return None
    if not is_much_padding(parameter.nbytes, padded_ratio(parameter.shape[0], ranks)):
        return None
    dim = sharded_dim(parameter.shape, ranks)
    return Shard(dim) if dim else None


def is_much_padding(num_bytes: int, ratio: float) -> bool:
    """Whether padding a parameter of so many bytes by a `padded_ratio` costs more than it is to avoid it."""
    return num_bytes * (ratio - 1) > _MOST_PADDING_BYTES


def sharded_dim(shape: Sequence[int], ranks: int) -> int:
    """0, or the first other dimension that `ranks` divide, where dimension 0 would be padded by more than a quarter.

    Fused experts have one index of dimension 0 per expert: 8 experts on 64 ranks would be whole on 8 ranks, and each
        gather
    and each reduction would carry 8 times their bytes. FSDP2 splits other dimensions than 0 evenly only. An early
    dimension is better to load: of the last, a rank's columns are so short in files that it reads its neighbours' with
    them.
    """
    if len(shape) < 2 or not math.prod(shape) or padded_ratio(shape[0], ranks) <= _MOST_PADDING:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def padded_ratio(size: int, ranks: int) -> float:
    """Indices of a dimension of `size` that FSDP2 stores and sends, over those that there are.

    Each rank's shard is as long as the longest (`padded_sharded_param_size` in torch's `_fsdp_param.py`).
    """
    return -(-size // ranks) * ranks / size if size else 1.0
