"""Checkpoints written anew; adapters merged as PEFT merges them, also into quantised bases that keep their format; bad
input; and the command. `test_training_states.py` exports states."""

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
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    export_checkpoint,
    from_pretrained,
    save_pretrained,
)
from hf_fsdp_tools.saving import export
from tests._checkpoints import (
    Tensors,
    assert_same_tensors,
    dequantized_by_transformers,
    make_checkpoint,
    make_quantized,
    plain_model,
    stored_tensors,
)
from tests._dist import run_ranks
from tests._round_trip import differences
from tests.api import MemoryWatch, quantize
from tests.ranks.test_adapter import CASES, grown, lora

SIZE = "60KB"
in_parts_of = partial(patch.object, export, "_PART_BYTES")


def test_the_state_of_a_peft_model_becomes_its_adapter_and_is_merged(folders: dict[str, Path], tmp_path: Path) -> None:
    config = LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model: Any = get_peft_model(plain_model("llama", folders["llama"]), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 if parameter.requires_grad else 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "state")
    model.peft_config["default"].save_pretrained(tmp_path / "state")
    model.save_pretrained(tmp_path / "saved")
    export_checkpoint(tmp_path / "state", tmp_path / "out")
    assert_same_tensors(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "saved")))
    with pytest.raises(ConfigError, match="the training state of a PeftModel"):
        export_checkpoint(None, tmp_path / "merged", adapter=tmp_path / "state")
    export_checkpoint(None, tmp_path / "merged", adapter=tmp_path / "out")
    model.merge_and_unload().save_pretrained(tmp_path / "expected")
    assert_same_tensors(stored_tensors(tmp_path / "merged"), stored_tensors(tmp_path / "expected"))


