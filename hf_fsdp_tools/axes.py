"""The ways in which ranks share more than FSDP's shards, a row each: meshes, loaders, settings and estimates read them.

size     `NAME_size` of ParallelDims, LaunchConfig, TrainingSetup and options, and `NAME` of a mesh's axis
does     a file of `extensions/`, imported where the size is above 1
costs    `foresight.timing.efficiency.group_of`
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache, partial
from typing import Any, Literal, Self, TypeAlias, TypeVar

T = TypeVar("T", bound="OfAxes")
Weights: TypeAlias = Literal["copy", "shard", "divide"]
Tried: TypeAlias = Literal["GPUs wait", "rows are long", "nothing else fits"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One way."""

    name: str
    weights: Weights
    """What the ranks of a group have: shards of a copy each, shards of one copy together, or parts of weights, which
    are sharded over other ranks then."""
    has_same_rows: bool
    """Whether they have the same rows: loaders deal them out, and tokens and steps are counted, once for all."""
    feature: str = ""
    """The file of `extensions/`; none where FSDP2 does it."""
    about: str
    """What `--help` says."""
    tried: Tried | None = None
    """Where a search tries sizes above 1, unless its user asks for one; None: nowhere."""

    @property
    def size(self) -> str:
        """What its degree is called."""
        return f"{self.name}_size"


AXES = [
    Axis(
        name="dp_replicate",
        weights="copy",
        has_same_rows=False,
        about="replicas of the model, each of them sharded (HSDP)",
    ),
    Axis(
        name="cp",
        weights="shard",
        has_same_rows=True,
        feature="context_parallel",
        about="context-parallel degree: N GPUs share each sequence",
        tried="rows are long",
    ),
    Axis(
        name="tp",
        weights="divide",
        has_same_rows=True,
        feature="tensor_parallel",
        about="tensor-parallel degree: N GPUs share each layer",
        tried="nothing else fits",
    ),
    Axis(
        name="ep",
        weights="divide",
        has_same_rows=False,
        feature="tensor_parallel",
        about="expert-parallel degree: N GPUs share the experts",
        tried="GPUs wait",
    ),
]
"""In the order of a mesh: copies first, `dp_shard`, the others; `ep` is made of parts of those."""


SHARING: tuple[Weights, ...] = ("shard", "divide")
"""The axes whose ranks share a copy."""


def size_names(*weights: Weights, of_rows: bool = False) -> list[str]:
    """What degrees are called: of all axes, of those that do such a thing with weights, or have the same rows."""
    return [
        axis.size for axis in AXES if (not weights or axis.weights in weights) and (axis.has_same_rows or not of_rows)
    ]


def shared_rows(word: str = " or ") -> str:
    """What degrees of ranks with the same rows are called, in a sentence."""
    return word.join(size_names(of_rows=True))


def product(degrees: object, names: Iterable[str]) -> int:
    """The product of these degrees, which are attributes."""
    return math.prod(getattr(degrees, name) for name in names)


def spread_problem(degrees: Any) -> str:
    """Why ranks with these degrees cannot hold own tokens between shared layers; "" where they can."""
    fact = f"sequence_parallel divides tokens among ranks that share layers, and has tp_size {degrees.tp_size}"
    return "" if degrees.tp_size > 1 else f"{fact}; give tp_size above 1, or leave it out"


class OfAxes:
    """A dataclass that has a field for the degree of each axis: its own, and for further rows of `AXES` such as it
    finds there when it is made."""

    def __new__(cls, **_: Any) -> Self:
        return super().__new__(with_degrees(cls))

    @property
    def num_copies(self) -> int:
        """How many ranks have the same shard."""
        return product(self, size_names("copy"))

    @property
    def ranks_per_row(self) -> int:
        """How many neighbouring processes have the same rows."""
        return product(self, size_names(of_rows=True))


def with_degrees(kind: type[T]) -> type[T]:
    """A dataclass with a field for the degree of each row of `AXES`."""
    return _with_fields(kind, tuple(size_names()))  # type: ignore[arg-type]  # classes can be hashed


@cache
def _with_fields(kind: type[T], names: Iterable[str]) -> type[T]:
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # it is a dataclass
    further = [(name, int, field(default=1)) for name in names if name not in known]
    own = {"__module__": kind.__module__, "__reduce__": lambda self: (partial(kind, **vars(self)), ())}
    how: dict[str, Any] = {"bases": (kind,), "namespace": own, "frozen": True, "kw_only": True}
    return make_dataclass(kind.__name__, further, **how) if further else kind
