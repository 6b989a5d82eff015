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
"""

import contextlib
import errno
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from hf_fsdp_tools.text import cut, first_lines, printable, space_at


class FSDPToolsError(Exception):
    """The base of every error that this package raises on purpose: catch this one to catch them all.

    Example:
        >>> try:
        ...     from_pretrained("checkpoint", auto_class="AutoModelForCausalML")
        ... except FSDPToolsError as error:
        ...     print(f"{type(error).__name__}: {error}")
        ConfigError: auto_class 'AutoModelForCausalML' is no model class of transformers: did you mean...
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(cut(printable(message), 10_000))  # lists are cut to ten where they arise


class BlockDetectionError(FSDPToolsError, ValueError):
    """The structure of a model could not be read: no parameters, or nothing that can be sharded.

    Example:
        >>> try:
        ...     detect_blocks(torch.nn.Identity())
        ... except BlockDetectionError as error:
        ...     print(error)
        Identity has no parameters...
    """


class WrapPlanError(FSDPToolsError, ValueError):
    """A wrap plan or policy breaks a rule of a correct plan, or names a module or class that the model lacks.

    Example:
        >>> try:
        ...     make_wrap_plan(build_meta_model("checkpoint"), policy=WrapPolicy(block_types=("LlamaDecoderLyer",)))
        ... except WrapPlanError as error:
        ...     print(error)
        The policy does not fit the model:
          - 'LlamaDecoderLyer' matches no module: did you mean LlamaDecoderLayer?...
    """


class MeshError(FSDPToolsError, ValueError):
    """The parallel degrees asked for do not fit the number of processes or devices at hand.

    Example:
        >>> try:
        ...     ParallelDims(dp_replicate_size=2).resolve(world_size=3)
        ... except MeshError as error:
        ...     print(error)
        dp_replicate_size...
    """


class CheckpointError(FSDPToolsError, ValueError):
    """A checkpoint is absent, damaged, or does not fit the model; the message names file, key, expected and found.

    Example:
        >>> try:
        ...     open_checkpoint("./nowhere")
        ... except CheckpointError as error:
        ...     print(error)
        No such folder: 'nowhere'...
    """


class ConfigError(FSDPToolsError, ValueError):
    """A setting is unknown, contradicts another, or cannot be honoured on this machine.

    Example:
        >>> try:
        ...     LaunchConfig(num_processes=8, dp_replicate_size=3)
        ... except ConfigError as error:
        ...     print(error)
        the configuration cannot be used: dp_replicate_size 3 does not divide num_processes 8...
    """


class RanksError(FSDPToolsError, RuntimeError):
    """A rank is lost, does not come, makes no progress, or is in another call than the others; names the rank.

    Example:
        >>> try:
        ...     model = from_pretrained("checkpoint")
        ... except RanksError as error:  # another rank is lost, or has called something else
        ...     raise SystemExit(str(error))
    """


@contextlib.contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError`, and torch's word for one, into a `CheckpointError` that names the file or folder."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("inline_container|iostream error", str(error)):
            raise
        space = space_at(path) if getattr(error, "errno", errno.ENOSPC) == errno.ENOSPC else ""
        raise CheckpointError(
            f"Cannot {doing} {str(path)!r}{space}: {error}. Check path, permissions and space, then try again."
        ) from None


@contextlib.contextmanager
def library_errors(fact: str, cure: str, kind: type[FSDPToolsError] = CheckpointError) -> Iterator[None]:
    """Turn any error of a library over the content of a file, or over a full disk, into one error of this package.

    Libraries fail with any error where a file is wrong. So a block holds calls of libraries alone, and no code of this
    package, whose mistakes must show. Exhausted memory, and errors of this package, pass unchanged.
    """
    try:
        yield
    except (FSDPToolsError, MemoryError):
        raise
    except ImportError as error:
        raise ConfigError(f"{fact}: {first_lines(error)}. Install what is missing.") from None
    except Exception as error:
        raise kind(f"{fact}: {type(error).__name__}: {first_lines(error)}. {cure}") from error


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line outside of this package that called it."""
    own = (str(Path(__file__).parent), contextlib.__file__)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())]
    level = next((level for level, file in enumerate(files, 1) if not file.startswith(own)), 2)
    warnings.warn(text, category, stacklevel=level)
