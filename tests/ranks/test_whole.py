"""A training state of one rank, whose model is a plain one, goes on in shards, and back: bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit
from transformers.optimization import Adafactor

from hf_fsdp_tools import ConfigError, from_pretrained, make_accelerator
from hf_fsdp_tools.testing import forget_accelerate
from tests._checkpoints import lora, make_checkpoint, small_llama
from tests._dist import run_cases, run_ranks
from tests._training import full_states
from tests.api import Held, all_ranks

IDS = torch.randint(3, 131, (5, 2, 12), generator=torch.Generator().manual_seed(0))
"""The rows of each step, the same on every rank: the average of equal gradients is the gradient."""

MODELS: dict[str, dict[str, Any]] = {
    "masters in fp32": {},
    "LoRA": {"dtype": "bf16", "peft_config": lora(init_lora_weights=False)},
}


def steps_in_a_loop(model_name: str, source: Path, out: Path, parts: list[tuple[int, int, int]]) -> None:
    """Train the steps of the part for this number of ranks, from the state of the part before."""
    first, last, ranks = parts[-1]
    assert ranks == dist.get_world_size()
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    seeded = {"load_kwargs": {"progress": False, "seed": 1}}
    model = from_pretrained(source, accelerator=accelerator, **MODELS[model_name], **seeded).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert any(isinstance(each, DTensor) for each in model.parameters()) == (ranks > 1)
    if len(parts) > 1:
        accelerator.load_state(out / f"{model_name} {parts[:-1]}")
    for step in range(first, last):
        accelerator.backward(model(input_ids=IDS[step], labels=IDS[step]).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(out / f"{model_name} {parts}")
    states = full_states(model, optimizer)
    if accelerator.is_main_process:
        torch.save(states, out / f"{model_name} {parts}.pt")


def optimizers_that_shards_do_not_take(source: Path, out: Path) -> None:
    """They step a whole model, and their state resumes; not that of bitsandbytes."""
    made: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "transformers' Adafactor": partial(Adafactor, lr=1e-2, scale_parameter=False, relative_step=False),
        "Rprop": torch.optim.Rprop,
    }
    for name, make in made.items():
        ends = []
        for parts in ([(0, 4)], [(0, 2), (2, 4)]):
            for first, last in parts:
                forget_accelerate()
                accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
                model = from_pretrained(source, accelerator=accelerator, load_kwargs={"progress": False}).train()
                model, optimizer = accelerator.prepare(model, make(list(model.parameters())))
                if first:
                    accelerator.load_state(out / name)
                for step in range(first, last):
                    accelerator.backward(model(input_ids=IDS[step], labels=IDS[step]).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.save_state(out / name)
            ends.append({key: tensor.clone() for key, tensor in model.state_dict().items()})
        assert all(torch.equal(ends[1][key], tensor) for key, tensor in ends[0].items()), name
    with pytest.raises(ConfigError, match="AdamW8bit of bitsandbytes keeps a state that cannot be resumed here"):
        accelerator.prepare(bitsandbytes.optim.AdamW8bit(model.parameters()))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def test_a_state_goes_from_one_rank_to_two_and_back_bit_for_bit(source: Path, tmp_path: Path) -> None:
    chain = [(0, 2, 1), (2, 4, 2), (4, 5, 1)]
    for ranks, parts in ((1, [(0, 5, 1)]), (1, chain[:1]), (2, chain[:2]), (1, chain)):
        cases = {name: partial(steps_in_a_loop, name, source, tmp_path, parts) for name in MODELS}
        run_ranks(run_cases, ranks, cases)
    for name in MODELS:
        straight, in_parts = (torch.load(tmp_path / f"{name} {parts}.pt") for parts in ([(0, 5, 1)], chain))
        assert straight.keys() == in_parts.keys()
        assert all(torch.equal(in_parts[key], tensor) for key, tensor in straight.items()), name


def test_optimizers_that_shards_do_not_take(source: Path, tmp_path: Path) -> None:
    run_ranks(optimizers_that_shards_do_not_take, 1, source, tmp_path)


def state_of_8_bits(source: Path, read: Any, write: Any) -> dict[str, torch.Tensor]:
    """The optimizer's state after one step, or as it was read, gathered; torchao compiles steps, which takes long."""
    torch.compiler.set_stance("force_eager")
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(source, accelerator=accelerator, load_kwargs={"progress": False}).train()
    model, optimizer = accelerator.prepare(model, AdamW8bit(model.parameters(), lr=1e-2))
    if read is not None:
        accelerator.load_state(read)
    else:
        accelerator.backward(model(input_ids=IDS[0], labels=IDS[0]).loss)
        optimizer.step()
    accelerator.save_state(write)
    found, kinds = {}, set()
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            local = Held.of(optimizer.state[parameter][key]).memory
            kinds.add(type(local).__name__)
            floats = local.dequantize() if isinstance(local, OptimState8bit) else local
            parts = all_ranks(floats.tolist())
            found[f"{name} {key}"] = torch.cat([torch.tensor(part) for part in parts]) if len(parts) > 1 else floats
    assert "OptimState8bit" in kinds
    return found


def test_a_state_of_8_bits_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "model")
    saved = run_ranks(state_of_8_bits, 2, source, None, tmp_path / "state")[0]
    for ranks in (1, 2):
        found = run_ranks(state_of_8_bits, ranks, source, tmp_path / "state", tmp_path / f"{ranks}")[0]
        for name, tensor in saved.items():  # a shard of fewer than 4,096 values is in fp32, and the whole in 8 bits
            assert (found[name] - tensor).abs().max() <= (0.03 * tensor.abs().max() if ranks == 1 else 0), name
