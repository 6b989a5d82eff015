"""A classifier as a user trains it: names of the classes from the rows, a fresh head, accuracy, and a pipeline."""

import re
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    pipeline,
)

from hf_fsdp_tools.scripting.demo import demo_rows, make_demo_model
from tests.recipes._launch import HAS_BITSANDBYTES, Series, launch_series, two_runs, write_split

pytest.importorskip("trl")

CLASSES = ["language", "special methods", "statements", "types"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("classify")
    texts = [row["text"] for row in demo_rows("classes")[:512:32]]
    labels = {
        "scores": [n / 7 for n in range(16)],
        "ids": [f"row {n}" for n in range(16)],
        "holes": ["a", "b", None, "a"] * 4,
    }
    rows = {
        "classes": demo_rows("classes")[:512:32],
        "numbers": [{"sentence": text, "stars": n % 3} for n, text in enumerate(texts)],
        **{
            name: [{"text": text, "label": label} for text, label in zip(texts, column, strict=True)]
            for name, column in labels.items()
        },
    }
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2, max_length=256))
    bare = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    bare += ["--max_length", "64", "--lr_scheduler_type", "constant"]
    common = [*bare, *data["classes"]]
    runs = two_runs(folder, 8, *common, learning_rate=3e-3)
    lora = ["--use_peft", "--lora_r", "4", "--merge_adapters", "--max_steps", "4", "--learning_rate", "3e-3"]
    runs["lora"] = [*common, *lora]
    if HAS_BITSANDBYTES:
        short = ["--max_steps", "4", "--learning_rate", "3e-3"]
        runs["qlora"] = [*common, *lora[:3], *short, "--load_in_4bit", "--bnb_4bit_quant_storage", "float32"]
    masked = bert_without_pooler(model, folder / "bert")
    runs["pooler"] = [*common, *lora[:3], "--max_steps", "2", "--model_name_or_path", masked]
    numbers = [*bare[:6], *data["numbers"], "--dataset_text_field", "sentence", "--label_column_name"]
    runs["numbers"] = [*numbers, "stars", "--max_steps", "1", "--gradient_accumulation_steps", "2"]
    figures = ["--dataset_text_field", "stars", "--label_column_name", "sentence"]
    refused = {"figures": [*bare, *data["numbers"], *figures]}
    refused |= {name: [*bare, *data[name]] for name in labels}
    return launch_series(folder, "classify.py", runs, refused=refused)


def bert_without_pooler(model: str, target: Path) -> str:
    """A model of masked tokens, as DeBERTa-v3 is stored: a classifier of it has a new pooler below its new head."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def test_the_loss_falls_and_the_result_opens_as_a_pipeline(runs):
    losses = runs.log("trained", "eval_loss")
    assert losses[0] > 1.2 and losses[-1] < 0.9
    assert runs.log("trained", "eval_accuracy")[-1] > 0.6
    model = AutoModelForSequenceClassification.from_pretrained(runs.folder / "trained")
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert list(model.config.id2label.values()) == CLASSES
    runs.check_opened("trained", model)
    row = demo_rows("classes")[0]
    classify = pipeline("text-classification", str(runs.folder / "trained"), device="cpu")
    assert classify(row["text"], truncation=True, max_length=64)[0]["label"] == row["label"]


def test_a_run_resumed_in_the_middle_has_the_same_end(runs):
    runs.check_resumed()


def test_the_loss_is_a_mean_over_ranks_and_micro_batches(runs):
    # three classes of which the fresh head prefers none
    assert runs.log("numbers", "loss") == pytest.approx([1.1], abs=0.2)
    assert "0, 1, 2" in runs.of("numbers")
    assert "--max_length 256: " in runs.of("numbers"), "the default, cut to the model's positions"


def test_an_adapter_is_saved_with_the_head(runs):
    before, after = runs.log("lora", "eval_loss")
    assert after < before
    merged = AutoModelForSequenceClassification.from_pretrained(runs.folder / "lora" / "merged")
    assert list(merged.config.id2label.values()) == CLASSES
    runs.check_opened("lora", merged)
    settings = {"num_labels": len(CLASSES)}
    runs.check_opened("lora", AutoPeftModelForSequenceClassification.from_pretrained(runs.folder / "lora", **settings))
    assert "peft.AutoPeftModelForSequenceClassification" in runs.of("lora")


def test_what_no_file_holds_is_saved_with_an_adapter(runs):
    assert re.search(r"drawn by the seed, .*; it is trained whole, and saved with", runs.of("pooler"))
    assert any("bert.pooler.dense" in name for name in runs.weights("pooler"))
    settings = {"num_labels": len(CLASSES)}
    opened = AutoPeftModelForSequenceClassification.from_pretrained(runs.folder / "pooler", **settings)
    runs.check_opened("pooler", opened)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed (pip install bitsandbytes)")
def test_an_adapter_on_4_bits_learns(runs):
    assert "4-bit in float32" in runs.of("qlora")
    losses = runs.log("qlora", "eval_loss")
    assert losses[-1] < losses[0]
    assert set(runs.weights("qlora")) == set(runs.weights("lora")), "the adapter alone, and the head that it trains"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("figures", "Column 'stars' holds no text"),
        ("scores", "float64"),
        ("ids", "16 different labels in 16 rows"),
        ("holes", "rows without a class"),
    ],
)
def test_errors_come_before_the_model(runs, run, message):
    assert message in runs.error(run)
