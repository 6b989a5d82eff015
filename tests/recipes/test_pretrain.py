"""Continued pre-training on a stream and on packed files, and from a configuration, launched on two ranks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.scripting.demo import make_demo_model
from hf_fsdp_tools.sharding.allocate import allocate
from tests._checkpoints import assert_same_model
from tests.recipes._launch import PROBE, Series, launch_series, three_runs, write_lines


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
    """Streams of three files (rows are divided among two ranks) and of two (files are); the last run packs with OPT."""
    folder = tmp_path_factory.mktemp("pretrain")
    model = str(make_demo_model(folder / "demo", hidden_size=64, num_layers=2))
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1}
    opt = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=2, word_embed_proj_dim=32, max_position_embeddings=64))
    opt.save_pretrained(folder / "opt")
    tokenizer.save_pretrained(folder / "opt")
    three, two = files(folder / "three", 3), files(folder / "two", 2)
    common = ["--per_device_train_batch_size", "2", "--max_length", "48", "--logging_steps", "1"]
    stream = ["--dataset_streaming", "--lr_scheduler_type", "constant"]
    ours = ["--model_name_or_path", model, *common]
    runs = three_runs(folder, 4, *ours, *stream, "--dataset_name", three, learning_rate=1e-2)
    runs["drawn"] = [*ours, *stream, "--from_scratch", "--dataset_name", two, "--max_steps", "1", "--seed", "7"]
    runs["drawn"] += ["--learning_rate", "0", "--eval_strategy", "no"]
    runs["whole"] = [*ours, "--dataset_name", two, "--num_train_epochs", "1", "--learning_rate", "1e-2"]
    wrong = ["--model_name_or_path", str(folder / "opt"), *common, *stream, "--dataset_name", two, "--max_steps", "1"]
    done = launch_series(folder, "pretrain.py", runs, wrong=wrong)
    assert done.code == 1, done.said[-4000:]
    return done


def probed(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(PROBE["input_ids"])).logits


def test_the_loss_falls_and_without_a_learning_rate_it_does_not(series):
    before, after = series.losses("trained")
    assert after < before - 1.0
    before, after = series.losses("still")
    assert after == before
    before, after = series.losses("whole")
    assert after < before - 1.0, "packed before training, in one epoch"


def test_a_run_resumed_in_its_middle_ends_as_the_one_that_was_not_stopped(series):
    torch.testing.assert_close(series.logits("resumed"), series.logits("trained"), rtol=1e-5, atol=1e-6)
    losses = [
        [entry["loss"] for entry in series.state(name)["log_history"] if "loss" in entry]
        for name in ("trained", "resumed")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the same rows in each step"


@pytest.mark.parametrize("name", ["trained", "whole"])
def test_what_was_saved_opens_in_plain_transformers_and_is_what_was_trained(series, name):
    opened = AutoModelForCausalLM.from_pretrained(series.folder / name)
    torch.testing.assert_close(probed(opened), series.logits(name), rtol=1e-4, atol=1e-4)


def test_a_model_drawn_on_two_ranks_is_the_one_that_one_process_draws(series):
    config = json.loads((series.folder / "demo" / "config.json").read_text())
    alone = build_meta_model(series.folder / "demo", dtype=torch.float32)
    allocate(alone, device=torch.device("cpu"))
    initialize_missing(alone, missing_keys={name for name, _ in alone.named_parameters()}, seed=7)
    drawn = AutoModelForCausalLM.from_pretrained(series.folder / "drawn")
    assert_same_model(drawn, alone)
    assert drawn.config.num_hidden_layers == config["num_hidden_layers"]
    given = AutoModelForCausalLM.from_pretrained(series.folder / "demo")
    assert not torch.equal(drawn.lm_head.weight, given.lm_head.weight), "nothing of the checkpoint"
    assert "new weights, drawn with the seed 7" in series.of("drawn") and "read per rank" not in series.of("drawn")


def test_a_model_that_sees_other_documents_in_a_packed_row_is_refused_in_one_line(series):
    errors = [line for line in series.said.splitlines() if line.startswith("pretrain: error:")]
    assert len(errors) == 1
    assert "OPTForCausalLM" in errors[0] and "sees the documents before its own" in errors[0]
    assert 'pretrain.py", line' not in series.said, "no traceback of ours"
