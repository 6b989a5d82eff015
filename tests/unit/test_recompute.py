"""Inputs of checkpointed blocks on the host: copied while blocks compute, on a stand-in for an accelerator."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.sharding import recompute
from hf_fsdp_tools.sharding.recompute import Link, checkpoint_activations
from tests._checkpoints import make_model
from tests._late import LateSideStream, Machine
from tests.api import Recompute

LAYERS = 4


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=97)).train()


def gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(24).reshape(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 3])
def test_late_copies_give_the_same_values_and_memory_is_given_back(every: int, seed: int) -> None:
    expected, model = gradients(llama()), llama()
    with Machine(seed=seed) as machine:
        link = Link(LateSideStream(machine, 1))
        checkpoint_activations(model, Recompute(offload=True, every_n_layers=every), link_of=lambda _: link)
        for _ in range(2):
            model.zero_grad()
            assert_same(gradients(model), expected)
            assert machine.pinned_alive == 0, "a backward pass gives it back"
        count = len(range(0, LAYERS, every))
        assert machine.pinned_bytes == [2 * 12 * 32 * 4] * 2 * count
        assert machine.done == ["copy"] * 4 * count, "one copy there and one back"
        model(input_ids=torch.arange(8)[None]).logits.sum()
        assert machine.pinned_alive == 0, "a pass without a backward pass too"


def test_a_system_that_gives_no_pinned_memory_is_one_line() -> None:
    class Full(LateSideStream):
        def pinned(self, num_bytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    with Machine() as machine:
        link = Link(Full(machine, 1))
        with pytest.raises(ConfigError, match=r"does not give 64 B more of pinned host memory .* Take a smaller batch"):
            link.keep(torch.ones(9))


def test_two_passes_before_their_backward_passes_keep_their_own() -> None:
    ids = torch.arange(24).reshape(2, 12)
    expected = []
    for way in (None, Recompute(offload=True)):
        model = llama()
        if way is not None:
            checkpoint_activations(model, way)
        losses = [model(input_ids=each, labels=each).loss for each in (ids, ids + 7)]
        losses[0].backward()
        losses[1].backward()
        expected.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(expected[0][name], expected[1][name]) for name in expected[0])


def test_blocks_are_counted_in_each_stack_and_operators_named() -> None:
    """transformers counts on from the encoder to the decoder; a stack of its own begins with a checkpointed block."""
    model = make_model("t5")
    checkpoint_activations(model, Recompute(every_n_layers=2))
    for stack in (model.encoder.block, model.decoder.block):
        assert [block.gradient_checkpointing for block in stack] == [n % 2 == 0 for n in range(len(stack))]
    assert recompute.operators_named(("aten::mm",)) == recompute.operators_named(("mm",))
    assert varlen_attn and torch.ops.torch_attn._varlen_attn.default in recompute.operators_named(("attention",))
    assert set(recompute.operators_named(("mm",))) < set(recompute.operators_named(("matmul",)))
    with pytest.raises(ConfigError, match="no operator 'flash::attention'"):
        recompute.operators_named(("flash::attention",))

    class Old(nn.Module):
        supports_gradient_checkpointing = True

    recompute.check_checkpointing(Old(), Recompute())
    with pytest.raises(ConfigError, match="has no GradientCheckpointingLayer"):
        recompute.check_checkpointing(Old(), recompute.as_recompute({"every_n_layers": 2}))
