"""Habits of scripts on shards (docs/migrate.md): each does what it does on one process, or says that it does not."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.tensor import Replicate
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, from_pretrained, make_accelerator
from tests._checkpoints import full, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import Held

NAME = "model.layers.0.mlp.up_proj.weight"


def both(parent: Path) -> tuple[Any, Any]:
    plain = AutoModelForCausalLM.from_pretrained(parent).train()
    model = from_pretrained(parent, load_kwargs={"progress": False}).train()
    ids = torch.arange(3, 15)[None]
    for each in (model, plain):
        each(input_ids=ids, labels=ids).loss.backward()
    return model, plain


def draws_are_those_of_one_process(parent: Path) -> None:
    draws: tuple[Callable[[torch.Tensor], Any], ...] = (
        nn.init.kaiming_uniform_,
        lambda weight: nn.init.normal_(weight, std=0.02),
        nn.init.trunc_normal_,
        lambda weight: weight.data.uniform_(-1, 1),
        lambda weight: weight.data.copy_(torch.randn_like(weight)),
        lambda weight: weight.data.bernoulli_(0.5),
    )
    model, plain = both(parent)
    for draw in draws:
        for each in (model, plain):
            torch.manual_seed(7)
            draw(each.get_parameter(NAME))
        assert torch.equal(full(model.get_parameter(NAME)), plain.get_parameter(NAME)), draw


def decisions_of_a_part_are_refused(parent: Path) -> None:
    model, plain = both(parent)
    weight, alone = model.get_parameter(NAME), plain.get_parameter(NAME)
    assert not weight.grad.isnan().any().full_tensor()
    if dist.get_rank() == 1:
        Held.of(weight.grad).memory[0, 0] = float("nan")
    for decide in (lambda: bool(weight.grad.isnan().any()), lambda: not weight.grad.isfinite().all()):
        answers_whole = all(placement.is_replicate() for placement in weight.grad.isnan().any().placements)
        with nullcontext() if answers_whole else pytest.raises(ConfigError, match="holds a part of the answer"):
            assert decide(), "torch 2.15 asks the other ranks by itself"
    for decide in (lambda: float(weight.norm()), lambda: weight.sum().item()):
        with pytest.raises(ConfigError, match="holds a part of the answer"):
            decide()
    torch.testing.assert_close(weight.norm().full_tensor(), alone.norm())


def writes_to_a_copy_are_refused(parent: Path) -> None:
    model, _ = both(parent)
    weight = model.get_parameter(NAME)
    for write in (lambda: weight.grad[:2].zero_(), lambda: weight.data[-3:].copy_(torch.zeros_like(weight.data[-3:]))):
        with pytest.raises(ConfigError, match="writes to a copy of shards"):
            write()
    whole = weight.grad.redistribute(placements=[Replicate()])
    for right in (weight.grad, weight.data, weight.grad.view(-1), whole, whole[:2]):  # own memory, or the shard's
        right.mul_(2)
    assert torch.equal(full(weight.grad)[:2], whole.to_local()[:2])
    torch.optim.AdamW(model.parameters(), foreach=True).step()


def gradients_by_autograd_are_refused(parent: Path) -> None:
    model, _ = both(parent)
    weights, loss = [*model.parameters()], model(input_ids=torch.arange(3, 15)[None]).logits.sum()
    for ask in (lambda: torch.autograd.grad(loss, weights, allow_unused=True), lambda: loss.backward(inputs=weights)):
        with pytest.raises(ConfigError, match=r"read p\.grad"):
            ask()


def two_losses_in_two_backward_passes(parent: Path) -> None:
    """The second loss is of hidden states alone, in whose unit the head is, too."""
    model, plain = both(parent)
    ids = torch.arange(3, 15)[None]
    for each in (model, plain):
        output = each(input_ids=ids, labels=ids, output_hidden_states=True)
        output.loss.backward(retain_graph=True)
        output.hidden_states[-1].pow(2).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), plain.get_parameter(name).grad, msg=name)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, rows: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.body(rows).relu()).pow(2).sum()


def heads_that_ranks_choose(parent: Path) -> None:
    """As a script for DDP has it: `find_unused_parameters=True`."""
    accelerator = new_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    torch.manual_seed(0)
    model, rows = Heads(), torch.randn(2, 3, 8)
    plain = copy.deepcopy(model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(rows[dist.get_rank()], dist.get_rank()))
    for rank in range(2):
        (plain(rows[rank], rank) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), plain.get_parameter(name).grad, msg=name)


class Centre(nn.Module):
    """A layer with statistics of its rows: some that torch writes, and one that this code makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layer(rows))
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * (hidden + rows).mean(0).detach()
        return (hidden - self.centre).pow(2).sum()


def buffers_that_forward_changes(parent: Path) -> None:
    """As DDP does it: before each forward pass they are rank 0's."""
    torch.manual_seed(0)
    model, rows = Centre(), torch.randn(4, 2, 5, 8)
    plain = copy.deepcopy(model)
    model = new_accelerator().prepare(model)
    for step in range(3):
        model(rows[step, dist.get_rank()]).backward()
        plain(rows[step, 0])
    assert torch.equal(model.eval()(rows[3, 0]), plain.eval()(rows[3, 0]))


class LosingTrainer(ShardedTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == dist.get_rank() == 1 else loss


def trainer(parent: Path, kind: type[ShardedTrainer] = ShardedTrainer, **settings: Any) -> ShardedTrainer:
    args = arguments(parent / "out", **settings)
    model = from_pretrained(parent, accelerator=make_accelerator(args), load_kwargs={"progress": False})
    return kind(model=model, args=args, train_dataset=make_rows(16), eval_dataset=make_rows(4))


def losses_that_are_no_numbers(parent: Path) -> None:
    made = trainer(parent, LosingTrainer, max_steps=3, logging_steps=3, logging_nan_inf_filter=True)
    with pytest.raises(ConfigError, match=r"loss of step 2 is nan on rank 1, whose batch begins with tensor\(\[\d, "):
        made.train()
    made.fsdp_settings.allow_nan = True
    assert made.train().global_step == 3


def test_habits_of_scripts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    randomize(AutoModelForCausalLM.from_config(tiny_config("llama", 2))).save_pretrained(tmp_path)
    cases = (
        draws_are_those_of_one_process, decisions_of_a_part_are_refused, writes_to_a_copy_are_refused,
        gradients_by_autograd_are_refused, two_losses_in_two_backward_passes,
        heads_that_ranks_choose, buffers_that_forward_changes,
        losses_that_are_no_numbers,
    )  # fmt: skip
    run_ranks(run_cases, 2, cases, tmp_path)
