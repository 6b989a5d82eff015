"""The note that this package keeps on a module of a user's model: one attribute for all that it must remember."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is known of one module. A note is shared by copies of its module, and replaced where it changes."""

    sharding: Any = None
    """The `Sharding` of a model that `shard_model` sharded."""
    hooks: tuple[Any, ...] = ()
    """What features have installed on such a model: hooks, and what they changed in addition to these."""
    casts: tuple[Any, ...] = ()
    """The `CastWeights` of a module of such a model, where no unit gathers its weights."""
    is_prepared: bool = False
    """Whether an Accelerator of FSDP2 has prepared the model."""
    cached: tuple[int, ...] = ()
    """Which configs of a model (its own, that of its text) had `use_cache` before it was turned off for training."""
    gathered: bool | None = None
    """Whether the units of such a model stay gathered while it generates; None where memory decides."""
    packed: Mapping[str, Any] = field(default_factory=dict)
    """The `PackedForm` of each weight of a module whose weights are quantised as stored."""
    packed_parts: Mapping[str, Any] = field(default_factory=dict)
    """The `PackedForm` of this rank's part of such a weight that ranks share."""
    compute_dtype: Any = None
    """The dtype in which such a module computes, if it is not that of the plain weights."""
    deltas: Mapping[str, Any] = field(default_factory=dict)
    """What adapters add to parameters of such a module in this pass (`packed.with_added`)."""
    float8: Any = None
    """torchao's config of a linear layer that computes in FP8."""
    reads: str = ""
    """How a module runs under context parallelism that was tried and does not run as it looks: with the "keys" of whole
    rows, or with whole "rows". A decoder has here what it does after its blocks."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """(mesh, placements) of each weight that is divided among ranks before it is sharded."""
    style: Any = None
    """What lets a module compute with its part of weights or heads."""
    is_block: bool = False
    """Whether the user's policy says that this module is a block."""
    is_dispatched: bool = False
    """Whether ranks share these experts: tokens travel to them, and they are sharded over fewer ranks."""
    stored_quantization: Mapping[str, Any] | None = None
    """How the checkpoint of a plain model is quantised, until it is loaded."""
    is_fused: bool = False
    """Whether a model computes by Liger's kernels."""
    attention_is_chosen: bool = False
    """Whether the user named the attention function of a model."""
    heads: Any = None
    """The `Heads` of a loaded model's checkpoint that it has no modules for; saves copy them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Note":
        # A copy of a sharded model has no hooks.
        return replace(self, hooks=(), casts=())


_EMPTY = Note()


def note_of(module: nn.Module) -> Note:
    """The note on a module, an empty one where there is none."""
    note = module.__dict__.get("_hf_fsdp_note", _EMPTY)
    assert isinstance(note, Note)
    return note


def add_to_note(module: nn.Module, **values: Any) -> None:
    """Replace the note on a module by one with these values."""
    module.__dict__["_hf_fsdp_note"] = replace(note_of(module), **values)


def install_style(module: nn.Module) -> None:
    """Let a module compute with its part of its weights, as its note says; a copy of a module needs it again."""
    if (style := note_of(module).style) is not None:
        module.__dict__.pop("forward", None)
        style(module)
