"""HSDP: the first replica reads, and each shard is broadcast along the replicate axis; the same bits, each byte
once."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.report import LoadReport
from hf_fsdp_tools.modeling.meta import build_meta_model
from tests._checkpoints import full_state, make_checkpoint, make_model
from tests._dist import run_cases, run_ranks

KINDS = ("llama", "tied", "gpt2", "mixtral")


def load(folder: Path, *, replicas: int, **options: Any) -> tuple[nn.Module, LoadReport]:
    """The kind that the folder is named after, a unit for each member of a ModuleList, FSDP or HSDP."""
    world = dist.get_world_size()
    shape, names = ((world,), ("s",)) if replicas == 1 else ((replicas, world // replicas), ("r", "s"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build_meta_model(folder, auto_class=type(make_model(folder.name)))
    for block in [b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m][::-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, load_weights(model, folder, **options)


def assert_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for key, tensor in full_state(model).items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


def the_first_replica_reads(folder: Path) -> None:
    first_replica = dist.get_rank() < 2
    stored = CheckpointIndex.open(folder).num_bytes
    for options in ({}, {"dtype": torch.float32}, {"staging_bytes": 2**20, "requests_in_flight": 1}):
        expected = full_state(load(folder, replicas=1, **options)[0])
        model, report = load(folder, replicas=2, **options)
        assert_equal(model, expected)
        buffers = sum(b.nbytes for b in model.buffers())  # whole on every rank, which reads them for itself
        assert sum(all_ranks(report.bytes_read)) <= 1.02 * stored + 3 * buffers, str(report)
        assert (report.bytes_read > 0.4 * stored) == first_replica


def the_disk_of_one_rank_fails(folder: Path) -> None:
    """All ranks stop before a shard is broadcast, and loading again works."""
    expected = full_state(load(folder, replicas=2)[0])
    broken = Mock(side_effect=OSError(5, "Input/output error"))
    with (
        patch("os.preadv", broken if dist.get_rank() == 1 else os.preadv),
        pytest.raises(CheckpointError) as caught,
    ):
        load(folder, replicas=2)
    assert "failed on 1 of 4 ranks" in str(caught.value) and "rank 1: " in str(caught.value)
    assert len(set(all_ranks(str(caught.value)))) == 1
    assert_equal(load(folder, replicas=2)[0], expected)


def test_the_first_replica_reads_and_all_get_the_same_bits(tmp_path: Path) -> None:
    folders = {kind: make_checkpoint(kind, tmp_path / kind, dtype=torch.bfloat16) for kind in KINDS}
    cases = {kind: partial(the_first_replica_reads, folder) for kind, folder in folders.items()}
    run_ranks(run_cases, 4, cases | {"a disk fails": partial(the_disk_of_one_rank_fails, folders["llama"])})
