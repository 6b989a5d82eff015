"""What is kept of a part of the run: values that go into a line of JSON and into the page."""

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Check", "Done", "Outcome", "Ratio", "Record"]

Record = dict[str, Any]
"""A line of the JSON file: either `{"run": …}`, where and when, or a part with its outcome."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Two figures of the same kind, and which of them should be larger."""

    what: str
    """What was measured, in words."""

    ours: float
    """This package's figure."""

    other: float
    """The figure beside it."""

    of: str
    """Whose that is."""

    unit: str
    """Of both."""

    more_is_better: bool = True
    """False for memory."""

    @property
    def value(self) -> float:
        """Ours over the other."""
        return self.ours / self.other if self.other else float("nan")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim that the figures bear out, or not."""

    claim: str
    """With its figures."""

    held: bool
    """Whether they do."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a part."""

    figures: dict[str, Any] = field(default_factory=dict)
    """By name, as they are shown."""

    ratios: list[Ratio] = field(default_factory=list)
    """Against something else that was measured in the same part."""

    checks: list[Check] = field(default_factory=list)
    """A part whose checks do not hold has failed."""

    text: str = ""
    """Output that is worth keeping whole."""

    skipped: str = ""
    """Why nothing was measured, in one line."""

    def as_record(self) -> Record:
        """As JSON takes it."""
        return asdict(self)


@dataclass(kw_only=True)
class Done:
    """A program that has ended."""

    code: int | None
    """Its exit code; None where its time was over."""

    output: str
    """What it printed, the end of it."""

    result: Any = None
    """The JSON that it left, if it did."""

    files: str = ""
    """The folder in which it could leave files."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or not at all."""
        return self.code != 0
