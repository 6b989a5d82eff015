"""Hub names, downloaded for real by huggingface_hub from a small hub on this machine."""

import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import CheckpointError, from_pretrained, load_adapter
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import full_state, make_checkpoint, refusal
from tests._dist import run_cases, run_ranks
from tests._hub import commit_of, fake_hub, impatient, use_hub


def assert_equal(model: torch.nn.Module, folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for key, tensor in full_state(model).items():
        assert torch.equal(tensor, expected[key]), key


@contextmanager
def short_sleeps() -> Iterator[list[float]]:
    """huggingface_hub's pauses before another try that were asked for; each is cut to 0.1 s."""
    asked: list[float] = []
    sleep = time.sleep
    with patch("time.sleep", lambda s: (asked.append(s), sleep(min(s, 0.1)))):
        yield asked


def in_short(case: Callable[..., Any], *args: Any) -> None:
    with short_sleeps():
        case(*args)


def names_revisions_and_adapters(main: Path, tagged: Path, url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = from_pretrained("org/model")
        assert_equal(model, main)
        assert model.config._name_or_path == "org/model" and model.config._commit_hash == commit_of("main")
        assert model.generation_config.max_new_tokens == 17
        assert_equal(from_pretrained("org/model", revision="v1"), tagged)
        assert_equal(from_pretrained("org/model", revision=commit_of("v1")), tagged)
        assert_equal(from_pretrained("org/kept", subfolder="inner"), main)
    adapted = from_pretrained("org/adapter").state_dict()
    added = {key: tensor for key, tensor in adapted.items() if "lora_" in key}
    for key, expected in load_file(main.with_name("adapter") / "adapter_model.safetensors").items():
        assert torch.equal(added.pop(key.replace(".weight", ".default.weight")).full_tensor(), expected), key
    assert not added
    with pytest.raises(CheckpointError, match=r"No adapter_config.json in 'org/model'. Give a folder"):
        load_adapter(from_pretrained("org/model"), "org/model")


def without_the_network(main: Path, tagged: Path, url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equal(from_pretrained("org/model", local_files_only=True), main)
        with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            assert_equal(from_pretrained("org/model"), main)
            assert "OfflineModeIsEnabled" in refusal(lambda: from_pretrained("org/other"))
    assert "LocalEntryNotFoundError" in refusal(lambda: from_pretrained("org/other", local_files_only=True))


def a_push_between_two_nodes(main: Path, tagged: Path, url: str) -> None:
    """The hub answers one node before the push, and the other after it."""
    ours = {"revision": ("main", "v1")[dist.get_rank()]}
    with patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        for get in (partial(from_pretrained, "org/model"), partial(load_weights, build_meta_model(main), "org/model")):
            message = refusal(partial(get, **ours))
            assert "'org/model' is not the same on all nodes" in message
            found = [rf"{commit_of(name)} \(host \S+\) on rank {rank}" for rank, name in enumerate(("main", "v1"))]
            assert re.search(", ".join(found), message), message
            get(revision="main")


def refusals(main: Path, tagged: Path, url: str) -> None:
    message = refusal(lambda: from_pretrained("org/model", revision="v9"))
    assert "'org/model' at revision 'v9'" in message and "RevisionNotFoundError" in message
    refused = {"org/private": "RepositoryNotFoundError: 401", "org/absent": "RepositoryNotFoundError: 404"}
    for name, said in (refused | {"org/gated": "403", "org/broken": "503", "org/resets": "ReadError"}).items():
        message = refusal(lambda name=name: from_pretrained(name))
        assert said in message and "private or gated, the token (`hf auth login`); or download it" in message, message
    assert_equal(from_pretrained("org/private", token="secret"), main)
    assert "No config.json in 'org/empty'" in refusal(lambda: from_pretrained("org/empty"))
    with impatient("ETAG"):
        assert "Timeout" in refusal(lambda: from_pretrained("org/silent"))


def a_hub_that_falls_silent(main: Path, tagged: Path, url: str) -> None:
    """In the middle of a file; and it answers nothing from here on."""
    with impatient("DOWNLOAD"):
        message = refusal(lambda: from_pretrained("org/silences"))
    assert "'org/silences'" in message and "ReadTimeout" in message
    with impatient("ETAG"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(from_pretrained("org/kept", subfolder="inner"), main)
    said = [str(warning.message) for warning in caught if "did not give" in str(warning.message)]
    assert len(said) == (dist.get_rank() == 0), "the first rank of a node asks, once, and says it"
    assert all("'org/kept' (ReadTimeout" in text and "Using what is cached, in " in text for text in said)


CASES = (
    names_revisions_and_adapters,
    without_the_network,
    a_push_between_two_nodes,
    refusals,
    a_hub_that_falls_silent,
)
NAMES = {case.__name__: partial(in_short, case) for case in CASES}


def use_and_run(url: str, home: Path, cases: Any, *args: Any) -> None:
    use_hub(url, home)
    run_cases(cases, *args)


def test_hub_names_on_two_ranks(tmp_path: Path) -> None:
    main, tagged = make_checkpoint("llama", tmp_path / "main"), make_checkpoint("llama", tmp_path / "tagged", seed=1)
    (main / "generation_config.json").write_text('{"max_new_tokens": 17}')
    (main / "consolidated.safetensors").write_bytes(b"named by no index")
    # One file: of several, one may still be asked for when the hub falls silent, which takes huggingface_hub 6 minutes.
    AutoModelForCausalLM.from_pretrained(main).save_pretrained(tmp_path / "single")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(main), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.peft_config["default"].base_model_name_or_path = "org/model"
    adapted.save_pretrained(tmp_path / "adapter")
    shutil.copy(main / "config.json", tmp_path / "adapter")  # as Axolotl leaves it
    shutil.copytree(main, tmp_path / "kept" / "inner")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("")
    repositories = {
        "org/model": {"main": main, "v1": tagged},
        "org/adapter": {"main": tmp_path / "adapter"},
        "org/private": {"main": main},
        "org/kept": {"main": tmp_path / "kept"},
        "org/empty": {"main": tmp_path / "empty"},
    }
    moods = {"org/silences": ("silences", 99), "org/broken": ("HTTP 503", 99), "org/resets": ("resets", 99)}
    repositories |= {name: {"main": tmp_path / "single"} for name in moods}
    with fake_hub(repositories, moods) as server:
        run_ranks(use_and_run, 2, server.url, tmp_path / "home", NAMES, main, tagged, server.url)
        files = {f.name for f in main.glob("model-*.safetensors")}
        for name, revisions in (("org/model", 2), ("org/private", 1)):
            counts = {server.requests["GET", name, file] for file in files}
            assert counts == {revisions}, "each revision, once for both ranks"
        assert server.requests["GET", "org/adapter", "adapter_model.safetensors"] == 1
        # One rank alone asks; after a hub that did not answer, the cache is used without asking again.
        assert server.requests["GET", "org/kept", ""] <= 7
