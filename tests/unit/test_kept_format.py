"""Adapters merged into quantised bases that keep their format: what is quantised again, by whose rule, and what is
not."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_by_library
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from hf_fsdp_tools import CheckpointError, ConfigError, export_checkpoint, from_pretrained, save_pretrained
from hf_fsdp_tools.cli.main import main
from hf_fsdp_tools.modeling.float_rules import RULES as FLOATS
from hf_fsdp_tools.modeling.quantize_rules import quantize
from hf_fsdp_tools.saving import export
from hf_fsdp_tools.saving.publish import SaveReport
from tests._checkpoints import (
    QUANTIZED,
    Tensors,
    _two_to_a_byte,
    dequantized_by_transformers,
    make_quantized,
    stored_tensors,
)

LORA = {"r": 4, "target_modules": ["q_proj", "k_proj", "q_a_proj", "o_proj"], "init_lora_weights": False}
OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
NAMES = r"(q_proj|k_proj|q_a_proj|o_proj)\.|\.experts\."
"""Weights that the adapter touches."""
UNTOUCHED = "layers.0.self_attn.o_proj"
"""Where its second factor is zero, as in a module that no token reached."""


def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    model = from_pretrained(base, peft_config=LoraConfig(**options), load_kwargs={"progress": False})
    save_pretrained(model, folder)
    file = folder / "adapter_model.safetensors"
    factors = load_file(file)
    save_file({k: 0 * t if f"{UNTOUCHED}.lora_B" in k else t for k, t in factors.items()}, file)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The quantised checkpoint of a kind, and an adapter of it."""
    root = tmp_path_factory.mktemp("quantised")

    def make(kind: str) -> tuple[Path, Path]:
        base, adapter = root / kind / "base", root / kind / "adapter"
        if not base.exists():
            make_quantized(kind, base)
            is_of_experts = "experts" in kind or kind == "mxfp4"
            make_adapter(base, adapter, **LORA, **(OF_EXPERTS if is_of_experts else {}))
        return base, adapter

    return make


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def changed(ours: Tensors, theirs: Tensors) -> set[str]:
    assert ours.keys() == theirs.keys()
    return {key for key, tensor in theirs.items() if bits(ours[key]) != bits(tensor)}


def kept(base: Path, adapter: Path, folder: Path, **options: Any) -> tuple[SaveReport, Tensors]:
    report = export_checkpoint(base, folder, adapter=adapter, keep_stored_format=True, **options)
    return report, stored_tensors(folder)


# ---- the rules, beside those of the libraries ----


def args(bits: int, type: str, **given: Any) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type=type, **{"symmetric": True, **given})


def by_compressed_tensors(weight: torch.Tensor, given: QuantizationArgs) -> Tensors:
    """Parts as the library makes them of float32."""
    weight, size = weight.float(), given.group_size or weight.shape[1]
    grid = weight.view(1, -1) if given.strategy == "tensor" else weight.unflatten(1, (-1, size))
    whole = generate_gparam(*weight.aminmax()) if given.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(grid.amin(-1), grid.amax(-1), given, global_scale=whole)
    options = {"zero_point": None if given.symmetric else zero, "args": given, "global_scale": whole}
    if whole is not None:
        packed = pack_fp4_to_uint8(quantize_by_library(x=weight, scale=scale, **options))
        return {"packed": packed, "scale": scale.to(torch.float8_e4m3fn), "global scale": whole}
    values = quantize_by_library(x=weight, scale=scale, dtype=given.pytorch_dtype(), **options)
    if given.type == "float" or given.strategy == "channel":
        return {"packed": values, "scale": scale}
    parts = {"packed": pack_to_int32(values, given.num_bits), "scale": scale}
    packed_zero = {} if given.symmetric else {"zero point": pack_to_int32(zero, given.num_bits, packed_dim=0)}
    return parts | packed_zero


def by_transformers(weight: torch.Tensor, block: tuple[int, int], scale_fmt: str = "float") -> Tensors:
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    found = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})
    return {"packed": found["weight"], "scale": found["weight_scale_inv"]}


