"""Blocks are read from structure: every shape a list of layers can take, with and without hints, wrapped and plain."""

import pytest
import torch
from torch import nn

from hf_fsdp_tools.errors import BlockDetectionError
from hf_fsdp_tools.steps import detect_blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class OtherBlock(Block):
    pass


class Model(nn.Module):
    """Embedding, `layers`, norm, head: what remote code looks like, with no base class and no hints."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = layers
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for stack in detect_blocks(model).major_stacks for name in stack.blocks)


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{index}" for index in range(count))


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList(Block() for _ in range(4)),
        nn.Sequential(*(Block() for _ in range(4))),
        nn.ModuleDict({str(index): Block() for index in range(4)}),
        nn.ModuleList([Block(), OtherBlock(), Block(), OtherBlock()]),
        nn.ModuleList(Block(width) for width in (8, 16, 32, 64)),
    ],
    ids=["list", "sequential", "dict", "alternating classes", "unequal blocks"],
)
def test_a_stack_is_found_in_any_container(layers: nn.Module) -> None:
    assert blocks_of(Model(layers)) == numbered("layers.", 4)
    attributes = Model(nn.Identity())
    for name, block in layers.named_children():
        setattr(attributes, f"layer{name}", block)
    assert blocks_of(attributes) == numbered("layer", 4)


def test_what_repeats_is_opened_down_to_blocks_and_no_further() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.downsample = nn.Linear(8, 8)

    of_lists = Model(nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)))
    assert blocks_of(of_lists) == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    of_stages = Model(nn.ModuleList(Stage() for _ in range(2)))
    assert blocks_of(of_stages) == tuple(f"layers.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1))
    assert detect_blocks(of_stages).stacks[0].fqn == "layers.*.blocks"

    class WithHeads(Block):
        def __init__(self) -> None:
            super().__init__(16)
            self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    class T5Like(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([Block(), OtherBlock()])  # attention and feed-forward: each class once

    assert blocks_of(Model(nn.ModuleList(WithHeads() for _ in range(3)))) == numbered("layers.", 3)
    assert blocks_of(Model(nn.ModuleList(T5Like() for _ in range(3)))) == numbered("layers.", 3)
    shared = Block()
    assert blocks_of(Model(nn.ModuleList([shared] * 6))) == ("layers.0",)
    assert blocks_of(Model(nn.ModuleList([Block(64)]))) == ("layers.0",)


def test_single_experts_are_not_blocks_by_their_name_or_their_router() -> None:
    class Moe(nn.Module):
        def __init__(self, experts: str) -> None:
            super().__init__()
            self.attn = nn.Linear(8, 8)
            self.gate = nn.Linear(8, 6, bias=False)
            setattr(self, experts, nn.ModuleList(Block() for _ in range(6)))

    for name in ("experts", "parts"):
        assert blocks_of(Model(nn.ModuleList(Moe(name) for _ in range(3)))) == numbered("layers.", 3)


def test_small_stacks_are_minor_and_what_has_no_blocks_is_refused() -> None:
    model = Model(nn.ModuleList(Block(64) for _ in range(8)))
    model.tower = nn.ModuleList(Block(4) for _ in range(3))
    model.norm.owner = model  # a model that registers its parent
    stacks = detect_blocks(model).stacks
    assert [(stack.fqn, stack.is_major) for stack in stacks] == [("layers", True), ("tower", False)]
    with pytest.raises(BlockDetectionError, match=r"no parameters.*Pass the model"):
        detect_blocks(nn.Sequential(nn.ReLU()))
    with pytest.raises(BlockDetectionError, match=r"0\.weight.*Run one forward pass"):
        detect_blocks(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("is_made", [True, False])
def test_parts_around_the_blocks_are_named(is_made: bool) -> None:
    """A tie that loading will make counts before it is made."""
    model = Model(nn.ModuleList(Block() for _ in range(4)))
    apart = 0 if is_made else model.head.weight.numel()
    if is_made:
        model.head.weight = model.embed.weight
    else:
        model.all_tied_weights_keys = {"head.weight": "embed.weight"}  # type: ignore[assignment]
    model.scale = nn.Parameter(torch.ones(()))
    found = detect_blocks(model)
    assert [part.fqn for part in found.embeddings] == ["embed"]
    assert found.final_norm is not None and found.final_norm.fqn == "norm"
    assert found.head is not None and found.head.fqn == "head"
    assert list(found.ties) == [("embed.weight", "head.weight")]
    assert found.scalars == ("scale",)
    assert found.num_params == sum(parameter.numel() for parameter in model.parameters()) - apart
