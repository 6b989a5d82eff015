"""Adapters merged into quantised bases that keep their format: what is quantised again, by whose rule, and what is
not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from hf_fsdp_tools import CheckpointError, ConfigError, export_checkpoint, from_pretrained, save_pretrained
from hf_fsdp_tools.saving import export
from tests._checkpoints import Tensors, dequantized_by_transformers, make_quantized, stored_tensors
from tests.api import SaveReport, main, patched, quantize

Made = Callable[[str], tuple[Path, Path]]

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
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
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


def by_transformers(weight: torch.Tensor, block: tuple[int, int], scale_fmt: str = "float") -> Tensors:
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    found = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})
    return {"packed": found["weight"], "scale": found["weight_scale_inv"]}


@pytest.mark.parametrize("theirs", [{}, {"scale_fmt": "ue8m0"}], ids=["floats", "exponents"])
def test_the_rule_is_that_of_transformers_bit_for_bit(theirs: dict[str, Any]) -> None:
    """In slabs, with blocks at the edges that are not whole, and with values in the middle between two others.

    Powers of two give the stored bytes back; other scales need not, for their largest value is rounded, too. Scales
    that files must not hold, zeros and infinities, are none of theirs.
    """
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = by_transformers(weight, (8, 16), **theirs)
    like: Any = [SimpleNamespace(dtype=part.dtype, shape=part.shape) for part in expected.values()]

    def found(matrix: torch.Tensor, *, stored: Any = like) -> list[torch.Tensor]:
        with patched(_SLAB_VALUES=2000):
            return quantize(matrix, (8, 16), *stored)

    assert [bits(part) for part in found(weight)] == [bits(part) for part in expected.values()]
    if theirs:
        floats = expected["packed"].float() * expected["scale"].float().repeat_interleave(8, 0).repeat_interleave(16, 1)
        assert [bits(part) for part in found(floats)] == [bits(part) for part in expected.values()]
    edge = torch.nn.functional.pad(weight[:61, :90].float(), (0, 6, 0, 3))
    padded = by_transformers(edge, (8, 16), **theirs)["packed"][:61, :90]
    of_edge: Any = [SimpleNamespace(dtype=like[0].dtype, shape=(61, 90)), like[1]]
    assert bits(found(weight[:61, :90], stored=of_edge)[0]) == bits(padded)
    zeros, scale = found(torch.zeros(64, 96))
    assert bool((torch.isfinite(scale.float()) & (scale.float() > 0)).all()) and set(bits(zeros)[2]) == {0}


@pytest.mark.parametrize(
    "kind",
    ["fp8 experts", "mxfp8 experts", "compressed mxfp8", pytest.param("fp8 of 128 x 128", marks=pytest.mark.nightly)],
)
def test_a_merged_base_keeps_its_format(made: Made, tmp_path: Path, kind: str) -> None:
    """What no adapter changes has the stored bytes; the rest is, for transformers, as far from the merged floats as the
    report says."""
    base, adapter = made(kind)
    with patch.object(export, "_PART_BYTES", 60_000):
        report, found = kept(base, adapter, tmp_path / "kept", max_shard_size="20KB")
    export_checkpoint(base, tmp_path / "plain", adapter=adapter)
    different = changed(found, stored_tensors(base))
    assert different and all(re.search(NAMES, key) and UNTOUCHED not in key for key in different)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "kept")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    listing = json.loads((tmp_path / "kept" / "model.safetensors.index.json").read_text())
    assert listing["weight_map"].keys() == found.keys() and len(report.files) > 1
    ours = dequantized_by_transformers(kind, tmp_path / "kept", torch.bfloat16).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    errors = {key: float((ours[key].float() - t).norm() / t.float().norm()) for key, t in merged.items()}
    assert all(re.search(NAMES, key) and UNTOUCHED not in key for key, error in errors.items() if error)
    said = report.requantized
    most = 0.035 if "mxfp8" in kind else 0.03  # OCP's rule clamps the largest values: 2.9 % of a normal matrix
    assert said and all(0 < error < most for error in said.values()) and f"{UNTOUCHED}.weight" not in said
    assert all(abs(errors[key] - said[key]) < 0.01 * said[key] for key in said.keys() & errors.keys())
    assert max(errors.values()) <= 1.01 * max(said.values()), "of fused experts, of which the report has each"
    floats = stored_tensors(tmp_path / "plain")
    for key in said if kind == "fp8 of 128 x 128" else ():
        expected = by_transformers(floats[key], (128, 96 if "o_proj" in key else 128))
        assert bits(found[key]) == bits(expected["packed"]), key
        assert bits(found[f"{key}_scale_inv"]) == bits(expected["scale"]), key


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("fp8", {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, "use_dora": True}),
    "tied head trained whole": ("fp8", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "matrix trained whole": ("fp8 of 128 x 128", {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]}),
}


@pytest.mark.parametrize("name", MORE)
def test_whatever_peft_merges(made: Made, tmp_path: Path, name: str) -> None:
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


def test_the_command_says_the_errors(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("kind", ["fp8 and fp4 experts", "compressed per channel", "mxfp4", "gptq"])
def test_every_other_format_is_refused(made: Made, tmp_path: Path, kind: str) -> None:
    base, adapter = made(kind)
    with pytest.raises(
        ConfigError,
        match=r"does not hold .*(proj|experts).* in a format into which an adapter can be merged.*Merge into floats",
    ):
        kept(base, adapter, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_what_cannot_keep_a_format(made: Made, folders: dict[str, Path], tmp_path: Path) -> None:
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
