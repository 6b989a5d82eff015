"""Mistakes that would end a run only after its model is loaded, found before, and rows that train nothing."""

import tempfile
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import ConfigError, library_errors
from hf_fsdp_tools.extensions.muon.muon import muon_options, wants_muon
from hf_fsdp_tools.modeling.configs import beyond_positions, has_angles, max_positions, text_config
from hf_fsdp_tools.modeling.meta import build_meta_model, load_config
from hf_fsdp_tools.scripting.setups import check_generates
from hf_fsdp_tools.scripting.tokenizer import class_options, hub_options, training_template
from hf_fsdp_tools.sharding.adapters import say_what_has_none, stacked_experts
from hf_fsdp_tools.sharding.checks import check_kind
from hf_fsdp_tools.text import did_you_mean, first_line, listed

_ROWS = 100
"""Rows of which labels and lengths are looked at. (assumed: enough to see a mistake that all rows share)"""


def check_before_loading(
    model_args: Any, training: Any, tokenizer: Any, train: Any, evaluation: Any = None, *, auto_class: Any = None
) -> None:
    """Refuse settings that would fail only after the model is loaded.

    Looked at: the model's config, the first 100 rows (all where the tokenizer has more tokens than the model), and for
    adapters the model on meta. A default of `--max_length` becomes the positions of a model that has fewer.

    `tokenizer` may be a processor; `auto_class` is that of `load_model`. Every rank must call; errors are exchanged.

    Raises:
        ConfigError: this kind of training, adapter or optimizer does not fit the model, its positions, its tokens or
            this device; rows do not fit the options; or the output folder cannot be used. On every rank alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> data, held_out = load_splits(script, training, columns=[{"text"}])
        rows.jsonl: 19 rows to train on, 1 to evaluate
        >>> training.max_length = 4096
        >>> check_before_loading(model_args, training, load_tokenizer(model_args, training), data, held_out)
        --max_length 4096: checkpoint has 256 positions...
    """
    with agreed("checking the settings"):
        config = load_config(model_args.model_name_or_path, **hub_options(model_args, training))
        if auto_class is None:
            remote = getattr(training, "trust_remote_code", False)
            check_generates(config, model_args.model_name_or_path, trust_remote_code=remote)
        _check_output(training, model_args)
        _check_optimizer(training)
        if getattr(training, "padding_free", False) and not training.packing and training.max_length is not None:
            option = f"--padding_free true cuts no rows, and --max_length is {training.max_length}"
            raise ConfigError(f"{option}. Use --max_length none with short rows, or --packing true, which cuts them.")
        _fit_positions(config, training, model_args, auto_class)
        _check_rows(training, tokenizer, train)
        _check_end(config, tokenizer, model_args.model_name_or_path, auto_class)
        _check_vocabulary(config, tokenizer, model_args.model_name_or_path, [train, evaluation])
        if model_args.load_in_4bit:
            _check_4bit(model_args, training)
        if model_args.use_peft:
            _check_targets(_on_meta(config, model_args, training, auto_class), model_args)
    model_args.rows = len(train) if hasattr(train, "__len__") else None


def check_prepared_rows(trainer: Any, given: int | None = None) -> None:
    """Refuse rows of which no token counts in the loss, as the trainer has prepared them; print how many are cut, and
    how many of the `given` rows it has left out.

    Every rank must call. The ranks exchange errors alone.
    """
    most = getattr(trainer.args, "max_length", None)
    with agreed("checking the rows"):
        rows = list(islice(iter(trainer.train_dataset), _ROWS))
        labels = [row.get("labels") for row in rows]
        if not rows or (isinstance(labels[0], list) and all(label == -100 for row in labels for label in row)):
            cut = "" if most is None else f" within --max_length {most}"
            raise ConfigError(
                f"All labels of the first rows are masked{cut}, so nothing would be learnt. Give rows with an answer "
                "(`completion`, or turns of the role assistant), or a longer --max_length."
            )
    is_packed = getattr(trainer.args, "packing", False)
    if given is not None and not is_packed and (left := len(trainer.train_dataset)) < given and rank_and_size()[0] == 0:
        print(f"{given - left:,} of {given:,} rows have no answer within --max_length {most}: {left:,} are trained on")
    full = sum(len(row["input_ids"]) == most for row in rows if "input_ids" in row)
    if full and not is_packed and rank_and_size()[0] == 0:
        print(f"{full} of the first {len(rows)} rows fill --max_length {most}; longer rows are cut there")


