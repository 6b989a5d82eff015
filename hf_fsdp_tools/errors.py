"""Every error that a user of hf_fsdp_tools can cause, as one tree.

    FSDPToolsError                 anything this package raises on purpose
    ├── BlockDetectionError        the structure of a model could not be read (also ValueError)
    ├── WrapPlanError              a plan or policy breaks a rule, or names something that is not there (also
    ValueError) ├── MeshError                  parallel degrees do not fit the processes at hand (also ValueError) ├──
    CheckpointError            a checkpoint is absent, damaged, or does not fit the model (also ValueError) └──
    ConfigError                a setting is unknown or cannot be honoured (also ValueError)

A message reads in this order: the fact, the offending value, the allowed values, the cure. Mistakes inside this package
are `AssertionError`, never one of these.
"""

__all__ = [
    "BlockDetectionError",
    "CheckpointError",
    "ConfigError",
    "FSDPToolsError",
    "MeshError",
    "RanksError",
    "WrapPlanError",
]


class FSDPToolsError(Exception):
    """The base of every error that this package raises on purpose: catch this one to catch them all."""


class BlockDetectionError(FSDPToolsError, ValueError):
    """The structure of a model could not be read: no parameters, or nothing that can be sharded."""


class WrapPlanError(FSDPToolsError, ValueError):
    """A wrap plan or policy breaks a rule of a correct plan, or names a module or class that the model does not
    have."""


class MeshError(FSDPToolsError, ValueError):
    """The parallel degrees asked for do not fit the number of processes or devices at hand."""


class CheckpointError(FSDPToolsError, ValueError):
    """A checkpoint is absent, damaged, or does not fit the model; names the file, key, and what was expected and
    found."""


class ConfigError(FSDPToolsError, ValueError):
    """A setting is unknown, contradicts another, or cannot be honoured on this machine."""


class RanksError(FSDPToolsError, RuntimeError):
    """A rank is lost, does not come, makes no progress, or is in another call than the others; names the rank."""
