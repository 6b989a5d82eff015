"""What a name means: a local path or a repository on the hub, alike for every function that takes one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import build_meta_model, from_pretrained, load_adapter, load_weights
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import HubTarget, local_path, upload_errors
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.text import first_line
from tests._checkpoints import make_checkpoint


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home folder, with a model and an adapter in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path / "model"))
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    yield tmp_path
    if dist.is_initialized():  # `from_pretrained` makes a group of one
        dist.destroy_process_group()


def test_a_path_is_local_where_it_exists_or_can_be_no_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert local_path("~/model") == home / "model" and local_path("~/absent") == home / "absent"
    assert local_path("model") == Path("model") and local_path(home / "model") == home / "model"
    assert local_path("~nosuchuser/model") == Path("~nosuchuser/model")
    assert [local_path(name) for name in ("gpt2", "org/model")] == [None, None]
    assert all(local_path(name) for name in ("./gpt2", "../gpt2", "/gpt2", "a/b/c", ".\\gpt2"))
    os.makedirs("org/model")
    assert local_path("org/model") == Path("org/model")


def use_everywhere(model_name: str, adapter_name: str) -> dict[str, Callable[[], Any]]:
    """Every function that takes a name."""
    return {
        "from_pretrained": lambda: from_pretrained(model_name),
        "from_pretrained, adapter": lambda: from_pretrained(adapter_name),
        "build_meta_model": lambda: build_meta_model(model_name),
        "load_weights": lambda: load_weights(build_meta_model(Path.home() / "model"), model_name),
        "CheckpointIndex.open": lambda: CheckpointIndex.open(model_name),
        "load_adapter": lambda: load_adapter(from_pretrained(Path.home() / "model"), adapter_name),
    }


@pytest.mark.parametrize("function", use_everywhere("", ""))
def test_every_function_takes_the_home_folder_and_refuses_an_empty_name(home: Path, function: str) -> None:
    use_everywhere("~/model", "~/adapter")[function]()
    with pytest.raises(
        CheckpointError, match=r"name of a checkpoint is empty \(''\)\. Give a local folder or a hub name"
    ):
        use_everywhere("", "")[function]()
    with pytest.raises(CheckpointError, match=r"(No such folder|No adapter_config\.json in).*absent"):
        use_everywhere("~/absent", "~/absent")[function]()


def test_a_model_in_the_home_folder_is_the_model(home: Path) -> None:
    model, expected = from_pretrained("~/model"), AutoModelForCausalLM.from_pretrained(home / "model")
    state = model.state_dict()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(state[key].full_tensor(), tensor), key
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n  It is wrong.\nAt length.")) == "It is wrong"
    assert first_line(EOFError()) == "EOFError"


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("HTTP status client error (403 Forbidden), domain: x", "with a token that may use it"),
        ("connection reset", "does not answer"),
    ],
)
def test_an_error_of_hf_xet_has_its_status_in_the_text(text: str, cure: str) -> None:
    said = rf"'out' is saved and complete.*{cure}.*Then upload it: `hf upload org/model out`\."
    with pytest.raises(CheckpointError, match=said), upload_errors(HubTarget(repo_id="org/model"), "out"):
        raise ConnectionError(f"Network error: {text}")