def export_and_merge(small: Path, large: Path, adapter: Path, root: Path) -> list[tuple[int, int, int]]:
    """(bytes that this rank wrote, bytes in all, bytes by which its memory rose) of a cast and an adapter."""
    found = []
    for name, source, options in (
        ("imports what any export needs", small, {}),
        ("cast", large, {"dtype": torch.float32}),  # before merging leaves freed memory, which would be used again
        ("imports what merging needs", None, {"adapter": adapter}),
        ("merged", None, {"adapter": adapter}),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far (proc(5))
        watch = MemoryWatch()
        with in_parts_of(4 * 2**20), patch.object(export, "STAGING_BYTES", 8 * 2**20):
            report = export_checkpoint(source, root / name, max_shard_size="90MB", **options)
        found.append((report.bytes_written, report.total_bytes, watch.above(0)))
    return found


@pytest.mark.nightly
def test_ranks_share_the_work_in_bounded_memory(folders: dict[str, Path], tmp_path: Path) -> None:
    """136 MB in bf16, of which the embedding is 33 MB and the largest adapted module 6 MB, in parts of 4 MiB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=16000, num_hidden_layers=3, dtype="bfloat16")
    large, adapter = tmp_path / "large", tmp_path / "adapter"
    LlamaForCausalLM(config).bfloat16().save_pretrained(large, max_shard_size="90MB")
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(large), config)
    adapted.save_pretrained(adapter)
    per_rank = run_ranks(export_and_merge, 2, folders["llama"], large, adapter, tmp_path)
    before, after = stored_tensors(large), stored_tensors(tmp_path / "cast")
    assert all(torch.equal(after[key], tensor.float()) for key, tensor in before.items())
    assert_same_tensors(stored_tensors(tmp_path / "merged"), adapted.merge_and_unload().state_dict())
    adapter_bytes = 2 * (adapter / "adapter_model.safetensors").stat().st_size  # the file's pages, and PEFT's copy
    for _, (_, _, large_rise), _, (written, total, merged_rise) in per_rank:
        assert abs(2 * written - total) < 0.2 * total, "about as much each"
        # 4 MiB of a part, 8 of staging; 16 for what Python and torch allocate meanwhile.
        assert large_rise <= (4 + 8 + 16) * 2**20
        # Less than what a process writes: a module of 6 MB in bf16, with what PEFT computes for it in fp32, and memory
        # that the allocator has not given back.
        assert merged_rise <= total // 2 + adapter_bytes


@pytest.mark.parametrize("kind", ["tied", "gpt2", "deepseek_v3", "t5"])
def test_a_checkpoint_is_written_again_in_small_parts(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Parts of 2 kB cut every matrix into slabs, also those that are stacked or transposed on the way."""
    with in_parts_of(2000):
        export_checkpoint(folders[kind], tmp_path / "out", max_shard_size=SIZE)
    assert differences(tmp_path / "out", folders[kind]) == []


def test_dtypes_stay_and_files_of_a_tokenizer_come_along(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", dtype=torch.bfloat16)
    (file, *_) = sorted(source.glob("*.safetensors"))
    save_file({key: t.float() for key, t in load_file(file).items()}, file, metadata={"format": "pt"})
    along = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
    for name in (*along, "training_args.bin", "README.md", "notes.txt"):
        (source / name).write_text(name)
    export_checkpoint(source, tmp_path / "kept")
    assert_same_tensors(stored_tensors(tmp_path / "kept"), stored_tensors(source))
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", *along}
    export_checkpoint(source, tmp_path / "cast", dtype=torch.float16)
    assert {t.dtype for t in stored_tensors(tmp_path / "cast").values()} == {torch.float16}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_weights_become_floats_of_the_dtype_in_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_quantized("fp8 experts", tmp_path / "source")
    export_checkpoint(source, tmp_path / "out", dtype=dtype, max_shard_size=SIZE)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert getattr(written.config, "quantization_config", None) is None and written.dtype == dtype
    expected = dict(dequantized_by_transformers("fp8 experts", source, dtype).named_parameters())
    # Plain weights are in bf16 there.
    assert all(torch.equal(t, expected[key].to(dtype)) for key, t in written.named_parameters())


def merged_by_peft(base: Any, adapter: Path, target: Path) -> None:
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)


def adapter_on(base: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = get_peft_model(base, config)
    grown(model)
    model.save_pretrained(folder)
    return folder


MORE = {
    "a classifier on a language model": ("llama", lambda: lora(task_type="SEQ_CLS")),
    "transposed layers": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True)),
    "tied head trained whole": ("tied", lambda: lora(modules_to_save=["lm_head"])),
}


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - {"prompt"}), *MORE])
def test_an_adapter_is_merged_as_peft_merges_it(tmp_path: Path, name: str) -> None:
    """In bf16, where another order of operations shows."""
    kind, config = (CASES | MORE)[name]
    dtype, auto_class = torch.float32 if name in MORE else torch.bfloat16, AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": dtype}
    if "classifier" in name:
        auto_class, options = AutoModelForSequenceClassification, options | {"num_labels": 5}
    again = partial(auto_class.from_pretrained, make_checkpoint(kind, tmp_path / "base", dtype=dtype), **options)
    adapter = adapter_on(again(), config(), tmp_path / "adapter")
    merged_by_peft(again(), adapter, tmp_path / "theirs")
    with in_parts_of(2000):
        export_checkpoint(None, tmp_path / "ours", adapter=adapter)
    assert differences(tmp_path / "ours", tmp_path / "theirs") == []


def test_an_adapter_is_merged_into_another_base_and_cast(tmp_path: Path) -> None:
    """As after training on a copy in 4 bits, or on a base that has moved since."""
    base = make_checkpoint("llama", tmp_path / "base")
    adapter = adapter_on(plain_model("llama", base), lora(), tmp_path / "adapter")
    (adapter / "tokenizer.json").write_text("of the adapter")
    base = base.rename(tmp_path / "moved")
    (base / "tokenizer.json").write_text("of the base")
    with pytest.raises(CheckpointError, match=r"base of the adapter .* cannot be opened: No such .*STATE"):
        export_checkpoint(None, tmp_path / "ours", adapter=adapter)
    export_checkpoint(base, tmp_path / "ours", adapter=adapter, dtype=torch.bfloat16)
    merged_by_peft(plain_model("llama", base), adapter, tmp_path / "theirs")
    ours, theirs = stored_tensors(tmp_path / "ours"), stored_tensors(tmp_path / "theirs")
    assert all(torch.equal(ours[key], theirs[key].bfloat16()) for key in theirs), "cast after it was merged"
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "of the adapter"


def changed_config(folder: Path, target: Path, name: str, **content: Any) -> Path:
    shutil.copytree(folder, target)
    (target / name).write_text(json.dumps(json.loads((target / name).read_text()) | content))
    return target


