"""The events of a training step on one rank, in the order in which the host issues them. A dry run of the model gives
those of a pass without FSDP, with a `Mark` wherever FSDP acts; `fsdp2` lays its schedule over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Literal

import torch

Stream = Literal[
    "compute", "copy_in", "all_gather", "reduce_scatter", "all_reduce", "offload", "exchange", "activations"
]
"""The streams of FSDP2 (`FSDPCommContext` in torch), CPU offload, what GPUs that have rows, layers or experts
exchange, for which their computation waits, and the copies of blocks' inputs to the host and back."""
Axis = Literal["shard", "expert_shard", "replicate", "all", "cp", "tp", "ep"]
"""Ranks over which FSDP shards a weight, or an expert; that hold the same shards; all; and of further axes."""
Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]
"""The part of a step. What activation checkpointing recomputes belongs to the backward pass."""
Kind = Literal[
    "parameters", "gradients", "optimizer", "gathered parameters", "gather buffers", "whole gradients",
    "reduce buffers", "activations", "logits and loss", "temporaries", "inputs",
]  # fmt: skip
"""What memory is for. Parameters, gradients and optimizer are this rank's shards; whole gradients are not yet reduced;
temporaries do not outlive the module that made them."""
Operation = Literal[
    "matmul", "attention", "memory", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "host_to_device",
    "device_to_host",
]  # fmt: skip
"""What bounds the duration: matrix units, attention kernels, the GPU's memory, links between GPUs or to the host."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
COPIES = ("host_to_device", "device_to_host")


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory that is taken."""

    block: int  # Number of the memory in this list of events; one that is never freed outlives it
    num_bytes: int  # As requested, before an allocator rounds it
    kind: Kind
    unit: str  # The plan's unit in which it is taken: fqn of the unit's first module, "" for the root
    stream: Stream = "compute"
    source: str = ""
    """What makes it: the module inside of its unit, with "*" for numbers, and the operator; "" for memory of FSDP."""


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that is given back."""

    block: int


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, a copy or a collective."""

    operation: Operation
    flops: float  # Floating-point operations; a multiplication and an addition count two. 0 for copies and collectives
    num_bytes: float
    """Bytes that it reads and writes; a collective counts the whole tensor, gathered or before it is reduced."""
    unit: str
    phase: Phase
    stream: Stream = "compute"
    dtype_bytes: int = 2  # Bytes of an element of its inputs: which rate of the matrix units counts
    again: bool = False  # Whether activation checkpointing computes it for the second time
    ranks: int = 1  # How many take part in a collective
    axis: Axis = "shard"  # Which ranks take part in a collective
    model_flops: float = 0.0
    """By the usual count of a model's operations (PaLM, appendix B): attention in full also where it is causal, its
    backward pass twice its forward pass, and nothing that is recomputed."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place where FSDP may act: a module's passes begin and end."""

    where: Literal["before_forward", "after_forward", "before_backward", "after_backward"]
    """The last two: the gradient of the output is there; those of the inputs are (never, where no input has one)."""
    module: str
    again: bool = False  # Whether this is a forward pass of activation checkpointing, inside the backward pass


@dataclass(frozen=True, slots=True)
class Gradient:
    """The whole gradient of a parameter is complete; the memory stays until FSDP has reduced it."""

    parameter: str  # Fqn of the parameter; of a tied one the first of its names
    block: int


Event = Alloc | Free | Work | Mark | Gradient


class EventWriter:
    """A list of events that grows."""

    def __init__(self, first_block: int = 0) -> None:
        self.events: list[Event] = []
        self.phase: Phase = "forward"  # The part of the step that new work belongs to
        self.unit = ""  # The unit that new memory and work belong to
        self.numbers = count(first_block + 1)  # Numbers of memory

    def alloc(self, num_bytes: int, kind: Kind, stream: Stream = "compute") -> Alloc:
        """Memory with a number of its own, which is not written."""
        return Alloc(next(self.numbers), num_bytes, kind, self.unit, stream)

    def take(self, num_bytes: int, kind: Kind, stream: Stream = "compute") -> int:
        self.events.append(taken := self.alloc(num_bytes, kind, stream))
        return taken.block

    def free(self, *blocks: int) -> None:
        self.events.extend(Free(block) for block in blocks)

    def work(self, operation: Operation, num_bytes: float, stream: Stream = "compute", **more: Any) -> None:
        """A copy or a collective."""
        self.events.append(Work(operation, 0.0, float(num_bytes), self.unit, self.phase, stream, **more))


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
    """One parameter of the model, whole, in the dtype in which it is gathered, or lies whole on every rank."""

    fqn: str  # Its first name
    other_names: tuple[str, ...] = ()  # Its other names, where it is tied
    requires_grad: bool  # Whether it is trained
    is_whole: bool = False  # Whether every rank holds it whole, because the plan replicates it or the model is plain
    matrices: tuple[int, int, int] | None = None  # (number, rows, columns) of the hidden matrices that it is made of
    num_floats: int | None = None  # How many floats it holds, where these are not its elements

    @property
    def parameter(self) -> "Parameter":
        """What a shard is part of, as `Shard.parameter`."""
        return self


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One micro-batch (forward, loss, backward) of a model without FSDP, with marks where FSDP acts."""

    events: tuple[Event, ...]  # Without memory of parameters and buffers; whole gradients are taken and never freed
    parameters: tuple[Parameter, ...]  # In the order of `named_parameters`
    buffer_bytes: int  # All buffers'; every rank holds them
    model_flops: float  # Forward and backward pass by the usual count (`Work.model_flops`)
    tokens: int  # Tokens of the micro-batch on one rank
    notes: tuple[str, ...] = ()  # Remarks for a reader: what was assumed, what could not be followed
    frozen_bytes: int = 0  # Of `TrainingSetup.frozen_models`, whole
    repeated: int = 0  # How many blocks have events that were repeated, and not recorded

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(".experts." in each.fqn for each in self.parameters)

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once, quantised ones as values."""
        return sum(each.numel if each.num_floats is None else each.num_floats for each in self.parameters)


def in_use(events: Sequence[Event], resident: Iterable[Alloc]) -> tuple[str, dict[int, Alloc]]:
    """The unit that computes at the end of some events, and the memory in use then, by its number."""
    unit, blocks = "", {alloc.block: alloc for alloc in resident}
    for event in events:
        if isinstance(event, Alloc):
            blocks[event.block] = event
        elif isinstance(event, Free):
            blocks.pop(event.block, None)
        elif isinstance(event, Work) and event.stream == "compute":
            unit = event.unit
    return unit, blocks
