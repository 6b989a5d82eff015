"""Blocks are compiled each for itself, and run as they are where a cache comes in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.sharding.compile import check_options, compile_blocks
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "max-autotune"}, r"mode='max-autotune' records CUDA graphs.*Use mode='max-autotune-no-cudagraphs'\."),
        ({"mode": "reduce-overhead", "backend": "inductor"}, r"mode='reduce-overhead'.*Use mode='default'\."),
        ({"options": {"triton.cudagraphs": True}}, r"triton\.cudagraphs.*Use False there\."),
        ({"backend": "cudagraphs"}, r"backend='cudagraphs'.*Use backend='inductor'\."),
    ],
)
def test_cuda_graphs_are_refused_where_parameters_move(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options(options, "cuda")
    check_options(options, "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": None, "backend": "inductor", "options": None},  # as Accelerate gives them
        {"options": {"triton.cudagraphs": False}},
    ],
)
def test_other_options_are_compiled_with(options: dict[str, Any]) -> None:
    check_options(options, "cuda")
