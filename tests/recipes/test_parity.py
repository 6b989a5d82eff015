"""A recipe of TRL's trainer and one of transformers' have the losses of their library alone: same rows, seed, settings.

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

KINDS = {"finetune": "text", "classify": "classes"}

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


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("parity") / "model", hidden_size=32, num_layers=2)


def plain_trainer(recipe: str, model: str, data: str, folder: Path) -> hf.Trainer:
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=data, cache_dir=str(folder / "cache"))["train"]
    settings = {**SETTINGS, "output_dir": str(folder)}
    if recipe == "classify":
        names = sorted(set(rows["label"]))
        cut = {"truncation": True, "max_length": LENGTH}
        encoded = [{**tokenizer(row["text"], **cut), "labels": names.index(row["label"])} for row in rows]
        loaded = hf.AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names))
        return hf.Trainer(loaded, hf.TrainingArguments(**settings), train_dataset=encoded, processing_class=tokenizer)
    args = trl.SFTConfig(**settings, bf16=False, max_length=LENGTH)
    loaded = hf.AutoModelForCausalLM.from_pretrained(model)
    return trl.SFTTrainer(model=loaded, args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("recipe", ["finetune", pytest.param("classify", marks=pytest.mark.nightly)])
def test_a_recipe_has_the_losses_of_its_library_alone(base, alone, tmp_path, monkeypatch, recipe):
    model = str(base)
    if recipe == "classify":  # where a head is fresh, its values are ours
        model = str(tmp_path / "model")
        hf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=4).save_pretrained(model)
        hf.AutoTokenizer.from_pretrained(base).save_pretrained(model)
    data = write_lines(tmp_path / "rows.jsonl", demo_rows(KINDS[recipe])[:512:32])
    source = {"model_name_or_path": model, "dataset_name": data}
    settings = SETTINGS | source | {"max_length": LENGTH, "output_dir": "ours"}
    options = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", [recipe, *options])
    runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["main"]()
    alone()
    trainer = plain_trainer(recipe, model, data, tmp_path / "plain")
    trainer.train()
    ours = json.loads((tmp_path / "ours" / "trainer_state.json").read_text())["log_history"]
    theirs = trainer.state.log_history
    for key in ("loss", "grad_norm"):
        found, expected = ([entry[key] for entry in log if key in entry] for log in (ours, theirs))
        assert len(expected) == SETTINGS["max_steps"]
        assert found == pytest.approx(expected, rel=1e-5), key
