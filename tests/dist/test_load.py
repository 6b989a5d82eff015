"""Loading on real ranks: bit for bit what plain from_pretrained gives, each rank reading its own bytes, errors on all ranks."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fsdp_tools.checkpoint import CheckpointIndex, load_weights
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.meta import build_meta_model
from tests._checkpoints import KINDS, make_checkpoint, make_model
from tests._dist import run_ranks


def sharded_meta_model(kind: str, folder: Path, mesh: Any = None, **kwargs: Any) -> PreTrainedModel:
    """The kind's model on meta, every member of a ModuleList a unit, then the root."""
    model = build_meta_model(folder, auto_class=type(make_model(kind)), **kwargs)
    for module in reversed([m for m in model.modules() if isinstance(m, nn.ModuleList)]):  # inner lists first
        for block in module:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: PreTrainedModel, reference: PreTrainedModel, kind: str) -> None:
    """Every parameter and buffer, gathered, equals the plain model's: values, dtypes, names, ties."""
    expected, found = reference.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    assert list(found) == list(expected), kind
    for key, tensor in expected.items():
        whole = full(found[key]).detach()
        assert whole.dtype == tensor.dtype, (kind, key)
        assert torch.equal(whole, tensor.detach()), (kind, key)
    for (key, a), (other, b) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert key == other and a.dtype == b.dtype and torch.equal(a, b), (kind, key)
    ties = {(a, b) for a in expected for b in expected if expected[a] is expected[b]}
    assert ties == {(a, b) for a in found for b in found if found[a] is found[b]}, kind


def load_every_kind(folders: dict[str, Path]) -> list[tuple[str, float, int]]:
    rows = []
    for kind, folder in folders.items():
        model = sharded_meta_model(kind, folder)
        report = load_weights(model, folder)
        assert_same(model, type(make_model(kind)).from_pretrained(folder), kind)
        assert not report.missing_keys and not report.unexpected_keys and not report.converted_bytes, (kind, str(report))
        assert report.bytes_read_per_rank[dist.get_rank()] == report.bytes_read
        rows.append((kind, report.read_ratio, report.share_bytes))
    return rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_equals_from_pretrained_and_reads_its_share(folders: dict[str, Path], world_size: int) -> None:
    for rows in zip(*run_ranks(load_every_kind, world_size, folders), strict=True):
        kind = rows[0][0]
        for _, ratio, _ in rows:
            assert ratio <= 1.01, (kind, ratio)
        shares = sum(share for _, _, share in rows)
        stored = CheckpointIndex.open(folders[kind]).num_bytes
        assert stored <= shares <= 1.05 * stored, kind  # no rank's share is the whole, all shares are
