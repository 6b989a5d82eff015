"""The tokenizer of a recipe's model, or its processor of images and text, with the chat template of the options."""

import re
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import first_line, listed


def load_tokenizer(model_args: Any, training: Any) -> Any:
    """The model's tokenizer, with the chat template of `--chat_template_path` where that is given.

    The path is a Jinja file, or the folder or hub name of a tokenizer, whose template is taken. Tokens that the
    template needs must be in the vocabulary.

    Args:
        model_args: `ModelArguments`.
        training: the Trainer's arguments; its `chat_template_path` becomes None, for the template is set.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        CheckpointError: there is no such model, or it has no tokenizer; on every rank alike.
        ConfigError: the template cannot be had.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> tokenizer = load_tokenizer(model_args, training)
        >>> len(tokenizer), tokenizer.eos_token
        (400, '<|eos|>')
    """
    from transformers import AutoTokenizer

    name, hub = model_args.model_name_or_path, hub_options(model_args, training)
    with agreed("loading the tokenizer"):
        load_config(name, **hub)
        cure = "Copy the tokenizer's files of the base model into it."
        with library_errors(f"{name} has a config and no tokenizer that can be loaded", cure):
            tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:  # T5's has one word of its own
            raise CheckpointError(
                f"{name} has no tokenizer files: its {type(tokenizer).__name__} knows special tokens alone. {cure}"
            )
        _set_template(tokenizer, tokenizer, training)
    return tokenizer


def load_processor(model_args: Any, training: Any) -> Any:
    """A vision-language model's image processor and tokenizer, with the template of `--chat_template_path` if given.

    Args:
        model_args: `ModelArguments`.
        training: the Trainer's arguments; its `chat_template_path` becomes None, for the template is set.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        CheckpointError: there is no such model, or it has no processor of images; on every rank alike.
        ConfigError: the template cannot be had, or a package that the processor needs is absent.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path = "vision_checkpoint"
        >>> processor = load_processor(model_args, training)
        >>> processor.image_processor.size["shortest_edge"], processor.tokenizer.eos_token
        (32, '<|eos|>')
    """
    from transformers import AutoProcessor

    name, path = model_args.model_name_or_path, training.chat_template_path
    training.chat_template_path = None
    tokenizer = load_tokenizer(model_args, training)
    training.chat_template_path = path
    with agreed("loading the processor"):
        try:
            processor = AutoProcessor.from_pretrained(name, **hub_options(model_args, training))
        except ImportError as error:
            needed = re.search(r"requires the (\w+) library", f"{error}")
            cure = f"pip install {needed[1].lower()}" if needed else first_line(error)
            raise ConfigError(f"The processor of {name} needs a package: {cure}.") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{name} has a tokenizer and no processor of images that can be loaded: {first_line(error)}. Copy "
                "processor_config.json and preprocessor_config.json of the base model into it."
            ) from error
        if getattr(processor, "image_processor", None) is None:
            raise CheckpointError(
                f"{name} has no processor of images, so it is a model of text alone, or processor_config.json and "
                "preprocessor_config.json are missing. Give a vision-language model, or use finetune."
            )
        _set_template(processor, tokenizer, training)
    return processor


def hub_options(model_args: Any, training: Any) -> dict[str, Any]:
    """The revision of a model's files, and whether code among them may run."""
    remote = getattr(training, "trust_remote_code", False)
    return {"revision": model_args.model_revision, "trust_remote_code": remote}


def _set_template(target: Any, tokenizer: Any, training: Any) -> None:
    """Give the target the template of `--chat_template_path`, if any, which needs the tokenizer's own tokens."""
    from transformers import AutoTokenizer

    path = getattr(training, "chat_template_path", None)
    if path is None:
        return
    training.chat_template_path = None
    if Path(path).is_file():
        target.chat_template = Path(path).read_text(encoding="utf-8")
        return
    if Path(path).suffix in (".jinja", ".j2", ".txt"):
        raise ConfigError(f"--chat_template_path {path}: no such file.")
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"--chat_template_path {path}: no Jinja file and no tokenizer: {first_line(error)}."
        ) from error
    if not isinstance(other.chat_template, str):
        raise ConfigError(f"--chat_template_path {path}: this tokenizer has no chat template.")
    used = [str(token) for token in other.added_tokens_decoder.values() if str(token) in other.chat_template]
    if unknown := [token for token in used if token not in tokenizer.get_vocab()]:
        raise ConfigError(
            f"--chat_template_path {path}: its template uses {listed(unknown)}, which the tokenizer of the model does "
            "not have. Use a template made of the model's own tokens, or add the tokens to a copy of the model first."
        )
    target.chat_template = other.chat_template
