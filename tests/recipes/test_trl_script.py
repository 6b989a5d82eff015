"""The README's second example: TRL's own script with three lines of ours trains as it does alone on one process."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests._documents import blocks
from tests.api import make_demo_model
from tests.recipes._launch import launch_series, write_split

sft = pytest.importorskip("trl.scripts.sft")

OPTIONS = ["--use_cpu", "--bf16", "false", "--dtype", "float32", "--max_steps", "2", "--save_steps", "2"]
OPTIONS += ["--max_length", "64", "--learning_rate", "1e-3", "--logging_steps", "1", "--report_to", "none"]


def with_the_lines_of_the_readme(script: str) -> str:
    (diff,) = blocks("README.md", "diff")
    assert len(re.findall(r"^\+", diff.text, re.MULTILINE)) == 3
    for part in re.split(r"^@@.*\n", diff.text, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert script.count(before) == 1, f"TRL's script does not have {before!r}"
        script = script.replace(before, after)
    return script


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_the_readmes_three_lines_in_trls_script(tmp_path, monkeypatch):
    make_demo_model(tmp_path / "model", hidden_size=16, num_layers=2, vocab_size=400, max_length=256)
    rows = [{"text": " ".join(["words"] * (number % 5 + 1) + [f"of row {number}"])} for number in range(24)]
    options = ["--model_name_or_path", "model", "--dataset_name", write_split(tmp_path / "rows", rows), *OPTIONS]
    source, script = Path(sft.__file__), tmp_path / "sft.py"
    script.write_text(with_the_lines_of_the_readme(source.read_text()))

    shared = [str(script), *options, "--per_device_train_batch_size", "2"]
    launch_series(tmp_path, {"shared": shared}).of("shared")
    assert "checkpoint_manifest.json" in {path.name for path in (tmp_path / "shared" / "checkpoint-2").iterdir()}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    alone = [*options, "--output_dir", "alone", "--per_device_train_batch_size", "4"]
    monkeypatch.setattr(sys, "argv", [str(source), *alone])
    runpy.run_path(str(source), run_name="__main__")

    torch.testing.assert_close(losses(tmp_path / "shared"), losses(tmp_path / "alone"), rtol=1e-5, atol=1e-5)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "shared"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
