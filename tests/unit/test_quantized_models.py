"""Models of quantised checkpoints on one process: what a config alone says is what the files hold; memory is bounded
while weights are dequantised or packed; what cannot be is refused."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig
from transformers.quantizers import quantizer_bnb_4bit

from hf_fsdp_tools import CheckpointError, ConfigError, FSDPToolsError, from_pretrained
from hf_fsdp_tools.loading import fill
from hf_fsdp_tools.loading.io import files
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan
from tests._checkpoints import QUANTIZED, make_quantized, stored_tensors
from tests._late import LateSideStream, Machine
from tests._transfers import Windows
from tests.api import (
    CheckpointIndex,
    Packed,
    PackedForm,
    PackedPart,
    in_fp32,
    keep_by_config,
    keep_stored,
    packed_parameters,
    patched,
    weights_4bit,
)

SIZES = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}


def llama(**quantization: Any) -> Any:
    config = hf.LlamaConfig(**SIZES)
    config.quantization_config = quantization
    return build_meta_model(config)


def four_bits(**options: Any) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    return BitsAndBytesConfig(load_in_4bit=True, **{"bnb_4bit_quant_storage": torch.bfloat16, **options})


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantized("fp8", tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(folder := tmp_path_factory.mktemp("plain"))
    return folder


# ---- what a config says ----


def deepseek_v3() -> Any:
    """A model of sizes that its blocks divide, as those of released ones."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 131}
    sizes |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, first_k_dense_replace=1))


def in_one_byte(form: PackedForm) -> PackedForm:
    """A form in which exponents of a byte have one dtype and one name, of which files have two."""

    def alike(part: PackedPart) -> PackedPart:
        is_exponent = part.dtype in (torch.uint8, torch.float8_e8m0fnu)
        return replace(part, dtype=torch.uint8, name=part.name.replace(".scale", "_scale_inv")) if is_exponent else part

    return replace(form, codec=None, scales={name: alike(part) for name, part in form.scales.items()})


@pytest.mark.parametrize(
    "kind",
    [
        "fp8",
        "fp8 and fp4 experts",
        "mxfp4",
        "compressed int4 experts",
        "compressed mxfp8",
        "mxfp8 experts",
        "gptq",
        "awq",
    ],
)
def test_the_forms_of_a_config_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    """In a whole model, with what joins experts; each format by itself is in test_stored_formats."""
    is_fp4 = "fp4 " in kind
    folder = make_quantized(kind, tmp_path, deepseek_v3 if is_fp4 else None)
    real, estimated = build_meta_model(folder), build_meta_model(folder)
    keep_stored(real, CheckpointIndex.open(folder))
    says = {"weight_block_size": [8, 16], "expert_dtype": "fp4"} if is_fp4 else {}
    Packed.put(estimated, stored_quantization={**QUANTIZED[kind][2], **says})
    keep_by_config(estimated)
    found, expected = packed_parameters(estimated), packed_parameters(real)
    if is_fp4:
        found, expected = ({key: in_one_byte(form) for key, form in each.items()} for each in (found, expected))
    assert found == expected and list(found) == list(expected)
    looks = ([(name, p.shape, p.dtype) for name, p in model.named_parameters()] for model in (estimated, real))
    assert next(looks) == next(looks)


def of_group(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}}
    group["weights"] |= weights
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}


def test_layers_that_a_config_leaves_plain_are_plain_and_blocks_keep_their_size() -> None:
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
    keep_by_config(model := mixtral(96))
    assert len(packed_parameters(model)) == 6  # of 96 rows two blocks of 48, as transformers takes them
    for size in ([32, 16], "32x16"):
        config = of_group(num_bits=8, type="float", strategy="block", block_structure=size)
        keep_by_config(model := llama(**config | {"format": "float-quantized"}))
        form = packed_parameters(model)["model.layers.0.mlp.up_proj.weight"]
        assert not form.codec.is_converted and form.scales["scale"].block == (32, 16)
        shapes = [tuple(each.shape) for each in model.model.layers[0].mlp.up_proj.parameters()]
        assert shapes == [(96, 64), (3, 4 * 2)], "bytes of values, and of scales of 16 bits"


def mixtral(intermediate_size: int) -> Any:
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = hf.MixtralConfig(**sizes, vocab_size=131, num_local_experts=2, intermediate_size=intermediate_size)
    config.quantization_config = FP8 | {"weight_block_size": [64, 64]}
    return build_meta_model(config)


# ---- loading ----


