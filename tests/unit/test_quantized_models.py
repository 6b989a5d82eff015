"""Models of quantised checkpoints on one process: what a config alone says is what the files hold; memory is bounded
while weights are dequantised or packed; what cannot be is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import transformers as hf
from transformers import BitsAndBytesConfig
from transformers.quantizers import quantizer_bnb_4bit

from hf_fsdp_tools import CheckpointError, ConfigError, FSDPToolsError, from_pretrained
from hf_fsdp_tools.loading import fill
from hf_fsdp_tools.loading.quantized import dequantize
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import make_quantized, stored_tensors
from tests._late import LateSideStream, Machine
from tests.api import in_fp32, keep_by_config, packed_parameters

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


def test_memory_is_bounded_and_reads_are_few(tmp_path: Path, patch_inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 2 MB at 1 MiB of staging: no part that is dequantised is larger than its share of that."""
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Qwen3Config(vocab_size=131, num_key_value_heads=4, head_dim=64, **sizes)
    folder = make_quantized("fp8 of 128 x 128", tmp_path / "large", lambda: hf.Qwen3ForCausalLM(config))
    parts: list[int] = []
    read: Any = WeakSet()

    def dequantizing(values: torch.Tensor, *args: Any, **options: Any) -> Any:
        parts.append(values.numel())
        assert sum(slab.num_bytes for slab in read) <= most_read, "what is done is forgotten"
        return in_fp32(values, *args, **options)

    def begin(slab: Any) -> Any:
        read.add(slab)
        return beginning(slab)

    beginning, most_read = dequantize.Slab.begin, 2 * 2**16  # two windows of 1/16 of the staging buffers
    patch_inner(in_fp32=dequantizing)
    monkeypatch.setattr(dequantize.Slab, "begin", begin)
    report = load_weights(build_meta_model(folder), folder, staging_bytes=2**20)
    stored = stored_tensors(folder)
    # scales are read again for the next rows of their blocks
    assert sum(t.nbytes for t in stored.values()) == report.share_bytes <= report.bytes_read
    assert report.read_ratio <= 1.05 and max(parts) * dequantize.WORK_BYTES <= 2**18
    assert sum(parts) == sum(t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn)
    many = hf.LlamaConfig(**SIZES | {"num_hidden_layers": 12})
    small = make_quantized("fp8", tmp_path / "small", lambda: hf.LlamaForCausalLM(many))
    load_weights(build_meta_model(small), small, staging_bytes=2**20)
    parts.clear()
    most_read = 2**23
    report = load_weights(build_meta_model(folder), folder)
    assert len(parts) < 60 and report.read_calls <= len(parts) + len(stored), "few calls for scales"
    assert report.read_ratio <= 1.001


def test_a_whole_load_to_a_late_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values travel through pinned buffers and arrive late, with the bits of a load by the CPU."""
    config = hf.LlamaConfig(**SIZES | {"intermediate_size": 1024})
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)

    def loaded() -> dict[str, torch.Tensor]:
        model = build_meta_model(tmp_path, dtype=torch.float32, quantization_config=four_bits())
        report = load_weights(model, tmp_path, staging_bytes=2**20)
        assert 0 < report.staging_bytes <= 2**20
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


def without_bitsandbytes(*folders: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
        built(BitsAndBytesConfig(load_in_4bit=True))(*folders)


REFUSED: dict[str, tuple[Call, type[FSDPToolsError], str]] = {
    "kept: no config": (kept(), ConfigError, "has no quantization_config"),
    "kept: a method": (kept(quant_method="quip", bits=4), ConfigError, "weights of quip cannot be kept"),
    "kept: ordered": (kept(quant_method="gptq", desc_act=True), ConfigError, "gptq, ordered by activation"),
    "kept: no weight": (kept(quant_method="mxfp4"), ConfigError, r"no weight of LlamaForCausalLM \(mxfp4\) cannot"),
    "kept: ordered groups": (kept(**of_group(actorder="group")), ConfigError, "actorder group"),
    "8 bits": (built(BitsAndBytesConfig(load_in_8bit=True)), ConfigError, "only 4-bit weights of .*load_in_4bit=True"),
    "no layer": (built(llm_int8_skip_modules=["model", "lm_head"]), ConfigError, "No layer of Llama.*skip_modules"),
    "no bitsandbytes": (without_bitsandbytes, ConfigError, "pip install bitsandbytes"),
    "a method of zero points": (loaded_as(quant_method="auto-round"), CheckpointError,
         r"quantised \(auto-round\); .*packs values with zero points(.|\n)*model\.dequantize\(\)"),
    "not packed": (lambda _, plain, tmp: load_weights(llama(quant_method="fp8"), plain), CheckpointError,
         r"quantised \(fp8\), but its files hold plain values \(float32\)\. Remove"),
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
