"""Each public name shows its use, and the examples run: in one process, on the CPU, from a small checkpoint."""

import doctest
import inspect
import json
import sys
import warnings

import pytest
import torch

import hf_fsdp_tools
from hf_fsdp_tools import scripting, steps
from hf_fsdp_tools.extensions import fsdp1
from tests._checkpoints import make_checkpoint

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

COMMAND = """train.py --model_name_or_path checkpoint --dataset_name rows.jsonl --max_steps 2 --max_length 64
    --per_device_train_batch_size 2 --output_dir outputs/mine --use_cpu true --disable_tqdm true"""
"""How the scripts of the examples for own scripts are started."""


DEAR = ("FSDPTrainerMixin", "TrainingSetup", "finish", "recommend_config", "train")
"""Names whose examples train or search."""


def in_each_commit_or_nightly(names):
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in DEAR)) for name in names]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """The folder in which examples run: `checkpoint` is a small Llama."""
    folder = tmp_path_factory.mktemp("examples")
    make_checkpoint("llama", folder / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def beside_a_script(tmp_path_factory):
    """The folder of an own script: besides, rows of text; the checkpoint has a tokenizer."""
    from tests.api import make_demo_model

    folder = tmp_path_factory.mktemp("script")
    sizes = {"hidden_size": 16, "num_layers": 1, "vocab_size": 400}
    make_demo_model(folder / "checkpoint", **sizes, max_length=256)
    rows = [{"text": f"words of row {number}"} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def runs(name, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = inspect.getdoc(names[name]) or ""
    (example,) = [doctest.DocTestParser().get_doctest(text, names, name, None, 0)]
    assert any(name in each.source for each in example.examples), f"{name} has no example in its docstring"
    output = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=output.append)
    assert not failed, "".join(output)


@pytest.mark.parametrize("name", in_each_commit_or_nightly([*hf_fsdp_tools.__all__, *steps.__all__, *fsdp1.__all__]))
def test_the_example_of_a_public_name_runs(name, where, monkeypatch):
    names = {each: getattr(hf_fsdp_tools, each) for each in hf_fsdp_tools.__all__} | {"torch": torch}
    names |= {each: getattr(steps, each) for each in steps.__all__}
    names |= {each: getattr(fsdp1, each) for each in fsdp1.__all__}
    runs(name, names, where, monkeypatch)


@pytest.mark.parametrize("name", in_each_commit_or_nightly(scripting.__all__))
def test_the_example_of_a_name_for_scripts_runs(name, beside_a_script, monkeypatch, tmp_path):
    import trl

    monkeypatch.setattr(sys, "argv", COMMAND.split())
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    names = {each: getattr(hf_fsdp_tools, each) for each in hf_fsdp_tools.__all__}
    names |= {each: getattr(scripting, each) for each in scripting.__all__}
    names |= {each: getattr(trl, each) for each in ("ScriptArguments", "SFTConfig", "SFTTrainer")}
    runs(name, names, beside_a_script, monkeypatch)
