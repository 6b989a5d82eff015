"""What several commands share: values and options, quiet libraries, files that are written."""

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import ConfigError


def count(text: str) -> int:
    """A whole number from 1, as a type for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def amount(text: str) -> float:
    """A number above 0, as a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the model, its class, whether its code may run, and `--json`."""
    about = "reads this model: a hub name, a local folder, or the path of a config.json"
    parser.add_argument("model", metavar="NAME", nargs="?" if optional else None, help=about)
    add_class_and_json(parser.add_argument)


def add_class_and_json(add: Callable[..., Any]) -> None:
    """Add the model's class, whether its code may run, and `--json`."""
    about = (
        "builds this class of transformers (default: the one that the config names): AutoModelFor followed by "
        "CausalLM, Seq2SeqLM, SequenceClassification, ImageTextToText, …; AutoModel; or a model class"
    )
    add("--auto-class", metavar="CLASS", help=about)
    add("--trust-remote-code", action="store_true", help="runs model code that comes with the checkpoint")
    add("--json", action="store_true", help="prints one JSON value instead of text")


def parse_dtype(name: str | None) -> Any:
    """The floating-point dtype of that name; None without a name."""
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None) if name else None
    if name and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"--dtype {name} is no floating-point dtype of torch; use bfloat16, float16 or float32")
    return dtype


def prepare_model(options: argparse.Namespace) -> dict[str, Any]:
    """Silence the libraries that build a model, say when the hub is asked, and return how the model is built."""
    import huggingface_hub
    import transformers

    from hf_fsdp_tools.hub import local_path

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which PEFT imports
    warnings.simplefilter("ignore")
    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    return {"trust_remote_code": options.trust_remote_code, "auto_class": options.auto_class}


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work of which it takes the result; None is no file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    above = next((each for each in path.absolute().parents if each.exists()), None)
    if above is not None and not above.is_dir():
        raise ConfigError(f"{path} cannot be written: {above} is a file, not a folder; name another file")


def write(path: Path, text: str) -> None:
    """Write a text file, in a new folder if need be."""
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from None
