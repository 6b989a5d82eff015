"""The tokenizer of a recipe's model, or its processor of images and text, with the chat template that is asked for."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import CheckpointError, ConfigError
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

    name = model_args.model_name_or_path
    hub = {
        "revision": model_args.model_revision,
        "trust_remote_code": getattr(training, "trust_remote_code", False),
    }
    with agreed("loading the tokenizer"):
        load_config(name, **hub)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{name} has a config and no tokenizer that can be loaded: {first_line(error)}. Copy the tokenizer's "
                "files of the base model into it."
            ) from error
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:  # T5's has one word of its own
            raise CheckpointError(
                f"{name} has no tokenizer files: its {type(tokenizer).__name__} knows special tokens alone. Copy the "
                "tokenizer's files of the base model into it."
            )
        if (path := getattr(training, "chat_template_path", None)) is not None:
            tokenizer.chat_template = _template(path, tokenizer)
            training.chat_template_path = None
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
    with agreed("loading the processor"):
        hub = {
            "revision": model_args.model_revision,
            "trust_remote_code": getattr(training, "trust_remote_code", False),
        }
        try:
            processor = AutoProcessor.from_pretrained(name, **hub)
        except ImportError as error:
            needed = re.search(r"(\w+) requires the (\w+) library", str(error))
            said = first_line(error)
            if needed:
                package = {"PIL": "pillow"}.get(needed[2], needed[2].lower())
                said = f"{needed[1]} requires {needed[2]}: pip install {package}"
            raise ConfigError(f"The processor of {name} needs a package that is absent. {said}.") from error
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
        if path is not None:
            processor.chat_template = _template(path, tokenizer)
    return processor


def _template(path: str, tokenizer: Any) -> str:
    from transformers import AutoTokenizer

    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    if Path(path).suffix in (".jinja", ".j2", ".txt"):
        raise ConfigError(f"--chat_template_path {path}: no such file.")
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"--chat_template_path {path}: no Jinja file and no tokenizer: {first_line(error)}."
        ) from error
    template = other.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"--chat_template_path {path}: this tokenizer has no chat template.")
    unknown = [token for token in _special_tokens(other) if token in template and token not in tokenizer.get_vocab()]
    if unknown:
        raise ConfigError(
            f"--chat_template_path {path}: its template uses {listed(unknown)}, which the tokenizer of the model does "
            "not have. Use a template made of the model's own tokens, or add the tokens to a copy of the model first."
        )
    return template


def _special_tokens(tokenizer: Any) -> Iterator[str]:
    for token in tokenizer.added_tokens_decoder.values():
        yield str(token)
