"""What lies in the GPU's memory: under CPU offload nothing of a rank's share, and no whole tensor only to be cut.

Each test runs on each device, as in `test_one_gpu`; what it says about a GPU's memory, where there is one.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import (
    ParallelDims,
    add_adapter,
    from_pretrained,
    load_weights,
    make_wrap_plan,
    resize_token_embeddings,
    save_pretrained,
    shard_model,
)
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.distributed.shards import local_tensor
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.sharding.allocate import allocate
from tests._checkpoints import assert_same_model, full, make_quantized
from tests._dist import num_gpus, run_ranks
from tests.ranks.test_one_gpu import IDS, _batch, _close, _expected, _is_gpu, _steps, on_each


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def _share_bytes(model: nn.Module) -> int:
    return sum(local_tensor(parameter).nbytes for parameter in model.parameters())


def _assert_offloaded(model: nn.Module) -> None:
    """Every shard is on the CPU, in pinned memory where there is a GPU; buffers are where the computation is."""
    for name, parameter in model.named_parameters():
        shard = local_tensor(parameter)
        assert isinstance(parameter, DTensor) and parameter.device.type == shard.device.type == "cpu", name
        assert not shard.numel() or shard.is_pinned() == _is_gpu(), name
    assert {buffer.device.type for buffer in model.buffers()} <= {local_device().type}


@contextmanager
def _nothing_on_the_gpu(share_bytes: int) -> Iterator[None]:
    """A block that takes less memory of the GPU than a tenth of the share."""
    if not _is_gpu():
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < share_bytes / 10


def _offloaded(folder: Path, out: Path) -> list[float]:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with _nothing_on_the_gpu(sum(p.nbytes for p in plain.parameters()) // dist.get_world_size()):
        model = from_pretrained(folder, offload_policy=CPUOffloadPolicy())
        _assert_offloaded(model)
        save_pretrained(model, out / "offloaded")
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(out / "offloaded"))
    losses = _steps(model)
    _assert_offloaded(model)
    with _nothing_on_the_gpu(_share_bytes(model)):
        load_weights(model, folder)  # over weights that are there
        for assign in (False, True):
            model.load_state_dict(plain.state_dict(), assign=assign)
            _assert_offloaded(model)
        twin = copy.deepcopy(model)
    assert_same_model(twin, plain)
    _close(_steps(twin, count=1), losses[:1])
    _assert_offloaded(twin)
    model.eval().generate(IDS[:1, :3].to(local_device()), max_new_tokens=3, do_sample=False)
    resize_token_embeddings(model, 140)
    _assert_offloaded(model)
    return losses


@on_each
def test_cpu_offload_trains_from_pinned_shards(device: Any, ranks: int, folder: Path, tmp_path: Path) -> None:
    for losses in run_ranks(_offloaded, ranks, folder, tmp_path, device=device):
        _close(losses, _expected(folder))


def _adapted_and_offloaded(folder: Path, out: Path) -> list[float]:
    """LoRA and a head that is trained whole; on several ranks all are replicas (HSDP), which share the writing."""
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    mesh = ParallelDims(dp_replicate_size=dist.get_world_size()).build_mesh()
    offload = {"mesh": mesh, "offload_policy": CPUOffloadPolicy()}
    model = add_adapter(from_pretrained(folder, **offload), config, seed=0)
    _assert_offloaded(model)
    losses = _steps(model)
    _assert_offloaded(model)
    save_pretrained(model, out / "adapter")
    save_pretrained(model, out / "merged", merge_adapters=True)
    loss = model.eval()(**_batch()).loss.item()
    for name in ("adapter", "merged"):
        again = from_pretrained(out / name, **offload)
        _assert_offloaded(again)
        assert again.eval()(**_batch()).loss.item() == pytest.approx(loss, rel=1e-4), name
    return losses


@on_each
@pytest.mark.shows("LoRA", "offload")
def test_adapters_under_cpu_offload(device: Any, ranks: int, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    (expected,) = run_ranks(_adapted_and_offloaded, 1, folder, tmp_path / "expected")
    assert expected[-1] < expected[0]
    for losses in run_ranks(_adapted_and_offloaded, ranks, folder, tmp_path, device=device):
        _close(losses, expected)


def _whole_and_offloaded(out: Path) -> None:
    """Parameters that FSDP cannot shard (0-d, empty) and buffers stay on the device of the computation."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.none = nn.Parameter(torch.empty(0, 8))
            self.register_buffer("kept", torch.arange(8.0))
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * self.scale + self.kept * self.count).sum() + self.none.sum()

    torch.manual_seed(0)
    plain = Odd()
    if dist.get_rank() == 0:
        save_file(plain.state_dict(), out / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Odd()
    shard_model(model, make_wrap_plan(model), offload_policy=CPUOffloadPolicy())
    load_weights(model, out)
    assert_same_model(model, plain)
    here = {name: t.device.type for name, t in (*model.named_parameters(), *model.named_buffers())}
    there = local_device().type
    assert here == {
        "inner.weight": "cpu", "inner.bias": "cpu", "scale": there, "none": there, "kept": there, "count": there,
    }  # fmt: skip
    x = torch.arange(8.0)
    model(x.to(local_device())).backward()
    plain(x).backward()
    assert model.scale.grad is not None and model.scale.grad.device.type == there
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad)


