"""What a quantization_config alone says of a checkpoint's weights is what its files hold."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from transformers import initialization

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.modeling import packed_weight
from hf_fsdp_tools.modeling.packed_weight import PackedPart
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import QUANTIZED, make_quantized
from tests.api import CheckpointIndex, PackedForm, add_to_note, keep_by_config, keep_stored, packed_parameters

KINDS = [kind for kind in QUANTIZED if kind not in ("fp8 experts", "compressed int4", "gptq experts", "awq experts")]


def deepseek_v3() -> Any:
    """A config of sizes that its blocks divide, as those of released models."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 131}
    sizes |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, first_k_dense_replace=1))


PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "scale_dtype": "torch.float32"}
SAYS: dict[str, dict[str, Any]] = {
    "fp8 and fp4 experts": {"weight_block_size": [8, 16], "expert_dtype": "fp4"},
    "compressed per tensor": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": PER_TENSOR}}},
}
"""What released configurations say, beside the small ones of the checkpoints."""


def in_one_byte(form: PackedForm) -> PackedForm:
    """A form in which exponents of a byte have one dtype and one name, of which files have two."""

    def alike(part: PackedPart) -> PackedPart:
        is_exponent = part.dtype in (torch.uint8, torch.float8_e8m0fnu)
        return replace(part, dtype=torch.uint8, name=part.name.replace(".scale", "_scale_inv")) if is_exponent else part

    return replace(form, scales={name: alike(part) for name, part in form.scales.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_the_forms_of_a_config_are_those_of_the_files(kind, tmp_path):
    folder = make_quantized(kind, tmp_path, deepseek_v3 if kind in SAYS and "fp4" in kind else None)
    real, estimated = build_meta_model(folder), build_meta_model(folder)
    keep_stored(real, CheckpointIndex.open(folder))
    add_to_note(estimated, stored_quantization={**QUANTIZED[kind][2], **SAYS.get(kind, {})})
    keep_by_config(estimated)
    found, expected = packed_parameters(estimated), packed_parameters(real)
    if "fp4" in kind:
        found, expected = ({key: in_one_byte(form) for key, form in each.items()} for each in (found, expected))
    assert found == expected and list(found) == list(expected)
    looks = ([(name, p.shape, p.dtype) for name, p in model.named_parameters()] for model in (estimated, real))
    assert next(looks) == next(looks)


def test_packed_weights_are_not_drawn_and_are_floats_where_they_are_joined(monkeypatch):
    model = llama(**FP8)
    keep_by_config(model)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(1)
    weight = model.model.layers[0].mlp.up_proj.weight
    expected = weight.floats()
    assert torch.equal(torch.cat([weight, weight]), torch.cat([expected] * 2))
    # as on a GPU where nothing can be compiled
    monkeypatch.setattr(packed_weight, "_takes_kernel", lambda values: packed_weight._is_kernel_possible)
    monkeypatch.setattr(packed_weight, "_is_kernel_possible", True)
    monkeypatch.setattr(packed_weight, "_compiled", Mock(side_effect=RuntimeError("Failed to find C compiler.")))
    with pytest.warns(UserWarning, match="Failed to find C compiler") as said:
        assert torch.equal(weight.floats(), expected) and torch.equal(weight.floats(), expected)
    assert len(said) == 1
    # Falcon-Mamba draws all weights of a mixer by transformers' functions, which leave what is loaded.
    config = QUANTIZED["fp8"][0]().config
    config.quantization_config = QUANTIZED["fp8"][2]
    model = build_meta_model(config)
    keep_by_config(model)
    monkeypatch.setattr(PackedForm, "floats", None)
    initialization.uniform_(next(iter(model.model.layers)).mlp.up_proj.weight)


def test_every_shape_of_a_model_has_a_compiled_kernel(monkeypatch):
    real, parts = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, options: real(run, dynamic=dynamic, backend="eager"))
    monkeypatch.setattr(packed_weight, "_takes_kernel", lambda values: True)
    monkeypatch.setattr(packed_weight, "VALUES_AT_A_TIME", 2**9)
    make_chunks = PackedForm.chunks

    def chunks(form: PackedForm, matrices: int, most: int) -> object:
        parts.append((form.shape, torch.compiler.is_compiling()))
        return make_chunks(form, matrices, most)

    monkeypatch.setattr(PackedForm, "chunks", chunks)
    packed_weight._compiled.cache_clear()
    values = PackedPart(name="", dtype=torch.float8_e4m3fn, ndim=2)
    scales = {"scale": PackedPart(name="_scale_inv", dtype=torch.float32, ndim=2, block=(8, 16))}
    for number in range(1, 12):  # torch compiles one function 8 times
        shape = (8 * number, 32)
        form = PackedForm(
            shape=shape, dtype=torch.bfloat16, rule="scaled", is_transposed=False, values=values, scales=scales
        )
        stored = torch.randint(0, 100, shape, dtype=torch.uint8), [torch.ones(number, 2).view(torch.uint8)]
        floats = form.floats(*stored, torch.bfloat16)
        assert torch.equal(floats, stored[0].view(torch.float8_e4m3fn).to(torch.bfloat16))
    assert all(is_compiled for _, is_compiled in parts), parts
    packed_weight._compiled.cache_clear()


def llama(**quantization: Any) -> Any:
    config = hf.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config.quantization_config = quantization
    return build_meta_model(config)


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}


