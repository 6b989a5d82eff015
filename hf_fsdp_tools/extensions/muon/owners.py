"""Which rank orthogonalises which matrix, and what the ranks send each other for it, as data: no tensor is touched."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np
import torch
from torch import nn

from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.extensions.muon.matrices import newton_schulz_flops
from hf_fsdp_tools.loading.conversion import map_parts, persistent_tensors
from hf_fsdp_tools.loading.regions import Piece, View
from hf_fsdp_tools.modeling.tree_copy import is_wrapper
from hf_fsdp_tools.streaming.routes import Arrival, Holders, Spread
from hf_fsdp_tools.text import show_bytes

SENT_DTYPE = torch.bfloat16
"""In which matrices travel, both ways: the Newton-Schulz iteration of torch begins and ends in it."""


# ---- matrices ----


def matrices_in(model: nn.Module, names: Collection[str]) -> dict[str, tuple[Piece, ...]]:
    """The matrices that each of these parameters is made of, as pieces of it.

    A parameter that the checkpoint has in several tensors (fused query, key and value, gate and up, experts) is taken
    apart as they are; what is stacked beyond two dimensions, along the leading ones. All other parameters are one
    matrix. Any rank may call; nothing is communicated.
    """
    state = persistent_tensors(model)
    key_of = {id(tensor): key for key, tensor in reversed(state.items())}
    parts: dict[str, list[Piece]] = defaultdict(list)
    unclear: set[str] = set()
    if not any(is_wrapper(module) for module in model.modules()):  # of PEFT: names are no checkpoint's
        for name, symbol in map_parts(model).items():
            if symbol.pieces is None or len(symbol.pieces) != 1 or symbol.ndim < 2:
                unclear |= symbol.sources
            else:
                piece = symbol.pieces[0]
                parts[piece.source] += _stacked(replace(piece, source=name))
    found: dict[str, tuple[Piece, ...]] = {}
    for name in names:
        tensor = model.get_parameter(name)
        key = key_of.get(id(tensor), name)
        pieces = [] if key in unclear else parts.get(key, [])
        if sum(piece.box.numel for piece in pieces) != tensor.numel():
            pieces = list(_stacked(Piece.whole(name, tensor.shape)))
        found[name] = tuple(pieces)
    return found


def _stacked(piece: Piece) -> Iterator[Piece]:
    """The matrices of a piece that is a whole tensor, along its leading dimensions."""
    view = piece.view
    if len(view.length) == 2:
        yield piece
        return
    for i in range(view.length[0]):
        inner = View(offset=view.offset + i * view.strides[0], length=view.length[1:], strides=view.strides[1:])
        yield from _stacked(Piece(start=(0,) * len(inner.length), source=f"{piece.source}[{i}]", view=inner))


# ---- owners ----


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that one rank orthogonalises."""

    parameter: int
    """Number of the parameter that it is a part of."""
    piece: Piece
    """That part."""
    arrival: Arrival
    """How it comes to its owner."""

    @property
    def owner(self) -> int:
        """The rank that orthogonalises it."""
        return self.arrival.to

    @property
    def flops(self) -> int:
        """Operations of one iteration of Newton-Schulz."""
        return newton_schulz_flops(*self.arrival.box.length)

    @property
    def is_home(self) -> bool:
        """Whether its owner alone holds it, so that nothing is sent."""
        return self.arrival.spread.of_rank.keys() == {self.owner}

    def returns(self, rank: int) -> Iterator[Arrival]:
        """Yield how its update comes to all that hold parts of it, of which a rank gets or sends something."""
        gather = self.arrival
        whole = Spread([(gather.box, (gather.to,))])
        for i in range(len(gather.spread)) if rank == gather.to else gather.spread.of_rank.get(rank, ()):
            box, ranks = gather.spread[i]
            for to in ranks if rank == gather.to else (rank,):
                yield Arrival(to, f"{gather.key} {i}", gather.key, box, SENT_DTYPE, whole)


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The matrices of one step with their owners, the same on every rank."""

    matrices: tuple[Matrix, ...]
    num_ranks: int
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the matrices that travel together: no rank owns more than `bucket_bytes` of them, or one larger
        matrix. Each bucket has about as many operations for every owner, large matrices first."""
        begun = [0] * self.num_ranks
        begins: dict[int, int] = {}
        travelling = [i for i, each in enumerate(self.matrices) if not each.is_home]
        for i in sorted(travelling, key=lambda i: -self.matrices[i].flops):
            begins[i] = begun[self.matrices[i].owner]
            begun[self.matrices[i].owner] += self.matrices[i].flops
        buckets: list[list[int]] = []
        filled: dict[int, int] = {}
        for i in sorted(begins, key=lambda i: begins[i]):
            matrix = self.matrices[i]
            num_bytes = matrix.arrival.box.numel * SENT_DTYPE.itemsize
            if not buckets or 0 < filled.get(matrix.owner, 0) > self.bucket_bytes - num_bytes:
                buckets.append([])
                filled = {}
            buckets[-1].append(i)
            filled[matrix.owner] = filled.get(matrix.owner, 0) + num_bytes
        return tuple(map(tuple, buckets))

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """Operations of one iteration of Newton-Schulz over all matrices, by rank."""
        of_rank = Counter[int]()
        for matrix in self.matrices:
            of_rank[matrix.owner] += matrix.flops
        return tuple(of_rank[rank] for rank in range(self.num_ranks))

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends in a step: cells to owners, and updates to all that hold the cells."""
        sent = np.zeros(self.num_ranks, np.int64)
        for arrival in (matrix.arrival for matrix in self.matrices):
            sources, sizes, _ = arrival.sizes()
            np.add.at(sent, sources, sizes)
            sent[arrival.to] += arrival.spread.elements - arrival.box.numel + sizes.sum()
        return tuple(map(int, sent * SENT_DTYPE.itemsize))

    def __str__(self) -> str:
        home = sum(matrix.is_home for matrix in self.matrices)
        mean = sum(self.flops) / self.num_ranks
        return (
            f"{len(self.matrices)} matrices, {home} of them whole on their rank, in {len(self.buckets)} exchanges; "
            f"{show_bytes(max(self.sent_bytes, default=0))} sent by a rank at most, "
            f"{max(self.flops) / max(mean, 1):.2f} × the mean of the operations on the busiest rank"
        )


def assign_owners(
    pieces: Sequence[tuple[int, Piece]], holders: Sequence[Holders], num_ranks: int, bucket_bytes: int
) -> Ownership:
    """Give each matrix the rank that orthogonalises it, so that all ranks have about as many operations.

    A matrix that some ranks hold whole stays with one of them, unless these have their share already. The others go,
    the largest first, to the rank with the fewest operations so far.

    Args:
        pieces: (number of the parameter, its part that is a matrix).
        holders: which ranks hold which boxes of each parameter.
    """
    spreads = [holders[parameter].spread_of(piece) for parameter, piece in pieces]
    flops = [newton_schulz_flops(*piece.view.length) for _, piece in pieces]
    share = sum(flops) / num_ranks
    load = [0] * num_ranks
    owners: dict[int, int] = {}
    order = sorted(range(len(pieces)), key=lambda i: -flops[i])
    for i in order:
        owner = min(spreads[i].of_all, key=lambda rank: (load[rank], rank), default=None)
        if owner is not None and load[owner] + flops[i] <= max(share, flops[i]):
            owners[i] = owner
            load[owner] += flops[i]
    least = list(zip(load, range(num_ranks), strict=True))
    heapify(least)
    for i in order:
        if i not in owners:
            flops_before, owners[i] = least[0]
            heapreplace(least, (flops_before + flops[i], owners[i]))
    return Ownership(
        matrices=tuple(
            Matrix(
                parameter,
                piece,
                Arrival(owners[i], str(i), str(i), Box.whole(piece.view.length), SENT_DTYPE, spreads[i]),
            )
            for i, (parameter, piece) in enumerate(pieces)
        ),
        num_ranks=num_ranks,
        bucket_bytes=bucket_bytes,
    )