def test_bad_input_is_refused_and_destroys_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    llama, tied, gpt2, out = folders["llama"], folders["tied"], folders["gpt2"], tmp_path / "out"
    adapter = adapter_on(plain_model("llama", llama), lora(), tmp_path / "adapter")
    prompts = adapter_on(plain_model("llama", llama), CASES["prompt"][1](), tmp_path / "prompts")
    of_plain = make_adapter(tied, tmp_path / "of plain", **LORA)
    exchanged = {"target_parameters": ["experts.gate_up_proj"], "peft_version": "0.18.1"}
    older = changed_config(adapter, tmp_path / "older", "adapter_config.json", **exchanged)
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    four["llm_int8_skip_modules"] = ["gate_proj", "up_proj", "down_proj", "lm_head"]  # their values fill no blocks
    packed = changed_config(llama, tmp_path / "packed", "config.json", quantization_config=four)
    source, state = shutil.copytree(llama, tmp_path / "source"), shutil.copytree(llama, tmp_path / "state")
    (state / "pytorch_model_fsdp_0").mkdir()
    (text := tmp_path / "text").mkdir()
    (text / "notes.txt").write_text("mine")
    (heads := tmp_path / "heads").mkdir()
    of_class = AutoModelForSequenceClassification
    model = of_class.from_pretrained(tied, num_labels=3)
    torch.save(model.state_dict(), heads / "pytorch_model_fsdp.bin")
    pickled, given = {"allow_pickle": True}, {"allow_pickle": True, "config": tied}
    no_place = r"for which Qwen3ForCausalLM has no place: score\.weight.*--auto"
    other_shape = r"another shape.*\n- score\.weight: \[3, 48\] in the files, \[2, 48\]"
    lacks = r"does not hold 1 tensors of LlamaForSequence.*: score\.weight"
    no_file, is_plain = r"No adapter_config\.json in .* without --adapter", r"base .*tied.* is not quantised\. Leave it"
    keep = {"keep_stored_format": True}
    rows: list[tuple[Any, Path, dict[str, Any], str]] = [
        (adapter, out, {}, r"is an adapter of .* hf-fsdp export --adapter"),
        (None, out, {"adapter": llama}, no_file),
        (source, source, {}, "is what is read"),
        (source, source, {"adapter": adapter}, "is what is read"),
        (source, state, {}, r"not empty, and holds something else.*pytorch_model_fsdp_0"),
        (source, text, {}, r"not empty, and holds something else.*notes.txt"),
        (None, out, {"adapter": prompts}, "no adapter in its modules that could be merged"),
        (gpt2, out, {"adapter": adapter, "force": True}, r"PEFT cannot make this LORA adapter: Target modules"),
        (gpt2, out, {"adapter": adapter}, r"was trained on '.*llama', and '.*gpt2' has another name.* --force"),
        (None, out, {"adapter": older}, r"PEFT before 0\.19 wrote .*exchanged.*\(0\.18\.1\) by merge_and_unload"),
        (packed, out, {"adapter": adapter, "force": True}, r"in 4 bits.*STATE"),
        (llama, out, {"max_shard_size": "5X"}, "max_shard_size='5X' is no size of a file"),
        (heads, out, pickled, r"No config\.json in"),
        (heads, out, given, no_place),
        (heads, out, given | {"auto_class": of_class}, other_shape),
        (llama, out, {"auto_class": of_class}, lacks),
        (llama, out, keep, r"merges an adapter, and casts nothing\. Give one \(--adapter"),
        (None, out, keep | {"adapter": of_plain}, is_plain),
    ]
    for opened, target, options, said in rows:
        with pytest.raises((ConfigError, CheckpointError), match=said):
            export_checkpoint(opened, target, **options)
    assert not out.exists() and differences(source, llama) == []
    model.config.save_pretrained(heads)
    export_checkpoint(heads, out, auto_class=of_class, **pickled)
    model.save_pretrained(tmp_path / "saved")
    assert differences(out, tmp_path / "saved") == []


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
    save_file({k: 0 * t if f"{UNTOUCHED}.lora_B" in k else t for k, t in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("quantised")

    def make(kind: str) -> tuple[Path, Path]:
        base, adapter = root / kind / "base", root / kind / "adapter"
        if not base.exists():
            make_quantized(kind, base)
            make_adapter(base, adapter, **LORA, **(OF_EXPERTS if "experts" in kind or kind == "mxfp4" else {}))
        return base, adapter

    return make


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def by_transformers(weight: torch.Tensor, block: tuple[int, int], scale_fmt: str = "float") -> Tensors:
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    found = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})
    return {"packed": found["weight"], "scale": found["weight_scale_inv"]}


