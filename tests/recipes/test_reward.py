"""A reward model as a user trains it: the loss falls, the head is saved, a resumed run has the same end."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_fsdp_tools import from_pretrained
from hf_fsdp_tools.scripting.demo import demo_rows, make_demo_model
from tests.recipes._launch import Series, launch_series, two_runs, write_split

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("reward")
    rows = {"turns": demo_rows("preferences")[:512:32], "wrong": [{"prompt": "?", "chosen": "!"}] * 8}
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2))
    bare = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    bare += ["--max_length", "512", "--lr_scheduler_type", "constant"]
    common = [*bare, *data["turns"]]
    runs = two_runs(folder, 8, *common, learning_rate=3e-3)
    runs["still"] = [*common, "--max_steps", "1", "--learning_rate", "0"]
    return launch_series(folder, "reward.py", runs, refused={"wrong": [*bare, *data["wrong"]]})


def test_the_loss_falls_and_the_result_opens_in_transformers(runs):
    losses = runs.log("trained", "eval_loss")
    assert losses[0] > 0.5 and losses[-1] < 0.5
    assert runs.log("still", "eval_loss") == pytest.approx([losses[0]] * 2), "without a learning rate"
    model = AutoModelForSequenceClassification.from_pretrained(runs.folder / "trained")
    assert model.config.architectures == ["LlamaForSequenceClassification"] and model.config.num_labels == 1
    runs.check_opened("trained", model)
    assert "chosen preferred" in runs.of("trained")


def test_the_head_is_drawn_by_the_seed_whatever_the_number_of_ranks(runs):
    settings = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1, "load_kwargs": {"seed": 42}}
    alone = from_pretrained(runs.folder / "model", **settings).score.weight.full_tensor()
    assert alone.abs().sum() > 0 and torch.equal(alone, runs.weights("still")["score.weight"])


def test_a_run_resumed_in_the_middle_has_the_same_end(runs):
    runs.check_resumed()


def test_an_error_comes_before_the_model(runs):
    assert "Needed: `chosen` and `rejected`" in runs.error("wrong")