def test_the_layers_that_transformers_would_quantise() -> None:
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
    config = hf.LlamaConfig(**SIZES)
    units = [unit.modules for unit in make_wrap_plan(build_meta_model(config)).units]
    for storage in (torch.uint8, torch.float32):
        model = build_meta_model(config, quantization_config=four_bits(bnb_4bit_quant_storage=storage))
        assert [unit.modules for unit in make_wrap_plan(model).units] == units, storage


@pytest.mark.nightly
def test_without_being_asked_nothing_imports_bitsandbytes(tmp_path: Path) -> None:
    code = (
        "import sys; from transformers import LlamaConfig; from hf_fsdp_tools import from_config, save_pretrained; "
        f"model = from_config(LlamaConfig(**{SIZES}), seed=0); save_pretrained(model, {str(tmp_path / 'saved')!r}); "
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_is_bounded_and_reads_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_inner: Any) -> None:
    """A weight of 2 MB at 1 MiB of staging: no part that is dequantised and no window that is read is larger than its
    share of that; one window is read while the one before is dequantised."""
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Qwen3Config(vocab_size=131, num_key_value_heads=4, head_dim=64, **sizes)
    folder = make_quantized("fp8 of 128 x 128", tmp_path / "large", lambda: hf.Qwen3ForCausalLM(config))
    seen = Windows(monkeypatch)
    patch_inner(in_fp32=seen.computing(in_fp32))
    report = load_weights(build_meta_model(folder), folder, staging_bytes=2**20)
    stored = stored_tensors(folder)
    # scales are read again for the next rows of their blocks
    assert sum(t.nbytes for t in stored.values()) == report.share_bytes <= report.bytes_read
    assert report.read_ratio <= 1.05
    assert sum(seen.parts) == sum(t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn)
    seen.are_bounded(1, int(1.05 * 2**16))
    seen.parts.clear()
    report = load_weights(build_meta_model(folder), folder)
    assert len(seen.parts) < 60 and report.read_calls <= len(seen.parts) + len(stored), "few calls for scales"
    assert report.read_ratio <= 1.001


def test_weights_are_packed_in_parts_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same while they are packed; and a plain model on one process computes with what was loaded."""
    given = four_bits()
    import bitsandbytes.functional

    plain = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"intermediate_size": 8192, "num_hidden_layers": 1}))
    plain.save_pretrained(tmp_path)
    seen = Windows(monkeypatch)
    packing = seen.computing(bitsandbytes.functional.quantize_4bit)
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", packing)
    model = build_meta_model(tmp_path, dtype=torch.float32, quantization_config=given)
    report = load_weights(model, tmp_path, staging_bytes=2**20)
    assert report.read_ratio == 1.0 and report.bytes_read == sum(p.numel() for p in plain.parameters()) * 4
    assert sum(seen.parts) == sum(math.prod(form.shape) for form in weights_4bit(model).values())
    assert sum(seen.windows[1:]) == 4 * sum(seen.parts), "the first read is of what is not packed"
    seen.are_bounded(1, 2**16)
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=given)
    ids = torch.arange(3, 19).reshape(1, 16)
    assert torch.equal(model.train()(ids).logits, expected.train()(ids).logits)


def test_a_whole_load_to_a_late_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values travel through pinned buffers and arrive late: one pool of threads and one set of buffers for all of it,
    and the bits of a load by the CPU."""
    config = hf.LlamaConfig(**SIZES | {"intermediate_size": 1024})
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    pools, pool = [], files.ThreadPoolExecutor
    monkeypatch.setattr(files, "ThreadPoolExecutor", lambda *args, **given: pools.append(args) or pool(*args, **given))

    def loaded() -> dict[str, torch.Tensor]:
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
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_experts_of_nvfp4_are_as_compressed_tensors_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as transformers does, which leaves the scale of the whole weight of experts out (5.23)."""
    from tests.unit.test_stored_formats import by_compressed_tensors

    folder = make_quantized("compressed nvfp4", tmp_path, QUANTIZED["compressed experts"][0])
    stored, config = stored_tensors(folder), QUANTIZED["compressed nvfp4"][2]
    load_weights(model := build_meta_model(folder), folder)
    found = model.state_dict()
    for layer in range(2):
        theirs: dict[str, list[torch.Tensor]] = {"w1": [], "w2": [], "w3": []}
        for expert, name in ((expert, name) for expert in range(4) for name in theirs):
            module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}."
            parts = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
            theirs[name].append(by_compressed_tensors(parts, config, torch.bfloat16))
        w1, w2, w3 = map(torch.stack, theirs.values())
        assert torch.equal(found[f"model.layers.{layer}.mlp.experts.down_proj"], w2)
        assert torch.equal(found[f"model.layers.{layer}.mlp.experts.gate_up_proj"], torch.cat([w1, w3], 1))


def test_8_bit_floats_without_scales_are_floats(plain: Path, tmp_path: Path) -> None:
    model, tensors = build_meta_model(plain), stored_tensors(plain)
    save_file({key: t.to(torch.float8_e5m2) for key, t in tensors.items()}, tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].to(torch.float8_e5m2).float())


@pytest.mark.parametrize("given", [hf.FineGrainedFP8Config(dequantize=True), None, "silence"])
def test_what_transformers_needs_to_be_told_may_be_said(fp8: Path, tmp_path: Path, given: Any) -> None:
    """Nor need the config say anything, as in folders that transformers saves after it has dequantised (5.23)."""
    folder = Path(shutil.copytree(fp8, tmp_path / "copy"))
    if given == "silence":
        config = json.loads((fp8 / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    options = {} if given in (None, "silence") else {"quantization_config": given}
    model, report = from_pretrained(folder, output_loading_info=True, **options)
    assert report.dequantized_from == "fp8" and "fp8: 38.0 kB as stored, with scales, became" in str(report)
    assert not hasattr(model.config, "quantization_config") and not getattr(model, "is_quantized", False)


def test_warnings_say_what_was_dequantised(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers spreads the scales evenly; weights whose size is no multiple of the block size come out otherwise
    than they were quantised."""
    folder = Path(shutil.copytree(fp8, tmp_path / "copy"))
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 17]  # 48 columns are 3 blocks of them, the last one short
    (folder / "config.json").write_text(json.dumps(config))
    said: list[str] = []
    monkeypatch.setattr(hf.logging.get_logger("transformers.modeling_utils"), "warning", said.append)
    from_pretrained(folder)
    assert len(said) == 2 and "its weights were dequantised while they were read. fp8: 38.0 kB as stored" in said[0]
    assert "14 weights have scales on other blocks than weight_block_size says (model.layers.0.mlp.down" in said[1]