def of_group(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}}
    group["weights"] |= weights
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}


def test_layers_that_a_config_leaves_plain_are_plain_and_blocks_that_are_cut_are_refused():
    def packed(**quantization: Any) -> set[str]:
        keep_by_config(model := llama(**quantization))
        return {fqn.removeprefix("model.layers.") for fqn in packed_parameters(model)}

    every = packed(**FP8)
    assert len(every) == 14 and not any("lm_head" in fqn for fqn in every)
    left_out = ["lm_head", "model.layers.1", "model.layers.0.mlp.gate", "model.layers.*.self_attn"]
    kept = packed(**FP8, modules_to_not_convert=left_out)
    assert kept == {n for n in every if n.startswith("0.mlp")}, "with gate_proj, which no name of a router is"
    ignored = ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp.up_proj"]
    assert packed(**of_group(), ignore=ignored) == {n for n in every if "mlp" in n} - {"0.mlp.up_proj.weight"}
    patterns = of_group()
    patterns["config_groups"]["a"]["targets"] = [r"re:.*\.down_proj$"]
    assert packed(**patterns) == {n for n in every if "down_proj" in n}
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=131, num_local_experts=2)
    config.quantization_config = FP8 | {"weight_block_size": [64, 64]}
    keep_by_config(model := build_meta_model(config))
    assert len(packed_parameters(model)) == 6  # of 96 rows two blocks of 48, as transformers takes them
    config.intermediate_size = 97
    with pytest.raises(ConfigError, match=r"gate_up_proj of MixtralForCausalLM cannot be kept as stored"):
        keep_by_config(build_meta_model(config))
    for size in ([32, 16], "32x16"):
        config = of_group(num_bits=8, type="float", strategy="block", block_structure=size)
        keep_by_config(model := llama(**config | {"format": "float-quantized"}))
        form = packed_parameters(model)["model.layers.0.mlp.up_proj.weight"]
        assert form.rule == "scaled" and form.scales["scale"].block == (32, 16)
        shapes = [tuple(each.shape) for each in model.model.layers[0].mlp.up_proj.parameters()]
        assert shapes == [(96, 64), (3, 4 * 2)], "bytes of values, and of scales of 16 bits"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({}, "has no quantization_config"),
        ({"quant_method": "quip", "bits": 4}, "weights of quip cannot be kept as stored"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits of gptq (gptq) cannot be kept as stored"),
        (
            {"quant_method": "gptq", "desc_act": True},
            "4 bits of gptq (gptq, ordered by activation) cannot be kept as stored",
        ),
        ({"quant_method": "mxfp4"}, "no weight of LlamaForCausalLM (mxfp4) cannot be kept as stored"),
        (FP8 | {"weight_block_size": "8 x 16"}, "the quantization_config of fp8 cannot be read (ValueError"),
        (of_group(actorder="group"), "actorder group) cannot be kept as stored"),
        (
            of_group(group_size=7),
            "into whose layers compressed-tensors as the config has it does not fit, cannot be kept",
        ),
    ],
)
def test_a_config_whose_weights_cannot_stay_is_one_error(quantization, said):
    with pytest.raises(ConfigError) as caught:
        keep_by_config(llama(**quantization))
    assert said in str(caught.value) and "\n" not in str(caught.value)
