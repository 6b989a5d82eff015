"""Reading together (`read_mode="node"`): the same bits, each byte read once, errors on all ranks; and what "auto" picks."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.checkpoint.index import CheckpointIndex
from hf_fsdp_tools.checkpoint.io import reader
from hf_fsdp_tools.checkpoint.load import load_weights
from hf_fsdp_tools.checkpoint.report import LoadReport
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.meta import build_meta_model
from tests._checkpoints import make_checkpoint, make_model, randomize
from tests._dist import run_ranks

KINDS = ("llama", "tied", "gpt2", "mixtral")
REAL = os.preadv
NARROW = threading.Lock()


def load(
    folder: Path, mode: str, *, replicas: int = 1, dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, LoadReport]:
    """The kind that the folder is named after, a unit for each member of a ModuleList, FSDP or HSDP."""
    world = dist.get_world_size()
    shape, names = ((world,), ("s",)) if replicas == 1 else ((replicas, world // replicas), ("r", "s"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build_meta_model(folder, auto_class=type(make_model(folder.name.split("-")[0])))
    for block in [b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m][::-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, load_weights(model, folder, read_mode=mode, dtype=dtype, **options)  # type: ignore[arg-type]


def local(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: t.to_local() if isinstance(t, DTensor) else t for k, t in model.state_dict().items()}


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    expected = local(other)
    for key, tensor in local(model).items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


@contextmanager
def reads(shim: Callable[..., int], *, rank: int | None = None) -> Iterator[None]:
    """Every read call of all ranks, or of one, goes through the shim."""
    reader.os.preadv = shim if rank in (None, dist.get_rank()) else REAL
    try:
        yield
    finally:
        reader.os.preadv = REAL


def slow(descriptor: int, buffers: list[memoryview], position: int, *flags: int) -> int:
    time.sleep(0.005)
    return REAL(descriptor, buffers, position, *flags)


def narrow(descriptor: int, buffers: list[memoryview], position: int, *flags: int) -> int:
    """All requests of a rank share 4 MB/s."""
    with NARROW:
        time.sleep(sum(len(buffer) for buffer in buffers) / 4e6)
    return slow(descriptor, buffers, position, *flags)


def fsdp(folders: list[Path]) -> None:
    for folder in folders:
        alone, _ = load(folder, "rank")
        for options in ({}, {"staging_bytes": 2**20}, {"dtype": torch.float32}):
            together, report = load(folder, "node", **options)
            assert_equal(together, load(folder, "rank", **options)[0] if options.get("dtype") else alone)
            assert report.read_mode == "node" and "as asked" in str(report)
            stored = CheckpointIndex.open(folder).num_bytes
            assert report.total["bytes_read"] <= 1.02 * stored, (folder.name, str(report))
            assert report.staging_bytes <= options.get("staging_bytes", 2**26)
            assert max(report.bytes_read_per_rank) < 0.75 * stored  # several read


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(kind, root / kind, dtype=torch.bfloat16) for kind in KINDS] + list(wide(root))


def wide(root: Path) -> Iterator[Path]:
    """3 MB each, which takes several rounds with little staging memory; rows (llama) and columns (gpt2) of odd lengths."""
    sizes = {"vocab_size": 1531, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    shape = {"hidden_size": 168, "intermediate_size": 671, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **shape, max_position_embeddings=64))
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, n_embd=168, n_layer=2, n_head=4, n_positions=64, n_inner=671))
    for name, model in (("llama-wide", llama), ("gpt2-wide", gpt2)):
        randomize(model.to(torch.bfloat16)).save_pretrained(root / name, max_shard_size="1MB")
        yield root / name


def fsdp_and_choice(folders: list[Path]) -> None:
    fsdp(folders)
    broken_disk(folders[-1])
    broken_later(folders[-1])
    choice(folders)
    with pytest.raises(ConfigError, match='"rank", "node" or "auto"'):
        load(folders[0], "best")


def broken_disk(folder: Path) -> None:
    """One rank fails at its second request for data; all stop with the same error, and loading again works."""
    calls: list[int] = []

    def broken(descriptor: int, buffers: list[memoryview], position: int, *flags: int) -> int:
        calls.append(position)
        if len(calls) > 8:  # the six that measure, and two
            raise OSError(5, "Input/output error")
        return REAL(descriptor, buffers, position, *flags)

    with reads(broken, rank=1), pytest.raises(CheckpointError) as caught:
        load(folder, "node", staging_bytes=2**20)
    assert "failed on 1 of" in str(caught.value) and "rank 1: " in str(caught.value)
    assert "Input/output error" in str(caught.value) and "on meta again" in str(caught.value)
    assert len(calls) > 8 or dist.get_rank() != 1
    assert len(set(all_ranks(str(caught.value)))) == 1
    assert_equal(load(folder, "node")[0], load(folder, "rank")[0])


def broken_later(folder: Path) -> None:
    """The disk of one rank fails while all ranks are timed at once: no rank waits for another, all stop alike."""
    calls: list[int] = []

    def broken(descriptor: int, buffers: list[memoryview], position: int, *flags: int) -> int:
        calls.append(position)
        if len(calls) > 8:
            raise OSError(5, "Input/output error")
        return slow(descriptor, buffers, position, *flags)

    with reads(broken if dist.get_rank() == 1 else slow), pytest.raises(CheckpointError, match="Input/output error"):
        load(folder, "auto")


def assert_expected_to_be_quicker(report: LoadReport) -> None:
    alone_s, together_s = map(float, re.findall(r"([\d.]+) s (?:each for itself|together)", report.read_mode_why))
    assert report.read_mode == ("node" if together_s < alone_s else "rank") or alone_s == together_s, str(report)


def choice(folders: list[Path]) -> None:
    """The local disk is not timed twice; slow storage is, and then neighbours are read in one request."""
    for folder in folders[:3]:
        alone, report = load(folder, "auto")
        assert report.read_mode == "rank" and report.request_s < 2e-3, report.read_mode_why
        with reads(slow):
            auto, report = load(folder, "auto")
            few, in_rank = load(folder, "rank")
        assert_expected_to_be_quicker(report)
        assert report.request_s >= 5e-3 and "a request takes" in str(report)
        assert_equal(auto, alone)
        assert_equal(few, alone)
        assert in_rank.read_calls < load(folder, "rank")[1].read_calls / 4  # neighbours became one request


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp_reads_together_the_same_bits(folders: list[Path], world_size: int) -> None:
    run_ranks(fsdp_and_choice if world_size == 2 else fsdp, world_size, folders)


def hsdp(folders: list[Path]) -> list[LoadReport]:
    reports = []
    for ranks_per_node in (4, 2):
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % ranks_per_node)
        for folder in folders:
            together, report = load(folder, "node", replicas=2)
            assert_equal(together, load(folder, "rank", replicas=2)[0])
            assert report.total["bytes_read"] <= 1.02 * CheckpointIndex.open(folder).num_bytes, str(report)
        with reads(narrow):
            auto, report = load(folders[-2], "auto", replicas=2)
        assert_equal(auto, load(folders[-2], "rank", replicas=2)[0])
        reports.append(report)
    # FSDP over two nodes: two groups, each of which reads what its own ranks want
    together, report = load(folders[0], "node")
    assert_equal(together, load(folders[0], "rank")[0])
    return reports


def test_hsdp_reads_each_byte_once_in_the_whole_job(folders: list[Path]) -> None:
    """And "auto" picks that where storage is narrow."""
    for reports in run_ranks(hsdp, 4, folders):
        for report in reports:
            assert report.read_mode == "node", str(report)
            copies = re.search(r"each byte would be read (\d\.\d) times", report.read_mode_why)
            assert copies and float(copies[1]) >= 2, (
                "two replicas, and the gaps that are read through when requests are slow"
            )
            assert report.probe_bytes > 2**19  # that many bytes say something about all ranks at once
            assert_expected_to_be_quicker(report)
