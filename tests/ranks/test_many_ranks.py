"""As many real processes as one machine can hold, once a night: what tests of few ranks, and fake ones, do not see."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import from_pretrained, make_accelerator, save_pretrained
from tests._dist import run_ranks
from tests._training import full_parameters, make_rows

RANKS = 64
EAGER = {"experts_implementation": "eager"}  # the grouped matrix product refuses these awkward sizes


def stepped_and_resumed(folder: Path, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two steps, of which the second is repeated from a state, and the weights before it."""
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(folder, accelerator=accelerator, load_kwargs={"progress": False}, **EAGER)
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = {key: value[None] for key, value in make_rows(1)[0].items()}
    losses: list[float] = []

    def step() -> None:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step()
    accelerator.save_state(str(out / "state"))
    save_pretrained(model, out / "saved")
    weights = full_parameters(model)
    step()
    accelerator.load_state(str(out / "state"))
    step()
    return losses, weights


@pytest.mark.nightly
def test_many_ranks_load_shard_train_save_and_resume(folders: dict[str, Path], tmp_path: Path) -> None:
    results = run_ranks(stepped_and_resumed, RANKS, folders["mixtral"], tmp_path, timeout_s=1800)
    plain = AutoModelForCausalLM.from_pretrained(folders["mixtral"], **EAGER).train()
    batch = {key: value[None] for key, value in make_rows(1)[0].items()}
    first, second, again = results[0][0]
    assert first == pytest.approx(plain(**batch).loss.item(), abs=1e-5) and again == second < first
    assert all(losses == results[0][0] for losses, _ in results)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in results[0][1].items())
