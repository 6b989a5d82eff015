"""Sharded models on one axis and on replicas of shards train as one process does, with what is often combined.

Accumulation, clipping, steps of foreach and fused optimizers; blocks recomputed or compiled, shards on the host.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_tools import ParallelDims, from_pretrained
from tests._dist import run_cases, run_ranks
from tests.ranks.test_layouts import OPTIONS, QUIET
from tests.ranks.test_parallel import copies_and_generation, folder_of, layouts_train, rows

REPLICAS = ParallelDims(dp_replicate_size=2)


def in_bf16(parent: Path) -> None:
    """Three steps on replicas of shards, as on one axis with the same rows on each rank; fp32 masters, and LoRA."""
    for options in ({}, {"peft_config": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}}):
        found = []
        for dims in (ParallelDims(), REPLICAS):
            model = from_pretrained(
                folder_of("llama", parent), mesh=dims, mp_policy="bf16", load_kwargs=QUIET | {"seed": 1}, **options
            )
            trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
            optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
            for step in range(3):
                mine = rows(dims, step)[1]
                loss = model(input_ids=mine, labels=mine, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            found.append(losses)
        assert found[0] == pytest.approx(found[1], rel=5e-3) and found[0][0] != found[0][2], options


def cases(dims: ParallelDims, parent: Path) -> dict[str, Any]:
    ways = {
        name: partial(layouts_train, ("llama",), [dims], parent) for name in ("recomputed", "compiled", "offloaded")
    }
    return {name: partial(way, **OPTIONS[name]) for name, way in ways.items()}


@pytest.mark.shows("clipping", "compile")
@pytest.mark.shows("gradient accumulation", "offload", "compile")
def test_one_axis(tmp_path: Path) -> None:
    run_ranks(run_cases, 2, cases(ParallelDims(), tmp_path))


@pytest.mark.shows("activation checkpointing", "bf16", "clipping", "generate", "gradient accumulation", "HSDP")
@pytest.mark.shows("HSDP", "offload", "compile")
def test_replicas_of_shards(tmp_path: Path) -> None:
    more = {
        "plain": partial(layouts_train, ("llama", "qwen3_moe"), [REPLICAS], tmp_path),
        "generation": partial(copies_and_generation, ("llama",), [REPLICAS], tmp_path),
        "bf16": partial(in_bf16, tmp_path),
    }
    run_ranks(run_cases, 4, cases(REPLICAS, tmp_path) | more)
