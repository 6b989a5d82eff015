"""A reward model as a user trains it: the loss falls, the head is saved, a resumed run has the same end."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from tests.recipes._series import Series, run_series, write_rows

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("reward")
    options = ["--learning_rate", "3e-3", "--max_length", "512", "--lr_scheduler_type", "constant"]
    few = [{"prompt": "Say", "chosen": " a", "rejected": " b"}]
    more = {
        "lora": ["--use_peft", "--lora_r", "4", "--max_steps", "4", "--merge_adapters"],
        "wrong": ["--dataset_name", write_rows(folder / "wrong_rows", [{"prompt": "?", "chosen": "!"}] * 8)],
        "few": ["--dataset_name", write_rows(folder / "few_rows", few)],
        "targets": ["--use_peft", "--lora_target_modules", "q_prj"],
    }
    return run_series("reward", folder, "preferences", options, more)


def opened(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def test_the_loss_falls_and_the_result_opens_in_transformers(runs):
    losses = runs.log("trained", "eval_loss")
    assert losses[0] > 0.5 and losses[-1] < 0.3
    before, after = runs.log("still", "eval_loss")
    assert before == pytest.approx(after) == pytest.approx(losses[0]), "without a learning rate"
    model = AutoModelForSequenceClassification.from_pretrained(runs.folder / "trained")
    assert model.config.architectures == ["LlamaForSequenceClassification"] and model.config.num_labels == 1
    runs.same_logits("trained", model)
    assert "chosen preferred" in runs.printed["trained"]


def test_a_run_resumed_in_the_middle_has_the_same_end(runs):
    for name, weight in runs.weights("trained").items():
        assert torch.equal(weight, runs.weights("resumed")[name]), name
    assert runs.log("resumed", "loss") == runs.log("trained", "loss")


def test_an_adapter_is_saved_with_the_head(runs):
    before, after = runs.log("lora", "eval_loss")
    assert after < before
    runs.same_logits("lora", opened(runs.folder / "lora" / "merged"))
    runs.same_logits("lora", PeftModel.from_pretrained(opened(runs.folder / "model"), runs.folder / "lora"))


@pytest.mark.parametrize(
    ("run", "said"),
    [("wrong", "Needed: `chosen` and `rejected`"), ("few", "2 processes"), ("targets", "--lora_target_modules")],
)
def test_errors_come_before_the_model(runs, run, said):
    assert said in runs.error(run)
