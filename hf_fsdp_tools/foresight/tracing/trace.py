"""The result of a dry run of a model: the events of one micro-step, and the parameters that take part."""

from dataclasses import dataclass
from functools import cached_property

import torch

from hf_fsdp_tools.foresight.events import Event


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """How large a tensor is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @cached_property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Parameter(TensorSize):
    """One parameter of the model, whole, in the dtype in which it is gathered, or kept whole on every rank."""

    fqn: str
    """Its first name."""
    other_names: tuple[str, ...] = ()
    """Its other names, where it is tied."""
    requires_grad: bool
    """Whether it is trained."""
    is_whole: bool = False
    """Whether every rank holds it whole, because the plan replicates it or nothing is wrapped."""
    packed_values: int = 0
    """Of a 4-bit weight: how many values its elements hold."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One micro-step (forward, loss, backward) of a model without FSDP, with marks where FSDP acts."""

    events: tuple[Event, ...]
    """In the order of their issue. Memory of parameters and buffers is in none of them; whole gradients are taken and
    never freed."""
    parameters: tuple[Parameter, ...]
    """In the order of `named_parameters`."""
    buffer_bytes: int
    """Of all buffers; every rank holds them."""
    model_flops: float
    """Of forward and backward pass by the usual count (`Work.model_flops`)."""
    tokens: int
    """Tokens of the micro-step on one rank."""
    notes: tuple[str, ...] = ()
    """Remarks for a reader: what was assumed, what could not be followed."""
    repeated: int = 0
    """How many blocks have events that were repeated, and not recorded."""

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once, 4-bit ones as values."""
        return sum(each.packed_values or each.numel for each in self.parameters)


def modules_above(fqn: str) -> list[str]:
    """The modules that a parameter is in, the innermost first, the root last."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
