"""Continued pre-training on a stream and on packed files, and from a configuration, launched on two ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.scripting.demo import make_demo_model
from hf_fsdp_tools.sharding.allocate import allocate
from tests._checkpoints import assert_same_model
from tests.recipes._launch import Series, launch_series, two_runs, write_lines


def files(folder, count: int) -> str:
    """A data set of as many files of 30 documents, of which some are longer than a row, and a file to evaluate on."""
    folder.mkdir()
    for number in range(count):
        rows = [{"text": f"{n} and then {n + number}. " * (1 + n % 9)} for n in range(30)]
        write_lines(folder / f"train-{number}.jsonl", rows)
    write_lines(folder / "test.jsonl", [{"text": f"{n} and then {n}. " * 3} for n in range(100, 108)])
    return str(folder)


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    """Streams of three files (rows are divided among two ranks) and of two (files are)."""
    folder = tmp_path_factory.mktemp("pretrain")
    model = str(make_demo_model(folder / "demo", hidden_size=64, num_layers=2))
    three, two = files(folder / "three", 3), files(folder / "two", 2)
    common = ["--per_device_train_batch_size", "2", "--max_length", "48", "--logging_steps", "1"]
    stream = ["--dataset_streaming", "--lr_scheduler_type", "constant"]
    ours = ["--model_name_or_path", model, *common]
    runs = two_runs(folder, 4, *ours, *stream, "--dataset_name", three, learning_rate=1e-2)
    runs["drawn"] = [*ours, *stream, "--from_scratch", "--dataset_name", two, "--max_steps", "1", "--seed", "7"]
    runs["drawn"] += ["--learning_rate", "0", "--eval_strategy", "no"]
    runs["whole"] = [*ours, "--dataset_name", two, "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    return launch_series(folder, "pretrain.py", runs)


def test_the_loss_falls(series):
    before, after = series.losses("trained")
    assert after < before - 1.0
    before, after = series.losses("whole")
    assert after < before - 1.0, "packed before training, in one epoch"


def test_a_run_resumed_in_its_middle_ends_as_the_one_that_was_not_stopped(series):
    series.check_resumed()


@pytest.mark.parametrize("name", ["trained", "whole"])
def test_what_was_saved_opens_in_plain_transformers_and_is_what_was_trained(series, name):
    series.check_opened(name, AutoModelForCausalLM.from_pretrained(series.folder / name))


def test_a_model_drawn_on_two_ranks_is_the_one_that_one_process_draws(series):
    alone = build_meta_model(series.folder / "demo", dtype=torch.float32)
    allocate(alone, device=torch.device("cpu"))
    initialize_missing(alone, missing_keys={name for name, _ in alone.named_parameters()}, seed=7)
    drawn = AutoModelForCausalLM.from_pretrained(series.folder / "drawn")
    assert_same_model(drawn, alone)
    given = AutoModelForCausalLM.from_pretrained(series.folder / "demo")
    assert not torch.equal(drawn.lm_head.weight, given.lm_head.weight), "nothing of the checkpoint"
    assert "not evaluated" in series.of("drawn") and not series.log("drawn", "eval_loss")
    assert "new weights, drawn with the seed 7" in series.of("drawn") and "rank 0 read" not in series.of("drawn")
