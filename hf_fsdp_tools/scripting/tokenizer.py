"""The tokenizer of a recipe's model, or its processor of images and text, with the chat template of the options."""

from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import listed


def load_tokenizer(model_args: Any, training: Any, *, images: bool = False) -> Any:
    """The model's tokenizer, with the chat template of `--chat_template_path` where that is given.

    The path is a Jinja file, or the folder or hub name of a tokenizer, whose template is taken if its tokens are in the
    vocabulary. `images=True` gives the processor of images and text, of which the tokenizer is a part. Every rank must
    call. The ranks exchange errors alone.

    Raises:
        CheckpointError: there is no such model, or it has no tokenizer, or no processor; on every rank alike.
        ConfigError: the template cannot be had.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> tokenizer = load_tokenizer(model_args, training)
        >>> len(tokenizer), tokenizer.eos_token
        (400, '<|eos|>')
    """
    from transformers import AutoProcessor, AutoTokenizer

    name, hub = model_args.model_name_or_path, hub_options(model_args, training)
    with agreed("loading the tokenizer"):
        load_config(name, **hub)
        cure = "Copy the tokenizer's files of the base model into it."
        with library_errors(f"{name} has a config and no tokenizer that can be loaded", cure):
            tokenizer = found = AutoTokenizer.from_pretrained(name, **hub)
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:  # T5's has one word of its own
            kind = type(tokenizer).__name__
            raise CheckpointError(f"{name} has no tokenizer files: its {kind} knows special tokens alone. {cure}")
        if images:
            cure = "Copy processor_config.json and preprocessor_config.json of the base model into it."
            with library_errors(f"{name} has a tokenizer and no processor of images that can be loaded", cure):
                found = AutoProcessor.from_pretrained(name, **hub)
            if getattr(found, "image_processor", None) is None:
                raise CheckpointError(
                    f"{name} has no processor of images. A model of text alone needs finetune. {cure}"
                )
        _set_template(found, tokenizer, training)
    return found


def hub_options(model_args: Any, training: Any) -> dict[str, Any]:
    """The revision of a model's files, and whether code among them may run."""
    remote = getattr(training, "trust_remote_code", False)
    return {"revision": model_args.model_revision, "trust_remote_code": remote}


def class_options(model_args: Any, auto_class: Any) -> dict[str, Any]:
    """The class of a model, and its attention, where they are chosen."""
    options = {"attn_implementation": model_args.attn_implementation, "auto_class": auto_class}
    return {name: value for name, value in options.items() if value}


def _set_template(target: Any, tokenizer: Any, training: Any) -> None:
    """Give the target the template of `--chat_template_path`, if any, which needs the tokenizer's own tokens."""
    from transformers import AutoTokenizer

    path = getattr(training, "chat_template_path", None)
    if path is None:
        return
    training.chat_template_path = None
    option = f"--chat_template_path {path}"
    if Path(path).is_file():
        target.chat_template = Path(path).read_text(encoding="utf-8")
        return
    if Path(path).suffix in (".jinja", ".j2", ".txt"):
        raise ConfigError(f"{option}: no such file.")
    with library_errors(f"{option}: no Jinja file and no tokenizer", "Give one of the two.", ConfigError):
        other = AutoTokenizer.from_pretrained(path)
    if not isinstance(other.chat_template, str):
        raise ConfigError(f"{option}: this tokenizer has no chat template.")
    used = [str(token) for token in other.added_tokens_decoder.values() if str(token) in other.chat_template]
    if unknown := [token for token in used if token not in tokenizer.get_vocab()]:
        raise ConfigError(
            f"{option}: its template uses {listed(unknown)}, which the tokenizer of the model does not have. Use a "
            "template of the model's own tokens, or add the tokens to a copied model first."
        )
    target.chat_template = other.chat_template
