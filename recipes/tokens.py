"""Train a classifier of words (named entities, parts of speech) under FSDP2: any pretrained model with a new head.

Nothing to download: a small Llama learns which words of CPython's own documentation are code, from passages without
their quotation marks. On two CPU processes the F1 of what is code rises from 0.07 to above 0.4 in two minutes.

Rows have a list of words and one of as many classes, names or whole numbers, in the columns `tokens` and `tags` (or
`ner_tags`). The first token of a word has its class, no other counts in the loss. With LoRA the head is trained too.
"""

import re
from functools import partial
from typing import Any

import datasets
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers import Trainer as PlainTrainer

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, scripting


class Trainer(FSDPTrainerMixin, PlainTrainer):
    """Transformers' Trainer on our shards."""


def main() -> Trainer:
    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("tokens", scripting.DataArguments, TrainingArguments)
    columns = [{"tokens", "tags"}, {"tokens", "ner_tags"}]
    data, held_out = scripting.load_splits(script, training, columns=columns)
    tokenizer = scripting.load_tokenizer(model_args, training)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    # 2. Checks of what would fail later
    auto_class = AutoModelForTokenClassification
    names = class_names(script, tokenizer, data, held_out)
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out, auto_class=auto_class)

    # 3. The model, straight into shards. Its head is newly initialised, equal on any number of ranks
    id2label = dict(enumerate(names))
    label2id = {name: number for number, name in id2label.items()}
    options = {"id2label": id2label, "label2id": label2id, "ignore_mismatched_sizes": True}  # another head's
    model = scripting.load_model(model_args, training, accelerator, auto_class=auto_class, **options)

    # 4. Train
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encode(data, training, tokenizer, label2id),
        eval_dataset=encode(held_out, training, tokenizer, label2id) if held_out is not None else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_loss_func=partial(scripting.mean_over_tokens, label_smoothing=training.label_smoothing_factor),
        compute_metrics=partial(measure, names=names),
        # an encoder with a decoder gives more than logits
        preprocess_logits_for_metrics=lambda out, labels: (out[0] if isinstance(out, tuple) else out).argmax(-1),
    )
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    use = f'use it with pipeline("token-classification", "{training.output_dir}")'
    if model_args.use_peft:
        use = f"open it with peft.AutoPeftModelForTokenClassification.from_pretrained, num_labels={len(names)}"
    lines = {"classes": ", ".join(names), "checkpoint": f"{training.output_dir} ({use})"}
    for name, title in (("eval_accuracy", "words right"), ("eval_f1", "F1 of spans")):
        if values := [log[name] for log in trainer.state.log_history if name in log]:
            lines[title] = f"{values[0]:.0%} before, {values[-1]:.0%} after"
    scripting.finish(trainer, training, model_args, tokenizer, lines=lines)
    return trainer


def tags_of(rows: datasets.Dataset) -> str:
    """The column with the classes."""
    return "tags" if "tags" in rows.column_names else "ner_tags"


def class_names(
    script: scripting.DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: datasets.Dataset,
    held_out: datasets.Dataset | None,
) -> list[str]:
    """The names of the classes: those that the dataset declares, else its classes in order, what is none first."""
    if script.dataset_streaming:
        raise ConfigError("--dataset_streaming: the classes are known when all words were seen. Leave it out.")
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say which word a token is of. Use a model with tokenizer.json."
        )
    seen: list[set[Any]] = []
    for part in (data, held_out):
        seen.append(set())
        for batch in part.iter(1000) if part is not None else ():
            seen[-1].update(tag for tags in batch[tags_of(part)] for tag in tags)
    feature = getattr(data.features[tags_of(data)], "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    if {type(tag) for part in seen for tag in part} not in ({str}, {int}):
        raise ConfigError(f"Classes of words are names or whole numbers, and {script.dataset_name!r} has others.")
    if rest := seen[1] - seen[0]:
        raise ConfigError(
            f"The class {min(rest)!r} is in the evaluation split alone. Name another one with --dataset_test_split."
        )
    if len(seen[0]) < 2:
        raise ConfigError(f"All words of {script.dataset_name!r} have the same class. Name others with --tags_column.")
    return sorted(map(str, sorted(seen[0])), key=lambda name: name != "O")


def encode(
    rows: datasets.Dataset, training: TrainingArguments, tokenizer: PreTrainedTokenizerBase, numbers: dict[str, int]
) -> datasets.Dataset:
    """Tokens, and for the first one of each word the number of its class, in place of the dataset's own columns."""
    column = tags_of(rows)
    feature = getattr(rows.features[column], "feature", None)
    name_of = feature.int2str if isinstance(feature, datasets.ClassLabel) else str
    space = space_before_words(tokenizer)

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        sentences = [[space * (place > 0) + word for place, word in enumerate(words)] for words in batch["tokens"]]
        tokens = tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=training.max_length)
        labels = []
        for row, tags in enumerate(batch[column]):
            words = tokens.word_ids(row)
            firsts = [word is not None and word != before for word, before in zip(words, [None, *words], strict=False)]
            classes = [
                numbers[name_of(tags[word])] if first else -100 for word, first in zip(words, firsts, strict=True)
            ]
            labels.append(classes)
        return {**tokens, "labels": labels}

    with training.main_process_first():  # the others read what it has written
        return rows.map(encode_batch, batched=True, remove_columns=rows.column_names)


def space_before_words(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a word needs before it to have the tokens of running text: a space, for tokenizers that do not add it."""
    plain = tokenizer("a b", add_special_tokens=False)["input_ids"]
    spaced = tokenizer(["a", " b"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
    alone = tokenizer(["a", "b"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
    return " " if spaced == plain != alone else ""


def measure(result: EvalPrediction, names: list[str]) -> dict[str, float]:
    """The share of words with the right class; for names such as B-PER and I-PER also the F1 of whole spans."""
    counts = result.label_ids != -100
    figures = {"accuracy": float((result.predictions == result.label_ids)[counts].mean())}
    if all(re.fullmatch("O|[BIESLU]-.+", name) for name in names):
        found, there, right = 0, 0, 0
        for guesses, labels, is_word in zip(result.predictions, result.label_ids, counts, strict=True):
            guessed, true = (spans([names[number] for number in row[is_word]]) for row in (guesses, labels))
            found, there, right = found + len(guessed), there + len(true), right + len(guessed & true)
        figures["f1"] = 2 * right / max(1, found + there)
    return figures


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """Beginning, end and kind of each span; one that begins with I- begins all the same, as conlleval has it."""
    found, start, kind = set(), None, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if start is not None and (prefix in "BSUO" or name != kind):
            found.add((start, place, kind))
            start = None
        if prefix != "O" and start is None:
            start, kind = place, name
    return found


if __name__ == "__main__":
    scripting.run(main, "tokens")
