"""Sharded models on one axis and on replicas of shards train as one process does, with what is often combined.

Accumulation, clipping, steps of foreach and fused optimizers; blocks recomputed or compiled, shards on the host.
"""

from functools import partial
from pathlib import Path
from typing import Any

from hf_fsdp_tools import ParallelDims
from tests._dist import run_cases, run_ranks
from tests.ranks.test_layouts import OPTIONS, in_bf16
from tests.ranks.test_parallel import copies_and_generation, layouts_train

REPLICAS = ParallelDims(dp_replicate_size=2)
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}}


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
        "bf16": partial(in_bf16, tmp_path, [("llama", REPLICAS, {}), ("llama", REPLICAS, LORA)]),
    }
    run_ranks(run_cases, 4, cases(REPLICAS, tmp_path) | more)