def _check_output(training: Any, model_args: Any) -> None:
    """Refuse to write over what is read, to resume from nothing, and to mix checkpoints of two runs: the older ones
    would be deleted as surplus."""
    folder, resume = Path(training.output_dir), training.resume_from_checkpoint
    written = [path.resolve() for path in (folder, folder / "merged", folder / "ema")]
    for name, value in chain.from_iterable(
        vars(one).items() for one in (model_args, *getattr(model_args, "others", ()))
    ):
        is_read = isinstance(value, str) and name.endswith(("name_or_path", "dataset_name"))
        if is_read and any(Path(each.strip()).resolve() in written for each in value.split(",")):
            raise ConfigError(
                f"--output_dir {folder}: --{name} {value} is there, and would be destroyed. Give another."
            )
    checkpoints = sorted(folder.glob("checkpoint-*"))
    if resume and resume is not True and not Path(resume).is_dir():
        raise ConfigError(f"--resume_from_checkpoint {resume}: no such folder. Give a checkpoint-N folder, or true.")
    there = {path.name for path in Path(resume).iterdir()} if resume and resume is not True else set()
    if "config.json" in there and "trainer_state.json" not in there:
        raise ConfigError(
            f"--resume_from_checkpoint {resume}: no checkpoint of a run. Give a checkpoint-N folder, or true."
        )
    if resume is True and not checkpoints:
        raise ConfigError(f"--resume_from_checkpoint true: --output_dir {folder} holds no checkpoint. Give that run's.")
    if not resume and checkpoints:
        raise ConfigError(
            f"{folder} holds checkpoints of another run ({listed([path.name for path in checkpoints], 2)}). Go on with "
            "it by --resume_from_checkpoint true, give another --output_dir, or move them away."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: {error.strerror}. Give a folder that you may write to.") from error


_NEED_WHOLE_GRADIENTS = ("galore", "apollo", "lomo", "adalomo")
"""Beginnings of names of optimizers that cannot step shards. Tried on 2 ranks: APOLLO multiplies them with plain
matrices and fails; GaLore keeps an object for each of them, which no training state holds; LOMO updates in the
backward pass, where shards have no gradients yet, and keeps all of them. AdaLomo has plain rows and columns of each."""


def _check_optimizer(training: Any) -> None:
    """Refuse an optimizer that cannot step shards, or whose package is absent."""
    name = str(getattr(training.optim, "value", training.optim))
    if wants_muon(training):
        muon_options(training)
        return
    if name.startswith(_NEED_WHOLE_GRADIENTS):
        raise ConfigError(f"--optim {name} needs whole gradients, and each process has its shards. Use adamw_torch.")
    try:
        check_kind(Trainer.get_optimizer_cls_and_kwargs(training)[0], has_shards=rank_and_size()[1] > 1)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"--optim {name}: {first_line(error)}.") from error


def _fit_positions(config: Any, training: Any, model_args: Any, auto_class: Any) -> None:
    """Refuse a `max_length` beyond a table of positions, and name one beyond trained angles.

    The options' default, which nobody asked for, is cut.
    """
    if (positions := max_positions(config)) is None:
        return
    length, name = getattr(training, "max_length", None), model_args.model_name_or_path
    written = getattr(training, "max_completion_length", None) or 0
    has = f"{name} has {{}} positions (by its config)"
    if positions <= written:
        raise ConfigError(
            f"--max_completion_length {written}: {has.format(positions)}, and prompts need some of them. Use "
            f"--max_completion_length {positions // 2}."
        )
    if length is None:
        return
    if auto_class is not None and length + (getattr(text_config(config), "pad_token_id", None) or 0) >= positions:
        # RoBERTa and its kind count from behind the row of padding
        modules = _on_meta(config, model_args, training, auto_class).named_modules()
        tables = [
            getattr(module, "padding_idx", None) for key, module in modules if key.endswith(".position_embeddings")
        ]
        positions -= next((padding + 1 for padding in tables if padding is not None), 0)
    if length <= positions:
        return
    first = rank_and_size()[0] == 0
    if length == model_args.default_max_length:
        training.max_length = positions
        if first:
            print(f"--max_length {positions}: {name} has no more positions (the default is {length})")
    elif not has_angles(config):
        raise ConfigError(f"--max_length {length}: {has.format(positions)}. Use --max_length {positions}.")
    elif first:
        print(f"--max_length {length}: {name} {beyond_positions(positions)}")


# ---- what is trained on ----


