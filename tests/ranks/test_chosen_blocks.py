"""The user's answer to which modules are blocks (`block_types`) is that of FP8, Muon, skipped units, shared rows."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from hf_fsdp_tools import Float8Policy, Muon, ParallelDims, WrapPolicy
from hf_fsdp_tools.steps import WrapPlan, make_wrap_plan, shard_model
from tests._checkpoints import full, tiny_config
from tests._dist import run_cases, run_ranks
from tests.api import ModuleTree, float8_layers


class Alpha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(self.first(hidden).relu())


class Beta(Alpha):
    """The same under another name, so that nothing repeats."""


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.alpha, self.beta, self.head = nn.Embedding(64, 32), Alpha(), Beta(), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.beta(self.alpha(self.table(ids))))


def blocks_of_a_stranger() -> None:
    torch.manual_seed(0)
    model, policy = Strange(), WrapPolicy(block_types=("Alpha", "Beta"))
    plan = make_wrap_plan(model, policy=policy)
    assert plan.blocks == ("alpha", "beta") and WrapPlan.from_json(plan.to_json()) == plan
    shard_model(model, plan, mesh=ParallelDims().build_mesh("cpu"))
    layers = {f"{block}.{layer}" for block in plan.blocks for layer in ("first", "second")}
    assert set(float8_layers(ModuleTree(model), Float8Policy())) == layers
    optimizer = Muon(model, lr=0.1)
    assert {name.removesuffix(".weight") for name in optimizer.matrices.matrices} == layers
    model(torch.arange(8)[None] + dist.get_rank()).sum().backward()
    optimizer.step()


class Early(LlamaDecoderLayer):
    pass


class Decoder(LlamaModel):
    """A model has two stacks, and the smaller one runs last."""

    layers = property(lambda self: [*self.early, *self.late])

    def __init__(self, config) -> None:
        super().__init__(config)
        layers = list(self._modules.pop("layers"))
        for layer in layers[:-1]:
            layer.__class__ = Early
        self.early, self.late = nn.ModuleList(layers[:-1]), nn.ModuleList(layers[-1:])


def rows_shared_by_two_stacks() -> None:
    torch.manual_seed(0)
    plain, ids = LlamaForCausalLM(tiny_config("llama", 2)), torch.arange(3, 15)[None]
    plain.model = Decoder(plain.config)
    model = copy.deepcopy(plain)
    plan = make_wrap_plan(model, policy=WrapPolicy(block_types=("Early", "LlamaDecoderLayer")))
    shard_model(model, plan, mesh=ParallelDims(cp_size=2).build_mesh("cpu"))
    for each in (model, plain):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), plain.get_parameter(name).grad, msg=name)


def test_the_users_blocks_are_everybodys() -> None:
    run_ranks(run_cases, 2, (blocks_of_a_stranger, rows_shared_by_two_stacks))
