"""Blocks are compiled each for itself, and run as they are where a cache comes in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.sharding.compile import compile_blocks
from tests.unit.test_blocks import Block, Model


class CachingBlock(Block):
    def forward(self, x: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
        return self.mlp(self.attn(x)) + (0 if cache is None else 1)


@pytest.fixture
def compiled() -> tuple[nn.Module, list[int]]:
    """The first block of a compiled model, and a list that grows whenever a graph is compiled."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    model = Model(nn.ModuleList(CachingBlock() for _ in range(3)))
    assert compile_blocks(model, make_wrap_plan(model), {"backend": backend}) == ("layers.0", "layers.1", "layers.2")
    return model.layers[0], graphs  # type: ignore[index, return-value]


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by position"])
def test_a_call_with_a_cache_is_not_compiled(compiled: tuple[nn.Module, list[int]], by_name: bool) -> None:
    block, graphs = compiled
    x = torch.ones(2, 8)
    with_cache = block(x, cache=DynamicCache()) if by_name else block(x, DynamicCache())
    assert graphs == []
    without = block(x)
    assert len(graphs) == 1, "a call without a cache is compiled"
    torch.testing.assert_close(with_cache, without + 1)
