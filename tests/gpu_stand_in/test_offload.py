"""An offloaded step on the stand-in's GPUs: what travels, and equal numbers while streams are late."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_fsdp_tools import from_config
from tests._dist import run_ranks
from tests.api import Held
from tests.gpu_stand_in import counts_on, fakegpu

pytestmark = counts_on(2)

CONFIG: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 131}


def made(offload: bool, layers: int) -> Any:
    torch.manual_seed(0)
    return from_config(LlamaConfig(**CONFIG, num_hidden_layers=layers), mp_policy="bf16", offload_policy=offload)


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


def counted() -> dict[str, float]:
    """One step after two: bytes for each parameter of this rank, and copies to memory that is not pinned."""
    model = made(True, 4)
    steps_of(model, 2)
    torch.cuda.synchronize()
    fakegpu.reset()
    steps_of(model, 1)
    torch.cuda.synchronize()
    stats, held = fakegpu.stats(), sum(Held.of(each).memory.numel() for each in model.parameters())
    found = {name: stats.get(f"bytes {name}", 0) / held for name in ("H2D", "D2H")}
    return found | {"pageable": stats.get("copy D2H pageable", 0)}


def equal() -> None:
    with fakegpu.kernels_on_cpu():
        for delay_us in (0, 300):
            fakegpu.set_delay(delay_us)
            stayed, streamed = made(False, 3), made(True, 3)
            assert steps_of(stayed, 3) == steps_of(streamed, 3), delay_us
            pairs = zip(stayed.parameters(), streamed.parameters(), strict=True)
            assert all(torch.equal(Held.of(a).memory.cpu(), Held.of(b).memory) for a, b in pairs), delay_us


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_steps_equal_those_of_shards_on_the_device_while_streams_are_late(ranks: int) -> None:
    run_ranks(equal, ranks, device="cuda")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offloaded_step_moves_two_bytes_of_each_weight_for_each_gather(ranks: int) -> None:
    """Two micro-batches, each with two gathers; gradients go down in fp32, without waiting."""
    for found in run_ranks(counted, ranks, device="cuda"):
        assert found["H2D"] <= 8.1 and found["D2H"] <= 8.1
        assert found["pageable"] <= 2, "the losses"
