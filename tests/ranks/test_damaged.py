"""Damaged files under several ranks: one error on all of them, none waits, and the model is as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import add_adapter, from_pretrained, load_adapter
from tests._checkpoints import full_state, make_checkpoint, refusal
from tests._dist import run_cases, run_ranks
from tests.unit.test_damaged import DAMAGED, DAMAGED_ADAPTERS, Damage, config, described, truncated

IDS = torch.arange(3, 19).reshape(1, 16)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options)


def copy(folder: Path, name: str, damage: Damage, *, everywhere: bool = True) -> Path:
    """A damaged copy beside the folder; or one whose copy for rank 1 alone is damaged."""
    if everywhere:
        target = folder.parent / name
        if dist.get_rank() == 0:
            damage(Path(shutil.copytree(folder, target)))
    else:
        target = folder.parent / f"{name}-{dist.get_rank()}"
        shutil.copytree(folder, target)
        if dist.get_rank() == 1:
            damage(target)
    dist.barrier()
    return target


def files_that_are_damaged_for_all(root: Path) -> None:
    for name in ("unknown rope", "sizes beyond 64 bits", "generation config a list"):
        folder = copy(root / "model", name, DAMAGED[name][1])
        message = refusal(lambda folder=folder: from_pretrained(folder))
        assert str(folder) in message and len(message) < 1500 and "of 2 ranks" not in message


def adapters_that_are_damaged_for_all(root: Path) -> None:
    model = from_pretrained(root / "model")
    for name in ("unknown type", "truncated", "code", "another shape"):
        folder = copy(root / "adapter", name, DAMAGED_ADAPTERS[name][0])
        assert "of 2 ranks" not in refusal(lambda folder=folder: load_adapter(model, folder))
        refusal(lambda folder=folder: from_pretrained(folder))


def a_config_that_is_damaged_for_one_rank(root: Path) -> None:
    folder = copy(root / "model", "a_list", lambda folder: (folder / "config.json").write_text("[]"), everywhere=False)
    message = refusal(lambda: from_pretrained(folder))
    assert message.startswith("Opening the checkpoint failed on 1 of 2 ranks.\nrank 1: "), message
    folder = copy(root / "model", "negative", config(hidden_size=-48), everywhere=False)
    assert "is not the same on all nodes: its config is" in refusal(lambda: from_pretrained(folder))


def an_adapter_that_is_damaged_for_one_rank(root: Path) -> None:
    model = from_pretrained(root / "model")
    before = described(model), full_state(model)
    folder = copy(root / "adapter", "cut", truncated, everywhere=False)
    message = refusal(lambda: load_adapter(model, folder))
    assert message.startswith("Opening the adapter failed on 1 of 2 ranks.\nrank 1: ")
    assert "adapter_model.safetensors: cannot be read" in message
    is_as_it_was(model, *before)
    loads_as_on_one_process(load_adapter(model, root / "adapter"), root)


def an_adapter_that_cannot_be_made(root: Path) -> None:
    """Some modules have adapters already when the one is reached that has none."""
    model = from_pretrained(root / "model")
    before = described(model), full_state(model)
    assert "PEFT cannot make" in refusal(lambda: add_adapter(model, lora(target_modules=["q_proj", "rotary_emb"])))
    is_as_it_was(model, *before)
    loads_as_on_one_process(load_adapter(model, root / "adapter"), root)


def is_as_it_was(model: torch.nn.Module, parts: list[Any], state: dict[str, torch.Tensor]) -> None:
    assert described(model) == parts
    now = full_state(model)
    assert now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)


def loads_as_on_one_process(model: Any, root: Path) -> None:
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "model"), lora())
    plain.load_adapter(root / "adapter", "default")
    torch.testing.assert_close(model(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


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
        files_that_are_damaged_for_all,
        adapters_that_are_damaged_for_all,
        a_config_that_is_damaged_for_one_rank,
        an_adapter_that_is_damaged_for_one_rank,
        an_adapter_that_cannot_be_made,
    )
    run_ranks(run_cases, 2, cases, tmp_path)
