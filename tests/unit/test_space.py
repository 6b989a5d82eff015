"""The page for people who do not install: its answers, and a click on it in a browser."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests._checkpoints import make_model

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "space"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    import app

    return app


@pytest.fixture
def config() -> str:
    made = make_model("llama").config
    return json.dumps(made.to_dict() | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096})


def test_an_answer_has_memory_speed_and_the_command(app, config: str) -> None:
    method = "all weights, 8-bit AdamW in bf16"
    said, rows, command = app.answer("", config, "h200-141gb", "2", "64", "1k", method, False)
    assert said.startswith("### fits: ") and " tokens/s** on each GPU in an optimised loop (" in said
    assert rows[0][1] >= rows[-1][1] > 0 and {"CUDA context", "activations"} <= {part for part, _ in rows}
    words = "hf-fsdp search config.json --gpu h200-141gb --num-processes 2 --max-length 64 --optimizer adamw_8bit"
    assert command == f"{words} --master-dtype bf16 --output run.yaml"
    assert app.answer("", config, "rtx-4090", "1", "64", "9999999", "LoRA", False)[0].startswith("### does not fit: ")


@pytest.mark.parametrize(
    ("model", "config", "gpus", "message"),
    [
        ("me/gated", "", "8", "### No checkpoint 'me/gated': "),
        ("", '{"hidden_size": 64}', "8", '### This config.json has no "model_type"'),
        ("", "{", "8", "### This is no config.json: "),
        ("me and you", "", "8", "### Give a model's name on the hub"),
        ("", "[" * 100_000, "8", "### This is no config.json: "),
        (
            "",
            '{"model_type": "llama", "hidden_size": 1000000000}',
            "8",
            "### This config.json has 1,000,000,000, which",
        ),
        ("me/it", "", "eight", "### GPUs: 'eight' is no whole number above 0."),
    ],
)
def test_a_mistake_is_one_line(app, monkeypatch, tmp_path, model: str, config: str, gpus: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said, rows, command = app.answer(model, config, "h100-80gb", gpus, "64", "1", "LoRA", True)
    assert said.startswith(message) and "\n" not in said and rows == [] and command == ""


def test_the_requirements_name_the_wheel_of_this_version() -> None:
    version = metadata.version("hf-fsdp-tools")
    assert f"hf_fsdp_tools-{version}-py3-none-any.whl" in (FOLDER / "requirements.txt").read_text()
