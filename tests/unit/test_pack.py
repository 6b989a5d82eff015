"""4-bit layers on meta: which become ones, how they are packed, what is refused, and how much is packed at a time."""

import math
import subprocess
import sys

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig
from transformers.quantizers import quantizer_bnb_4bit

from hf_fsdp_tools import CheckpointError, ConfigError
from hf_fsdp_tools.loading import fill
from hf_fsdp_tools.loading.io import files
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan
from tests._late import LateSideStream, Machine
from tests._transfers import Windows
from tests.api import patched, weights_4bit

TINY = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def four_bits(**options) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, **{"bnb_4bit_quant_storage": torch.bfloat16, **options})


@pytest.fixture(autouse=True)
def with_bitsandbytes(request):
    if "without" not in request.node.name:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")


def test_the_layers_that_transformers_would_quantise():
    """T5 keeps `wo` in fp32 beside fp16, and heads are left out; what is named is left out too."""
    config = hf.T5Config(vocab_size=131, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    given = four_bits(llm_int8_skip_modules=["SelfAttention.q", "lm_head"])
    kind = hf.AutoModelForSeq2SeqLM
    model = build_meta_model(config, auto_class=kind, dtype=torch.float16, quantization_config=given)
    packed = weights_4bit(model)
    assert packed and not [key for key in packed if ".wo." in key or "SelfAttention.q" in key or "lm_head" in key]
    for key, form in packed.items():
        weight = model.get_parameter(f"{key}_packed")
        assert weight.is_meta and weight.dtype == torch.uint8 and not weight.requires_grad, key
        assert weight.shape == (math.prod(form.shape) // 64, 32)
        assert form.dtype == torch.float16 and form.values.dtype == torch.bfloat16
    assert {p.dtype for name, p in model.named_parameters() if ".wo." in name} == {torch.float32}
    assert model.is_loaded_in_4bit and model.config.quantization_config is model.hf_quantizer.quantization_config


def test_what_cannot_be_packed_is_refused_and_a_plan_is_that_of_the_plain_model(tmp_path):
    config = hf.LlamaConfig(**TINY)
    units = [unit.modules for unit in make_wrap_plan(build_meta_model(config)).units]
    for storage in (torch.uint8, torch.float32):
        model = build_meta_model(config, quantization_config=four_bits(bnb_4bit_quant_storage=storage))
        assert [unit.modules for unit in make_wrap_plan(model).units] == units, storage
    config = hf.LlamaConfig(**TINY)
    for other in (BitsAndBytesConfig(load_in_8bit=True), hf.EetqConfig()):
        with pytest.raises(ConfigError, match=r"only 4-bit weights of bitsandbytes .*load_in_4bit=True"):
            build_meta_model(config, quantization_config=other)
    with pytest.raises(ConfigError, match=r"No layer of LlamaForCausalLM .*llm_int8_skip_modules"):
        build_meta_model(config, quantization_config=four_bits(llm_int8_skip_modules=["model", "lm_head"]))
    endless = four_bits(llm_int8_skip_modules=["(.|.)*[xy]"])
    with patched(_MATCH_S=0.1), pytest.raises(CheckpointError, match=r"is no regular .*timed out"):
        build_meta_model(config, quantization_config=endless)
    odd = hf.LlamaConfig(**TINY | {"hidden_size": 36, "intermediate_size": 67, "head_dim": 8})
    with pytest.raises(ConfigError, match=r"gate_proj\.weight' \[67, 36\] has 2412 values.*llm_int8_skip"):
        build_meta_model(odd, quantization_config=four_bits())
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    save_file({k: t.to(torch.float8_e4m3fn) if "q_proj" in k else t for k, t in tensors.items()}, file)
    model = build_meta_model(tmp_path, quantization_config=four_bits(bnb_4bit_quant_storage=torch.uint8))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight': expected 16 or 32-bit .* found float8_e4m3fn"):
        load_weights(model, tmp_path)


def test_without_bitsandbytes_the_message_has_the_pip_line(monkeypatch):
    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        build_meta_model(hf.LlamaConfig(**TINY), quantization_config=four_bits())


@pytest.mark.nightly
def test_without_being_asked_nothing_imports_bitsandbytes(tmp_path):
    code = (
        "import sys; from transformers import LlamaConfig; from hf_fsdp_tools import from_config, save_pretrained; "
        f"model = from_config(LlamaConfig(**{TINY}), seed=0); save_pretrained(model, {str(tmp_path / 'saved')!r}); "
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_packed_in_parts_of_bounded_size(tmp_path, monkeypatch):
    """A weight of 2 MB at 1 MiB of staging: no part, and no window that is read, is larger than its share of that; one
    window is read while the one before is packed."""
    import bitsandbytes.functional

    config = hf.LlamaConfig(**TINY | {"intermediate_size": 8192, "num_hidden_layers": 1})
    plain = hf.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)
    seen = Windows(monkeypatch)
    packing = seen.computing(bitsandbytes.functional.quantize_4bit)
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", packing)
    model = build_meta_model(tmp_path, dtype=torch.float32, quantization_config=four_bits())
    report = load_weights(model, tmp_path, staging_bytes=2**20)
    assert report.read_ratio == 1.0 and report.bytes_read == sum(p.numel() for p in plain.parameters()) * 4
    assert sum(seen.parts) == sum(math.prod(form.shape) for form in weights_4bit(model).values())
    assert sum(seen.windows[1:]) == 4 * sum(seen.parts), "the first read is of what is not packed"
    seen.are_bounded(1, 2**16)
    # a plain model on one process computes with what was loaded
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=four_bits())
    ids = torch.arange(3, 19).reshape(1, 16)
    assert torch.equal(model.train()(ids).logits, expected.train()(ids).logits)


def test_a_whole_load_to_a_late_accelerator(tmp_path, monkeypatch):
    """Values travel through pinned buffers and arrive late: one pool of threads and one set of buffers for all of it,
    and the bits of a load by the CPU."""
    config = hf.LlamaConfig(**TINY | {"intermediate_size": 1024})
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    pools, pool = [], files.ThreadPoolExecutor
    monkeypatch.setattr(files, "ThreadPoolExecutor", lambda *args, **given: pools.append(args) or pool(*args, **given))

    def loaded():
        model = build_meta_model(tmp_path, dtype=torch.float32, quantization_config=four_bits())
        pools.clear()
        report = load_weights(model, tmp_path, staging_bytes=2**20)
        assert len(pools) == 1 and 0 < report.staging_bytes <= 2**20
        return model.state_dict()

    expected = loaded()
    with Machine(late_s=2e-4) as machine:
        machine.set_device(1)
        side = LateSideStream(machine, 1, holds=lambda tensor: True)
        monkeypatch.setattr(fill, "side_stream_for", lambda tensors: side)
        found = loaded()
        assert set(machine.named) == {1} and machine.released == 1
        assert sum(machine.pinned_bytes) <= 2**20 and machine.pinned_alive == 0 and machine.copies_under_way == 0
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key
