"""The ways in which ranks share more than FSDP's shards, a row each: meshes, loaders, settings and estimates read them.

size     `NAME_size` of ParallelDims, launch files, options and estimates, and `NAME` of a mesh's axis
does     a file of `extensions/`, imported where the size is above 1
costs    `foresight.timing.efficiency.group_of`
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One way."""

    name: str
    weights: Literal["copy", "shard", "divide"]
    """What the ranks of a group have: shards of a copy each, shards of one copy together, or parts of weights, which
    are sharded over other ranks then."""
    has_same_rows: bool
    """Whether they have the same rows: loaders deal them out, and tokens and steps are counted, once for all."""
    feature: str = ""
    """The file of `extensions/`; none where FSDP2 does it."""
    about: str
    """What `--help` says."""

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
    ),
    Axis(
        name="tp",
        weights="divide",
        has_same_rows=True,
        feature="tensor_parallel",
        about="tensor-parallel degree: N GPUs share each layer",
    ),
    Axis(
        name="ep",
        weights="divide",
        has_same_rows=False,
        feature="tensor_parallel",
        about="expert-parallel degree: N GPUs share the experts",
    ),
]
"""In the order of a mesh; `dp_shard` is between the first and the second, and `ep` is made of parts of the others."""


def size_names(*, of_rows: bool = False, of_copies: bool = True) -> list[str]:
    """What degrees are called: of all axes, of those whose ranks have the same rows, of those that share a copy."""
    return [axis.size for axis in AXES if (axis.has_same_rows or not of_rows) and (of_copies or axis.weights != "copy")]
