"""A wrap plan as FSDP1's policies: the plan's units where FSDP1 can have them, PyTorch's own signature, clear
refusals."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap

from hf_fsdp_tools import WrapPolicy
from hf_fsdp_tools.extensions.fsdp1.flat_shards import FlatShare
from hf_fsdp_tools.steps import WrapPlanError, make_wrap_plan
from tests._checkpoints import make_model
from tests.api import Held, hybrid_auto_wrap_policy
from tests.unit.test_blocks import Model
from tests.unit.test_wrap import RunningBlock

LAYERS = ["model.layers.0", "model.layers.1"]
UNITS = {
    "llama": ["model.embed_tokens", *LAYERS, "model.norm", "lm_head"],
    "tied": [*LAYERS, "model.norm"],  # embedding and head are one parameter: it stays where both are, in the root
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.ln_f"],
    "mixtral": ["model.embed_tokens", *LAYERS, "model.norm", "lm_head"],
    "t5": [*(f"{half}.block.{n}" for half in ("encoder", "decoder") for n in (0, 1)), "decoder.final_layer_norm"],
}


def wrapped_by_torch(model: nn.Module, policy) -> list[str]:
    """Fqns that PyTorch's own recursion wraps with a policy, the root aside."""
    names = {module: name for name, module in model.named_modules()}
    wrapped = []

    def wrapper(module, **kwargs):
        wrapped.append(names[module])
        return module

    _recursive_wrap(model, policy, wrapper, ignored_modules=set(), ignored_params=set(), only_wrap_children=True)
    return wrapped


@pytest.mark.parametrize("kind", sorted(UNITS))
def test_units_are_the_plans_as_far_as_fsdp1_can_have_them(kind):
    model = make_model(kind)
    policy = hybrid_auto_wrap_policy(model)
    assert sorted(policy.units) == sorted(UNITS[kind])
    assert sorted(wrapped_by_torch(model, policy)) == sorted(UNITS[kind])
    plan = make_wrap_plan(model)
    assert hybrid_auto_wrap_policy(model, plan=plan).units == policy.units
    assert set(policy.units) <= {name for unit in plan.units for name in unit.modules}


def test_what_fsdp1_cannot_have_is_refused():
    model = Model(nn.ModuleList(RunningBlock(64) for _ in range(3)))
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(WrapPlanError, match=r"scale of Model must stay whole.*Use FSDP2"):
        hybrid_auto_wrap_policy(model)
    model = make_model("llama")
    wanted = WrapPolicy(reshard_after_forward={"model.layers.*": 2})
    with pytest.raises(WrapPlanError, match=r"smaller world.*model\.layers\.0 \(2\).*True or False.*FSDP2"):
        hybrid_auto_wrap_policy(model, policy=wanted)
    model = Model(nn.ModuleList(RunningBlock(64) for _ in range(3)))
    for block in model.layers:
        block.to(torch.bfloat16).requires_grad_(False)
        block.attn.bias = nn.Parameter(torch.zeros(64))  # an fp32 adapter on a frozen bf16 block
    with pytest.raises(WrapPlanError, match=r"one dtype per unit.*layers\.0 \(bfloat16, float32\).*Cast the m") as e:
        hybrid_auto_wrap_policy(model)
    assert "layers.2" in str(e.value), "all units at once"
    model, other = make_model("llama"), make_model("llama")
    policy = hybrid_auto_wrap_policy(model)
    with pytest.raises(WrapPlanError, match=r"does not know the LlamaForCausalLM.*the very model"):
        wrapped_by_torch(other, policy)
    assert wrapped_by_torch(nn.Sequential(model), lambda **question: policy(**question)), "a wrapper is no stranger"
    with pytest.raises(WrapPlanError, match=r"does not fit GPT2LMHeadModel"):
        hybrid_auto_wrap_policy(make_model("gpt2"), plan=make_wrap_plan(model))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (3, 1, 2), (1, 5)])
def test_boxes_of_a_flat_share_are_its_run(shape):
    count = math.prod(shape)
    whole = torch.arange(count).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            run = whole.view(-1)[start:stop]
            share = FlatShare(whole.shape, run, start, requires_grad=False, is_first_replica=True)
            boxes = [box for box, _ in Held.of(share).boxes]
            parts = [whole[tuple(slice(s, s + n) for s, n in zip(b.start, b.length, strict=True))] for b in boxes]
            assert [x for part in parts for x in part.flatten().tolist()] == list(range(start, stop))
            assert len(boxes) <= 2 * max(len(shape), 1) - 1, "few boxes, whatever the range"
