"""The tokenizer of a recipe's model, or its processor of images and text, and what its chat template makes of rows."""

import json
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors
from hf_fsdp_tools.modeling.configs import file_at_hand
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.scripting.formats import chats_of
from hf_fsdp_tools.text import first_line, listed, quoted


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
        if Path(name).is_file():
            raise ConfigError(f"{name} is a file: give its folder, which has the weights and the tokenizer too.")
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
        _say_other_pieces(tokenizer, name, model_args.model_revision)
    return found


_PIECES = "It's 3,141.5 m\n\n  of naïve 東京 text; don't __split__ CamelCase\t\tor 12345678!?"
"""A text of what pre-tokenizers split in different ways."""


def _say_other_pieces(tokenizer: Any, name: str, revision: str | None) -> None:
    """Say it where the class of a tokenizer splits texts otherwise than its tokenizer.json, which it replaces."""
    if rank_and_size()[0] > 0 or getattr(tokenizer, "backend_tokenizer", None) is None:
        return
    if (path := file_at_hand(name, "tokenizer.json", revision=revision)) is None:
        return
    pair = tokenizer.backend_tokenizer, Tokenizer.from_file(str(path))
    pair[1].no_truncation()
    pieces = [one.pre_tokenizer and one.pre_tokenizer.pre_tokenize_str(_PIECES) for one in pair]
    own, file = (one.encode(_PIECES, add_special_tokens=False).tokens for one in pair)
    if own != file or (all(pieces) and pieces[0] != pieces[1]):
        print(
            f"{name}: {type(tokenizer).__name__} has another pre-tokenizer than tokenizer.json, and the run saves its "
            'own. If the model was trained with that of the file, set "tokenizer_class": "PreTrainedTokenizerFast" in '
            "tokenizer_config.json"
        )


def hub_options(model_args: Any, training: Any) -> dict[str, Any]:
    """The revision of a model's files, and whether code among them may run."""
    remote = getattr(training, "trust_remote_code", False)
    return {"revision": model_args.model_revision, "trust_remote_code": remote}


def class_options(model_args: Any, auto_class: Any) -> dict[str, Any]:
    """The class of a model, and its attention, where they are chosen."""
    options = {"attn_implementation": model_args.attn_implementation, "auto_class": auto_class}
    return {name: value for name, value in options.items() if value}


# ---- conversations ----


class Chats:
    """What the chat template of a tokenizer makes of conversations, and which of their turns are trained on.

    Conversations of the same roles and keys are shown alike, so one of each kind is looked at.
    """

    def __init__(self, tokenizer: Any, training: Any, *, is_stream: bool) -> None:
        self.tokenizer, self.is_of_assistant = tokenizer, bool(getattr(training, "assistant_only_loss", False))
        self.can_mask = self.is_of_assistant and tokenizer is not None and not is_stream
        self.seen: set[Any] = set()
        self.has_marks = False
        self.unanswered: dict[str, None] = {}  # roles, where the assistant says nothing in a row to train on

    def __reduce__(self) -> Any:
        """As one that looks at nothing but marks: datasets hashes whatever a filter refers to, and this changes no row;
        a worker process that is not forked has that one."""
        return partial(Chats, is_stream=True), (None, None)

    def check(self, row: Mapping[str, Any], *, has_images: bool) -> None:
        """Render the conversations of a row as TRL will; ValueError: what a row must hold, and this one does not."""
        tools, kwargs = _tools_of(row), row.get("chat_template_kwargs") or {}
        trained = next((row[name] for name in ("messages", "conversations", "completion") if row.get(name)), ())
        if any("train" in turn for turn in trained if isinstance(turn, dict)):
            if has_images or "completion" in row or not self.can_mask:
                raise ValueError(
                    "no turn that is marked as not to be trained on (`weight`, `train`, `loss`): such are masked in "
                    "`messages` of finetune with --assistant_only_loss true and no --dataset_streaming"
                )
            self.has_marks = True
        for turns in chats_of(row) if not has_images else ():  # rows with images go through the processor
            answers = [turn for turn in turns if turn["role"] == "assistant"]
            said = [str(turn.get("tool_calls") or turn.get("content") or "").strip() for turn in answers]
            if self.is_of_assistant and not answers:
                raise ValueError("a turn of the assistant, for --assistant_only_loss trains on nothing else")
            if row.get("messages") and not any(said):
                self.unanswered |= dict.fromkeys(f"`{turn['role']}`" for turn in turns if turn not in answers)
            kind = (tools is None, *kwargs, *((turn["role"], *turn) for turn in turns))
            if kind in self.seen or getattr(self.tokenizer, "chat_template", None) is None:
                continue
            try:
                shown = self.tokenizer.apply_chat_template(turns, tokenize=False, tools=tools, **kwargs)
            except TemplateSyntaxError as error:
                reason = f"line {error.lineno} of the chat template is no Jinja: {first_line(error)}"
                raise ConfigError(f"{reason}. Correct it, or give another --chat_template_path.") from error
            except Exception as error:  # a template is a program, whose errors are of any kind
                raise ValueError(f"turns that the chat template takes, and it says: {first_line(error)}") from error
            self.seen.add(kind)
            for role in ("user", "assistant"):
                texts = [turn.get("content") for turn in turns if turn["role"] == role]
                words = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
                ends = [text.splitlines()[-1].strip() for text in words]
                if ends and not any(end in shown for end in ends):
                    raise ConfigError(
                        f"The chat template shows no turn of the {role}: {quoted(ends[0])} becomes {quoted(shown)}. "
                        "Give the template of this tokenizer with --chat_template_path, or one that reads `messages`."
                    )

    def with_labels(self, dataset: Any) -> Any:
        """The rows of `messages` with tokens and labels, as TRL makes them, of which marked turns are masked too."""
        template = training_template(self.tokenizer)
        return dataset.map(_labelled, fn_kwargs={"tokenizer": self.tokenizer, "template": template})


