"""Sizes and rules by which layers and experts cannot be divided: one error, with values and cure, before any is."""

from itertools import product
from types import SimpleNamespace

import pytest

from hf_fsdp_tools import ConfigError, ParallelDims
from hf_fsdp_tools.distributed.mesh import dims_of
from hf_fsdp_tools.errors import MeshError
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import tiny_config
from tests.api import checked_rules

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

UP = "model.layers.*.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "changes", "sizes", "given", "said"),
    [
        ("llama", {}, (3, 1), {}, "num_attention_heads 4 of model.layers.0.self_attn cannot be divided by tp_size 3"),
        ("llama", {"vocab_size": 67}, (2, 1), {}, r"\(67, 64\) cannot be divided by tp_size 2. Add rows: .*of=2"),
        ("qwen3_moe", {}, (1, 3), {}, r"gate_up_proj of shape \(4, .* divided by ep_size 3. Use another ep_size"),
        ("gpt2", {}, (2, 1), {}, "GPT2LMHeadModel has no tp_plan for tp_size 2. Leave tp_size out, or give rules"),
        ("gemma3n_text", {}, (2, 1), {}, "computes something else than one process: statistics of the units"),
        ("llama", {}, (2, 1), {"tp_plan": {f"{UP}j": "colwise"}}, f"tp_plan names {UP}j.*did you mean {UP}"),
        ("qwen3_moe", {}, (1, 2), {"ep_implementation": "all_to_al"}, "'all_to_al', which .*did you mean all_to_all"),
        ("qwen3_moe", {}, (1, 2), {"ep_implementation": "all_reduce"}, "ep_size 2 equal to tp_size 1. Use 'all_to"),
        ("qwen3_moe", {"_experts_implementation": "deepgemm_megamoe"}, (2, 2), {}, "backward pass. Use 'grouped_mm'"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_values_and_cure(kind, changes, sizes, given, said):
    config = tiny_config(kind, 2)
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_meta_model(config)
    with pytest.raises(ConfigError, match=said) as error:
        checked_rules(model, *sizes, **given)
    assert "\n" not in str(error.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_sizes_are_whole_numbers_from_1_that_fit():
    for name, size in product(("tp_size", "ep_size"), (0, 2.0, True)):
        for make in (ParallelDims, lambda **sizes: dims_of(SimpleNamespace(**sizes))):
            with pytest.raises(MeshError, match=f"{name} is {size!r}; it must be a whole number, 1 or more"):
                make(**{name: size})
    for sizes, said in (
        ({"tp_size": 3}, "x tp_size 3 does not make the 8 processes"),
        ({"ep_size": 8, "dp_replicate_size": 2}, "ep_size 8 does not divide the 4 processes of a copy"),
        ({"ep_size": 2, "tp_size": 2, "cp_size": 2}, "ep_size 2 is no multiple of cp_size 2 x tp_size 2"),
    ):
        with pytest.raises(MeshError, match=said):
            ParallelDims(**sizes).resolve(8)
