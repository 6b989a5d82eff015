"""Loading on real ranks: bit for bit what plain from_pretrained gives, each rank reading its own bytes, errors on all
ranks."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from hf_fsdp_tools import CheckpointError, save_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import (
    assert_same_model,
    full,
    loaded,
    make_checkpoint,
    plain_model,
    refusal,
    sharded_meta_model,
    stored_tensors,
)
from tests._dist import run_cases, run_ranks
from tests.api import CheckpointIndex, LoadReport, all_ranks

# ---- other placements, dtypes, and what is in no file ----


def last_even_dim(parameter: nn.Parameter) -> Shard | None:
    """Shard along the last dimension where it divides evenly (FSDP2 asks for that), else along the first."""
    last = parameter.dim() - 1
    return Shard(last) if last > 0 and parameter.shape[last] % dist.get_world_size() == 0 else Shard(0)


def over_two_axes(kind: str, folders: dict[str, Path], tmp: Path) -> None:
    """Replicated over one, sharded over the other: the first replica reads and the other receives, each byte once."""
    bf16 = tmp / f"{kind} in bf16"
    if dist.get_rank() == 0:
        make_checkpoint(kind, bf16, dtype=torch.bfloat16)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stored = CheckpointIndex.open(bf16).num_bytes
    for options in ({}, {"dtype": torch.float32, "staging_bytes": 2**20, "requests_in_flight": 1}):
        model = sharded_meta_model(kind, bf16, mesh=mesh)
        report = load_weights(model, bf16, **options)
        assert_same_model(model, plain_model(kind, bf16, dtype=options.get("dtype", torch.bfloat16)))
        buffers = sum(buffer.nbytes for buffer in model.buffers())  # whole on every rank, which reads them for itself
        assert sum(all_ranks(report.bytes_read)) <= 1.02 * stored + 3 * buffers, str(report)
        assert (report.bytes_read > 0.4 * stored) == (dist.get_rank() < 2)


def over_two_axes_where_the_disk_of_one_rank_fails(folders: dict[str, Path], tmp: Path) -> None:
    """All ranks stop before a shard is broadcast, and loading again works."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_meta_model("llama", folders["llama"], mesh=mesh)
    broken = Mock(side_effect=OSError(5, "Input/output error"))
    with patch("os.preadv", broken if dist.get_rank() == 1 else os.preadv):
        said = refusal(lambda: load_weights(model, folders["llama"]), CheckpointError)
    assert "failed on 1 of 4 ranks" in said and "rank 1: " in said
    load_weights(model, folders["llama"])
    assert_same_model(model, plain_model("llama", folders["llama"]))


def along_other_dimensions(kind: str, folders: dict[str, Path], tmp: Path) -> None:
    model = sharded_meta_model(kind, folders[kind], shard_placement_fn=last_even_dim)
    assert any(p.placements == (Shard(1),) for p in model.parameters())
    load_weights(model, folders[kind])
    assert_same_model(model, plain_model(kind, folders[kind]))


def bf16_files_in_an_fp32_model(folders: dict[str, Path], tmp: Path) -> None:
    """Master weights."""
    bf16 = tmp / "bf16"
    if dist.get_rank() == 0:
        make_checkpoint("mixtral", bf16, dtype=torch.bfloat16)
    dist.barrier()
    model = sharded_meta_model("mixtral", bf16)
    report = load_weights(model, bf16, dtype=torch.float32)
    assert_same_model(model, plain_model("mixtral", bf16, dtype=torch.float32))
    assert report.dtypes == ("float32",) and report.staging_bytes > 0 and report.read_ratio == 1.0


def fp32_files_in_an_offloaded_bf16_model(folders: dict[str, Path], tmp: Path) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    model = loaded("gpt2", folders["gpt2"], dtype=torch.bfloat16, offload_policy=offload)
    assert_same_model(model, plain_model("gpt2", folders["gpt2"], dtype=torch.bfloat16))


ALONE = (
    over_two_axes_where_the_disk_of_one_rank_fails,
    bf16_files_in_an_fp32_model,
    fp32_files_in_an_offloaded_bf16_model,
)
OTHERWISE: dict[str, Callable[..., None]] = {
    **{case.__name__: case for case in ALONE},
    "over two axes": partial(over_two_axes, "mixtral"),
    "along other dimensions": partial(along_other_dimensions, "mixtral"),
}


@pytest.mark.shows("reads its own bytes", "HSDP", "offload")
def test_other_placements_and_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(run_cases, 4, OTHERWISE, folders, tmp_path)


