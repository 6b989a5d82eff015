"""The loop without a Trainer: launched on two ranks, resumed within an epoch, and compared with plain PyTorch."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from hf_fsdp_tools.scripting.demo import make_demo_model
from tests.recipes._launch import Series, launch, launch_series, two_runs, write_lines

EIGHT = [{"text": f"{n} and then {n + 1}. " * (1 + n % 4)} for n in range(8)]
"""Rows of 4 to 20 tokens: as many as the two ranks take in a step, in two micro-batches of two rows each."""

STEPS = 4


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    """Epochs of five steps, of which six are done: the middle lies within an epoch, and the end in the next."""
    folder = tmp_path_factory.mktemp("loop")
    model = str(make_demo_model(folder / "demo", hidden_size=64, num_layers=2))
    rows = [{"text": f"{n} and then {n + 1}. " * (1 + n % 5)} for n in range(43)]
    for name, train in (("many", rows[:40]), ("eight", EIGHT)):
        (folder / name).mkdir()
        write_lines(folder / name / "train.jsonl", train)
        write_lines(folder / name / "test.jsonl", rows[40:])
    common = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    common += ["--logging_steps", "1"]
    runs = two_runs(folder, 6, *common, "--dataset_name", str(folder / "many"), learning_rate=2e-2)
    runs["compared"] = [*common, "--dataset_name", str(folder / "eight"), "--max_steps", str(STEPS)]
    runs["compared"] += ["--learning_rate", "1e-2"]
    wrong = ["--model_name_or_path", model, "--dataset_name", write_lines(folder / "wrong.jsonl", [{"txt": ""}] * 9)]
    done = launch_series(folder, "accelerate_loop.py", runs, wrong=wrong)
    assert done.code == 1, done.stderr[-4000:]
    return done


def plain_loss(model, tokenizer, rows: list[dict[str, str]]) -> torch.Tensor:
    """The mean over all tokens of all rows, by one process."""
    batch = tokenizer([row["text"] + tokenizer.eos_token for row in rows], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_loss_falls(series):
    before, after = series.losses("trained")
    assert after < before - 1.0
    line = r"^6/6  loss \S+  grad_norm \S+  tokens_per_second [\d.]+$"
    assert re.search(line, series.of("trained"), re.MULTILINE)


def test_it_trains_as_plain_pytorch_does_on_all_rows_at_once(series):
    """Rows of unequal lengths in micro-batches on two ranks: the gradient of the mean over all of their tokens."""
    model = AutoModelForCausalLM.from_pretrained(series.folder / "demo").train()
    tokenizer = AutoTokenizer.from_pretrained(series.folder / "demo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, 10, STEPS)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = plain_loss(model, tokenizer, EIGHT)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    printed = re.findall(r"loss (\S+)  grad_norm (\S+)", series.of("compared"))
    assert [float(loss) for loss, _ in printed] == pytest.approx(losses, rel=1e-4)
    assert [float(norm) for _, norm in printed] == pytest.approx(norms, rel=1e-3), "which AdamW would not show"
    series.check_opened("compared", model)


def test_rows_that_fill_up_the_last_batch_count_once_in_the_evaluation(series):
    model = AutoModelForCausalLM.from_pretrained(series.folder / "demo")
    tokenizer = AutoTokenizer.from_pretrained(series.folder / "demo")
    rows = [{"text": f"{n} and then {n + 1}. " * (1 + n % 5)} for n in range(40, 43)]
    with torch.no_grad():
        expected = plain_loss(model, tokenizer, rows).item()
    assert series.losses("trained")[0] == pytest.approx(expected, abs=1e-3)


def test_a_run_resumed_within_an_epoch_ends_as_the_one_that_was_not_stopped(series):
    torch.testing.assert_close(series.logits("resumed"), series.logits("trained"), rtol=1e-5, atol=1e-6)
    losses = {
        name: re.findall(r"^(\d)/6  loss (\S+)", series.of(name), re.MULTILINE) for name in ("trained", "resumed")
    }
    assert losses["resumed"] == losses["trained"][3:], "the same rows in each step"


def test_what_was_saved_opens_in_plain_transformers_and_is_what_was_trained(series):
    opened = AutoModelForCausalLM.from_pretrained(series.folder / "trained")
    series.check_opened("trained", opened)
    assert len(AutoTokenizer.from_pretrained(series.folder / "trained")) == opened.config.vocab_size


def test_bad_input_gets_one_clear_line(series):
    errors = [line for line in series.stderr.splitlines() if line.startswith("accelerate_loop: error:")]
    assert len(errors) == 1 and "has the columns txt" in errors[0]
    assert 'accelerate_loop.py", line' not in series.stderr


LATE = """
import os, time
from pathlib import Path
from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.scripting import run

sleep = time.sleep

def noting_sleep(seconds):
    Path("waits").touch()
    sleep(seconds)

def main():
    while os.environ["RANK"] == "0" and not Path("waits").exists():
        sleep(0.05)
    time.sleep = noting_sleep
    raise ConfigError("no such column")

run(main, "late")
"""


def test_the_line_is_said_by_a_rank_that_comes_to_the_error_last(tmp_path):
    """The launcher ends all processes a moment after one of them has ended."""
    (tmp_path / "late.py").write_text(LATE)
    done = launch(tmp_path, script=tmp_path / "late.py")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("late: ")] == ["late: error: no such column"]
