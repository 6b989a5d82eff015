"""Damaged files under several ranks: one error on all of them, none waits, and the model is as it was."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import add_adapter, from_pretrained, load_adapter, make_accelerator
from tests._checkpoints import Runs, full_state, lora, make_checkpoint, refusal
from tests._dist import run_cases, run_ranks
from tests.api import MANIFEST, METADATA
from tests.unit.test_refused_files import Damage, config, described, truncated

IDS = torch.arange(3, 19).reshape(1, 16)


def copy(folder: Path, name: str, damage: Damage) -> Path:
    """A copy beside the folder for each rank, that of rank 1 damaged."""
    target = folder.parent / f"{name}-{dist.get_rank()}"
    shutil.copytree(folder, target)
    if dist.get_rank() == 1:
        damage(target)
    dist.barrier()
    return target


def a_config_that_is_damaged_for_one_rank(root: Path) -> None:
    folder = copy(root / "model", "a_list", lambda folder: (folder / "config.json").write_text("[]"))
    message = refusal(lambda: from_pretrained(folder))
    assert message.startswith("Opening the checkpoint failed on 1 of 2 ranks.\nrank 1: "), message
    folder = copy(root / "model", "negative", config(hidden_size=-48))
    assert "is not the same on all nodes: its config is" in refusal(lambda: from_pretrained(folder))


def an_adapter_that_is_damaged_for_one_rank_or_cannot_be_made(root: Path) -> None:
    """Some modules have adapters already when the one is reached that has none."""
    model = from_pretrained(root / "model")
    before = described(model), full_state(model)
    folder = copy(root / "adapter", "cut", truncated)
    message = refusal(lambda: load_adapter(model, folder))
    assert message.startswith("Opening the adapter failed on 1 of 2 ranks.\nrank 1: ")
    assert "adapter_model.safetensors: cannot be read" in message
    is_as_it_was(model, *before)
    assert "PEFT cannot make" in refusal(lambda: add_adapter(model, lora(target_modules=["q_proj", "rotary_emb"])))
    is_as_it_was(model, *before)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "model"), lora())
    plain.load_adapter(root / "adapter", "default")
    found = load_adapter(model, root / "adapter")(input_ids=IDS).logits
    torch.testing.assert_close(found, plain.eval()(input_ids=IDS).logits)


def is_as_it_was(model: torch.nn.Module, parts: list[Any], state: dict[str, torch.Tensor]) -> None:
    assert described(model) == parts
    now = full_state(model)
    assert now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)


def run_code(optimizer: Path, marker: Path) -> None:
    """A value that is no tensor lies elsewhere now, where unpickling it runs code."""
    metadata = pickle.loads((optimizer / METADATA).read_bytes())
    torch.save(Runs(marker), optimizer / "more.distcp")
    key = next(key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata))
    index = next(index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = _StorageInfo("more.distcp", 0, (optimizer / "more.distcp").stat().st_size)
    (optimizer / METADATA).write_bytes(pickle.dumps(metadata))


def a_state_that_runs_code(root: Path) -> None:
    """`load_state` of Accelerate's; the Trainer checks its checkpoints by the same function."""
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(root / "model", accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    optimizer.step()
    good, bad = accelerator.save_state(root / "good"), root / "bad"
    before = full_state(model)
    if dist.get_rank() == 0:
        run_code(shutil.copytree(good, bad) / "optimizer_0", root / "ran")
        (bad / MANIFEST).unlink()  # the list of files
    dist.barrier()
    assert "could run code" in refusal(lambda: accelerator.load_state(bad))
    now = full_state(model)
    assert not (root / "ran").exists() and all(torch.equal(now[key], before[key]) for key in before)
    accelerator.load_state(good)


def test_every_damage_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path / "model"))
    adapted = get_peft_model(model, lora())
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "model")
    cases = (
        a_config_that_is_damaged_for_one_rank,
        an_adapter_that_is_damaged_for_one_rank_or_cannot_be_made,
        a_state_that_runs_code,
    )
    run_ranks(run_cases, 2, cases, tmp_path)
