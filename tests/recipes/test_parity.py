"""Each recipe in one process has the losses of the library that it uses, alone: same rows, seed and settings.

On two ranks: `tests/ranks/test_trl.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from hf_fsdp_tools.scripting.demo import demo_rows, make_demo_model
from tests._dist import LIMIT_S
from tests.recipes._launch import ROOT, write_lines

trl = pytest.importorskip("trl")

SCRIPT = """
import os, runpy, sys
from json import loads

from accelerate.state import AcceleratorState, GradientState, PartialState

series = sys.argv[1:]
environment = dict(os.environ)
PartialState.destroy_process_group = lambda *_: None  # one group for the series
for recipe, arguments in map(loads, series):
    sys.argv = [recipe, *arguments]
    runpy.run_path(recipe)["main"]()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
sys.stdout.flush()
os._exit(0)
"""

SETTINGS = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}

KINDS = {"finetune": "text", "dpo": "preferences", "reward": "preferences", "classify": "classes"}

NUM_LABELS = {"reward": 1, "classify": 4}

LENGTH = 192


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Any]:
    """Of each recipe a model, with a head where one is needed, and rows; all recipes have been run on them."""
    folder = tmp_path_factory.mktemp("parity")
    base = make_demo_model(folder / "model", hidden_size=64, num_layers=2)
    found, series = {}, []
    for recipe, kind in KINDS.items():
        model = str(base)
        if recipe in NUM_LABELS:  # where it is fresh, its values are ours
            model = str(folder / f"{recipe}-model")
            AutoModelForSequenceClassification.from_pretrained(base, num_labels=NUM_LABELS[recipe]).save_pretrained(
                model
            )
            AutoTokenizer.from_pretrained(base).save_pretrained(model)
        data = write_lines(folder / f"{recipe}.jsonl", demo_rows(kind)[:512:32])
        found[recipe] = {"model": model, "data": data, "folder": folder / recipe}
        settings = SETTINGS | {"max_length": LENGTH, "model_name_or_path": model, "dataset_name": data}
        arguments = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
        path = str(ROOT / "recipes" / f"{recipe}.py")
        series.append(json.dumps([path, [*arguments, "--output_dir", str(folder / recipe)]]))
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    (folder / "series.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "series.py"), *series]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | told, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return found


def plain_trainer(recipe: str, model: str, data: str, folder: Path) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=data, cache_dir=str(folder / "cache"))["train"]
    settings = {**SETTINGS, "output_dir": str(folder)}
    if recipe == "classify":
        names = sorted(set(rows["label"]))
        encoded = [
            {**tokenizer(row["text"], truncation=True, max_length=LENGTH), "labels": names.index(row["label"])}
            for row in rows
        ]
        loaded = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names))
        return Trainer(loaded, TrainingArguments(**settings), train_dataset=encoded, processing_class=tokenizer)
    kind, config, auto = {
        "finetune": (trl.SFTTrainer, trl.SFTConfig, AutoModelForCausalLM),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, AutoModelForCausalLM),
        "reward": (trl.RewardTrainer, trl.RewardConfig, AutoModelForSequenceClassification),
    }[recipe]
    args = config(**settings, bf16=False, max_length=LENGTH)
    return kind(model=auto.from_pretrained(model), args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_recipe_has_the_losses_of_its_library_alone(sources, tmp_path, recipe):
    source = sources[recipe]
    trainer = plain_trainer(recipe, source["model"], source["data"], tmp_path)
    trainer.train()
    ours = json.loads((source["folder"] / "trainer_state.json").read_text())["log_history"]
    theirs = trainer.state.log_history
    for key in ("loss", "grad_norm"):
        found, expected = ([entry[key] for entry in log if key in entry] for log in (ours, theirs))
        assert len(expected) == SETTINGS["max_steps"]
        assert found == pytest.approx(expected, rel=1e-5), key