def _tools_of(row: Mapping[str, Any]) -> Any:
    try:
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    except ValueError as error:
        raise ValueError(f"`tools` as a list or as JSON, and they are {quoted(row['tools'])}") from error
    return tools


def _labelled(row: Mapping[str, Any], tokenizer: Any, template: str) -> dict[str, Any]:
    shown = tokenizer.apply_chat_template(
        row["messages"],
        tools=_tools_of(row),
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **(row.get("chat_template_kwargs") or {}),
    )
    spans = [[*span] for _, span in groupby(shown["assistant_masks"])]
    answers = [turn for turn in row["messages"] if turn["role"] == "assistant"]
    if len(answers) != sum(span[0] for span in spans):
        raise ConfigError(
            "A turn is marked as not to be trained on, and the chat template marks other spans than the assistant's "
            f"turns in {quoted(row['messages'])}. Leave such marks out, or give another --chat_template_path."
        )
    counts = iter([turn.get("train") is not False for turn in answers])
    mask = [is_shown for span in spans for is_shown in [span[0] and next(counts)] for _ in span]
    labels = [token if is_trained else -100 for token, is_trained in zip(shown["input_ids"], mask, strict=True)]
    return {"input_ids": shown["input_ids"], "labels": labels}


def training_template(tokenizer: Any) -> str:
    """The chat template that marks the words of the assistant: the tokenizer's own, or that which TRL knows for it."""
    from trl import get_training_chat_template
    from trl.chat_template_utils import has_generation_markers

    template: str = tokenizer.chat_template
    if has_generation_markers(template):
        return template
    try:
        return get_training_chat_template(tokenizer) or template
    except ValueError as error:
        raise ConfigError(
            "--assistant_only_loss needs a chat template that marks the assistant's turns with {% generation %}, "
            "and this tokenizer's does not. Give one with --chat_template_path, or leave the option out."
        ) from error


def _set_template(target: Any, tokenizer: Any, training: Any) -> None:
    """Give the target the template of `--chat_template_path`, if any, which needs the tokenizer's own tokens."""
    from transformers import AutoTokenizer

    path = getattr(training, "chat_template_path", None)
    if path is None:
        return
    training.chat_template_path = None
    option = f"--chat_template_path {path}"
    if Path(path).is_file():
        with library_errors(f"{option}: no template in UTF-8", "Correct it.", ConfigError):
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
