"""The events of a training step on one rank, in the order in which the host issues them.

Memory and time are two readings of one list: `Alloc` and `Free` are what a caching allocator sees, `Work`, `Record` and
`Wait` what the streams of a GPU see. A dry run of the model gives the events of a forward and a backward pass without
FSDP, with a `Mark` wherever FSDP acts (`trace`); the schedule of FSDP2 is laid over these (`step`).
"""

from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "copy_in", "all_gather", "reduce_scatter", "all_reduce", "offload"]
"""The streams of FSDP2 (`FSDPCommContext` in torch's `_fsdp_param_group.py`), and the copies of CPU offload."""

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]
"""The part of a step. What activation checkpointing computes again belongs to the backward pass."""

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "gather buffers",
    "whole gradients",
    "reduce buffers",
    "activations",
    "logits and loss",
    "temporaries",
    "inputs",
]
"""What memory is for. Parameters, gradients and optimizer are this rank's shards; whole gradients are those of a unit
before they are reduced; temporaries do not outlive the module that made them."""

Operation = Literal[
    "matmul", "attention", "memory", "all_gather", "reduce_scatter", "all_reduce", "host_to_device", "device_to_host"
]
"""What bounds the duration: the matrix units, the attention kernels, the GPU's memory, the links between GPUs, or the
link to the host."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
"""Operations between GPUs."""

COPIES = ("host_to_device", "device_to_host")
"""Operations between a GPU and its host."""


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory that is taken."""

    block: int
    """Number of the memory in this list of events; freed by the same number. One that is never freed outlives it."""
    num_bytes: int
    """As requested, before an allocator rounds it."""
    kind: Kind
    unit: str
    """The plan's unit in which it is taken: fqn of the unit's first module, "" for the root."""
    stream: Stream = "compute"
    """The stream that owns it: an allocator gives freed memory to the same stream only."""
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
    flops: float
    """Floating-point operations; a multiplication and an addition count two. 0 for copies and collectives."""
    num_bytes: float
    """Bytes that it reads and writes in the GPU's memory; of a collective: the bytes of the whole tensor, gathered or
    before it is reduced; of a copy to or from the host: the bytes that cross the link."""
    unit: str
    phase: Phase
    stream: Stream = "compute"
    dtype_bytes: int = 2
    """Bytes of an element of its inputs: which rate of the matrix units counts."""
    again: bool = False
    """Whether activation checkpointing computes it for the second time."""
    size: int = 0
    """Of a matmul: the smallest of its three dimensions, on which its efficiency depends."""
    ranks: int = 1
    """Of a collective: how many take part."""
    model_flops: float = 0.0
    """What it counts for in the usual count of a model's operations (PaLM, appendix B): attention in full also where it
    is causal, its backward pass twice its forward pass, and nothing that is computed again."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place where FSDP may act: a module's passes begin and end."""

    where: Literal["before_forward", "after_forward", "before_backward", "after_backward"]
    """`before_backward`: the gradient of the output is there; `after_backward`: those of the inputs are (never, where
    no input has one)."""
    module: str
    """Fqn, as in the plan."""
    again: bool = False
    """Whether this is a forward pass of activation checkpointing, inside the backward pass."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The whole gradient of a parameter is complete; the memory stays until FSDP has reduced it."""

    parameter: str
    """Fqn of the parameter; of a tied one the first of its names."""
    block: int


@dataclass(frozen=True, slots=True)
class Record:
    """A CUDA event is recorded on a stream."""

    event: int
    stream: Stream
    """The stream whose earlier work it stands for."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream, or the host, waits for a recorded event."""

    event: int
    stream: Stream | Literal["host"]


Event = Alloc | Free | Work | Mark | Gradient | Record | Wait
