"""Choose the dimension along which a parameter is sharded: 0, unless it has too few indices for the ranks."""

import math
from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.planning.plan import WrapPlan

_MOST_PADDING = 1.25
"""Padded bytes over bytes up to which a parameter is split along dimension 0. Padding costs bandwidth between ranks;
another dimension costs FSDP2 one more copy of the gathered parameter and of its gradient, so memory bandwidth, of which
there is more. (assumed)"""

_MOST_PADDING_BYTES = 2**20
"""Bytes of padding up to which a parameter (a gate of one row, a small adapter) is split along dimension 0 whatever its
ratio. Sending them takes as long as starting a few kernels: 20 µs at 50 GB/s. (assumed)"""


def choose_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The placement of a parameter, for `fully_shard(shard_placement_fn=…)`; None leaves it to FSDP2.

    Only shapes and dtypes are read, so every rank gets the same. Parameters of tensor parallelism are left to FSDP2.

    Args:
        parameter: not sharded yet, on any device.
        ranks: number of shards; replicas do not count.
    """
    if isinstance(parameter, DTensor) or not parameter.dim():
        return None
    if not is_much_padding(parameter.nbytes, padded_ratio(parameter.shape[0], ranks)):
        return None
    dim = sharded_dim(parameter.shape, ranks)
    return Shard(dim) if dim else None


def is_much_padding(num_bytes: int, ratio: float) -> bool:
    """Whether padding costs more than it costs to avoid it."""
    return num_bytes * (ratio - 1) > _MOST_PADDING_BYTES


def sharded_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension to split: 0, or, where that pads more than a quarter, the first one that `ranks` divide.

    Fused experts have one index of dimension 0 per expert: 8 experts on 64 ranks would be whole on 8 ranks, and every
    all-gather and reduction would carry 8 times their bytes. FSDP2 splits dimensions other than 0 only evenly. Early
    dimensions load faster: of the last one, a rank's columns are so short in the file that it reads its neighbours'
    too.
    """
    if len(shape) < 2 or not math.prod(shape) or padded_ratio(shape[0], ranks) <= _MOST_PADDING:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def padded_ratio(size: int, ranks: int) -> float:
    """The number of indices that FSDP2 stores and sends for a dimension, over its `size`.

    FSDP2 pads every shard to the longest one (`padded_sharded_param_size` in torch's `_fsdp_param.py`).
    """
    return -(-size // ranks) * ranks / size if size else 1.0


def check_partial_resharding(model: nn.Module, plan: WrapPlan, ranks: int) -> None:
    """Refuse a unit that is to be resharded over fewer ranks with a parameter that is split along another dimension.

    FSDP2 reshards over fewer ranks along dimension 0 only: with a parameter that is split along another one, the
    backward pass fails (torch 2.13: an IndexError in `foreach_all_gather_copy_out` of its `_fsdp_collectives.py`).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {name for unit in plan.units for name in unit.modules}
    for unit in plan.units:
        if isinstance(unit.reshard_after_forward, bool) or unit.reshard_after_forward is None:
            continue
        for name in unit.modules:
            for fqn, parameter in _held(name, modules[name], units - {name}):
                placement = None if fqn in plan.replicated else choose_placement(parameter, ranks)
                if placement is not None:
                    raise ConfigError(
                        f"Unit {name or 'root'!r} has reshard_after_forward={unit.reshard_after_forward}, and {fqn!r} "
                        f"of shape {tuple(parameter.shape)} is split along dimension {placement.dim}, having too few "
                        f"rows for {ranks} ranks: FSDP2 reshards over fewer ranks along dimension 0 only. Use True or "
                        "False for this unit: HybridPolicy(reshard_after_forward={…: True})."
                    )


def _held(name: str, module: nn.Module, others: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters at and below a module, without those of other units."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{name}.{key}".lstrip("."), parameter
    for key, child in module.named_children():
        if (fqn := f"{name}.{key}".lstrip(".")) not in others:
            yield from _held(fqn, child, others)
