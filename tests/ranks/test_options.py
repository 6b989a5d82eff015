"""Blocks run again, and compiled, in every layout: what they do is counted; losses are those of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ParallelDims, WrapPolicy, from_pretrained
from tests._checkpoints import RELEASE, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._noted import Operators

LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "kept": {"policy": WrapPolicy(reshard_after_forward={"*": False})},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "rows": {"mesh": ParallelDims(cp_size=2)},
    "layers": {"mesh": ParallelDims(tp_size=2)},
    "experts": {"mesh": ParallelDims(ep_size=2)},
}
IDS = torch.arange(3, 27).view(2, 12)
BLOCKS = 4


def options_act(name: str, root: Path) -> None:
    folder = root / ("qwen3_moe" if name == "experts" else "llama")
    expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS, labels=IDS).loss.item()
    ran = 0

    def run(**options: Any) -> int:
        """How many norms a pass takes."""
        model: Any = from_pretrained(folder, **LAYOUTS[name], load_kwargs={"progress": False}, **options).train()
        with Operators(lambda operator, *_: operator is torch.ops.aten.rsqrt.default) as norms:
            loss = model(IDS, None, labels=IDS).loss
            loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-5), (name, options)
        return norms.sum

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph.forward(*args)

        return call

    usual = run()
    of_block = (usual - 1) // BLOCKS
    assert run(activation_checkpointing=True) == usual + of_block * BLOCKS, name
    assert run(activation_checkpointing={"every_n_layers": 2}) == usual + of_block * BLOCKS // 2, name
    torch._dynamo.reset()
    model: Any = from_pretrained(folder, **LAYOUTS[name], load_kwargs={"progress": False}, compile={"backend": backend})
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert ran >= BLOCKS, name


def test_options_act(tmp_path: Path) -> None:
    for kind in ("llama", "qwen3_moe"):
        config = tiny_config(kind, 2)
        config.num_hidden_layers = BLOCKS
        randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / kind)
    names = [name for name in LAYOUTS if RELEASE >= (5, 21) or name not in ("layers", "experts")]
    run_ranks(run_cases, 2, {name: partial(options_act, name) for name in names}, tmp_path)
