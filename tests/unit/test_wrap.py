"""Wrap plans: the rules of a correct plan over a sample of the census, policies, and messages that name the cure."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from hf_fsdp_tools import WrapPolicy
from hf_fsdp_tools.steps import WrapPlan, WrapPlanError, build_meta_model, make_wrap_plan
from tests._dist import fake_ranks
from tests.api import check_wrap_plan
from tests.census import plans
from tests.census.defaults import classes_by_default
from tests.unit.test_blocks import Block, Model

# An architecture for each kind of trap that the survey of the registry found.
SAMPLE = """
    llama gpt2 mixtral zamba2 gpt_oss bert albert t5 clip blip-2 resnet mobilevit funnel rt_detr wav2vec2 encodec
    perceiver
""".split()  # noqa: SIM905 (a table is easier to read and change than so many quoted names)
fake_group = pytest.fixture(fake_ranks)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_census_sample(fake_group: None, model_type: str) -> None:
    row = plans.examine(model_type, classes_by_default(model_type)["main"])
    assert row["verdict"] == "agrees", row["why"]


def faults(model: nn.Module, **policy: Any) -> list[str]:
    plan = make_wrap_plan(model, policy=WrapPolicy(**policy))
    assert check_wrap_plan(model, plan) == ()
    return plans.verdict(model, [(unit.modules, unit.reshard_after_forward) for unit in plan.units], plan.replicated)


def unit_names(model: nn.Module, **policy: Any) -> list[tuple[str, ...]]:
    return [unit.modules for unit in make_wrap_plan(model, policy=WrapPolicy(**policy)).units]


LAYERS = [(f"layers.{index}",) for index in range(6)]


def test_embedding_blocks_large_experts_and_tail_are_units() -> None:
    model = build_meta_model(t.LlamaConfig(num_hidden_layers=4))
    plan = make_wrap_plan(model)
    assert [unit.modules for unit in plan.units] == [
        ("model.embed_tokens",),
        *[(f"model.layers.{index}",) for index in range(4)],
        ("model.norm", "lm_head"),
        ("",),
    ]
    assert [unit.reshard_after_forward for unit in plan.units] == [True, *[True] * 4, False, None]
    assert sum(unit.num_params for unit in plan.units) == plan.num_params == model.num_parameters()
    assert plan.largest_unit.modules == ("model.layers.0",)
    model = build_meta_model(t.Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True))
    tied = make_wrap_plan(model).units[0]
    assert tied.modules == ("model.embed_tokens", "model.norm", "lm_head")
    assert tied.reshard_after_forward is False
    assert tied.num_params == model.config.vocab_size * 4096 + 4096
    model = build_meta_model(t.MixtralConfig(num_hidden_layers=2))
    experts = [("model.layers.0.mlp.experts",), ("model.layers.0",)]
    assert unit_names(model)[1:3] == experts
    assert ("model.layers.0.mlp.experts",) not in unit_names(model, expert_unit_params=math.inf)
    model = Model(nn.ModuleList(running(6, width=256)))
    model.tower = nn.ModuleList(running(4, width=64))
    assert unit_names(model) == [*LAYERS, ("",)], "a tower below the ceiling is gathered with the root"


def test_two_dtypes_are_parted_where_both_are_trained(fake_group: None) -> None:
    model = Model(nn.ModuleList(running(width=32))).to(torch.bfloat16)
    for layer in model.layers:
        layer.norm.float()
    assert unit_names(model)[1:3] == [("layers.0.norm",), ("layers.0",)]
    assert faults(model) == []
    frozen = Model(nn.ModuleList(running(width=32))).to(torch.bfloat16)
    for layer in frozen.layers:
        layer.norm.float().requires_grad_(False)
    assert ("layers.0.norm",) not in unit_names(frozen)


class RunningBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(self.attn(x)))


def running(count: int = 6, width: int = 8) -> list[RunningBlock]:
    return [RunningBlock(width) for _ in range(count)]


def test_a_policy_chooses_units_options_and_sizes() -> None:
    for wanted in (RunningBlock, "RunningBlock", "layers.?"):
        plan = make_wrap_plan(Model(nn.ModuleList(running())), policy=WrapPolicy(block_types=(wanted,)))
        assert [unit.modules for unit in plan.units if unit.reason.startswith("chosen by block_types")] == LAYERS

    def first_mlp(fqn: str, module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": False, "reason": "hot"} if fqn == "layers.0.mlp" else False

    plan = make_wrap_plan(Model(nn.ModuleList(running())), policy=WrapPolicy(units=(first_mlp,)))
    unit = next(unit for unit in plan.units if unit.modules == ("layers.0.mlp",))
    assert (unit.reshard_after_forward, unit.reason) == (False, "hot")
    assert unit_names(Model(nn.ModuleList(running())), units=(first_mlp,)).count(("layers.0",)) == 1
    model = Model(nn.ModuleList(running(6, width=64)))
    model.embed = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 64))
    assert ("embed.1",) not in unit_names(model)
    assert ("embed.1",) in unit_names(model, min_unit_params=500)
    assert ("norm",) not in unit_names(model, min_unit_params=1, floor_params=100)
    model = Model(nn.ModuleList(running()))
    plan = make_wrap_plan(model, policy=WrapPolicy(reshard_after_forward={"layers.[45]": False, "": True}))
    assert [u.reshard_after_forward for u in plan.units if "layers" in u.modules[0]] == [True] * 4 + [False] * 2
    assert plan.units[-1].reshard_after_forward is True
    policy = WrapPolicy(replicate=("layers.*.norm", "embed.weight"))
    plan = make_wrap_plan(Model(nn.ModuleList(running())), policy=policy)
    assert len(plan.replicated) == 13 and "embed.weight" in plan.replicated
    assert sum(unit.num_params for unit in plan.units) == plan.num_params - 6 * 16 - 32 * 8


def test_what_no_policy_can_be_is_refused_with_the_cure() -> None:
    policy = WrapPolicy(block_types=("RuningBlock",), replicate=("embedd.weight",))
    with pytest.raises(WrapPlanError, match=r"embed\.weight(.|\n)*'RuningBlock' .* did you mean RunningBlock"):
        make_wrap_plan(Model(nn.ModuleList(running())), policy=policy)
    model = Model(nn.ModuleList(running()))
    model.body = nn.Sequential(*(running(12, width=16)))
    with pytest.raises(WrapPlanError, match=r"(?s)Rule 2: unit 'body' gathers .* the bound is .*Change block_types"):
        make_wrap_plan(model, policy=WrapPolicy(block_types=("body",)))
    with pytest.raises(WrapPlanError, match=r"Rule 4: 'layers' is a ModuleList.*choose its members"):
        make_wrap_plan(model, policy=WrapPolicy(block_types=("ModuleList",)))
    with pytest.raises(WrapPlanError, match=r"min_unit_params is -1.*block_types is 'Block'.*write \('Block',\)"):
        WrapPolicy(min_unit_params=-1, block_types="Block")  # type: ignore[arg-type]
    with pytest.raises(WrapPlanError, match="unknown options colour; known are"):
        unit_names(Model(nn.ModuleList(running())), units=(lambda fqn, _: {"colour": 1} if fqn == "norm" else None,))


def test_a_plan_is_data_with_a_stable_digest() -> None:
    plan = make_wrap_plan(Model(nn.ModuleList(running())))
    again = WrapPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest == make_wrap_plan(Model(nn.ModuleList(running()))).digest
    worded = replace(plan, units=tuple(replace(unit, reason="other") for unit in plan.units))
    assert worded.digest == plan.digest  # the wording is no part of what FSDP is told
    others = (replace(plan.units[0], reshard_after_forward=False), *plan.units[1:])
    assert replace(plan, units=others).digest != plan.digest


@pytest.mark.parametrize("text", ["", "[" * 5000, "{}", '{"format": 9}', '{"format": 1, "units": [{"modules": []}]}'])
def test_what_is_no_plan_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(WrapPlanError, match=r"WrapPlan\.to_json"):
        WrapPlan.from_json(text)
