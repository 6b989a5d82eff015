"""Which settings the recipe takes: those of the demo for the demo alone."""

import sys

import pytest

pytest.importorskip("trl")

DEMO = {"learning_rate": 2e-3, "max_length": 192, "num_train_epochs": 6}


def parsed():
    from trl import ScriptArguments, SFTConfig

    from hf_fsdp_tools.scripting import ModelArguments, parse_arguments

    return parse_arguments(ScriptArguments, SFTConfig, ModelArguments, demo=DEMO)


@pytest.mark.parametrize("way", ["--model_name_or_path", "--model-name-or-path", "--model_name", "file"])
def test_a_model_of_the_users_own_is_not_trained_with_the_settings_of_the_demo(way, tmp_path, monkeypatch):
    if way == "file":
        (tmp_path / "run.yaml").write_text("model_name_or_path: demo\ndataset_name: text.jsonl\n")
        arguments = ["--config", str(tmp_path / "run.yaml")]
    else:
        arguments = [way, "demo", "--dataset_name", "text.jsonl"]
    monkeypatch.setattr(
        sys, "argv", ["recipe.py", *arguments, "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    )
    _, training, _ = parsed()
    assert training.learning_rate < 1e-3 and training.max_length != 192 and training.num_train_epochs == 3


def test_the_demo_takes_its_settings_and_a_file_goes_before_them(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("num_train_epochs: 1\n")
    arguments = ["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    monkeypatch.setattr(sys, "argv", ["recipe.py", *arguments])
    _, training, _ = parsed()
    assert training.learning_rate == 2e-3 and training.max_length == 192 and training.num_train_epochs == 1
