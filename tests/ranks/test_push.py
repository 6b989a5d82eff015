"""Uploads from shards, for real by huggingface_hub to a small hub on this machine; what it got is downloaded again."""

import json
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, FSDPToolsError, from_pretrained, save_pretrained
from tests._checkpoints import full_state, lora, make_checkpoint, refusal
from tests._dist import run_ranks
from tests._hub import FakeHub, fake_hub, impatient
from tests._training import ShardedTrainer, arguments, make_rows
from tests.ranks.test_hub import short_sleeps, use_and_run

TOKEN = {"token": "secret"}


def refused(call: Callable[[], object], kind: type[FSDPToolsError] = CheckpointError) -> str:
    """The message of the error that all ranks raise, without long pauses before other tries."""
    with short_sleeps():
        return refusal(call, kind)


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
    folder = out / "saved"
    folder.mkdir(exist_ok=True)
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
    carded = save_pretrained(model, out / "carded", model_card=True)
    assert "README.md" in carded.others and "library_name: transformers" in (out / "carded/README.md").read_text()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(str(out / "given"), state_dict=state, push_to_hub=True, repo_id="org/given", **TOKEN)
    dist.barrier()
    last = save(commit_message="one file", revision="small")
    assert last.files == ("model.safetensors",)
    assert_opens("org/new", model, revision="small")


def an_adapter_then_the_merged_model(main: Path, out: Path) -> None:
    os.environ["HF_TOKEN"] = "secret"
    adapted: Any = from_pretrained(main, peft_config=lora(init_lora_weights=False))
    adapted.save_pretrained(out / "adapter", push_to_hub=True)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(main), "me/adapter", **TOKEN)
    tokens = torch.arange(24).reshape(2, 12)
    expected = adapted(tokens).logits
    assert torch.equal(plain(tokens).logits, expected)
    merged = save_pretrained(
        adapted, out / "merged", merge_adapters=True, push_to_hub=True, repo_id="me/adapter", **TOKEN
    )
    assert merged.commit_url
    again = AutoModelForCausalLM.from_pretrained("me/adapter", **TOKEN)
    assert torch.allclose(again(tokens).logits, expected, atol=1e-5), "and no adapter is put on it once more"


REFUSED = {  # repository and token: what huggingface_hub says
    "org/new, read": "You have read access only",
    "org/down, secret": "under maintenance",
    "org/silent, secret": "ReadTimeout",
}


def what_is_refused_is_said_before_anything_is_saved_or_the_save_stays(main: Path, out: Path) -> None:
    model: Any = from_pretrained(main)
    for case, said in REFUSED.items():
        name, token = case.split(", ")
        folder = out / case
        hub = {"push_to_hub": True, "repo_id": name, "token": token}
        with impatient("ETAG") if name == "org/silent" else nullcontext():
            message = refused(partial(save_pretrained, model, folder, **hub))
        assert f"{str(folder)!r} is saved and complete, but its upload to {name!r} failed" in message
        assert said in message and f"Then upload it: `hf upload {name} {folder}`" in message, message
        assert_opens(str(folder), model)
    model: Any = from_pretrained(main)
    target = out / "refused"
    for asked, said in (
        ({"push_to_hub": True, "repo_id": "a/b/c"}, r"repo_id='a/b/c' is no name of a repository on the hub"),
        ({"push_to_hub": True, "repo": "org/new"}, "no argument 'repo': did you mean repo_id? Those for an upload"),
        ({"repo_id": "org/new"}, "repo_id mean nothing without an upload. Add push_to_hub=True"),
        ({"push_to_hub": True, "repo_id": f"org/{dist.get_rank()}"}, 'repo_id is "org/0" on rank 0'),
    ):
        assert said in refused(partial(save_pretrained, model, target, **asked), ConfigError)
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
    adapted = from_pretrained(main, peft_config=lora(init_lora_weights=False))
    trainer = trainer_of(adapted, out / "adapted", "org/adapted", hub_strategy="every_save", max_steps=2)
    trainer.train()
    trainer.push_to_hub()


