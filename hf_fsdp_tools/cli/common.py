"""What several commands share: names of classes and dtypes, quiet libraries, files that are written."""

import difflib
import logging
import textwrap
import warnings
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import ConfigError

__all__ = ["find_auto_class", "parse_dtype", "quiet", "within", "write"]


def find_auto_class(name: str) -> Any:
    """The auto class or model class of transformers of that name.

    Raises:
        ConfigError: there is none.
    """
    import transformers

    found = getattr(transformers, name, None)
    if isinstance(found, type) and (hasattr(found, "from_config") or hasattr(found, "_from_config")):
        return found
    near = difflib.get_close_matches(name, [entry for entry in dir(transformers) if entry[:1].isupper()])
    raise ConfigError(
        f"--auto-class {name} is no model class of transformers; "
        + (f"did you mean {' or '.join(near)}?" if near else "use AutoModel, AutoModelForCausalLM, …")
    )


def parse_dtype(name: str | None) -> Any:
    """The floating-point dtype of that name; None without a name.

    Raises:
        ConfigError: there is none.
    """
    import torch

    found = getattr(torch, name.removeprefix("torch."), None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f"--dtype {name} is no floating-point dtype of torch; use bfloat16, float16 or float32")
    return found


def quiet() -> None:
    """Silence progress bars, log messages and warnings of the libraries that build a model."""
    import huggingface_hub
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which PEFT imports
    warnings.simplefilter("ignore")


def within(text: object, width: int = 100) -> str:
    """A text with lines of at most `width` characters; what is left of a longer one follows on the next, indented."""
    wrapped = (textwrap.wrap(line, width, subsequent_indent="    ") or [""] for line in str(text).splitlines())
    return "\n".join(part for parts in wrapped for part in parts)


def write(path: Path, text: str) -> None:
    """Write a text file, in a new folder if need be.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --output") from None