def _check_rows(training: Any, tokenizer: Any, train: Any) -> None:
    """Refuse turns for which there is no template, rows of which some parts are text and some turns, and options for
    other rows or another tokenizer."""
    from trl import is_conversational

    row = next(iter(train))
    is_chat, have = is_conversational(row), f"the rows have {listed(sorted(row))}"
    words = getattr(tokenizer, "tokenizer", tokenizer)
    of_completion, of_assistant = (getattr(training, f"{part}_only_loss", None) for part in ("completion", "assistant"))
    if is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            f"The rows are chats ({listed(sorted(row))}), and the tokenizer of this model has no chat template. "
            "Give --chat_template_path (a Jinja file, or a tokenizer that has one), or an instruct model."
        )
    if words.pad_token is None and words.eos_token is None and not getattr(training, "pad_token", None):
        near = listed(words.all_special_tokens) or "none"
        raise ConfigError(
            "The tokenizer of this model has neither a padding token nor one of the end. Name some of its tokens with "
            f"--pad_token and --eos_token (special ones: {near})."
        )
    for option in ("eos_token", "pad_token"):
        if (token := getattr(training, option, None)) is not None and token not in words.get_vocab():
            near = did_you_mean(token, words.all_special_tokens)
            raise ConfigError(f"--{option} {token}: the tokenizer has no such token{near}")
    if of_completion and not {"prompt", "completion"} <= row.keys():
        raise ConfigError(f"--completion_only_loss needs `prompt` and `completion`, and {have}. Leave it out.")
    if of_assistant and not is_chat:
        raise ConfigError(f"--assistant_only_loss needs chats (`messages`), and {have}. Leave it out.")
    if of_assistant:
        training_template(tokenizer)
    names = [name for name in ("prompt", "completion", "chosen", "rejected") if row.get(name) is not None]
    if len({type(row[name]) for name in names}) > 1:  # as in all rows
        raise ConfigError(
            f"Some of {listed(f'`{name}`' for name in names)} are text, and some are turns of a chat. Make all alike."
        )


def _check_end(config: Any, tokenizer: Any, name: str, auto_class: Any) -> None:
    """Refuse a tokenizer that ends no text, where a classifier with an encoder and a decoder reads at the end."""
    is_read = getattr(auto_class, "__name__", "").endswith("SequenceClassification") and config.is_encoder_decoder
    if is_read and tokenizer.eos_token_id not in tokenizer("a")["input_ids"]:
        raise ConfigError(
            f"The tokenizer of {name} ends no text with {tokenizer.eos_token}, where a {config.model_type} model reads "
            "its class. Use the model's own tokenizer, or save it with a post-processor that adds it."
        )


def _check_vocabulary(config: Any, tokenizer: Any, name: str, parts: list[Any]) -> None:
    """Refuse a tokenizer whose tokens have no rows in the model's table; rare ones may, where no text has them."""
    tokenizer = tokenizer if hasattr(tokenizer, "get_vocab") else tokenizer.tokenizer  # of a processor
    size, vocabulary = getattr(text_config(config), "vocab_size", None), tokenizer.get_vocab()
    if not isinstance(size, int) or not (beyond := [token for token, row in vocabulary.items() if row >= size]):
        return
    looked_at = [part if hasattr(part, "__len__") else islice(part, _ROWS) for part in parts if part is not None]
    words = (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template)
    texts, added = map(str, chain(words, *looked_at)), tokenizer.get_added_vocab()
    met = next((token for text in texts for token in beyond if token not in added or token in text), None)
    if met is not None:
        count = max(vocabulary.values()) + 1
        raise ConfigError(
            f"The tokenizer of {name} has {count:,} tokens, and the model {size:,} rows for them (vocab_size): {met!r} "
            "has none. Use the tokenizer of the model, or give the model rows once: "
            f"model.resize_token_embeddings({count}), and model.save_pretrained."
        )


# ---- the model ----


def _on_meta(config: Any, model_args: Any, training: Any, auto_class: Any) -> Any:
    remote = getattr(training, "trust_remote_code", False)
    return build_meta_model(config, trust_remote_code=remote, **class_options(model_args, auto_class))


