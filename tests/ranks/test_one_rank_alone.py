"""What somebody new does on two ranks, as from one process: calls by rank 0 alone, the mixin forgotten. Each is named
within seconds, on all ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_fsdp_tools import RanksError, from_pretrained, make_accelerator, rank_timeout, save_pretrained
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


def rank_0_alone_calls(folder: Path) -> None:
    """When it generates, whether the weights fit is compared first, so that both ranks learn of it at once."""
    trainer = ShardedTrainer(from_pretrained(folder), arguments(folder / "out"), eval_dataset=make_rows(4))
    model, state = make_accelerator().prepare(from_pretrained(folder)), str(folder.with_name("state"))
    for call, doing in (
        (lambda: make_accelerator().get_state_dict(model), "gathering the state dict"),
        (trainer.evaluate, "evaluating"),
        (lambda: trainer.accelerator.save_state(state), "saving the state"),
        (lambda: model.generate(IDS), "generating"),
    ):
        assert f"rank 0 is {doing}, rank 1 is waiting for every rank" in refused(call)


def rank_0_alone_runs_forward(folder: Path) -> None:
    """It waits in a collective for rank 1, which is told that it may, and comes after all."""
    accelerator = make_accelerator()
    model = from_pretrained(folder)
    said = "rank 0 is in no call of hf_fsdp_tools; every rank must call, and run each forward pass .*generate"
    if dist.get_rank() == 1:
        with rank_timeout(1), pytest.raises(RanksError, match=said):
            accelerator.wait_for_everyone()
    model(IDS)
    if dist.get_rank() == 0:
        with pytest.raises(RanksError, match=said):
            accelerator.wait_for_everyone()


def cases(folder: Path) -> None:
    with patch.object(liveness, "_BEAT_S", 0.1):
        run_cases((rank_0_alone_saves, rank_0_alone_calls, rank_0_alone_runs_forward), folder)


def test_what_rank_0_does_alone_is_named_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    copytree(folders["llama"], tmp_path / "llama")  # a run writes into it
    run_ranks(cases, 2, tmp_path / "llama")
