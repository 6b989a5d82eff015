"""Every error that a user of hf_fsdp_tools can cause, as one tree.

    FSDPToolsError             any error that this package raises on purpose
    ├── BlockDetectionError    the structure of a model could not be read
    ├── WrapPlanError          a plan or policy breaks a rule, or names something that is not there
    ├── MeshError              parallel degrees do not fit the processes at hand
    ├── CheckpointError        a checkpoint is absent, damaged, or does not fit the model
    ├── ConfigError            a setting is unknown or cannot be honoured
    └── RanksError             a rank is lost, does not come, or is in another call than the others

The last is a `RuntimeError` too, those before it are `ValueError`s. A message gives the fact, the offending value, the
allowed values and the cure, in this order. A mistake inside this package is an `AssertionError`, and none of these.

Messages quote names and values of files, which may be of any length. So each line of a message is cut to 2,000
characters, and a message to 100 lines: out of the middle, since the fact comes first and the cure last.
"""

from hf_fsdp_tools.text import cut

__all__ = [
    "BlockDetectionError",
    "CheckpointError",
    "ConfigError",
    "FSDPToolsError",
    "MeshError",
    "RanksError",
    "WrapPlanError",
]


_MOST_CHARACTERS = 2000
"""Of a line: two paths of a usual length, a quoted name and the words around them, several times over. (assumed)"""

_MOST_LINES = 100
"""Of a message: more than the ranks or tensors that one looks at. (assumed)"""


def _bounded(message: str) -> str:
    """The message with bounded lines and a bounded number of them."""
    lines = [cut(line, _MOST_CHARACTERS) for line in message.split("\n")]
    if len(lines) > _MOST_LINES:
        left_out = len(lines) - _MOST_LINES + 1
        lines[_MOST_LINES // 2 : _MOST_LINES // 2 + left_out] = [f"… {left_out:,} lines more …"]
    return "\n".join(lines)


class FSDPToolsError(Exception):
    """The base of every error that this package raises on purpose: catch this one to catch them all.

    Args:
        message: of any length; see the top of this module for what is cut.
    """

    def __init__(self, message: str = "", *rest: object) -> None:
        super().__init__(_bounded(str(message)), *rest)


class BlockDetectionError(FSDPToolsError, ValueError):
    """The structure of a model could not be read: no parameters, or nothing that can be sharded."""


class WrapPlanError(FSDPToolsError, ValueError):
    """A wrap plan or policy breaks a rule of a correct plan, or names a module or class that the model lacks."""


class MeshError(FSDPToolsError, ValueError):
    """The parallel degrees asked for do not fit the number of processes or devices at hand."""


class CheckpointError(FSDPToolsError, ValueError):
    """A checkpoint is absent, damaged, or does not fit the model; the message names file, key, expected and found."""


class ConfigError(FSDPToolsError, ValueError):
    """A setting is unknown, contradicts another, or cannot be honoured on this machine."""


class RanksError(FSDPToolsError, RuntimeError):
    """A rank is lost, does not come, makes no progress, or is in another call than the others; names the rank."""
