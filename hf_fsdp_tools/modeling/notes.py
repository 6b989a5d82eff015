"""Notes that this package keeps on modules of a user's model: each owner of a fact has a class of its own for them.

@dataclass(frozen=True)
class Chosen(Note):
    is_block: bool = False

Chosen.put(module, is_block=True)
Chosen.of(module).is_block
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

_NAME = "_hf_fsdp_notes"


class Note:
    """What one owner knows of one module: a frozen dataclass, each field of which has a default. A note is shared by
    copies of its module, and replaced where it changes."""

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """The note of this kind on a module, one of defaults where there is none."""
        note = module.__dict__.get(_NAME, {}).get(cls)
        return cls() if note is None else note

    @classmethod
    def put(cls, module: nn.Module, **values: Any) -> None:
        """Replace the note of this kind on a module by one with these values."""
        notes = module.__dict__.get(_NAME, {})
        module.__dict__[_NAME] = {**notes, cls: replace(cls.of(module), **values)}  # type: ignore[type-var]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Note":
        return self


@dataclass(frozen=True)
class Chosen(Note):
    """What a user chose for a module."""

    is_block: bool = False
    """Whether the user's policy says that this module is a block."""
    has_attention: bool = False
    """Whether the user named the attention function of a model."""
    features: frozenset[str] = frozenset()
    """What of `extensions/` the user asked for when the model was built."""


@dataclass(frozen=True)
class Divided(Note):
    """How ranks share the weights of a module, before it is sharded."""

    parallel: Mapping[str, Any] = field(default_factory=dict)
    """(mesh, placements) of each weight that is divided."""
    style: Any = None
    """What lets a module compute with its part of weights or heads."""
    is_dispatched: bool = False
    """Whether tokens travel to these experts, which are sharded over fewer ranks."""


def install_style(module: nn.Module) -> None:
    """Let a module compute with its part of its weights, as its note says; a copy of a module needs it again."""
    if (style := Divided.of(module).style) is not None:
        module.__dict__.pop("forward", None)
        style(module)
