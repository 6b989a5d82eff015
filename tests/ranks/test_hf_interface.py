"""What transformers and users see of a sharded model: class names, methods, and what the Trainer makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from hf_fsdp_tools import from_pretrained, save_pretrained
from hf_fsdp_tools.errors import ConfigError
from tests._checkpoints import full_state, make_checkpoint
from tests._dist import run_ranks
from tests._training import ShardedTrainer, arguments

ROWS = torch.arange(8 * 12).reshape(8, 12) % 90


def smoothed_loss(cls: type[Trainer], model: nn.Module, folder: Path, rows: int) -> float:
    args = arguments(
        folder / "out", label_smoothing_factor=0.2, per_device_train_batch_size=rows, max_steps=1, learning_rate=5e-5
    )
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer: Any = cls(model=model, args=args, train_dataset=data)
    return float(trainer.train().training_loss)


def refusal(model: Any, folder: Path) -> str:
    with pytest.raises(ConfigError, match="On every rank") as caught:
        model.save_pretrained(folder / "plain")
    return str(caught.value)


def look_at(folder: Path) -> dict[str, Any]:
    model: Any = from_pretrained(folder)
    name = type(model).__name__, type(model.model.layers[0]).__name__
    refused = refusal(model, folder)
    state = full_state(model)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder / "whole", state_dict=state)  # Accelerate's documented way
    adapted: Any = from_pretrained(folder, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    refused_adapter = refusal(adapted, folder)
    save_pretrained(adapted, folder / "adapter")
    trained: Any = from_pretrained(folder, activation_checkpointing=True)
    assert trained.config.use_cache is False
    save_pretrained(trained, folder / "trained")
    assert trained.config.use_cache is False
    return {
        "name": name,
        "refused": (refused, refused_adapter),
        "loss": smoothed_loss(ShardedTrainer, model, folder, 4),
    }


def test_a_sharded_model_looks_like_the_model_that_it_is(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    ranks = run_ranks(look_at, 2, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    loss = smoothed_loss(Trainer, plain, tmp_path, 8)  # labels are shifted: the class name says that it is causal
    assert sum(found["loss"] for found in ranks) / 2 == pytest.approx(loss, rel=1e-6)  # each reports its own rows
    for found in ranks:
        assert found["name"] == ("LlamaForCausalLM", "LlamaDecoderLayer")
        assert found["refused"] == ranks[0]["refused"]
    assert not (tmp_path / "plain").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["use_cache"] is True, (
        "as it was before training"
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
