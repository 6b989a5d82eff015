"""`grpo` as a user trains with it: rewards of a file of the user's, resumed to the bit, refused before the model."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import Series, launch_series, refused_runs, two_runs, write_split

pytest.importorskip("trl")

REWARDS = '''
from helper import AT_MOST

def short(completions, topic, **kwargs):
    """Longer answers are worse; the column `topic` is there."""
    assert len(topic) == len(completions)
    return [-min(AT_MOST, len(each[-1]["content"])) / AT_MOST for each in completions]

def by_answer(completions, answer, **kwargs):
    return [0.0] * len(completions)
'''

STREAMED = "--dataset_streaming --max_steps 2"
REFUSED = {
    "nothing": ("bare", "", "Nothing rewards an answer. Give --reward_funcs"),
    "unknown": ("bare", "--reward_funcs think_format_rewards", "did you mean think_format_reward"),
    "no-function": ("bare", "--reward_funcs {file}:shor", "my_rewards.py has no function 'shor': did you mean short"),
    "by-answer": ("bare", "--reward_funcs {file}:by_answer", "takes `answer`, which the rows do not have"),
    "weights": ("grpo", "--reward_weights 1 2", "--reward_weights: give one for each reward, of which there are 1"),
    "headless": ("bare", "--reward_model_name_or_path {folder}/model", "its files have no head that gives a score"),
    "streamed": ("grpo", f"{STREAMED} --eval_strategy no", "--dataset_streaming gives each process rows of its own"),
    "uneven": ("grpo", "--num_generations 3", "must be divisible by the number of generations"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "helper.py").write_text("AT_MOST = 200\n")
    rows = [{**row, "topic": "python"} for row in demo_rows("prompts")[:512:32]]
    data = write_split(folder / "rows", rows, rows[:4])
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2, max_length=256))
    bare = ["grpo", "--model_name_or_path", model, "--dataset_name", data, "--logging_steps", "1"]
    bare += ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "4", "--num_generations", "4"]
    bare += ["--max_completion_length", "8", "--lr_scheduler_type", "constant"]
    bare += ["--eval_strategy", "steps", "--eval_steps", "100"]
    grpo = [*bare, "--reward_funcs", f"{folder}/my_rewards.py:short"]
    runs = two_runs(folder, "grpo", 4, *grpo, learning_rate=1e-2)
    lora = ["--use_peft", "--lora_r", "4", "--merge_adapters", "--beta", "0.1"]
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    shutil.copytree(folder / "model", folder / "scorer")  # with its tokenizer
    scorer.save_pretrained(folder / "scorer")
    lora += ["--reward_model_name_or_path", str(folder / "scorer")]
    runs["lora"] = [*grpo, *lora, "--max_steps", "2", "--learning_rate", "3e-3", "--eval_strategy", "no"]
    runs["lora"] += ["--save_strategy", "no"]
    refused = refused_runs(REFUSED, {"bare": bare, "grpo": grpo}, file=f"{folder}/my_rewards.py", folder=folder)
    return launch_series(folder, runs, refused=refused)


@pytest.mark.parametrize("run", REFUSED)
def test_errors_come_before_the_model(runs, run):
    assert REFUSED[run][-1] in runs.error(run)


def test_the_reward_of_a_file_is_told_and_the_checkpoint_is_plain(runs):
    assert len(runs.log("grpo", "reward")) == 4 and all(-1 <= each < 0 for each in runs.log("grpo", "reward"))
    assert "evaluation reward" in runs.of("grpo") and runs.of("grpo").count("rank 0 read") == 1
    runs.check_opened("grpo", AutoModelForCausalLM.from_pretrained(runs.folder / "grpo"))


def test_resumed_in_the_middle_it_has_the_same_end(runs):
    runs.check_resumed("grpo")
    assert runs.log("grpo-resumed", "reward") == runs.log("grpo", "reward")


def test_an_adapter_learns_from_a_reward_model_beside_its_base(runs):
    assert runs.log("lora", "kl")[0] == pytest.approx(0, abs=1e-6) and len(runs.log("lora", "kl")) == 2
    runs.check_opened("lora", AutoModelForCausalLM.from_pretrained(Path(runs.folder, "lora", "merged")))
