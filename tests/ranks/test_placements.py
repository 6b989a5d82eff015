"""Fused experts on more ranks than there are experts: split along another dimension, and everything else as ever."""

import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import diagnose, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.sharding import placement
from hf_fsdp_tools.sharding.describe import describe_sharding
from tests._checkpoints import full
from tests._dist import run_ranks
from tests._training import train


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["mixtral"]


def two_steps(model: nn.Module, batches: list[torch.Tensor], accelerator=None) -> nn.Module:
    """Clipped, on this rank's rows or on all. Not of AdamW, which makes the rounding of small gradients large."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    rows = [{"input_ids": batch, "labels": batch} for batch in batches]
    train(model, optimizer, rows, accelerator=accelerator, clip=0.1)
    return model


SMALL = patch.object(placement, "_MOST_PADDING_BYTES", 0)  # so that a small model will do


@SMALL
def load_train_and_save(folder: Path, to: Path, replicas: int) -> str:
    accelerator = make_accelerator()
    mesh = ParallelDims(dp_replicate_size=replicas).build_mesh("cpu")
    model = from_pretrained(folder, mesh=mesh, attn_implementation="eager")
    model.config._experts_implementation = "eager"  # the grouped matrix product refuses these awkward sizes
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain.config._experts_implementation = "eager"
    assert model.model.layers[0].mlp.experts.gate_up_proj.placements[-1] == Shard(2)  # of (4, 134, 48)
    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert here < 1.2 / mesh.size(-1) * sum(parameter.numel() for parameter in plain.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), plain.get_parameter(name)), name
    assert not [f for f in diagnose(model).findings if f.code == "padded-shards"]
    batches = torch.randint(3, 131, (2, dist.get_world_size(), 9), generator=torch.Generator().manual_seed(1))
    text = describe_sharding(model)
    model = two_steps(model, [batch[dist.get_rank()][None] for batch in batches], accelerator)
    expected = two_steps(plain, list(batches))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), expected.get_parameter(name), rtol=1e-4, atol=2e-5, msg=name)
    save_pretrained(model, to)
    saved = from_pretrained(to, mesh=mesh, attn_implementation="eager")
    for name, parameter in saved.named_parameters():
        assert torch.equal(full(parameter), full(model.get_parameter(name))), name
    return text


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (6, 2)])
def test_experts_on_more_ranks_than_experts_divide_by(folder: Path, tmp_path: Path, ranks: int, replicas: int):
    """4 experts on 3 ranks: 2, 2 and 0 of them, padded by a half, were dimension 0 split."""
    texts = run_ranks(load_train_and_save, ranks, folder, tmp_path / "saved", replicas)
    line = "split along dimension 2, having too few rows for 3 ranks: model.layers.{0..1}.mlp.experts.gate_up_proj"
    assert all(line in text for text in texts)
    shapes = {k: t.shape for f in tmp_path.rglob("*.safetensors") for k, t in load_file(f).items()}
    assert shapes == {k: t.shape for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}


@SMALL
def find_padding() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model.experts = nn.Parameter(torch.zeros(2, 24, 10))
    fine = copy.deepcopy(model)
    fully_shard(model)
    with patch.object(placement, "_MOST_PADDING_BYTES", 4000):  # 480 elements of padding are 1920 bytes
        assert not [f for f in diagnose(model).findings if f.code == "padded-shards"]
    findings = [f for f in diagnose(model).findings if f.code == "padded-shards"]
    fully_shard(fine, shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else None)
    assert not [f for f in diagnose(fine).findings if f.code == "padded-shards"]
    return [str(finding) for finding in findings]


def test_padding_of_other_peoples_sharding_is_found():
    (text,), *others = run_ranks(find_padding, 4)
    assert all(other == [text] for other in others)
    # 480 elements become 960 of 544
    assert "warning: padded-shards" in text and "carries 1.9 times its bytes" in text and "experts have too few" in text
