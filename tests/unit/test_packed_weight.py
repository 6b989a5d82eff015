"""Packed weights by themselves: they are floats where code takes them, drawn by nobody, and each shape has a kernel."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers as hf
from transformers import initialization

from hf_fsdp_tools.modeling import packed_weight
from hf_fsdp_tools.modeling.codecs.compressed import Scaled
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.steps import build_meta_model
from tests.api import keep_by_config


def test_packed_weights_are_not_drawn_and_are_floats_where_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = hf.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    keep_by_config(model := build_meta_model(config))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(1)
    weight = model.model.layers[0].mlp.up_proj.weight
    expected = weight.floats()
    assert torch.equal(torch.cat([weight, weight]), torch.cat([expected] * 2))
    # as on a GPU where nothing can be compiled
    on_gpu = {"_takes_kernel": lambda values: packed_weight._is_kernel_possible, "_is_kernel_possible": True}
    failing = Mock(side_effect=RuntimeError("Failed to find C compiler."))
    with (
        patch.multiple(packed_weight, **on_gpu, _compiled=failing),
        pytest.warns(UserWarning, match="Failed to find C compiler") as said,
    ):
        assert torch.equal(weight.floats(), expected) and torch.equal(weight.floats(), expected)
    assert len(said) == 1
    # transformers' functions, by which Falcon-Mamba draws all weights of a mixer, leave what is loaded
    monkeypatch.setattr(PackedForm, "floats", None)
    initialization.uniform_(weight)


def test_every_shape_of_a_model_has_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    real, parts, make_chunks = torch.compile, [], PackedForm.chunks
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, options: real(run, dynamic=dynamic, backend="eager"))

    def chunks(form: PackedForm, matrices: int, most: int) -> object:
        parts.append((form.shape, torch.compiler.is_compiling()))
        return make_chunks(form, matrices, most)

    monkeypatch.setattr(PackedForm, "chunks", chunks)
    packed_weight._compiled.cache_clear()
    values = PackedPart(name="", dtype=torch.float8_e4m3fn, ndim=2)
    scales = {"scale": PackedPart(name="_scale_inv", dtype=torch.float32, ndim=2, block=(8, 16))}
    given = {"dtype": torch.bfloat16, "codec": Scaled(), "is_transposed": False, "values": values, "scales": scales}
    for number in range(1, 12):  # torch compiles one function 8 times
        form = PackedForm(shape=(8 * number, 32), **given)
        stored = torch.randint(0, 100, form.shape, dtype=torch.uint8), [torch.ones(number, 2).view(torch.uint8)]
        with patch.multiple(packed_weight, _takes_kernel=lambda values: True, VALUES_AT_A_TIME=2**9):
            floats = form.floats(*stored, torch.bfloat16)
        assert torch.equal(floats, stored[0].view(torch.float8_e4m3fn).to(torch.bfloat16))
    assert all(is_compiled for _, is_compiled in parts), parts
    packed_weight._compiled.cache_clear()