# ---- refusals ----

Call = Callable[[Path, Path, Path], object]


def kept(**quantization: Any) -> Call:
    return lambda *_: keep_by_config(llama(**quantization))


def built(quantization: Any = None, *, model: hf.PreTrainedConfig | None = None, **options: Any) -> Call:
    config = model or hf.LlamaConfig(**SIZES)
    return lambda *_: build_meta_model(config, quantization_config=quantization or four_bits(**options))


def loaded_as(**says: Any) -> Call:
    """Files of FP8 by a config that says something else of them."""

    def load(fp8: Path, *_: Path) -> None:
        config = json.loads((fp8 / "config.json").read_text())
        quantization = (config["quantization_config"] if "quant_method" not in says else {}) | says
        load_weights(build_meta_model(hf.Qwen3Config(**config | {"quantization_config": quantization})), fp8)

    return load


def packed_from_8_bits(_: Path, plain: Path, tmp: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors = {k: t.to(torch.float8_e4m3fn) if "q_proj" in k else t for k, t in tensors.items()}
    save_file(tensors, tmp / "model.safetensors")
    load_weights(build_meta_model(plain, quantization_config=four_bits()), tmp)


def loaded_by(kind: Any, folder: Path, **options: Any) -> None:
    """Into a model on meta, which stays there."""
    model = kind if isinstance(kind, hf.PreTrainedModel) else build_meta_model(kind)
    try:
        load_weights(model, folder, **options)
    finally:
        assert all(p.is_meta for p in model.parameters())


def with_packed_values(method: str | None) -> Call:
    """As GPTQ packs them, whatever is said."""

    def load(_: Path, plain: Path, tmp: Path) -> None:
        tensors = stored_tensors(plain)
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.qweight"] = torch.ones(6, 96, dtype=torch.int32)
        tensors["model.layers.0.mlp.up_proj.scales"] = torch.ones(1, 96, dtype=torch.float16)
        save_file(tensors, tmp / "model.safetensors", metadata={"format": "pt"})
        model = build_meta_model(plain)
        if method:
            model.config.quantization_config = {"quant_method": method}
        loaded_by(model, tmp, ignore_mismatched_sizes=True)

    return load


def strictly_with_another_head(_: Path, plain: Path, tmp: Path) -> None:
    kind = hf.AutoModelForSequenceClassification
    loaded_by(build_meta_model(plain, auto_class=kind, num_labels=5), plain, strict=True)


def cast_where_it_is(_: Path, plain: Path, tmp: Path) -> None:
    load_weights(hf.LlamaForCausalLM.from_pretrained(plain), plain, dtype=torch.bfloat16)


def with_an_endless_pattern(*_: Path) -> None:
    with patched(_MATCH_S=0.1):
        build_meta_model(hf.LlamaConfig(**SIZES), quantization_config=four_bits(llm_int8_skip_modules=["(.|.)*[xy]"]))


def without_bitsandbytes(*folders: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
        built(BitsAndBytesConfig(load_in_4bit=True))(*folders)


def by_another_config(fp8: Path, *_: Path) -> None:
    from_pretrained(fp8, quantization_config=hf.FineGrainedFP8Config())


ODD = hf.LlamaConfig(**SIZES | {"hidden_size": 36, "intermediate_size": 67, "head_dim": 8})
NO_RULE = r"(.|\n)*model\.dequantize\(\)"
PACKED = rf"(.|\n)*up_proj\.\w+' holds \w+, expected .*up_proj\.weight'{NO_RULE}"
REFUSED: dict[str, tuple[Call, type[FSDPToolsError], str]] = {
    "kept: no config": (kept(), ConfigError, "has no quantization_config"),
    "kept: a method": (kept(quant_method="quip", bits=4), ConfigError, "weights of quip cannot be kept"),
    "kept: bits": (kept(quant_method="gptq", bits=3), ConfigError, r"3 bits of gptq \(gptq\) cannot be kept"),
    "kept: ordered": (kept(quant_method="gptq", desc_act=True), ConfigError, "gptq, ordered by activation"),
    "kept: no weight": (kept(quant_method="mxfp4"), ConfigError, r"no weight of LlamaForCausalLM \(mxfp4\) cannot"),
    "kept: no size": (kept(**FP8 | {"weight_block_size": "8 x 16"}), ConfigError, r"of fp8 cannot be read \(ValueE"),
    "kept: ordered groups": (kept(**of_group(actorder="group")), ConfigError, "actorder group"),
    "kept: other groups": (kept(**of_group(group_size=7)), ConfigError, "compressed-tensors .* does not fit"),
    "kept: cut": (lambda *_: keep_by_config(mixtral(97)), ConfigError, "gate_up_proj of MixtralForCausalLM cannot be"),
    "8 bits": (built(BitsAndBytesConfig(load_in_8bit=True)), ConfigError, "only 4-bit weights of .*load_in_4bit=True"),
    "EETQ": (built(hf.EetqConfig()), ConfigError, "only 4-bit weights of bitsandbytes"),
    "FP8 again": (by_another_config, ConfigError, "only 4-bit weights of bitsandbytes"),
    "no layer": (built(llm_int8_skip_modules=["model", "lm_head"]), ConfigError, "No layer of Llama.*skip_modules"),
    "an endless pattern": (with_an_endless_pattern, CheckpointError, "is no regular .*timed out"),
    "odd sizes": (built(model=ODD), ConfigError, r"gate_proj\.weight' \[67, 36\] has 2412 values.*llm_int8_skip"),
    "packed from 8 bits": (packed_from_8_bits, CheckpointError, r"q_proj\.weight': expected .* found float8_e4m3fn"),
    "no bitsandbytes": (without_bitsandbytes, ConfigError, "pip install bitsandbytes"),
    "a method of zero points": (loaded_as(quant_method="auto-round"), CheckpointError,
         rf"quantised \(auto-round\); .*packs values with zero points{NO_RULE}"),
    "packed values": (with_packed_values("some"), CheckpointError,
         rf"quantised \(some\); it cannot .*: no rule is{PACKED}"),
    "packed in silence": (with_packed_values(None), CheckpointError, rf"although its config has no quant{PACKED}"),
    "not packed": (lambda _, plain, tmp: loaded_by(llama(quant_method="fp8"), plain), CheckpointError,
         r"quantised \(fp8\), but its files hold plain values \(float32\)\. Remove"),
    "few bytes": (lambda _, plain, tmp: loaded_by(plain, plain, staging_bytes=1000), ConfigError,
         "is 1000; .* 1048576"),
    "strict": (strictly_with_another_head, CheckpointError,
         r"Missing: score\.weight\. Unexpected: lm_head\.weight\. Use"),
    "another dtype": (cast_where_it_is, ConfigError, "torch.bfloat16 cannot be honoured: .* storage in torch.float32"),
    "a method that is a number": (loaded_as(quant_method=7), CheckpointError,
         rf"quantised \(7\); .*no rule is{NO_RULE}"),
    "rotated": (loaded_as(transform_config={"config_groups": {"R4": {"type": "hadamard"}}}), CheckpointError,
         "has transform_config"),
}  # fmt: skip
"""What is called with folders of FP8, plain and empty; and the error."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_error(fp8: Path, plain: Path, tmp_path: Path, name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words) as caught:
        call(fp8, plain, tmp_path)
    assert "\n" not in str(caught.value) or "kept" not in name
    for transform in ({"config_groups": {}}, {}) if name == "rotated" else ():
        loaded_as(transform_config=transform)(fp8)
