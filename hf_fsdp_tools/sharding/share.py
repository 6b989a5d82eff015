"""What each rank keeps of a model: bytes, padding, and which parameters are split along which dimension."""

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.placement import choose_placement
from hf_fsdp_tools.text import listed, merge_alike, show_bytes

_TRAINED = 16
"""Bytes per parameter of mixed precision with AdamW: float32 weights (4), gradients (4) and two moments (8)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Parameters that are cut along the same dimension."""

    dim: int | None
    """The dimension; None for parameters that every rank holds whole."""
    parameters: tuple[str, ...]
    """Their names, in the order of the model; those that differ in numbers only are one."""
    num_bytes: int
    """Bytes of all of them, in the model's dtypes."""
    bytes_per_rank: int
    """Bytes of them that each rank keeps, padding included."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What each of some ranks keeps of a model between its uses, without activations and gathered units."""

    num_processes: int
    """Ranks over which the model is sharded."""
    total_bytes: int
    """Bytes of the model's parameters, in their dtypes."""
    bytes_per_rank: int
    """Bytes of parameters that each rank keeps: its shards, padding, and what is whole on every rank."""
    padding_bytes: int
    """Part of `bytes_per_rank` by which it exceeds an even share of what is sharded."""
    training_bytes_per_rank: int | None
    """Bytes with which each rank trains all of the model in mixed precision with AdamW: float32 weights, gradients and
    two moments; None for a model in 4 bits, whose base is frozen."""
    splits: tuple[Split, ...]
    """The parameters by the dimension along which they are split, that of most bytes first."""

    def __str__(self) -> str:
        ranks = f"each of {self.num_processes} ranks" if self.num_processes > 1 else "the one rank"
        lines = [f"{ranks} keeps {show_bytes(self.bytes_per_rank)} of {show_bytes(self.total_bytes)} of parameters"]
        if self.padding_bytes > 0.01 * self.bytes_per_rank:
            lines[0] += f", {show_bytes(self.padding_bytes)} of it padding"
        for split in self.splits:
            where = "whole on every rank" if split.dim is None else f"split along dimension {split.dim}"
            names = listed(split.parameters) if split.dim != 0 else "all" if len(self.splits) == 1 else "all others"
            lines.append(f"  {where}: {names} ({show_bytes(split.num_bytes)})")
        if self.training_bytes_per_rank is not None:
            lines.append(
                f"training all of it takes {show_bytes(self.training_bytes_per_rank)} per rank for float32 weights, "
                "gradients and AdamW's two moments; activations and gathered units come on top"
            )
        return "\n".join(lines)


def share_of(model: nn.Module, plan: WrapPlan, num_processes: int) -> RankShare:
    """What each of `num_processes` ranks keeps of a model, from its shapes alone.

    Any rank may call; nothing is communicated.
    """
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}; it must be 1 or more.")
    names: dict[int | None, list[str]] = defaultdict(list)
    sizes: dict[int | None, int] = defaultdict(int)
    kept: dict[int | None, int] = defaultdict(int)
    elements = 0
    for name, parameter in model.named_parameters():
        placement = choose_placement(parameter, num_processes)
        is_whole = name in plan.replicated or not parameter.numel() or not parameter.dim()
        dim = None if is_whole else placement.dim if placement else 0
        size = 1 if dim is None else parameter.shape[dim]
        own = parameter.numel() // size * -(-size // (1 if dim is None else num_processes))
        names[dim].append(name)
        sizes[dim] += parameter.nbytes
        kept[dim] += own * parameter.itemsize
        elements += own
    splits = [
        Split(dim=dim, parameters=tuple(merge_alike(found)), num_bytes=sizes[dim], bytes_per_rank=kept[dim])
        for dim, found in names.items()
    ]
    total, whole = sum(sizes.values()), sizes.get(None, 0)
    return RankShare(
        num_processes=num_processes,
        total_bytes=total,
        bytes_per_rank=sum(kept.values()),
        padding_bytes=sum(kept.values()) - whole - -(-(total - whole) // num_processes),
        training_bytes_per_rank=None if packed_linears(model) else _TRAINED * elements,
        splits=tuple(sorted(splits, key=lambda split: -split.num_bytes)),
    )