RULES: dict[str, tuple[str, tuple[int, int], Callable[[torch.Tensor], Tensors]]] = {
    "fp8": ("scaled in fp32", (8, 16), partial(by_transformers, block=(8, 16))),
    "fp8, exponents": ("scaled in fp32", (8, 16), partial(by_transformers, block=(8, 16), scale_fmt="ue8m0")),
    "fp8 per channel": ("scaled", (1, 96), partial(by_compressed_tensors, given=args(8, "float", strategy="channel"))),
    "fp8 per tensor": ("scaled", (64, 96), partial(by_compressed_tensors, given=args(8, "float", strategy="tensor"))),
    "int8": ("scaled", (1, 96), partial(by_compressed_tensors, given=args(8, "int", strategy="channel"))),
    "nvfp4": (
        "nvfp4",
        (1, 16),
        partial(
            by_compressed_tensors,
            given=args(4, "float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
        ),
    ),
    **{
        f"int{n}, {'symmetric' if is_symmetric else 'zero points'}": (
            f"packed int{n}",
            (1, 16),
            partial(
                by_compressed_tensors,
                given=args(n, "int", strategy="group", group_size=16, symmetric=is_symmetric),
            ),
        )
        for n in (4, 8)
        for is_symmetric in (True, False)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_the_library_bit_for_bit(name: str) -> None:
    """In slabs, too; values that lie in the middle between two others are among these."""
    rule, block, make = RULES[name]
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = make(weight)
    with patch("hf_fsdp_tools.modeling.quantize_rules._SLAB_VALUES", 2000):
        found = quantize(weight, rule, expected, block, is_compressed=rule == "scaled")
    assert {n: bits(part) for n, part in found.items()} == {n: bits(part) for n, part in expected.items()}


def by_the_specification(weight: torch.Tensor) -> Tensors:
    """MXFP4 by the sentences of the OCP specification: the shared exponent, then the nearest 4-bit float."""
    grid = weight.float().unflatten(1, (-1, 32))
    exponents = grid.abs().amax(2).log2().floor() - 2
    codes = _two_to_a_byte((grid / exponents.exp2().unsqueeze(2)).flatten(1))
    return {"packed": codes, "scale": (exponents + 127).to(torch.uint8)}


def test_mxfp4_and_powers_of_two_give_the_stored_bytes_back() -> None:
    """Of the dequantised values. Other scales need not: their largest value is rounded, too (as int4, 7.5 to 7 or -8),
    so a merge leaves the bytes of what it does not change alone."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    fp8 = RULES["fp8, exponents"][2](weight.bfloat16())
    scales = fp8["scale"].float().repeat_interleave(8, 0).repeat_interleave(16, 1)
    mxfp4 = by_the_specification(weight)
    floats = FLOATS["mxfp4"](mxfp4["packed"], {"scale": mxfp4["scale"]}, torch.float32)
    for rule, block, stored, values in (
        ("mxfp4", (1, 32), mxfp4, weight),
        ("mxfp4", (1, 32), mxfp4, floats),
        ("scaled in fp32", (8, 16), fp8, fp8["packed"].float() * scales),
    ):
        found = quantize(values, rule, stored, block)
        assert {n: bits(part) for n, part in found.items()} == {n: bits(part) for n, part in stored.items()}, rule


def test_zeros_stay_zeros() -> None:
    """Scales that files must not hold, zeros and infinities, are none of theirs."""
    for name, (rule, block, make) in RULES.items():
        stored = make(torch.ones(64, 96))
        found = quantize(torch.zeros(64, 96), rule, stored, block, is_compressed=rule == "scaled")
        scale = found["scale"].float()
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), name
        assert set(bits(found["packed"])[2]) <= {0, 0x80, 0x88}, name  # integers are stored less the smallest one


# ---- merged checkpoints ----


@pytest.mark.parametrize("kind", sorted(QUANTIZED.keys() - {"fp8", "compressed per tensor", "compressed experts"}))
@pytest.mark.shows("export", "stays quantised")
def test_a_merged_base_keeps_its_format(made: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    """What no adapter changes has the stored bytes; the rest is, for transformers, as far from the merged floats as the
    report says."""
    base, adapter = made(kind)
    with patch.object(export, "_PART_BYTES", 20_000):
        report, found = kept(base, adapter, tmp_path / "kept", max_shard_size="20KB")
    export_checkpoint(base, tmp_path / "plain", adapter=adapter)
    different = changed(found, stored_tensors(base))
    assert different and all(re.search(NAMES, key) and UNTOUCHED not in key for key in different)
    assert not any(key.endswith(("_shape", "g_idx", "input_scale", "input_global_scale")) for key in different)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "kept")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    listing = json.loads((tmp_path / "kept" / "model.safetensors.index.json").read_text())
    assert listing["weight_map"].keys() == found.keys() and len(report.files) > 1
    ours = dequantized_by_transformers(kind, tmp_path / "kept", torch.bfloat16).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    errors = {key: float((ours[key].float() - t).norm() / t.float().norm()) for key, t in merged.items()}
    assert all(re.search(NAMES, key) and UNTOUCHED not in key for key, error in errors.items() if error)
    said = report.requantized
    assert said and all(0 < error < 0.13 for error in said.values()) and f"{UNTOUCHED}.weight" not in said
    assert all(abs(errors[key] - said[key]) < 0.01 * said[key] for key in said.keys() & errors.keys())
    assert max(errors.values()) <= 1.01 * max(said.values()), "of fused experts, of which the report has each"


@pytest.mark.parametrize("kind", ["fp8 of 128 x 128", "compressed int4 experts"])
def test_what_is_stored_is_what_the_library_makes_of_the_merged_floats(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    base, adapter = made(kind)
    report, found = kept(base, adapter, tmp_path / "kept")
    export_checkpoint(base, tmp_path / "plain", adapter=adapter)
    merged = stored_tensors(tmp_path / "plain")
    for key in report.requantized:
        if "fp8" in kind:
            expected = by_transformers(merged[key], (128, 96 if "o_proj" in key else 128))
            ours = {"packed": found[key], "scale": found[f"{key}_scale_inv"]}
        else:
            given = args(4, "int", strategy="group", group_size=16)
            grid = merged[key].unflatten(1, (-1, 16))
            scale, _ = calculate_qparams(grid.amin(-1), grid.amax(-1), given)
            values = quantize_by_library(
                x=merged[key].float(), scale=scale.float(), zero_point=None, args=given, dtype=torch.int8
            )
            expected = {"packed": pack_to_int32(values, 4), "scale": scale}
            ours = {"packed": found[f"{key}_packed"], "scale": found[f"{key}_scale"]}
        assert {n: bits(part) for n, part in ours.items()} == {n: bits(part) for n, part in expected.items()}, key


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("fp8", {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, "use_dora": True}),
    "tied embedding": ("fp8", {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": False}),
    "tied head trained whole": ("fp8", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "matrix trained whole": ("fp8 of 128 x 128", {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]}),
}


@pytest.mark.parametrize("name", MORE)
def test_whatever_peft_merges(made: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str) -> None:
    """Tables have their dtype, and a name of their own where they are tied no more; a matrix that was trained whole is
    quantised."""
    kind, options = MORE[name]
    base, _ = made(kind)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    file = adapter / "adapter_model.safetensors"
    save_file({k: t if ".lora_" in k else t + 0.01 for k, t in load_file(file).items()}, file)
    report, found = kept(base, adapter, tmp_path / "kept")
    export_checkpoint(base, tmp_path / "plain", adapter=adapter)
    ours = dequantized_by_transformers(kind, tmp_path / "kept", torch.bfloat16).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    errors = {key: float((ours[key].float() - t).norm() / t.float().norm()) for key, t in plain.items()}
    assert ours.keys() == plain.keys()
    assert {key for key, error in errors.items() if error} == report.requantized.keys()
    assert any("v_proj" in key for key in report.requantized) == (name == "matrix trained whole")
    written = stored_tensors(tmp_path / "plain")
    assert {key for key in found if not key.endswith("_scale_inv")} == written.keys()
    of_tables = [key for key in written if "lm_head" in key or "embed" in key]
    assert all(bits(found[key]) == bits(written[key]) for key in of_tables)
    assert ("lm_head.weight" in found) == ("trained whole" in name)


# ---- the command and bad input ----


def test_the_command_says_the_errors(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter = made("fp8")
    words = ["export", "--adapter", str(adapter), str(tmp_path / "out"), "--keep-stored-format"]
    assert main(words) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"^again   5 weights, relative error 2\.\d\d% on average, 2\.\d\d% in model\.", out, re.MULTILINE)
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["requantized"]
    assert len(said) == 5 and all(0.02 < error < 0.03 for error in said.values())
    assert main([*words, "--dtype", "bfloat16"]) == 1
    assert "merges an adapter, and casts nothing. Leave dtype" in capsys.readouterr().err


def test_what_cannot_keep_a_format(
    made: Callable[[str], tuple[Path, Path]], folders: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter = made("fp8")
    with pytest.raises(ConfigError, match=r"merges an adapter, and casts nothing\. Give one \(--adapter"):
        export_checkpoint(base, tmp_path / "out", keep_stored_format=True)
    plain = make_adapter(folders["tied"], tmp_path / "of plain", **LORA)
    with pytest.raises(ConfigError, match=r"the base .*tied.* is not quantised\. Leave it out"):
        export_checkpoint(None, tmp_path / "out", adapter=plain, keep_stored_format=True)
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    file = damaged / "adapter_model.safetensors"
    save_file({key: t * float("nan") if "layers.1" in key else t for key, t in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\..* holds values that are infinite or NaN with the adapter"):
        export_checkpoint(None, tmp_path / "out", adapter=damaged, keep_stored_format=True)
    assert not (tmp_path / "out").exists()
