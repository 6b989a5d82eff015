"""What a dry run of a model found: the events of one micro-step, and the parameters that take part."""

import json
from dataclasses import asdict, dataclass

import torch

from hf_fsdp_tools.foresight.events import Event
from hf_fsdp_tools.text import dtype_name

__all__ = ["Parameter", "Trace"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the model, as it is gathered."""

    fqn: str
    """Its first name."""
    other_names: tuple[str, ...] = ()
    """Its other names, where it is tied."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: torch.dtype
    """In which it is gathered, or, where it is whole on every rank, kept."""
    requires_grad: bool
    """Whether it is trained."""
    module: str
    """Fqn of the module that holds it by its first name."""
    is_whole: bool = False
    """Whether every rank holds it whole, because the plan replicates it or nothing is wrapped."""
    packed_values: int = 0
    """Of a 4-bit weight: how many values its elements hold."""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter in `dtype`."""
        return self.numel * self.dtype.itemsize


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
    blocks: int = 0
    """How many blocks of the model stand for all of them; 0 where all were run."""
    repeated: int = 0
    """How many blocks have events that were repeated, and not recorded."""

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once, 4-bit ones as values."""
        return sum(each.packed_values or each.numel for each in self.parameters)

    def to_json(self) -> str:
        """This trace as JSON text."""
        content = asdict(self)
        content["events"] = [{"event": type(event).__name__, **asdict(event)} for event in self.events]
        content["parameters"] = [{**asdict(each), "dtype": dtype_name(each.dtype)} for each in self.parameters]
        return json.dumps(content)
