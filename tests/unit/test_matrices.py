"""Which parameters are hidden matrices, in models of many kinds, and how their owners are chosen."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_fsdp_tools import ConfigError, Muon
from hf_fsdp_tools.extensions.muon.matrices import find_matrices, newton_schulz_flops, sizes_of_matrices
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import make_model, tiny_config
from tests.api import matrices_in

KINDS = (
    "llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "bert", "t5", "whisper", "vit", "swin", "clip", "mamba",
    "detr", "qwen2_vl", "llama4_text", "phi3", "xlnet", "wav2vec2", "deberta-v2", "jetmoe",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_parameter_has_one_group_and_no_end_is_a_matrix(kind):
    model = build_meta_model(tiny_config(kind))
    plan = find_matrices(model)
    names = [*plan.matrices, *(name for name, _ in plan.others)]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(model.get_parameter(name)) for name in names} == set(map(id, trained))
    assert len(names) == len(set(names)) == len(trained)
    matrices = {id(model.get_parameter(name)) for name in plan.matrices}
    ends = [getattr(model, "lm_head", None), getattr(model, "class_embed", None), getattr(model, "bbox_embed", None)]
    ends += [m for m in model.modules() if isinstance(m, nn.Embedding | nn.LayerNorm | nn.modules.conv._ConvNd)]
    for end in filter(None, ends):
        assert not matrices.intersection(map(id, end.parameters())), type(end).__name__
    pieces = matrices_in(model, plan.matrices)
    assert all(sum(p.box.numel for p in pieces[name]) == model.get_parameter(name).numel() for name in plan.matrices)
    sizes = sizes_of_matrices(model)
    for name, (count, rows, columns) in sizes.items():  # what is estimated is what the optimizer does
        assert len(pieces[name]) == count, name
        assert {newton_schulz_flops(*p.view.length) for p in pieces[name]} == {newton_schulz_flops(rows, columns)}


def test_adapters_and_ties_are_no_matrices_and_a_model_without_blocks_is_refused():
    tied = make_model("tied")
    assert ("model.embed_tokens.weight", "embeddings") in find_matrices(tied).others
    adapted = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["v_proj"]))
    plan = find_matrices(adapted)
    assert {why for name, why in plan.others if "lora" in name} == {"adapters"}
    assert plan.matrices == tuple(f"model.layers.{i}.self_attn.v_proj.modules_to_save.default.weight" for i in range(2))
    assert "Muon    matrices of blocks" in str(plan) or "Muon   matrices of blocks" in str(plan)
    with pytest.raises(ConfigError, match=r"Linear trains no matrices for Muon\. Only linear layers inside"):
        Muon(nn.Linear(3, 4))


def test_a_router_chooses_experts_and_a_shared_expert_as_wide_as_there_are_experts_is_none():
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "num_experts": 16}
    mixture = hf.Qwen3NextConfig(
        **sizes, **heads, moe_intermediate_size=32, shared_expert_intermediate_size=16, layer_types=["full_attention"]
    )
    plan = find_matrices(build_meta_model(mixture))
    routers = {name for name, why in plan.others if why == "routers"}
    assert routers == {"model.layers.0.mlp.gate.weight"}, routers
    assert "model.layers.0.mlp.shared_expert.gate_proj.weight" in plan.matrices


def test_a_step_alone_is_that_of_torch_and_leaves_what_has_no_gradient():
    model = make_model("llama")
    optimizer = Muon(model, lr=0.1, weight_decay=0.0)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    twin = nn.Parameter(weight.detach().clone())
    twin.grad = weight.grad.clone()
    torch.optim.Muon([twin], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    optimizer.step()
    assert torch.equal(weight, twin)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if p is not weight)
    assert len(optimizer.state) == 1