def _check_targets(model: Any, model_args: Any) -> None:
    """Put the adapter on the model on meta, by PEFT itself, which says what it finds nothing for; then name experts."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from trl import get_peft_config

    if model_args.lora_experts:
        experts = [*stacked_experts(model), *(model_args.lora_target_parameters or ())]
        if not experts:
            raise ConfigError(
                f"--lora_experts: {type(model).__name__} has no stacked experts. Leave it out; --lora_target_modules "
                "all-linear adapts all linear layers."
            )
        model_args.lora_target_parameters = [*dict.fromkeys(experts)]
    linear = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    most = max((min(model.get_parameter(f"{name}.weight").shape) for name in linear), default=model_args.lora_r)
    if model_args.lora_r > most:
        raise ConfigError(f"--lora_r {model_args.lora_r}: no layer has a higher rank than {most}. Give fewer.")
    modules, parameters = (dict(of) for of in (model.named_modules(), model.named_parameters()))  # PEFT renames them
    adapter = get_peft_config(replace(model_args, load_in_4bit=False))
    try:
        adapted = get_peft_model(model, adapter, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        reason = first_line(error).split(". ")[0]
        names = listed(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear), 12)
        cure = "; or use all-linear" if model_args.lora_target_modules != "all-linear" else ". Name some of them"
        if "lora_dropout" in reason:  # PEFT has none for experts that are no linear layers
            cure += ", or use --lora_dropout 0"
        raise ConfigError(
            f"--lora_target_modules: {reason}. Linear layers of {type(model).__name__}: {names}{cure}."
        ) from error
    for option, there in (
        ("lora_target_modules", {*linear}),
        ("lora_modules_to_save", {*modules}),
        ("lora_target_parameters", {*parameters}),
    ):
        chosen = getattr(model_args, option)
        for name in chosen if isinstance(chosen, list) and chosen != ["all-linear"] else ():
            if not any(key == name or key.endswith(f".{name}") for key in (*there, *modules)):
                ends = {key.rsplit(".", 1 + name.count("."))[-1] for key in there}
                near = did_you_mean(name, ends, otherwise=".")
                raise ConfigError(f"--{option} {name}: {type(model).__name__} has none of that name{near}")
    say_what_has_none(adapted)
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(
            "--lora_target_modules: an adapter on the head would not be trained, for the loss reads the head's weight "
            "alone. Leave lm_head out, or train all of it with --lora_modules_to_save lm_head."
        )


def _check_4bit(model_args: Any, training: Any) -> None:
    """Pack and multiply a small weight on the device that the run will use."""
    from bitsandbytes.nn import Linear4bit

    device = torch.device("cpu") if training.use_cpu else training.device
    fact, cure = f"--load_in_4bit: bitsandbytes cannot compute on this {device.type}", "Leave --load_in_4bit out."
    with library_errors(fact, cure, ConfigError):
        layer = Linear4bit(64, 64, quant_type=model_args.bnb_4bit_quant_type, compute_dtype=torch.float32).to(device)
        layer(torch.ones(1, 64, device=device))


# ---- packed rows ----

_TOKENS = 16
"""Tokens of each of two documents."""

_NOISE, _NOISE_16_BITS = 1e-3, 3e-2
"""Noise of logits relative to their spread. Mixtures change by 1e-5, models that leak by 0.02 to 6 (of 60 measured)."""


def check_documents_apart(trainer: Any) -> None:
    """Refuse a model whose logits for a document depend on the document before it in a packed row: some make their mask
    without regard to positions (GPT-OSS, OPT, Falcon), and recurrent ones carry their state on (Mamba).

    The trainer's own collator packs two documents twice, with another first one. Every rank must call.
    """
    model = trainer.model
    option = "--packing" if trainer.args.packing else "--padding_free"
    ids = [3 + number % (model.config.get_text_config().vocab_size - 3) for number in range(3 * _TOKENS)]
    first, other, second = ids[:_TOKENS], ids[_TOKENS : 2 * _TOKENS], ids[2 * _TOKENS :]
    was_training = model.training
    model.eval()
    try:
        logits, changed = (_logits_of_second(trainer, before, second) for before in (first, other))
    except (ValueError, NotImplementedError) as error:  # how recurrent models of transformers say it
        raise ConfigError(
            f"{option}: {type(model).__name__} cannot run on packed rows: {first_line(error)}. Or leave {option} out."
        ) from error
    model.train(was_training)
    noise = _NOISE_16_BITS if logits.dtype.itemsize < 4 else _NOISE
    difference = ((logits.float() - changed.float()).pow(2).mean().sqrt() / logits.float().std()).item()
    if not difference < noise:
        cure = "Use --attn_implementation flash_attention_2, or leave" if model._supports_flash_attn else "Leave"
        raise ConfigError(
            f"{option}: {type(model).__name__} with the attention implementation "
            f"{model.config._attn_implementation!r} sees the documents before its own in a packed row (its logits "
            f"change by {difference:.0%} of their spread). {cure} {option} out."
        )


@torch.no_grad()
def _logits_of_second(trainer: Any, first: list[int], second: list[int]) -> torch.Tensor:
    row = {"input_ids": first + second, "seq_lengths": [len(first), len(second)]}
    batch = {name: value for name, value in trainer.data_collator([row]).items() if name != "labels"}
    device = trainer.accelerator.device
    moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    with trainer.compute_loss_context_manager():
        logits: torch.Tensor = trainer.model(**moved, use_cache=False).logits[0, len(first) :]
    return logits
