"""What a name means: a local path or a repository on the hub, alike for every function that takes one."""

import os
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import CheckpointError, from_pretrained, load_adapter
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import make_checkpoint
from tests.api import CheckpointIndex


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path / "model"))
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    return tmp_path


def test_a_path_is_local_where_it_exists_or_can_be_no_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert local_path("~/model") == home / "model" and local_path("~/absent") == home / "absent"
    assert local_path("model") == Path("model") and local_path(home / "model") == home / "model"
    assert local_path("~nosuchuser/model") == Path("~nosuchuser/model")
    assert [local_path(name) for name in ("gpt2", "org/model")] == [None, None]
    assert all(local_path(name) for name in ("./gpt2", "../gpt2", "/gpt2", "a/b/c", ".\\gpt2"))
    os.makedirs("org/model")
    assert local_path("org/model") == Path("org/model")
    load_adapter(from_pretrained("~/model"), "~/adapter")
    assert not load_weights(build_meta_model("~/model"), "~/model").missing_keys
    for use in (from_pretrained, build_meta_model, CheckpointIndex.open):
        with pytest.raises(CheckpointError, match=r"name of a checkpoint is empty \(''\)\. Give a local folder"):
            use("")
        with pytest.raises(CheckpointError, match=r"No such folder.*absent"):
            use("~/absent")
