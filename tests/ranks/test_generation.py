"""Texts generated on shards: the tokens of one process, weights gathered once where they fit, no rank waits in vain."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import from_pretrained, unsharded
from hf_fsdp_tools.sharding import hf_interface
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of

PROMPTS = torch.arange(3, 23).reshape(4, 5)
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def gathers_counted() -> Any:
    """Notes each unit that is gathered from other ranks in a block."""
    return calls_of(_fsdp_param_group, "foreach_all_gather")


def gathers_of_one_pass(model: Any) -> int:
    with gathers_counted() as gathers, torch.no_grad():
        model(input_ids=PROMPTS)
    return len(gathers)


def is_sharded(model: torch.nn.Module) -> bool:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return all(isinstance(parameter, DTensor) for unit in units for parameter in unit.parameters())


def mine(made: torch.Tensor) -> torch.Tensor:
    return made.split(2)[dist.get_rank()]


def unlike_lengths(plain: Any) -> dict[str, Any]:
    """Options with which all rows of rank 0 end by a token that no row of rank 1 has in so few."""
    made = plain.generate(PROMPTS, **GREEDY)[:, PROMPTS.shape[1] :]
    for length in range(1, made.shape[1]):
        for token in set(made[0, :length].tolist()) & set(made[1, :length].tolist()):
            if not (made[2:] == token).any():
                return {**GREEDY, "eos_token_id": token}
    raise AssertionError(f"these greedy texts cannot end at other lengths: {made.tolist()}")


def tokens_are_those_of_one_process(folder: Path) -> None:
    """Where the weights fit, each unit is gathered once, else once for each token."""
    for dtype, held in ((torch.float32, {}), (torch.bfloat16, {"dtype": "float32", "mp_policy": "bf16"})):
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model: Any = from_pretrained(folder, **held)
        expected = plain.generate(input_ids=PROMPTS, **GREEDY)
        units, tokens = gathers_of_one_pass(model), expected.shape[1] - PROMPTS.shape[1]
        for free, count in ((10**9, units), (0, units * tokens)):
            with gathers_counted() as gathers, patch.object(hf_interface, "free_bytes", lambda _, free=free: free):
                made = model.eval().generate(input_ids=mine(PROMPTS), **GREEDY)
            assert torch.equal(made, mine(expected)), held
            assert len(gathers) == count and is_sharded(model), (held, len(gathers))


def a_rank_whose_rows_end_early_keeps_no_other_waiting(folder: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = unlike_lengths(plain)
    model: Any = from_pretrained(folder)
    passes: dict[bool, int] = {}
    for gathered in (True, False):
        run: list[None] = []
        hook = model.register_forward_hook(lambda *_, run=run: run.append(None))
        with unsharded(model, gathered):
            made = model.generate(input_ids=mine(PROMPTS), **asked)
        hook.remove()
        assert torch.equal(made, plain.generate(mine(PROMPTS), **asked)) and is_sharded(model)
        passes[gathered] = len(run)
    length = made.shape[1] - PROMPTS.shape[1]
    assert length < 7 if dist.get_rank() == 0 else length == 7
    assert passes == {True: length, False: 7}, "unit by unit, all ranks go on until the last has finished"


def one_rank_generates_alone_while_weights_are_gathered(folder: Path) -> None:
    model: Any = from_pretrained(folder)
    with gathers_counted() as gathers, unsharded(model):
        if dist.get_rank() == 0:
            for length in (1, 3):
                assert model.generate(PROMPTS[:1], **{**GREEDY, "max_new_tokens": length}).shape == (1, 5 + length)
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(PROMPTS, nonsense=1)
        assert model.generate(PROMPTS, **GREEDY).shape == (4, 12)
    assert is_sharded(model) and len(gathers) == gathers_of_one_pass(model)
    with unsharded(model):
        model.state_dict()  # which shards the units, as a save does
        assert model.generate(PROMPTS[: dist.get_rank() + 1], **GREEDY).shape[0] == dist.get_rank() + 1


CASES = (
    tokens_are_those_of_one_process, a_rank_whose_rows_end_early_keeps_no_other_waiting,
    one_rank_generates_alone_while_weights_are_gathered,
)  # fmt: skip


def test_generation_on_shards(folders):
    run_ranks(run_cases, 2, CASES, folders["llama"])