@on_each
def test_what_is_whole_stays_on_the_device_under_cpu_offload(device: Any, ranks: int, tmp_path: Path) -> None:
    run_ranks(_whole_and_offloaded, ranks, tmp_path, device=device)


def _cut_on_the_host() -> None:
    """Values that live in no file, and a plain state dict, reach the GPU as this rank's part alone."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    shard_model(model, make_wrap_plan(model))
    allocate(model, device=local_device())
    with _nothing_on_the_gpu(_share_bytes(model)):
        initialize_missing(model, missing_keys={name for name, _ in model.named_parameters()}, seed=1)
    plain = {name: torch.arange(float(p.numel())).view(p.shape) for name, p in model.named_parameters()}
    assert all(0 < full(p).std() < 1 for p in model.parameters())
    with _nothing_on_the_gpu(_share_bytes(model)):
        model.load_state_dict(plain)
    assert all(torch.equal(full(p), plain[name]) for name, p in model.named_parameters())
    model.load_state_dict({name: -value for name, value in plain.items()}, assign=True)
    assert {p.device.type for p in model.parameters()} == {local_device().type}
    assert all(torch.equal(full(p), -plain[name]) for name, p in model.named_parameters())


@on_each
def test_whole_tensors_are_cut_on_the_host(device: Any, ranks: int) -> None:
    run_ranks(_cut_on_the_host, ranks, device=device)


def _layers(kind: str, folder: Path, layers: int) -> tuple[int, int]:
    """Bytes of the GPU's memory that a step takes above what it begins with, at most and in the end."""
    from peft import LoraConfig

    sizes = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    if dist.get_rank() == 0:
        make_quantized(kind, folder, lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads)))
    dist.barrier()
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"activation_checkpointing": True, "dtype": torch.bfloat16, "load_kwargs": {"seed": 0}}
    model = from_pretrained(folder, dequantize=False, peft_config=adapter, **options).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.arange(3, 67).view(1, 64).to(local_device())
    for _ in range(2):  # the first one makes what stays
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _depths(folder: Path) -> None:
    for kind in ("fp8 of 128 x 128", "compressed int4", "awq"):
        (few, left), (many, left_too) = (_layers(kind, folder / f"{kind} {n}", n) for n in (2, 6))
        assert left == left_too == 0, kind
        assert many - few < 2 * 768 * 256, f"{kind}: four layers more take less than one of their dequantised weights"


@pytest.mark.gpu
@pytest.mark.skipif(not num_gpus(), reason="needs a CUDA device")
def test_a_step_on_a_base_that_stays_quantised_takes_no_memory_that_grows_with_depth(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    run_ranks(_depths, min(2, num_gpus()), tmp_path, device="cuda")
