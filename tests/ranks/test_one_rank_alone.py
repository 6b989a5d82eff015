"""What somebody new does on two ranks, as from one process: calls by rank 0 alone, the mixin forgotten. Each is named
within seconds, on all ranks."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools import RanksError, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.distributed import liveness
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows

IDS = torch.arange(3, 11)[None]


def refused(call: Callable[[], object]) -> str:
    """The message with which rank 0's call and what the others do instead end, the same on both ranks."""
    accelerator = make_accelerator()
    with pytest.raises(RanksError) as caught:
        call() if dist.get_rank() == 0 else accelerator.wait_for_everyone()
    return str(caught.value)


def rank_0_alone_saves(folder: Path) -> None:
    model = from_pretrained(folder)
    for save in (partial(save_pretrained, model), model.save_pretrained):
        message = refused(partial(save, folder.with_name("saved")))
        assert "rank 0 is saving the model, rank 1 is waiting for every rank" in message


def rank_0_alone_gathers_the_state_dict(folder: Path) -> None:
    model = make_accelerator().prepare(from_pretrained(folder))
    said = refused(lambda: make_accelerator().get_state_dict(model))
    assert "rank 0 is gathering the state dict, rank 1 is waiting for every rank" in said


def rank_0_alone_saves_the_state_and_evaluates(folder: Path) -> None:
    trainer = ShardedTrainer(from_pretrained(folder), arguments(folder / "out"), eval_dataset=make_rows(4))
    said = refused(trainer.evaluate)
    assert "rank 0 is evaluating, rank 1 is waiting for every rank" in said
    said = refused(lambda: trainer.accelerator.save_state(str(folder.with_name("state"))))
    assert "rank 0 is saving the state, rank 1 is waiting for every rank" in said


def rank_0_alone_generates(folder: Path) -> None:
    """It waits in a collective for rank 1, which learns why it does, and comes after all."""
    accelerator = make_accelerator()
    model = from_pretrained(folder)
    if dist.get_rank() == 1:
        with pytest.raises(RanksError) as caught:
            accelerator.wait_for_everyone()
        said = str(caught.value)
        numbers = re.search(r"rank 0 waits in forward pass (\d+) of LlamaForCausalLM for rank 1, .* run (\d+)\.", said)
        assert numbers and int(numbers[1]) == int(numbers[2]) + 1, said
        assert "generate" in said
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    if dist.get_rank() == 0:
        with pytest.raises(RanksError, match="All ranks stop"):
            accelerator.wait_for_everyone()


def passes_over_weights_that_were_gathered_by_hand_wait_for_nobody(folder: Path) -> None:
    model = from_pretrained(folder)
    model(IDS)
    model.set_reshard_after_forward(False)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    before = dict(liveness._passes)
    if dist.get_rank() == 0:
        model(IDS)
        model(IDS)
    assert liveness._passes == before
    for unit in units:
        unit.reshard()
    model(IDS)
    assert liveness._passes != before


CASES = (
    rank_0_alone_saves,
    rank_0_alone_gathers_the_state_dict,
    rank_0_alone_saves_the_state_and_evaluates,
    passes_over_weights_that_were_gathered_by_hand_wait_for_nobody,
    rank_0_alone_generates,
)


def cases(folder: Path) -> None:
    with patch.multiple(liveness, _QUIET_S=0.4, _BEAT_S=0.1):
        run_cases(CASES, folder)


def test_what_rank_0_does_alone_is_named_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "llama").symlink_to(folders["llama"])
    run_ranks(cases, 2, tmp_path / "llama")
