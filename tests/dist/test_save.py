"""Saving on real ranks: the files are what plain save_pretrained writes, and plain from_pretrained gets every bit back."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_fsdp_tools.checkpoint import CheckpointIndex, SaveReport, load_weights, save_pretrained
from hf_fsdp_tools.errors import CheckpointError
from tests._checkpoints import KINDS, make_checkpoint, make_model
from tests._dist import run_ranks
from tests.dist.test_load import sharded_meta_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}


def contents(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {key: (t.dtype, t.shape) for key, t in CheckpointIndex.open(folder).tensors.items()}


def assert_same_checkpoint(kind: str, saved: Path, original: Path) -> None:
    """Same keys, dtypes, shapes and configs as plain save_pretrained wrote; the same model to plain from_pretrained."""
    assert contents(saved) == contents(original), kind
    for name in ("config.json", "generation_config.json"):
        if (original / name).exists():
            assert json.loads((saved / name).read_text()) == json.loads((original / name).read_text()), (kind, name)
    cls = type(make_model(kind))
    expected, found = (cls.from_pretrained(folder).state_dict() for folder in (original, saved))
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected), kind


def save_every_kind(folders: dict[str, Path], root: Path) -> list[SaveReport]:
    reports = []
    for kind, folder in folders.items():
        model = sharded_meta_model(kind, folder)
        load_weights(model, folder)
        reports.append(save_pretrained(model, root / kind, max_shard_size="60KB"))
    return reports


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_is_saved_as_transformers_saves_it(
    folders: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    per_rank = run_ranks(save_every_kind, world_size, folders, tmp_path)
    for kind, reports in zip(folders, zip(*per_rank, strict=True), strict=True):
        assert_same_checkpoint(kind, tmp_path / kind, folders[kind])
        assert sum(r.bytes_written for r in reports) == reports[0].total_bytes
        assert all(0 < r.bytes_written < r.total_bytes for r in reports), kind  # no rank wrote it all
        assert not reports[0].gathered_bytes, kind
        assert {p.name for p in (tmp_path / kind).iterdir() if p.name.startswith(".")} == set()
