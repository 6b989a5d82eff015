"""Rows under context parallelism: which part of them a rank has, and how parts and whole rows are exchanged."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from hf_fsdp_tools.sharding.replica_checks import require_same_batch

BOUNDARIES = "cu_seq_lens"
"""Begins the names of arguments that say where documents of a packed row begin and end."""


@dataclass(eq=False)
class Rows:
    """The rows that the ranks of a group share, and what is known of those in the forward pass under way."""

    group: dist.ProcessGroup | str | None
    """None where a model on meta is tried, and nothing is communicated; a name where a model is followed on tensors
    without data, and there is no such group."""
    rank: int
    size: int
    spread: int = 1
    """How many ranks share layers and hold their own tokens of a part between blocks (`sequence_parallel`)."""
    is_cut: bool = False
    """Whether the latest forward pass cut its rows; it did not if it had a cache (`generate`)."""
    entered_cut: bool = False
    """Whether it did so at the entry of the model, and not before its first block."""
    ids: torch.Tensor | None = None
    """Those of whole rows, where the latest pass entered cut."""
    in_pass: bool = False
    """Whether a pass of the whole model goes on."""
    is_alone: bool = False
    """Whether the base was called alone."""
    length: int = 0
    """Tokens of a whole row, without padding of its end to a multiple of the ranks."""
    has_mask: bool = False
    is_causal: bool = True
    """Whether no token attends to later ones, nor to the padding at the end."""
    labels: torch.Tensor | None = None
    """The labels of this rank's part, each of the token after it."""
    num_labels: Any = None
    """What the sum of this rank's losses is divided by."""
    loss_was_computed: bool = False
    former_loss: tuple[Any] | None = None
    """While a pass has labels: the loss function that a user, or a divided head, has set on the model, or None."""
    reached_blocks: bool = False
    """Whether the first block was run."""
    joins_outputs: bool = False
    """Whether outputs are those of whole rows next to a loss too."""
    kept: int | torch.Tensor = 0
    """Which tokens are to have logits: so many last ones, these, or all (0)."""
    angles_follow_length: bool = False
    """Whether rotary angles depend on the largest position of a row."""
    position_ids: torch.Tensor | None = None
    """Those of whole rows, by which masks and some attention functions tell packed documents apart."""
    were_compared: bool = False
    """Whether the ranks of the group were seen to have the same rows, which the first pass of a training shows."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """A copied model has its rows in the same group, which cannot be copied."""
        return copy(self)

    @property
    def part_length(self) -> int:
        """Tokens of this rank's part of each row."""
        return math.ceil(self.length / self.size)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor with whole rows."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length).contiguous()

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole rows of which each rank of the group has a part; every rank of it must call."""
        return self._from_all(part.expand(self.size, *part.shape), dim)

    def positions(self, own: torch.Tensor) -> torch.Tensor:
        """The positions of whole rows, given those of this rank's tokens."""
        if self.position_ids is None or self.position_ids.shape[:-1] != own.shape[:-1]:
            self.position_ids = self.whole(own, -1)
        return self.position_ids

    def places(self, mask: torch.Tensor) -> torch.Tensor:
        """Which number, among all tokens of the whole rows that a mask marks, those have that it marks in this part."""
        marked = self.whole(mask.to(torch.int64), 1)
        return self.part((marked.flatten().cumsum(0) - 1).view_as(marked), 1)[mask]

    def compare(self, tokens: torch.Tensor) -> None:
        """Refuse different rows on the ranks of the group, in the first pass alone."""
        if not self.were_compared and isinstance(self.group, dist.ProcessGroup):
            self.were_compared = True
            require_same_batch(tokens, self.group, "rows (cp_size)")

    def exchange(self, tensor: torch.Tensor, *, cut: int, join: int) -> torch.Tensor:
        """Cut one dimension into a part for each rank, and join the parts of all ranks along another one."""
        return self._from_all(torch.stack(tensor.chunk(self.size, cut)), join)

    def _from_all(self, to_ranks: torch.Tensor, dim: int) -> torch.Tensor:
        counts = [1] * self.size
        received = to_ranks = to_ranks.contiguous()
        if isinstance(self.group, dist.ProcessGroup):
            received = all_to_all_single_autograd(to_ranks, counts, counts, self.group)
        elif self.group is not None and to_ranks.is_floating_point():  # integers may have values there, and few bytes
            received = torch.ops._c10d_functional_autograd.all_to_all_single(to_ranks, counts, counts, self.group)
        return torch.cat(received.unbind(), dim)


@contextmanager
def called_instead(
    known: dict[str, Any], own: Mapping[str, Any], is_asked: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """A forward pass of a module whose code calls these functions by their names in its file."""
    former = {name: known[name] for name in own}
    known.update(own if is_asked() else {})
    try:
        yield
    finally:
        known.update(former)


def of_tokens(name: str, value: Any, length: int, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """An argument or a result of a module, changed along the dimension of its tokens, of which there are so many.

    What belongs to no tokens is given back as it is, and so are containers without a changed tensor: some models fill
    theirs while they run.
    """
    if isinstance(value, tuple | list):
        made = [of_tokens(name, each, length, change) for each in value]
        return value if all(new is old for new, old in zip(made, value, strict=True)) else type(value)(made)
    if isinstance(value, Mapping):
        changed = {key: of_tokens(name, each, length, change) for key, each in value.items()}
        return value if all(changed[key] is each for key, each in value.items()) else changed
    if not isinstance(value, torch.Tensor):
        return value
    if "mask" in name:  # of pairs of tokens, too
        for dim in range(1, value.dim()):
            value = change(value, dim) if value.shape[dim] == length else value
        return value
    dim = {"position_embeddings": -2, "position_ids": -1, "cache_position": 0}.get(name, 1)
    if name == "hidden_states" and value.dim() == 4 and value.shape[1] != length:  # several streams of them (Gemma 3n)
        dim = 2
    return change(value, dim) if -value.dim() <= dim < value.dim() and value.shape[dim] == length else value
