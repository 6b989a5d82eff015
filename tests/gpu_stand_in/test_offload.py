"""An offloaded step on the stand-in's GPUs: what travels, and equal numbers while streams are late.

`python -m tests.gpu_stand_in.test_offload` prints what one rank's step moves, next to PyTorch's own offload.
"""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import ParallelDims, from_config
from tests._dist import run_ranks
from tests.api import local_tensor
from tests.gpu_stand_in import counts_on, fakegpu

pytestmark = counts_on(2)

CONFIG: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 131}


def made(who: str, layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_hidden_layers=layers)
    if who != "PyTorch's offload":
        return from_config(config, mp_policy="bf16", offload_policy=who == "ours")
    model = LlamaForCausalLM(config)
    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for module in (*model.model.layers, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy(), **policy)
    return model


def steps_of(model: Any, count: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(count):
        for micro in range(2):
            ids = torch.arange(24, device="cuda").add(step + micro).remainder(131)[None]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def counted(who: str, layers: int = 4) -> dict[str, float]:
    """One step after two: bytes for each parameter of this rank, copies, kernels; MiB at its peak."""
    model = made(who, layers)
    steps_of(model, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fakegpu.reset()
    steps_of(model, 1)
    torch.cuda.synchronize()
    stats, held = fakegpu.stats(), sum(local_tensor(each).numel() for each in model.parameters())
    found = {name: stats.get(f"bytes {name}", 0) / held for name in ("H2D", "D2H", "D2D")}
    found |= {
        name: stats.get(name, 0) for name in ("copy H2D pinned", "copy H2D pageable", "copy D2H pageable", "kernel")
    }
    return found | {"peak MiB": torch.cuda.max_memory_allocated() / 2**20}


def equal() -> None:
    with fakegpu.kernels_on_cpu():
        for delay_us in (0, 300):
            fakegpu.set_delay(delay_us)
            stayed, streamed = made("resident", 3), made("ours", 3)
            assert steps_of(stayed, 3) == steps_of(streamed, 3), delay_us
            pairs = zip(stayed.parameters(), streamed.parameters(), strict=True)
            assert all(torch.equal(local_tensor(a).cpu(), local_tensor(b)) for a, b in pairs), delay_us


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_steps_equal_those_of_shards_on_the_device_while_streams_are_late(ranks: int) -> None:
    run_ranks(equal, ranks, device="cuda")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offloaded_step_moves_two_bytes_of_each_weight_for_each_gather(ranks: int) -> None:
    """Two micro-batches, each with two gathers; gradients go down in fp32, without waiting."""
    for found in run_ranks(counted, ranks, "ours", device="cuda"):
        assert found["H2D"] <= 8.1 and found["D2H"] <= 8.1
        assert found["copy D2H pageable"] <= 2, "the losses"


def main() -> None:
    """Print the table."""
    ParallelDims().build_mesh("cuda")
    rows = {who: counted(who, layers=32) for who in ("PyTorch's offload", "ours")}
    print("| | " + " | ".join(next(iter(rows.values()))) + " |\n|---|" + "---|" * len(rows["ours"]))
    for who, found in rows.items():
        print(f"| {who} | " + " | ".join(f"{figure:,.1f}" for figure in found.values()) + " |")


if __name__ == "__main__":
    main()
