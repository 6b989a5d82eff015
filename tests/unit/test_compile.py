"""Blocks are compiled each for itself, and run as they are where a cache comes in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, DynamicCache

from hf_fsdp_tools import ConfigError, from_pretrained, save_pretrained
from hf_fsdp_tools.sharding.compile import check_options, compile_blocks
from hf_fsdp_tools.steps import make_wrap_plan
from tests.api import Recompute
from tests.unit.test_blocks import Block, Model


class CachingBlock(Block):
    def forward(self, x: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
        return self.mlp(self.attn(x)) + (0 if cache is None else 1)


def noting_backend() -> tuple[list[str], Callable[..., Any]]:
    """A list that grows whenever a graph is compiled, and the backend that does so."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    return graphs, backend


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by position"])
def test_a_call_with_a_cache_is_not_compiled(by_name: bool) -> None:
    graphs, backend = noting_backend()
    model = Model(nn.ModuleList(CachingBlock() for _ in range(3)))
    assert compile_blocks(model, make_wrap_plan(model), {"backend": backend}) == ("layers.0", "layers.1", "layers.2")
    block, x = model.layers[0], torch.ones(2, 8)  # type: ignore[index]
    with_cache = block(x, cache=DynamicCache()) if by_name else block(x, DynamicCache())
    assert graphs == []
    without = block(x)
    assert len(graphs) == 1, "a call without a cache is compiled"
    torch.testing.assert_close(with_cache, without + 1)


def test_cuda_graphs_are_refused_where_parameters_move_and_results_are_not_kept_of_compiled_code() -> None:
    graphs: list[dict[str, Any]] = [{"mode": "max-autotune"}, {"backend": "cudagraphs"}]
    for options in (*graphs, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(ConfigError, match="records CUDA graphs"):
            check_options(options, "cuda")
        check_options(options, "cpu")
    check_options({"mode": None, "backend": "inductor", "options": None}, "cuda")  # as Accelerate gives them
    for options in ({}, {"backend": "inductor"}):
        with pytest.raises(ConfigError, match=r"save_ops .* do not compile"):
            check_options(options, "cpu", Recompute(save_ops=("matmul",)))


def test_a_plain_loop_runs_compiled_code_which_equal_blocks_share(folders: dict[str, Path], tmp_path: Path) -> None:
    """Models of transformers make a cache in training too, unless their config says not to."""
    graphs, backend = noting_backend()
    model = from_pretrained(folders["llama"], compile={"backend": backend}, load_kwargs={"progress": False}).train()
    tokens = torch.randint(3, 60, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(graphs) == 1 < len(model.model.layers)
    save_pretrained(model, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).use_cache is True, "generation has its cache"