def a_trainer_says_what_it_could_not_upload(main: Path, out: Path) -> None:
    model = from_pretrained(main)
    said = refused(lambda: trainer_of(model, out / "no", "org/no", hub_token="read"))
    assert "'org/no' on the hub cannot be written to" in said and "403" in said
    trainer = trainer_of(model, out / "kept", "org/down", save_total_limit=None)
    with short_sleeps(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(warning.message) for warning in caught if "an upload failed" in str(warning.message)]
    assert (len(told) > 0) == (dist.get_rank() == 0)
    assert all("checkpoint-" in text and "under maintenance" in text for text in told), told
    assert f"{str(out / 'kept')!r} is saved and complete" in refused(trainer.push_to_hub)
    assert_opens(str(out / "kept"), model)
    assert sorted(path.name for path in (out / "kept").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


CASES = (
    a_trainer_uploads_complete_checkpoints_and_its_model,
    a_trainer_says_what_it_could_not_upload,
    a_save_is_uploaded,
    an_adapter_then_the_merged_model,
    what_is_refused_is_said_before_anything_is_saved_or_the_save_stays,
)

MOODS = {"org/down": ("preupload HTTP 503 under maintenance", 99)}


def test_shards_are_uploaded(tmp_path: Path) -> None:
    main = make_checkpoint("llama", tmp_path / "main")
    (main / "generation_config.json").write_text('{"max_new_tokens": 17}')
    out = tmp_path / "out"
    out.mkdir()
    with fake_hub({}, MOODS, tmp_path / "hub") as server:
        run_ranks(use_and_run, 2, server.url, tmp_path / "home", CASES, main, out)
        assert_uploaded(server, out)


def assert_uploaded(server: FakeHub, out: Path) -> None:
    files = server.files("org/new", "small")
    saved = {f.name: f.read_bytes() for f in (out / "saved").iterdir() if f.name != "notes.txt"}
    assert {name: text for name, text in files.items() if name not in (".gitattributes", "README.md")} == saved
    assert server.created["org/new"]["visibility"] == "private" and server.created["me/adapter"]["name"] == "adapter"
    first, second, third = (commit for commit in server.commits if commit["name"] == "org/new")
    assert [first["summary"], second["summary"], third["summary"]] == ["four files", "Upload model", "one file"]
    weights = {name for kind, name in first["done"] if name.endswith(".safetensors")}
    assert len(weights) == 4 and {name for kind, name in second["done"] if kind == "deletedFile"} == weights
    assert {name for _, name in first["done"]} >= {"README.md", "config.json", "generation_config.json"}
    assert "rope_theta" in json.loads(server.files("org/given")["config.json"]), "as transformers 4 reads it"
    card = files["README.md"].decode()
    assert "library_name: transformers" in card and "- tiny" in card and "- llama" in card and "base_model" not in card
    assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLM"]
    assert "base_model:" in server.files("me/adapter")["README.md"].decode(), "PEFT's own card, which stays"
    assert not [name for name in server.files("me/adapter") if name.startswith("adapter")]
    assert "org/down" not in {commit["name"] for commit in server.commits}
    trained, local = server.files("org/trained"), out / "trained"
    last = {f"last-checkpoint/{f.name}": f.read_bytes() for f in (local / "checkpoint-4").glob("*.*")}
    assert last.items() <= trained.items() and "last-checkpoint/checkpoint_manifest.json" in last, "it was complete"
    assert sum(name.startswith("last-checkpoint/optimizer_0/") for name in trained) == 3
    steps = [commit["summary"] for commit in server.commits if commit["name"] == "org/trained"]
    assert steps == [*(f"Training in progress, step {step}" for step in (2, 4)), "End of training", "Model save"]
    words = ("- asked", "- ours", "This model is a fine-tuned version of `main` on")
    assert all(part in trained["README.md"].decode() for part in words)
    assert trained["model.safetensors"] == (local / "model.safetensors").read_bytes() and "training_args.bin" in trained
    adapted = server.files("org/adapted")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(adapted) and "model.safetensors" not in adapted
    assert not any("optimizer" in name or "checkpoint" in name for name in adapted)
