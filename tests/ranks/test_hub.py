"""Names on the hub: what a name means, what is downloaded for real by huggingface_hub from a small hub on this machine,
and what is uploaded to it from shards and downloaded again."""

import os
import re
import shutil
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, load_adapter, save_pretrained
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import full_state, lora, make_checkpoint, refusal
from tests._dist import run_cases, run_ranks
from tests._hub import FakeHub, commit_of, fake_hub, impatient, use_hub
from tests._training import ShardedTrainer, arguments, make_rows
from tests.api import CheckpointIndex

TOKEN = {"token": "secret"}


def assert_equal(model: torch.nn.Module, folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for key, tensor in full_state(model).items():
        assert torch.equal(tensor, expected[key]), key


def names_revisions_and_adapters(main: Path, tagged: Path) -> None:
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


def without_the_network(main: Path, tagged: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equal(from_pretrained("org/model", local_files_only=True), main)
        with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            assert_equal(from_pretrained("org/model"), main)
            assert "OfflineModeIsEnabled" in refusal(lambda: from_pretrained("org/other"))
    assert "LocalEntryNotFoundError" in refusal(lambda: from_pretrained("org/other", local_files_only=True))


def a_push_between_two_nodes(main: Path, tagged: Path) -> None:
    """The hub answers one node before the push, and the other after it."""
    ours = {"revision": ("main", "v1")[dist.get_rank()]}
    with patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        for get in (partial(from_pretrained, "org/model"), partial(load_weights, build_meta_model(main), "org/model")):
            message = refusal(partial(get, **ours))
            assert "'org/model' is not the same on all nodes" in message
            found = [rf"{commit_of(name)} \(host \S+\) on rank {rank}" for rank, name in enumerate(("main", "v1"))]
            assert re.search(", ".join(found), message), message
            get(revision="main")


def refusals(main: Path, tagged: Path) -> None:
    message = refusal(lambda: from_pretrained("org/model", revision="v9"))
    assert "'org/model' at revision 'v9'" in message and "RevisionNotFoundError" in message
    refused = {"org/private": "RepositoryNotFoundError: 401", "org/absent": "RepositoryNotFoundError: 404"}
    for name, said in (refused | {"org/gated": "403", "org/broken": "503", "org/resets": "ReadError"}).items():
        message = refusal(lambda name=name: from_pretrained(name))
        assert said in message and "private or gated, the token (`hf auth login`); or download it" in message, message
    assert_equal(from_pretrained("org/private", token="secret"), main)
    with impatient("ETAG"):
        assert "Timeout" in refusal(lambda: from_pretrained("org/silent"))


def a_hub_that_falls_silent(main: Path, tagged: Path) -> None:
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


CASES = (names_revisions_and_adapters, without_the_network, a_push_between_two_nodes, refusals, a_hub_that_falls_silent)


def use_and_run(url: str, home: Path, cases: Any, *args: Any) -> None:
    use_hub(url, home)
    sleep = time.sleep
    with patch("time.sleep", lambda s: sleep(min(s, 0.1))):  # huggingface_hub's pauses before another try
        run_cases(cases, *args)


def test_hub_names_on_two_ranks(tmp_path: Path) -> None:
    main, tagged = make_checkpoint("llama", tmp_path / "main"), make_checkpoint("llama", tmp_path / "tagged", seed=1)
    (main / "generation_config.json").write_text('{"max_new_tokens": 17}')
    (main / "consolidated.safetensors").write_bytes(b"named by no index")
    # One file: of several, one may still be asked for when the hub falls silent, which takes huggingface_hub 6 minutes.
    AutoModelForCausalLM.from_pretrained(main).save_pretrained(tmp_path / "single")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(main), lora(init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = "org/model"
    adapted.save_pretrained(tmp_path / "adapter")
    shutil.copy(main / "config.json", tmp_path / "adapter")  # as Axolotl leaves it
    shutil.copytree(main, tmp_path / "kept" / "inner")
    repositories = {
        "org/model": {"main": main, "v1": tagged},
        "org/adapter": {"main": tmp_path / "adapter"},
        "org/private": {"main": main},
        "org/kept": {"main": tmp_path / "kept"},
    }
    moods = {"org/silences": ("silences", 99), "org/broken": ("HTTP 503", 99), "org/resets": ("resets", 99)}
    repositories |= {name: {"main": tmp_path / "single"} for name in moods}
    with fake_hub(repositories, moods) as server:
        run_ranks(use_and_run, 2, server.url, tmp_path / "home", CASES, main, tagged)
        files = {f.name for f in main.glob("model-*.safetensors")}
        for name, revisions in (("org/model", 2), ("org/private", 1)):
            counts = {server.requests["GET", name, file] for file in files}
            assert counts == {revisions}, "each revision, once for both ranks"
        assert server.requests["GET", "org/adapter", "adapter_model.safetensors"] == 1
        # One rank alone asks; after a hub that did not answer, the cache is used without asking again.
        assert server.requests["GET", "org/kept", ""] <= 7


def test_a_path_is_local_where_it_exists_or_can_be_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_checkpoint("llama", tmp_path / "model")
    assert local_path("~/model") == tmp_path / "model" and local_path("~/absent") == tmp_path / "absent"
    assert local_path("model") == Path("model") and local_path("~nosuchuser/model") == Path("~nosuchuser/model")
    assert [local_path(name) for name in ("gpt2", "org/model")] == [None, None]
    assert all(local_path(name) for name in ("./gpt2", "../gpt2", "/gpt2", "a/b/c", ".\\gpt2"))
    os.makedirs("org/model")
    assert local_path("org/model") == Path("org/model")
    assert not load_weights(build_meta_model("~/model"), "~/model").missing_keys
    for use in (from_pretrained, build_meta_model, CheckpointIndex.open):
        for name, said in (("", "name of a checkpoint is empty"), ("~/absent", r"No such folder.*absent")):
            with pytest.raises(CheckpointError, match=said):
                use(name)


def assert_opens(name: str, model: torch.nn.Module, **how: Any) -> None:
    """Plain transformers downloads the same model; one rank after the other, as the cache is shared."""
    expected = full_state(model)
    plain, info = AutoModelForCausalLM.from_pretrained(name, **TOKEN, output_loading_info=True, **how)
    assert not any(info.values()), info
    found = plain.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def a_save_is_uploaded(main: Path, out: Path) -> None:
    """Its own files, in one commit, which takes what an earlier one left."""
    model: Any = from_pretrained(main)
    model.add_model_tags(["tiny", "llama"])
    (folder := out / "saved").mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine, and nobody else's")
    save = partial(save_pretrained, model, folder, push_to_hub=True, repo_id="org/new", private=True, **TOKEN)
    first = save(max_shard_size="60KB", commit_message="four files")
    assert first.commit_url.endswith(first.commit_url[-40:]) and "/org/new/commit/" in str(first)
    assert len(first.files) > 2 and set(first.others) >= {"config.json", "model.safetensors.index.json"}
    assert_opens("org/new", model)
    model.add_model_tags(["later"])
    with pytest.raises(ConfigError, match=r"Call model\.save_pretrained.*repo_id='short'"):
        model.push_to_hub("short")
    second = save(max_shard_size="100KB")
    assert second.commit_url != first.commit_url and not set(first.files) & set(second.files)
    assert_opens("org/new", model)
    assert save_pretrained(model, folder).commit_url == ""
    last = save(commit_message="one file", revision="small")
    assert last.files == ("model.safetensors",)
    assert_opens("org/new", model, revision="small")


def what_is_refused_is_said_before_anything_is_saved_or_the_save_stays(main: Path, out: Path) -> None:
    """`test_saves.py` has each step of an upload that fails."""
    model: Any = from_pretrained(main)
    for name, token, said in (("org/new", "read", "read access only"), ("org/silent", "secret", "ReadTimeout")):
        folder = out / name
        hub = {"push_to_hub": True, "repo_id": name, "token": token}
        with impatient("ETAG") if name == "org/silent" else nullcontext():
            message = refusal(partial(save_pretrained, model, folder, **hub), CheckpointError)
        assert said in message and f"Then upload it: `hf upload {name} {folder}`" in message, message
        assert_opens(str(folder), model)
    target = out / "refused"
    for asked, said in (
        ({"push_to_hub": True, "repo_id": "a/b/c"}, r"repo_id='a/b/c' is no name of a repository on the hub"),
        ({"push_to_hub": True, "repo": "org/new"}, "no argument 'repo': did you mean repo_id? Those for an upload"),
        ({"repo_id": "org/new"}, "repo_id mean nothing without an upload. Add push_to_hub=True"),
        ({"push_to_hub": True, "repo_id": f"org/{dist.get_rank()}"}, 'repo_id is "org/0" on rank 0'),
    ):
        assert said in refusal(partial(save_pretrained, model, target, **asked), ConfigError)
    assert not target.exists()


def trainer_of(model: Any, folder: Path, name: str, **settings: Any) -> ShardedTrainer:
    usual = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    hub = {"push_to_hub": True, "hub_model_id": name, "hub_token": "secret", "hub_always_push": True}
    args = arguments(folder, **{**usual, **hub, **settings})
    return ShardedTrainer(model=model, args=args, train_dataset=make_rows(16))


def a_trainer_uploads_complete_checkpoints_and_its_model(main: Path, out: Path) -> None:
    trainer = trainer_of(from_pretrained(main), out / "trained", "org/trained", hub_strategy="checkpoint")
    trainer.fsdp_settings.blocking = False  # uploads begin when the thread that writes has finished
    trainer.train()
    trainer.model.add_model_tags("ours")
    page = trainer.push_to_hub(tags="asked")
    assert (page is None) == (dist.get_rank() > 0)
    assert_opens("org/trained", trainer.model)
    trainer.save_model()


def a_trainer_says_what_it_could_not_upload(main: Path, out: Path) -> None:
    model = from_pretrained(main)
    said = refusal(lambda: trainer_of(model, out / "no", "org/no", hub_token="read"), CheckpointError)
    assert "'org/no' on the hub cannot be written to" in said and "403" in said
    trainer = trainer_of(model, out / "kept", "org/down", save_total_limit=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(warning.message) for warning in caught if "an upload failed" in str(warning.message)]
    assert (len(told) > 0) == (dist.get_rank() == 0)
    assert all("checkpoint-" in text and "under maintenance" in text for text in told), told
    assert f"{str(out / 'kept')!r} is saved and complete" in refusal(trainer.push_to_hub, CheckpointError)
    assert_opens(str(out / "kept"), model)
    assert sorted(path.name for path in (out / "kept").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


UPLOADS = (
    a_trainer_uploads_complete_checkpoints_and_its_model,
    a_trainer_says_what_it_could_not_upload,
    a_save_is_uploaded,
    what_is_refused_is_said_before_anything_is_saved_or_the_save_stays,
)

MOODS = {"org/down": ("preupload HTTP 503 under maintenance", 99)}


def test_shards_are_uploaded(tmp_path: Path) -> None:
    main = make_checkpoint("llama", tmp_path / "main")
    (main / "generation_config.json").write_text('{"max_new_tokens": 17}')
    out = tmp_path / "out"
    out.mkdir()
    with fake_hub({}, MOODS, tmp_path / "hub") as server:
        run_ranks(use_and_run, 2, server.url, tmp_path / "home", UPLOADS, main, out)
        assert_uploaded(server, out)


def assert_uploaded(server: FakeHub, out: Path) -> None:
    files = server.files("org/new", "small")
    saved = {f.name: f.read_bytes() for f in (out / "saved").iterdir() if f.name != "notes.txt"}
    assert {name: text for name, text in files.items() if name not in (".gitattributes", "README.md")} == saved
    assert server.created["org/new"]["visibility"] == "private"
    first, second, third = (commit for commit in server.commits if commit["name"] == "org/new")
    assert [first["summary"], second["summary"], third["summary"]] == ["four files", "Upload model", "one file"]
    weights = {name for kind, name in first["done"] if name.endswith(".safetensors")}
    assert len(weights) == 4 and {name for kind, name in second["done"] if kind == "deletedFile"} == weights
    assert {name for _, name in first["done"]} >= {"README.md", "config.json", "generation_config.json"}
    card = files["README.md"].decode()
    assert "library_name: transformers" in card and "- tiny" in card and "- llama" in card and "base_model" not in card
    assert "org/down" not in {commit["name"] for commit in server.commits}
    trained, local = server.files("org/trained"), out / "trained"
    last = {f"last-checkpoint/{f.name}": f.read_bytes() for f in (local / "checkpoint-4").glob("*.*")}
    assert last.items() <= trained.items() and "last-checkpoint/checkpoint_manifest.json" in last, "it was complete"
    assert sum(name.startswith("last-checkpoint/optimizer_0/") for name in trained) == 3
    steps = [commit["summary"] for commit in server.commits if commit["name"] == "org/trained"]
    assert steps == [*(f"Training in progress, step {step}" for step in (2, 4)), "End of training", "Model save"]
    assert trained["model.safetensors"] == (local / "model.safetensors").read_bytes() and "training_args.bin" in trained
