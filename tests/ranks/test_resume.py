"""A run that was interrupted goes on as if it had not been: states, checkpoints, and what an interruption leaves behind."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration, set_seed
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_fsdp_tools import CheckpointError, FSDPTrainerMixin, HybridFSDPPlugin, from_pretrained, make_accelerator
from hf_fsdp_tools.mesh import local_device
from tests._checkpoints import make_checkpoint
from tests._dist import run_ranks

ON_CPU = local_device().type == "cpu"
# Another number of ranks adds the same numbers in another order; over a few AdamW steps that grows to about 1e-5 (measured).
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def _rows(count: int) -> list[dict]:
    ids = torch.randint(3, 9, (count, 12), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, folder / kind) for kind in ("llama", "tied", "qwen2_moe")}


def _whole(model, optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of its optimizer state, gathered."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {name: parameter for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for k, t in tensors.items()}


# ---- a plain loop ----


class Loop:
    """A user's script: model, optimizer, scheduler and shuffled rows, with dropout."""

    def __init__(self, accelerator, source, *, sharded_before, optimizer=torch.optim.AdamW):
        accelerator.free_memory()
        set_seed(3)
        options = {"experts_implementation": "eager", "attention_dropout": 0.1}
        if sharded_before:
            model = from_pretrained(source, accelerator=accelerator, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, **options)
        made = optimizer(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(made, total_iters=20)
        loader = DataLoader(_rows(48), batch_size=2, shuffle=True)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model.train(), made, loader, scheduler
        )

        self.batches = iter(self.loader)

    def skip(self, count):
        self.batches = iter(self.accelerator.skip_first_batches(self.loader, count))

    def train(self, steps=3):
        losses = []
        for _ in range(steps):
            loss = self.model(**next(self.batches)).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


ROUTES = (("qwen2_moe", True, torch.optim.AdamW), ("tied", False, torch.optim.AdamW), ("llama", False, torch.optim.Adagrad))


def _loop(sources, folder):
    accelerator = make_accelerator(cpu=ON_CPU)
    saved = {}
    for kind, sharded_before, optimizer in ROUTES:
        loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
        loop.train()
        accelerator.save_state(folder / kind)
        saved[kind] = _whole(loop.model, loop.optimizer)
        expected = loop.train()
        other = Loop(accelerator, sources[kind], sharded_before=not sharded_before, optimizer=optimizer)
        accelerator.load_state(folder / kind)
        other.skip(3)
        assert saved[kind].keys() == _whole(other.model, other.optimizer).keys()
        assert other.train() == expected, kind
        assert other.scheduler.get_last_lr() == loop.scheduler.get_last_lr()
        resumed = _whole(other.model, other.optimizer)
        for name, tensor in _whole(loop.model, loop.optimizer).items():
            assert torch.equal(tensor, resumed[name]), name
    if dist.get_rank() == 0:
        torch.save(saved, folder / "saved.pt")


def _elsewhere(sources, folder):
    saved = torch.load(folder / "saved.pt")
    accelerator = make_accelerator(cpu=ON_CPU, gradient_accumulation_steps=4)
    accelerator.step = 2 * dist.get_rank()  # as if the ranks had counted differently
    for kind, sharded_before, optimizer in ROUTES:
        loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match=rf"saved by 2 process.es. and is read by {dist.get_world_size()}\."):
                accelerator.load_state(folder / kind)
        else:
            accelerator.load_state(folder / kind)
        for name, tensor in _whole(loop.model, loop.optimizer).items():
            assert torch.equal(tensor, saved[kind][name]), (kind, name)
        assert accelerator.step == 0, "every rank accumulates in step with rank 0"
        loop.train()


def test_complaint_23_a_state_is_resumed_exactly_and_by_other_numbers_of_ranks(checkpoints, tmp_path):
    run_ranks(_loop, 2, checkpoints, tmp_path)
    for ranks in (1, 3):
        run_ranks(_elsewhere, ranks, checkpoints, tmp_path)
