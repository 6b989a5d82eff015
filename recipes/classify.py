"""Train a classifier of texts under FSDP2: any pretrained model with a new head that has one output for each class.

Nothing to download: a small Llama learns which part of CPython's own documentation a passage comes from. On two CPU
processes the accuracy rises from a third to three quarters, and the loss falls from 1.4 to below 0.9, in two minutes.

Rows have a text and its class, a name or a whole number. With LoRA the head is trained and saved too.
"""

from typing import Any

import datasets
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, TrainingArguments
from transformers import Trainer as PlainTrainer

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, scripting


class Trainer(FSDPTrainerMixin, PlainTrainer):
    """Transformers' Trainer on our shards."""


def main() -> Trainer:
    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("classify", scripting.DataArguments, TrainingArguments)
    data, held_out = scripting.load_splits(script, training, columns=[{"text", "label"}])
    tokenizer = scripting.load_tokenizer(model_args, training)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    # 2. Checks of what would fail later
    auto_class = AutoModelForSequenceClassification
    names = class_names(script, data, held_out)
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out, auto_class=auto_class)

    # 3. The model, straight into shards. Its head is newly initialised, equal on any number of ranks
    id2label = dict(enumerate(names))
    label2id = {name: number for number, name in id2label.items()}
    options = {"id2label": id2label, "label2id": label2id, "ignore_mismatched_sizes": True}  # another head's
    model = scripting.load_model(model_args, training, accelerator, auto_class=auto_class, **options)
    config = model.config.get_text_config()
    stored, config.pad_token_id = config.pad_token_id, tokenizer.pad_token_id  # the head reads the last other token

    # 4. Train
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encode(data, training, tokenizer, label2id),
        eval_dataset=encode(held_out, training, tokenizer, label2id) if held_out is not None else None,
        processing_class=tokenizer,
        compute_metrics=lambda result: {"accuracy": float((result.predictions == result.label_ids).mean())},
        # an encoder with a decoder gives more than logits
        preprocess_logits_for_metrics=lambda out, labels: (out[0] if isinstance(out, tuple) else out).argmax(-1),
    )
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    right = [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
    use = f'use it with pipeline("text-classification", "{training.output_dir}")'
    if model_args.use_peft:
        use = f"open it with peft.AutoPeftModelForSequenceClassification.from_pretrained, num_labels={len(names)}"
        use += "" if stored == config.pad_token_id else f", pad_token_id={config.pad_token_id}"  # in no adapter's files
    lines = {
        "accuracy": f"{right[0]:.0%} before, {right[-1]:.0%} after" if right else "not evaluated",
        "classes": ", ".join(names),
        "checkpoint": f"{training.output_dir} ({use})",
    }
    scripting.finish(trainer, training, model_args, tokenizer, lines=lines)
    return trainer


def class_names(
    script: scripting.DataArguments, data: datasets.Dataset, held_out: datasets.Dataset | None
) -> list[str]:
    """The names of the classes: those that the dataset declares, else its labels in order."""
    label = script.column_names.get("label") or "label"  # as the user calls it
    where = f"Column {label!r} of {script.dataset_name!r}"
    if script.dataset_streaming:
        raise ConfigError("--dataset_streaming: the classes are known when all labels were seen. Leave it out.")
    feature = data.features["label"]
    if not str(getattr(feature, "dtype", feature)).startswith(("string", "large_string", "int", "uint", "bool")):
        raise ConfigError(
            f"{where} holds {feature}, and classes are names or whole numbers. Name another column with "
            "--label_column, or make classes of it."
        )
    seen, tested = (set(part.unique("label")) if part is not None else set() for part in (data, held_out))
    declared = feature.names if isinstance(feature, datasets.ClassLabel) else None
    if declared and -1 in seen | tested:
        raise ConfigError(f"{where} has rows without a class. Leave them out.")
    if tested - seen and not declared:
        raise ConfigError(
            f"{where}: the class {min(tested - seen)!r} is in the evaluation split alone. Name a split "
            "that has the classes of the training split with --dataset_test_split."
        )
    if len(seen) < 2 or len(seen) > len(data) // 2:
        raise ConfigError(
            f"{where} has {len(seen)} different labels in {len(data)} rows, so they are no classes. Name "
            "another column with --label_column."
        )
    return declared or [str(label) for label in sorted(seen)]


def encode(
    rows: datasets.Dataset,
    training: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    numbers: dict[str, int],
) -> datasets.Dataset:
    """Tokens and the number of the class, in place of the dataset's own columns."""
    feature = rows.features["label"]
    name_of = feature.int2str if isinstance(feature, datasets.ClassLabel) else str

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokens = tokenizer(batch["text"], truncation=True, max_length=training.max_length)
        return {**tokens, "labels": [numbers[name_of(label)] for label in batch["label"]]}

    with training.main_process_first():  # the others read what it has written
        return rows.map(encode_batch, batched=True, remove_columns=rows.column_names)


if __name__ == "__main__":
    scripting.run(main, "classify")
