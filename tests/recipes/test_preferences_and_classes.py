"""`dpo`, `reward` and `classify` as a user trains with them: on two ranks, with fresh heads and adapters on them."""

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import AutoPeftModelForSequenceClassification

from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import ONCE, Series, launch_series, refused_runs, write_split

pytest.importorskip("trl")

NO_PREFERENCE = pytest.approx(0.6931, abs=1e-4)
"""log 2, the loss of a model that equals its reference."""

CLASSES = ["language", "special methods", "statements", "types"]

STREAMED = "--max_steps 2 --precompute_ref_log_probs --dataset_streaming"
REFUSED = {
    "same": ("dpo", "--dataset_name {same}", "`chosen` equals `rejected`"),
    "streamed": ("dpo", f"--dataset_name {{turns}} {STREAMED}", "--precompute_ref_log_probs writes its values next to"),
    "wrong": ("reward", "--dataset_name {wrong}", "Needed: `chosen` and `rejected`"),
    "ids": ("classify", "--dataset_name {ids}", "16 different labels in 16 rows"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("runs")
    turns, classes = demo_rows("preferences")[:512:32], demo_rows("classes")[:512:32]
    rows = {
        "turns": turns,
        "implicit": [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in turns],
        "same": [{"prompt": "Say", "chosen": " a", "rejected": " a"}] * 8,
        "wrong": [{"prompt": "?", "chosen": "!"}] * 8,
        "classes": classes,
        "ids": [{"text": row["text"], "label": f"row {n}"} for n, row in enumerate(classes)],
    }
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2, max_length=256))
    options = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    options += ["--lr_scheduler_type", "constant", "--learning_rate", "3e-3", *ONCE, "--max_length"]
    lora = ["--use_peft", "--lora_r", "4"]

    dpo, reward = ["dpo", *options, "128"], ["reward", *options, "256"]
    runs = {"dpo": [*dpo, *data["turns"], "--max_steps", "6"]}
    runs["dpo-lora"] = [*dpo, *data["turns"], *lora, "--max_steps", "2", "--merge_adapters"]
    runs["precomputed"] = [*dpo, *data["implicit"], "--max_steps", "2", "--precompute_ref_log_probs"]
    runs["precomputed"] += ["--eval_strategy", "no", "--torch_compile", "true", "--torch_compile_backend", "eager"]
    runs["reward"] = [*reward, *data["turns"], "--max_steps", "6"]
    classify = ["classify", *options, "64"]
    runs["classify"] = [*classify, *data["classes"], "--max_steps", "8"]
    adapted = [*classify, *data["classes"], *lora, "--max_steps", "2"]
    runs["lora"] = [*adapted, "--merge_adapters"]
    runs["pooler"] = [*adapted, "--model_name_or_path", bert_without_pooler(model, folder / "bert")]
    places = {name: words[1] for name, words in data.items()}
    refused = refused_runs(REFUSED, {"dpo": dpo, "reward": reward, "classify": classify}, **places)
    return launch_series(folder, runs, refused=refused)


def bert_without_pooler(model: str, target: Path) -> str:
    """A model of masked tokens, as DeBERTa-v3 is stored: a classifier of it has a new pooler below its new head."""
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("run", REFUSED)
def test_errors_come_before_the_model(runs, run):
    assert REFUSED[run][-1] in runs.error(run)


def test_dpo_learns_the_preferences_and_an_adapter_is_its_own_reference(runs):
    losses = runs.log("dpo", "eval_loss")
    assert losses[0] == NO_PREFERENCE and losses[-1] < 0.45
    assert runs.log("dpo", "eval_rewards/accuracies")[-1] > 0.8 and "chosen preferred" in runs.of("dpo")
    assert "parameters in float32, sharded\n" in runs.of("dpo")
    before, after = runs.log("dpo-lora", "eval_loss")
    assert before == NO_PREFERENCE and after < before
    assert "not trained: " not in runs.of("dpo-lora") and runs.of("dpo").count("rank 0 read") == 1
    assert "is_gradient_checkpointing" not in runs.stderr
    for name, folder in (("dpo", "dpo"), ("dpo-lora", "dpo-lora"), ("dpo-lora", "dpo-lora/merged")):
        runs.check_opened(name, hf.AutoModelForCausalLM.from_pretrained(runs.folder / folder))


def test_prompts_within_answers_a_precomputed_reference_and_compiled_blocks_change_nothing(runs):
    assert runs.log("precomputed", "loss") == pytest.approx(runs.log("dpo", "loss")[:2], rel=1e-5)
    assert "compiled: model.layers.0 model.layers.1\n" in runs.of("precomputed")
    assert "compiled: none\n" in runs.of("dpo")


def test_a_reward_model_learns_the_preferences(runs):
    losses = runs.log("reward", "eval_loss")
    assert losses[0] > 0.5 and losses[-1] < 0.5
    model = hf.AutoModelForSequenceClassification.from_pretrained(runs.folder / "reward")
    assert model.config.architectures == ["LlamaForSequenceClassification"] and model.config.num_labels == 1
    runs.check_opened("reward", model)
    assert "chosen preferred" in runs.of("reward")


def test_a_classifier_learns_and_opens_as_a_pipeline(runs):
    losses = runs.log("classify", "eval_loss")
    assert losses[0] > 1.2 and losses[-1] < 0.9
    assert runs.log("classify", "eval_accuracy")[-1] > 0.6
    folder = runs.folder / "classify"
    runs.check_opened("classify", hf.AutoModelForSequenceClassification.from_pretrained(folder))
    row = demo_rows("classes")[0]
    classify = hf.pipeline("text-classification", str(folder), device="cpu")
    assert list(classify.model.config.id2label.values()) == CLASSES
    assert classify(row["text"], truncation=True, max_length=64)[0]["label"] == row["label"]


def test_an_adapter_is_saved_with_the_head_and_all_that_no_file_holds(runs):
    before, after = runs.log("lora", "eval_loss")
    assert after < before
    merged = hf.AutoModelForSequenceClassification.from_pretrained(runs.folder / "lora" / "merged")
    assert list(merged.config.id2label.values()) == CLASSES
    runs.check_opened("lora", merged)
    assert "peft.AutoPeftModelForSequenceClassification" in runs.of("lora")
    assert re.search(r"newly initialised .*; it is trained whole, and saved with", runs.of("pooler"))
    assert any("bert.pooler.dense" in name for name in runs.weights("pooler"))
    for name in ("lora", "pooler"):
        opened = AutoPeftModelForSequenceClassification.from_pretrained(runs.folder / name, num_labels=len(CLASSES))
        runs.check_opened(name, opened)