def load_incomplete(folder: Path, wrong_head: Path) -> tuple[Any, ...]:
    config = LlamaConfig.from_pretrained(folder, num_labels=5)
    model = build_meta_model(config, auto_class=AutoModelForSequenceClassification)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    report = load_weights(model, folder, seed=3)
    head = model.score.weight.full_tensor()

    config = LlamaConfig.from_pretrained(folder, vocab_size=77)
    other = build_meta_model(config)
    fully_shard(other)
    mismatched = load_weights(other, folder, ignore_mismatched_sizes=True, seed=3)
    embedding = other.get_input_embeddings().weight.full_tensor()
    assert torch.equal(other.model.norm.weight.full_tensor(), model.model.norm.weight.full_tensor())
    return report, head, mismatched, embedding


def test_what_is_in_no_file_is_initialised_alike_on_any_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    results = {n: run_ranks(load_incomplete, n, folders["llama"], tmp_path) for n in (1, 2)}
    report, head, mismatched, embedding = results[2][0]
    assert report.missing_keys == report.initialized_keys == ("score.weight",)
    assert report.unexpected_keys == ("lm_head.weight",)
    assert head.shape == (5, 48) and 0.01 < head.std() < 0.04  # the model's own initialisation has 0.02
    assert {key for key, *_ in mismatched.mismatched_keys} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert mismatched.mismatched_keys[0][1:] == ((131, 48), (77, 48))
    assert "score.weight" in str(report) and "other shape" in str(mismatched)
    for _, other_head, _, other_embedding in (*results[2], *results[1]):
        assert torch.equal(other_head, head) and torch.equal(other_embedding, embedding)


def untied_copy(folder: Path, target: Path, *, equal: bool) -> Path:
    tensors = stored_tensors(folder)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    if not equal:
        tensors["lm_head.weight"][-1, -1] += 1  # one element, on the last rank
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def only_head(folder: Path, target: Path) -> Path:
    untied_copy(folder, target, equal=True)
    tensors = load_file(target / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_ties(good: list[Path], bad: Path) -> None:
    for folder in good:
        model = sharded_meta_model("tied", folder)
        report = load_weights(model, folder)
        assert not report.missing_keys
        assert_same_model(model, plain_model("tied", folder), folder.name)
    said = refusal(lambda: load_weights(sharded_meta_model("tied", bad), bad), CheckpointError)
    assert all(part in said for part in ("rank 1: ", "different values", "tie_word_embeddings=False"))


def test_tied_weights_under_one_name_or_both(folders: dict[str, Path], tmp_path: Path) -> None:
    good = [untied_copy(folders["tied"], tmp_path / "equal", equal=True), only_head(folders["tied"], tmp_path / "head")]
    bad = untied_copy(folders["tied"], tmp_path / "different", equal=False)
    run_ranks(load_ties, 2, good, bad)


def load_plain_module(folder: Path) -> None:
    """A module that transformers does not know: keys are its own, and its own initialisation fills what is missing."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if dist.get_rank() == 0:
        stored = {key: tensor for key, tensor in original.state_dict().items() if key != "2.bias"}
        save_file(stored, folder / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    fully_shard(model)
    report = load_weights(model, folder)
    assert report.missing_keys == ("2.bias",)
    assert full(model[2].bias).abs().max() > 0
    for key, tensor in model.state_dict().items():
        assert key == "2.bias" or torch.equal(full(tensor), original.state_dict()[key]), key
    save_pretrained(model, folder / "saved")
    assert set(CheckpointIndex.open(folder / "saved").tensors) == set(original.state_dict())


def test_a_module_from_outside_transformers(tmp_path: Path) -> None:
    run_ranks(load_plain_module, 2, tmp_path)


STAGING = 8 * 2**20


def load_large(folder: Path, dtype: torch.dtype | None) -> tuple[LoadReport, int]:
    model = build_meta_model(folder)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    report = load_weights(model, folder, dtype=dtype, staging_bytes=STAGING)
    return report, sum(p.to_local().nbytes for p in model.parameters())


def test_memory_above_the_shards_is_bounded_by_the_staging_buffer(tmp_path: Path) -> None:
    """136 MB in bf16; a whole embedding is 33 MB, a rank's shards 68 or, in fp32, 136 MB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=16000, num_hidden_layers=3, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="90MB")
    total = CheckpointIndex.open(tmp_path).num_bytes
    assert total > 130e6
    of_ranks = [
        (dtype, found) for dtype in (None, torch.float32) for found in run_ranks(load_large, 2, tmp_path, dtype)
    ]
    for dtype, (report, shard_bytes) in of_ranks:
        assert shard_bytes == total // (1 if dtype else 2)
        assert report.read_ratio <= 1.01 and report.bytes_read <= 0.51 * total
        assert report.staging_bytes <= STAGING
        assert (report.staging_bytes > 0) == (dtype is not None)
        # What Python and torch allocate meanwhile (modules loaded late, thread stacks) is not staging: 16 MiB.
        assert report.peak_host_bytes <= STAGING + 16 * 2**20, str(report)
