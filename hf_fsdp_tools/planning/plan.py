"""A wrap plan as data: the units in order, their sizes and their reasons."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.text import listed, merge_alike, merge_names, show_bytes, show_count, table

_RESHARD = {"True": "yes", "False": "no", "None": "auto"}
_FORMAT = 1
"""Version of the JSON; raised when a field changes its meaning, so that an old file is refused and not misread."""


@dataclass(frozen=True, kw_only=True)
class WrapUnit:
    """Modules whose parameters FSDP gathers in one collective and frees together."""

    modules: tuple[str, ...]
    """Fqns of the modules, in the order of first use; `("",)` is the root. More than one: `fully_shard([a, b])`."""
    reshard_after_forward: bool | int | None
    """As in `fully_shard`: True frees the unit after forward, False keeps it, an int reshards to a smaller world, and
    with None FSDP decides."""
    num_params: int
    """Number of parameters below its modules that are in no unit inside it; tied ones count once."""
    num_bytes: int
    """Bytes of the gathered unit, in the dtypes of the model that was planned."""
    reason: str
    """Why this is a unit, for a reader."""


@dataclass(frozen=True, kw_only=True)
class WrapPlan:
    """The units of one model; the same on every rank, comparable by `digest`.

    Example:
        >>> plan = make_wrap_plan(build_meta_model("checkpoint"))
        >>> plan.largest_unit.modules, WrapPlan.from_json(plan.to_json()) == plan
        (('model.layers.0',), True)
    """

    units: tuple[WrapUnit, ...]
    """Units, children before parents, the root last with `modules == ("",)`."""
    replicated: tuple[str, ...]
    """Names of parameters that FSDP ignores and every rank holds whole: 0-d ones, and those that the policy names. FSDP
    does not reduce their gradients; `shard_model` averages them."""
    model_class: str
    """Class of the model."""
    num_params: int
    """Number of parameters of the model, tied ones once, replicated ones included."""
    notes: tuple[str, ...] = ()
    """Remarks for a reader, such as that units are chosen by size."""
    blocks: tuple[str, ...] = ()
    """Names of the modules that the policy's `block_types` chose: blocks for FP8, Muon and all else that asks, too."""

    @property
    def largest_unit(self) -> WrapUnit:
        """The unit that gathers most; every rank holds it whole for a while, next to its shards."""
        return max(self.units, key=lambda unit: unit.num_params)

    @property
    def digest(self) -> str:
        """sha256 (hex) of the units as FSDP gets them. Ranks with different digests would wait for each other."""
        content = [self.model_class, self.num_params, self.replicated]
        content += [[unit.modules, unit.reshard_after_forward, unit.num_params] for unit in self.units]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """This plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "WrapPlan":
        """Read a plan that `to_json` wrote.

        Raises:
            WrapPlanError: the text is no JSON, has another format, or has missing or unknown fields.
        """
        cure = "Write the plan again with WrapPlan.to_json()."
        try:
            data: dict[str, Any] = json.loads(text)
            written = data.pop("format", None)
            if written != _FORMAT:
                raise WrapPlanError(f"Wrap plan of format {written!r}; this version reads {_FORMAT}. {cure}")
            units = tuple(WrapUnit(**{**unit, "modules": tuple(unit["modules"])}) for unit in data.pop("units"))
            data |= {name: tuple(data.get(name, ())) for name in ("replicated", "notes", "blocks")}
            return cls(units=units, **data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, WrapPlanError):
                raise
            raise WrapPlanError(f"Not a wrap plan: {error}. {cure}") from None

    @property
    def alike(self) -> list[list[WrapUnit]]:
        """Units that differ in the numbers of their names only, grouped, in the order of the first."""
        groups: dict[object, list[WrapUnit]] = {}
        for unit in self.units:
            shape = tuple(re.sub(r"\d+", "#", name) for name in unit.modules)
            key = (shape, unit.reshard_after_forward, unit.num_params, unit.num_bytes, unit.reason)
            groups.setdefault(key, []).append(unit)
        return list(groups.values())

    def table(self) -> list[tuple[str, ...]]:
        """The units as texts, those that are alike in one row, below a row of titles."""
        rows: list[tuple[str, ...]] = [("unit", "count", "parameters", "size", "reshard", "why")]
        for units in self.alike:
            one = units[0]
            rows.append(
                (
                    _modules(units),
                    f"{len(units)} ×",
                    show_count(one.num_params),
                    show_bytes(one.num_bytes),
                    _RESHARD.get(str(one.reshard_after_forward), str(one.reshard_after_forward)),
                    one.reason,
                )
            )
        return rows

    def __str__(self) -> str:
        total = sum(unit.num_bytes for unit in self.units)
        lines = [
            f"{self.model_class}: {show_count(self.num_params)} parameters in {len(self.units)} units",
            *table(self.table(), right={1, 2, 3}),
        ]
        largest = self.largest_unit
        name = listed([largest.modules[0] or "the root", *largest.modules[1:]], 1)
        lines.append(
            f"total {show_bytes(total)} before sharding; largest gathered unit {show_bytes(largest.num_bytes)} ({name})"
        )
        lines += [f"replicated on every rank: {names}" for names in merge_alike(self.replicated)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _modules(units: list[WrapUnit]) -> str:
    names = [merge_names(column) for column in zip(*(unit.modules for unit in units), strict=True)]
    return listed(names, 3, separator=" + ")
