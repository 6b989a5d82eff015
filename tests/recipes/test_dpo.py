"""DPO as a user starts it: the loss falls, an adapter needs no reference, a resumed run has the same end."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_fsdp_tools.scripting.demo_data import demo_rows
from tests.recipes._series import Series, run_series, write_rows

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("dpo")
    same = [{"prompt": "Say", "chosen": " a", "rejected": " a"}] * 8
    turns = demo_rows("preferences")[:8]
    implicit = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in turns]
    options = ["--learning_rate", "3e-3", "--max_length", "128", "--lr_scheduler_type", "constant"]
    more = {
        "lora": ["--use_peft", "--lora_r", "4", "--max_steps", "4", "--merge_adapters"],
        "precomputed": ["--precompute_ref_log_probs", "--max_steps", "2"],
        "implicit": ["--dataset_name", write_rows(folder / "implicit_rows", implicit), "--max_steps", "1"],
        "same": ["--dataset_name", write_rows(folder / "same_rows", same)],
        "wrong": ["--dataset_name", write_rows(folder / "wrong_rows", [{"question": "?", "answer": "!"}] * 8)],
        "long": ["--max_length", "4096"],
        "streamed": ["--precompute_ref_log_probs", "--dataset_streaming", "--max_steps", "2"],
    }
    return run_series("dpo", folder, "preferences", options, more)


def test_the_loss_falls_and_the_result_opens_in_transformers(runs):
    losses = runs.log("trained", "eval_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.3
    assert runs.log("trained", "eval_rewards/accuracies")[-1] > 0.9
    assert runs.log("still", "eval_loss") == pytest.approx([0.6931] * 2, abs=1e-4), "without a learning rate"
    runs.same_logits("trained", AutoModelForCausalLM.from_pretrained(runs.folder / "trained"))
    assert "chosen preferred" in runs.printed["trained"]


def test_a_run_resumed_in_the_middle_has_the_same_end(runs):
    for name, weight in runs.weights("trained").items():
        assert torch.equal(weight, runs.weights("resumed")[name]), name
    assert runs.log("resumed", "loss") == runs.log("trained", "loss")


def test_an_adapter_is_its_own_reference(runs):
    before, after = runs.log("lora", "eval_loss")
    assert before == pytest.approx(0.6931, abs=1e-4) and after < before
    assert runs.printed["lora"].count("read per rank") == 1 and runs.printed["trained"].count("read per rank") == 2
    for folder in (runs.folder / "lora", runs.folder / "lora" / "merged"):
        runs.same_logits("lora", AutoModelForCausalLM.from_pretrained(folder))


def test_values_of_the_reference_computed_before_are_the_same(runs):
    assert runs.log("precomputed", "loss") == pytest.approx(runs.log("trained", "loss")[:2], rel=1e-5)


def test_a_prompt_may_stand_in_both_answers(runs):
    assert runs.log("implicit", "loss") == pytest.approx([0.6931], abs=1e-4)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("same", "`chosen` equals `rejected`"),
        ("wrong", "Needed: `chosen` and `rejected`"),
        ("long", "1024 positions"),
        ("streamed", "--precompute_ref_log_probs writes its values beside the data set"),
    ],
)
def test_errors_come_before_the_model(runs, run, said):
    assert said in runs.error(run)
