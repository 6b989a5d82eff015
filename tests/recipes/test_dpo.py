"""DPO as a user starts it: the loss falls, an adapter needs no reference, a resumed run has the same end."""

import pytest
from transformers import AutoModelForCausalLM

from hf_fsdp_tools.scripting.demo import demo_rows, make_demo_model
from tests.recipes._launch import Series, launch_series, two_runs, write_split

pytest.importorskip("trl")

NO_PREFERENCE = pytest.approx(0.6931, abs=1e-4)
"""log 2, the loss of a model that equals its reference."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("dpo")
    turns = demo_rows("preferences")[:512:32]
    same = [{"prompt": "Say", "chosen": " a", "rejected": " a"}] * 8
    implicit = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in turns]
    rows = {"turns": turns, "same": same, "implicit": implicit}
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2))
    bare = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    bare += ["--max_length", "128", "--lr_scheduler_type", "constant"]
    common = [*bare, *data["turns"]]
    runs = two_runs(folder, 8, *common, learning_rate=3e-3)
    short = [*common, "--learning_rate", "3e-3", "--max_steps"]
    runs["lora"] = [*short, "4", "--use_peft", "--lora_r", "4", "--merge_adapters"]
    runs["precomputed"] = [*short, "2", "--precompute_ref_log_probs", "--eval_strategy", "no"]
    runs["precomputed"] += ["--torch_compile", "true", "--torch_compile_backend", "eager"]
    runs["implicit"] = [*bare, *data["implicit"], "--max_steps", "1", "--eval_strategy", "no"]
    refused = {
        "same": [*bare, *data["same"]],
        "streamed": [*short, "2", "--precompute_ref_log_probs", "--dataset_streaming"],
    }
    return launch_series(folder, "dpo.py", runs, refused=refused)


def test_the_loss_falls_and_the_result_opens_in_transformers(runs):
    losses = runs.log("trained", "eval_loss")
    assert losses[0] == NO_PREFERENCE and losses[-1] < 0.45
    assert runs.log("trained", "eval_rewards/accuracies")[-1] > 0.8
    runs.check_opened("trained", AutoModelForCausalLM.from_pretrained(runs.folder / "trained"))
    assert "chosen preferred" in runs.of("trained")


def test_a_run_resumed_in_the_middle_has_the_same_end(runs):
    runs.check_resumed()


def test_an_adapter_is_its_own_reference(runs):
    before, after = runs.log("lora", "eval_loss")
    assert before == NO_PREFERENCE and after < before
    assert "reference: the same checkpoint in float32, sharded alike and not trained\n" in runs.of("trained")
    assert "reference" not in runs.of("lora") and runs.of("trained").count("rank 0 read") == 1
    assert "is_gradient_checkpointing" not in runs.stderr
    for folder in (runs.folder / "lora", runs.folder / "lora" / "merged"):
        runs.check_opened("lora", AutoModelForCausalLM.from_pretrained(folder))


def test_values_of_the_reference_computed_before_are_the_same_and_so_are_compiled_blocks(runs):
    assert runs.log("precomputed", "loss") == pytest.approx(runs.log("trained", "loss")[:2], rel=1e-5)
    assert "compiled: model.layers.0 model.layers.1\n" in runs.of("precomputed")
    assert "compiled: none\n" in runs.of("trained")


def test_a_prompt_may_stand_in_both_answers(runs):
    assert runs.log("implicit", "loss") == [NO_PREFERENCE]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("same", "`chosen` equals `rejected`"),
        ("streamed", "--precompute_ref_log_probs writes its values beside the data set"),
    ],
)
def test_errors_come_before_the_model(runs, run, message):
    assert message in runs.error(run)
