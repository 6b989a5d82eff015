"""A recipe of TRL's trainer has the losses of its library alone: same rows, seed, settings.

Others, and two ranks: `tests/ranks/test_trl.py`.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import transformers as hf
from datasets import load_dataset

from hf_fsdp_tools.testing import forget_accelerate
from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import ROOT, write_lines

trl = pytest.importorskip("trl")

SETTINGS = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}

LENGTH = 64


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def forget() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_accelerate()

    forget()
    yield forget
    forget()


def plain_trainer(model: str, data: str, folder: Path) -> hf.Trainer:
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=data, cache_dir=str(folder / "cache"))["train"]
    settings = {**SETTINGS, "output_dir": str(folder)}
    args = trl.SFTConfig(**settings, bf16=False, max_length=LENGTH)
    loaded = hf.AutoModelForCausalLM.from_pretrained(model)
    return trl.SFTTrainer(model=loaded, args=args, train_dataset=rows, processing_class=tokenizer)


def test_a_recipe_has_the_losses_of_its_library_alone(alone, tmp_path, monkeypatch):
    model = str(make_demo_model(tmp_path / "model", hidden_size=32, num_layers=2))
    data = write_lines(tmp_path / "rows.jsonl", demo_rows("text")[:512:32])
    source = {"model_name_or_path": model, "dataset_name": data}
    settings = SETTINGS | source | {"max_length": LENGTH, "output_dir": "ours"}
    options = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["finetune", *options])
    runpy.run_path(str(ROOT / "recipes" / "finetune.py"))["main"]()
    alone()
    trainer = plain_trainer(model, data, tmp_path / "plain")
    trainer.train()
    ours = json.loads((tmp_path / "ours" / "trainer_state.json").read_text())["log_history"]
    theirs = trainer.state.log_history
    for key in ("loss", "grad_norm"):
        found, expected = ([entry[key] for entry in log if key in entry] for log in (ours, theirs))
        assert len(expected) == SETTINGS["max_steps"]
        assert found == pytest.approx(expected, rel=1e-5), key
