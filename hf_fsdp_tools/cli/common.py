"""What several commands share: names of classes and dtypes, quiet libraries, files that are written."""

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import ConfigError

__all__ = ["add_model", "add_model_class", "parse_dtype", "quiet", "write"]


_CLASSES = (
    "CausalLM, Seq2SeqLM, MaskedLM, SequenceClassification, TokenClassification, QuestionAnswering, ImageTextToText, "
    "ImageClassification, SpeechSeq2Seq"
)
"""What `AutoModelFor…` is often asked for, for the help text."""


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the model, its class, and whether its code may run."""
    about = "hub name, local folder, or path of a config.json"
    parser.add_argument("model", metavar="NAME", nargs="?" if optional else None, help=about)
    add_model_class(parser.add_argument)


def add_model_class(add: Callable[..., Any]) -> None:
    """Add the model's class, and whether its code may run.

    Args:
        add: adds an option (`add_argument` of a parser or a group).
    """
    about = (
        "transformers class to build (default: the one that the config names): AutoModelFor followed by "
        f"{_CLASSES}, …; AutoModel, without a head; or a model class, such as LlamaModel"
    )
    add("--auto-class", metavar="CLASS", help=about)
    add("--trust-remote-code", action="store_true", help="run model code that comes with the checkpoint")


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
