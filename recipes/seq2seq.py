"""Train a model that reads one text and writes another (T5, BART, mBART, NLLB, Pegasus) under FSDP2.

Nothing to download: a small T5 reads passages of CPython's own documentation and writes which part each comes from. On
two CPU processes none of the held-out ones is right before and two of three are after, in two minutes.

Held-out rows are also written by the model (`--predict_with_generate`), and compared with their answers. Rows have
`prompt` and `completion`, texts or turns of a chat. Whisper needs a script of its own (docs/recipes.md).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets
import numpy as np
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, scripting


@dataclass
class TextArguments(scripting.DataArguments):
    """TRL's options for data, and what becomes of it."""

    max_target_length: int = field(default=128, metadata={"help": "Tokens at which what is written is cut."})
    source_prefix: str = field(default="", metadata={"help": "Stands before each prompt, such as T5's task."})
    source_lang: str | None = field(default=None, metadata={"help": "Language read, as the tokenizer names it."})
    target_lang: str | None = field(default=None, metadata={"help": "Language written, likewise."})


class Trainer(FSDPTrainerMixin, Seq2SeqTrainer):
    """Transformers' Seq2SeqTrainer on our shards."""


def main() -> Trainer:
    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("seq2seq", TextArguments, Seq2SeqTrainingArguments)
    training.generation_max_length = training.generation_max_length or script.max_target_length + 1  # with the start
    data, held_out = scripting.load_splits(script, training, columns=[{"prompt", "completion"}])
    tokenizer = scripting.load_tokenizer(model_args, training)

    # 2. Checks of what would fail later
    auto_class = AutoModelForSeq2SeqLM
    check_reads_and_writes(script, training, model_args)
    start = {} if script.target_lang is None else languages(script, tokenizer)
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out, auto_class=auto_class)

    # 3. The model, straight into shards; with an adapter, if one is asked for
    model = scripting.load_model(model_args, training, accelerator, auto_class=auto_class)
    model.generation_config.update(**start)

    # 4. Train
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encode(data, script, training, tokenizer),
        eval_dataset=encode(held_out, script, training, tokenizer) if held_out is not None else None,
        processing_class=tokenizer,
        data_collator=collator(model, tokenizer),
        compute_loss_func=partial(scripting.mean_over_tokens, label_smoothing=training.label_smoothing_factor),
        compute_metrics=partial(measure, tokenizer=tokenizer) if training.predict_with_generate else None,
    )
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    opener = "peft.AutoPeftModelForSeq2SeqLM" if model_args.use_peft else auto_class.__name__
    lines = {"checkpoint": f"{training.output_dir} (open it with {opener}.from_pretrained)"}
    for name, title in (("eval_exact_match", "written exactly"), ("eval_word_f1", "words in common")):
        values = [log[name] for log in trainer.state.log_history if name in log]
        lines[title] = f"{values[0]:.0%} before, {values[-1]:.0%} after" if values else "not evaluated"
    scripting.finish(trainer, training, model_args, tokenizer, lines=lines)
    return trainer


def check_reads_and_writes(
    script: TextArguments, training: Seq2SeqTrainingArguments, model_args: scripting.ModelArguments
) -> None:
    """Refuse a model that is no encoder of texts with a decoder, and answers longer than it has positions."""
    name, hub = model_args.model_name_or_path, {"revision": model_args.model_revision}
    config = AutoConfig.from_pretrained(name, trust_remote_code=training.trust_remote_code, **hub)
    if not config.is_encoder_decoder:
        raise ConfigError(f"{name} is a {config.model_type}, which has no encoder and decoder. Use finetune for it.")
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{name} is a {config.model_type}, which does not read text, so that its text side alone learns nothing: "
            "it needs sound or images. docs/recipes.md has the lines for a script of its own (Whisper)."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and script.max_target_length > positions:
        raise ConfigError(
            f"--max_target_length {script.max_target_length}: {name} has {positions} positions. Use {positions}."
        )


def languages(script: TextArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Tell the tokenizer which languages it reads and writes; return with which token the model begins to write."""
    if not hasattr(tokenizer, "src_lang"):
        raise ConfigError(f"--target_lang: {type(tokenizer).__name__} knows no languages. Use --source_prefix.")
    known = set(tokenizer.get_vocab())
    names = {option: getattr(script, option) for option in ("source_lang", "target_lang")}
    for option, name in names.items():
        if name is None or (name not in known and f"__{name}__" not in known):
            raise ConfigError(f"--{option} {name}: no language of {type(tokenizer).__name__}, such as deu_Latn.")
    tokenizer.src_lang, tokenizer.tgt_lang = names["source_lang"], names["target_lang"]
    name = names["target_lang"]
    return {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(name if name in known else f"__{name}__")}


def encode(
    rows: Any, script: TextArguments, training: Seq2SeqTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Tokens of what is read, and as labels those of what is written, in place of the dataset's own columns."""
    end = tokenizer.eos_token_id

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        prompts = [script.source_prefix + text_of(prompt) for prompt in batch["prompt"]]
        answers = [text_of(answer) for answer in batch["completion"]]
        tokens = tokenizer(prompts, truncation=True, max_length=training.max_length)
        labels = tokenizer(text_target=answers, truncation=True, max_length=script.max_target_length)["input_ids"]
        if end is not None:  # without it the model would not learn where to stop
            labels = [ids if end in ids else [*ids[: script.max_target_length - 1], end] for ids in labels]
        return {**tokens, "labels": labels}

    columns = rows.column_names or list(next(iter(rows)))
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(encode_batch, batched=True, remove_columns=columns)
    with training.main_process_first():  # the others read what it has written
        return rows.map(encode_batch, batched=True, remove_columns=columns)


def text_of(value: str | list[dict[str, str]]) -> str:
    """A text as it is, or the texts of the turns of a chat."""
    return value if isinstance(value, str) else "\n".join(turn["content"] for turn in value)


def collator(model: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], Any]:
    """Batches with what the decoder reads: the labels, one place to the right. Some models do not say how."""
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)

    def with_decoder_inputs(rows: list[dict[str, Any]]) -> Any:
        batch = collate(rows)
        if "decoder_input_ids" not in batch:
            shifted = batch["labels"].roll(1, dims=1)
            shifted[:, 0] = model.config.decoder_start_token_id
            batch["decoder_input_ids"] = shifted.masked_fill(shifted == -100, tokenizer.pad_token_id)
        return batch

    return with_decoder_inputs


def measure(result: EvalPrediction, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """The share of answers that were written exactly, and the mean F1 of their words."""
    pad = tokenizer.pad_token_id
    written, expected = (
        tokenizer.batch_decode(np.where(ids < 0, pad, ids), skip_special_tokens=True)
        for ids in (result.predictions, result.label_ids)
    )
    pairs = [(one.strip(), other.strip()) for one, other in zip(written, expected, strict=True)]
    return {
        "exact_match": sum(one == other for one, other in pairs) / len(pairs),
        "word_f1": sum(word_f1(one, other) for one, other in pairs) / len(pairs),
    }


def word_f1(written: str, expected: str) -> float:
    """The F1 of the words of two texts, each counted as often as it is there."""
    words, wanted = Counter(written.split()), Counter(expected.split())
    common = sum((words & wanted).values())
    return 2 * common / (words.total() + wanted.total()) if common else float(written == expected)


if __name__ == "__main__":
    scripting.run(main, "seq2seq")
