"""The user's answer to which modules are blocks (`block_types`) is that of FP8, Muon, skipped units, shared rows."""

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_tools import Float8Policy, Muon, ParallelDims, WrapPolicy
from hf_fsdp_tools.steps import WrapPlan, make_wrap_plan, shard_model
from tests._dist import run_ranks
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


def test_the_users_blocks_are_everybodys() -> None:
    run_ranks(blocks_of_a_stranger, 2)