@pytest.mark.parametrize("theirs", [{}, {"scale_fmt": "ue8m0"}], ids=["floats", "exponents"])
def test_the_rule_is_that_of_transformers_bit_for_bit(theirs: dict[str, Any]) -> None:
    """With blocks at the edges that are not whole; powers of two give the stored bytes back. Scales that files must not
    hold, zeros and infinities, are none of theirs."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = by_transformers(weight, (8, 16), **theirs)
    like: Any = [SimpleNamespace(dtype=part.dtype, shape=part.shape) for part in expected.values()]
    assert [bits(part) for part in quantize(weight, (8, 16), *like)] == [bits(part) for part in expected.values()]
    if theirs:
        floats = expected["packed"].float() * expected["scale"].float().repeat_interleave(8, 0).repeat_interleave(16, 1)
        assert [bits(part) for part in quantize(floats, (8, 16), *like)] == [bits(part) for part in expected.values()]
        stored: Any = [like[0], SimpleNamespace(dtype=torch.float32, shape=like[1].shape)]
        assert bits(quantize(weight, (8, 16), *stored, is_power=True)[0]) == bits(expected["packed"])
    edge = torch.nn.functional.pad(weight[:61, :90].float(), (0, 6, 0, 3))
    padded = by_transformers(edge, (8, 16), **theirs)["packed"][:61, :90]
    of_edge: Any = [SimpleNamespace(dtype=like[0].dtype, shape=(61, 90)), like[1]]
    assert bits(quantize(weight[:61, :90], (8, 16), *of_edge)[0]) == bits(padded)
    zeros, scale = quantize(torch.zeros(64, 96), (8, 16), *like)
    assert bool((torch.isfinite(scale.float()) & (scale.float() > 0)).all()) and set(bits(zeros)[2]) == {0}


@pytest.mark.parametrize("kind", ["fp8 experts", "mxfp8 experts", "compressed mxfp8"])
def test_a_merged_base_keeps_its_format(made: Made, tmp_path: Path, kind: str) -> None:
    """What no adapter changes has the stored bytes; the rest is, for transformers, as far from the merged floats as the
    report says."""
    base, adapter = made(kind)
    options = {"adapter": adapter, "keep_stored_format": True, "max_shard_size": "20KB"}
    with in_parts_of(60_000):
        report = export_checkpoint(base, tmp_path / "kept", **options)
    export_checkpoint(base, tmp_path / "plain", adapter=adapter)
    found, before = stored_tensors(tmp_path / "kept"), stored_tensors(base)
    different = {key for key, tensor in before.items() if bits(found[key]) != bits(tensor)}
    assert found.keys() == before.keys()
    assert different and all(re.search(NAMES, key) and UNTOUCHED not in key for key in different)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "kept")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    ours = dequantized_by_transformers(kind, tmp_path / "kept", torch.bfloat16).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    errors = {key: float((ours[key].float() - t).norm() / t.float().norm()) for key, t in merged.items()}
    assert all(re.search(NAMES, key) and UNTOUCHED not in key for key, error in errors.items() if error)
    said = report.requantized
    assert said and all(0 < error < 0.03 for error in said.values()) and f"{UNTOUCHED}.weight" not in said
    assert all(abs(errors[key] - said[key]) < 0.01 * said[key] for key in said.keys() & errors.keys())
    assert max(errors.values()) <= 1.01 * max(said.values()), "of fused experts, of which the report has each"


def test_what_cannot_keep_its_format_is_refused(made: Made, tmp_path: Path) -> None:
    damaged = shutil.copytree(made("fp8")[1], tmp_path / "damaged")
    file = damaged / "adapter_model.safetensors"
    save_file({key: t * float("nan") if "layers.1" in key else t for key, t in load_file(file).items()}, file)
    kinds = ["fp8 and fp4 experts", "compressed per channel", "mxfp4", "gptq"]
    other = r"does not hold .*(proj|experts).* in a format into which an adapter can be merged.*Merge into floats"
    rows = [(damaged, r"layers\.1\..* holds values that are infinite or NaN"), *((made(k)[1], other) for k in kinds)]
    for adapter, said in rows:
        with pytest.raises((ConfigError, CheckpointError), match=said):
            export_checkpoint(None, tmp_path / "out", adapter=adapter, keep_stored_format=True)
    assert not (tmp_path / "out").exists()
