"""Layouts that cannot be are refused in one sentence with value and cure, before anything is divided."""

import pytest
import torch.distributed as dist
import transformers as hf

from hf_fsdp_tools import ConfigError, ParallelDims, build_meta_model
from hf_fsdp_tools.errors import MeshError

parallel = pytest.importorskip("hf_fsdp_tools.sharding.parallel")
if parallel.ALL_PARALLEL_STYLES is None:
    pytest.skip("transformers 5.21 has plans", allow_module_level=True)

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def llama(**sizes):
    return hf.LlamaConfig(**(SIZES | HEADS | sizes))


def moe():
    return hf.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS)


@pytest.mark.parametrize(
    ("config", "sizes", "rules", "said"),
    [
        (llama(num_attention_heads=2, num_key_value_heads=1), (2, 1), {}, "num_key_value_heads 1 of .* tp_size 2"),
        (llama(vocab_size=131), (2, 1), {}, r"\(131, 64\) cannot be divided by tp_size 2. Add rows: .*pad_to_multiple"),
        (llama(intermediate_size=63), (2, 1), {}, r"gate_proj.weight of shape \(63, 64\) .* Use another tp_size"),
        (moe(), (1, 4), {}, r"gate_up_proj of shape \(6, 64, 64\) cannot be divided by ep_size 4"),
        (llama(), (1, 2), {}, "has no ep_plan for ep_size 2. Leave ep_size out, or give rules"),
        (hf.BloomConfig(hidden_size=64, n_layer=1, n_head=4), (2, 1), {}, "has no tp_plan for tp_size 2"),
        (moe(), (2, 1), {"tp_plan": {"model.layers.*.self_attn.q_prj": "colwise"}}, "did you mean .*q_proj"),
        (moe(), (2, 1), {"tp_plan": {"model.layers.*.self_attn.q_proj": "colwis"}}, "lacks: did you mean colwise"),
        (moe(), (1, 2), {"ep_implementation": "all_to_al"}, "lacks: did you mean all_to_all"),
        (moe(), (1, 2), {"ep_implementation": "all_reduce"}, "ep_size 2 equal to tp_size 1. Use 'all_to_all'"),
        (moe(), (1, 2), {"ep_implementation": "deepgemm_megamoe"}, "has no backward pass. Use 'all_to_all' to train"),
    ],
)
def test_a_layout_that_a_model_cannot_have_is_refused(config, sizes, rules, said):
    with pytest.raises(ConfigError, match=said):
        parallel.checked_rules(build_meta_model(config), *sizes, **rules)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp_size": 0}, "tp_size is 0; it must be a whole number, 1 or more"),
        ({"ep_size": 1.5}, "ep_size is 1.5; it must be a whole number"),
        ({"ep_size": 3}, "ep_size 3 does not divide the 8 processes of a copy"),
        ({"tp_size": 2, "ep_size": 3}, "ep_size 3 is no multiple of cp_size 1 x tp_size 2"),
        ({"tp_size": 3}, "x tp_size 3 does not make the 8 processes of this job"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes, said):
    with pytest.raises(MeshError, match=said):
        ParallelDims(**sizes).resolve(8)


def test_layers_that_machines_share_are_said(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with pytest.warns(UserWarning, match="tp_size 4 are more than the 2 processes of a machine"):
            ParallelDims(tp_size=4).build_mesh("cpu")
    finally:
        dist.destroy_process_group()
