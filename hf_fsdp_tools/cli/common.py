"""What several commands share: names of classes and dtypes, quiet libraries, files that are written."""

import argparse
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import ConfigError

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
    """Add the model's class, and whether its code may run."""
    about = (
        "transformers class to build (default: the one that the config names): AutoModelFor followed by "
        f"{_CLASSES}, …; AutoModel, without a head; or a model class, such as LlamaModel"
    )
    add("--auto-class", metavar="CLASS", help=about)
    add("--trust-remote-code", action="store_true", help="run model code that comes with the checkpoint")


def parse_dtype(name: str | None) -> Any:
    """The floating-point dtype of that name; None without a name."""
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


def in_options(message: str, command: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """A message about fields and arguments in the words of the command line: `--seq-len` for `seq_len`.

    A field is named by the option that was typed, such as `--gpus` for `num_processes`. Where a file was named, fields
    of other options stay as they are: they may be keys of the file.
    """
    typed = {word.partition("=")[0] for word in words}
    fields: dict[str, str] = command.get_default("fields") or {}
    may_be_keys = not typed.isdisjoint({"--from", "--config_file", "--config-file"})
    options: dict[str, str] = {}
    for action in command._actions:  # which argparse gives in no other way
        given = [option for option in action.option_strings if option in typed]
        name = fields.get(action.dest, action.dest)
        if given:
            options[name] = given[0]
        elif action.option_strings and not may_be_keys and options.get(name) not in typed:
            options[name] = action.option_strings[0]
    # A name without "_" may be a plain word, unless its value follows.
    names = "|".join(rf"{name}" if "_" in name else rf"{name}(?= is | \d)" for name in options)
    return re.sub(
        rf"(?<![\w./`'\"-])(?P<name>{names})(?:=True\b|\b(?![\w=./-]))", lambda found: options[found["name"]], message
    )


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
