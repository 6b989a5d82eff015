"""Checkpoints written anew, and adapters merged, by one process: as transformers and PEFT write them; bad input."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from hf_fsdp_tools import CheckpointError, ConfigError, export_checkpoint
from hf_fsdp_tools.saving import export
from tests._checkpoints import dequantized_by_transformers, make_checkpoint, make_quantized, randomize, stored_tensors
from tests._round_trip import differences
from tests.ranks.test_adapter import CASES, grown, lora

PLAIN = {"prompt"}
"""Cases of adapters that work beside the base."""


@pytest.mark.parametrize("kind", ["tied", "gpt2", "deepseek_v3", "t5"])
def test_a_checkpoint_is_written_again_in_small_parts(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Parts of 2 kB cut every matrix into slabs, also those that are stacked or transposed on the way."""
    with patch.object(export, "_PART_BYTES", 2000):
        report = export_checkpoint(folders[kind], tmp_path / "out", max_shard_size="60KB")
    assert differences(tmp_path / "out", folders[kind]) == []
    assert report.total_bytes == sum(t.nbytes for t in stored_tensors(folders[kind]).values())


def test_dtypes_stay_files_of_a_tokenizer_come_along_tokens_are_found(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = make_checkpoint("llama", tmp_path / "source", dtype=torch.bfloat16)
    (file, *_) = sorted(source.glob("*.safetensors"))
    save_file({key: t.float() for key, t in load_file(file).items()}, file, metadata={"format": "pt"})
    export_checkpoint(source, tmp_path / "kept")
    before, after = stored_tensors(source), stored_tensors(tmp_path / "kept")
    assert {t.dtype for t in before.values()} == {torch.bfloat16, torch.float32}
    assert {key: t.dtype for key, t in after.items()} == {key: t.dtype for key, t in before.items()}
    export_checkpoint(source, tmp_path / "cast", dtype=torch.float16)
    assert {t.dtype for t in stored_tensors(tmp_path / "cast").values()} == {torch.float16}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float16"
    source = shutil.copytree(folders["llama"], tmp_path / "other")
    along = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
    for name in (*along, "training_args.bin", "README.md", "notes.txt"):
        (source / name).write_text(name)
    export_checkpoint(source, tmp_path / "along")
    names = {path.name for path in (tmp_path / "along").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", *along}
    assert (tmp_path / "along" / "tokenizer.json").read_text() == "tokenizer.json"
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.resize_token_embeddings(140, mean_resizing=False)
    model.save_pretrained(tmp_path / "grown")
    export_checkpoint(tmp_path / "grown", tmp_path / "out", config=folders["llama"])
    assert differences(tmp_path / "out", tmp_path / "grown") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_weights_become_floats_of_the_dtype_in_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_quantized("fp8 experts", tmp_path / "source")
    export_checkpoint(source, tmp_path / "out", dtype=dtype, max_shard_size="60KB")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert getattr(written.config, "quantization_config", None) is None and written.dtype == dtype
    expected = dict(dequantized_by_transformers("fp8 experts", source, dtype).named_parameters())
    # Plain weights are in bf16 there.
    different = [key for key, t in written.named_parameters() if not torch.equal(t, expected[key].to(dtype))]
    assert different == []


def merged_by_peft(base: PreTrainedModel, adapter: Path, target: Path, **options: Any) -> None:
    PeftModel.from_pretrained(base, adapter, **options).merge_and_unload().save_pretrained(target)


def model_of(folder: Path, dtype: torch.dtype, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return auto_class.from_pretrained(folder, dtype=dtype, **options)


def adapter_on(base: PreTrainedModel, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = get_peft_model(base, config)
    grown(model)
    model.save_pretrained(folder)
    return folder


def classifier() -> LoraConfig:
    return LoraConfig(r=3, task_type="SEQ_CLS", target_modules=["q_proj"])


MORE = {
    "a classifier on a language model": ("llama", classifier),
    "transposed layers": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True)),
    "tied head trained whole": ("tied", lambda: lora(modules_to_save=["lm_head"])),
}


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - PLAIN), *MORE])
def test_an_adapter_is_merged_as_peft_merges_it(tmp_path: Path, name: str) -> None:
    """In bf16, where another order of operations shows; adapters in bf16, too, which are merged with their own
    values."""
    kind, config = (CASES | MORE)[name]
    dtype = torch.float32 if name in MORE else torch.bfloat16
    is_head = {"auto_class": AutoModelForSequenceClassification, "num_labels": 5} if config is classifier else {}
    again = partial(model_of, make_checkpoint(kind, tmp_path / "base", dtype=dtype), dtype, **is_head)
    adapter = adapter_on(again(), config(), tmp_path / "adapter")
    if name == "all linear layers":
        file = adapter / "adapter_model.safetensors"
        save_file({key: t.bfloat16() for key, t in load_file(file).items()}, file)
    merged_by_peft(again(), adapter, tmp_path / "theirs")
    with patch.object(export, "_PART_BYTES", 2000):
        export_checkpoint(None, tmp_path / "ours", adapter=adapter)
    assert differences(tmp_path / "ours", tmp_path / "theirs") == []
    assert not is_head or stored_tensors(tmp_path / "ours")["score.weight"].shape == (5, 48)


def test_tokens_that_came_with_an_adapter_and_another_base_and_dtype(tmp_path: Path) -> None:
    """PEFT saves the embeddings with the adapter, and needs a base of that size to load them."""
    base = make_checkpoint("llama", tmp_path / "base")

    def larger() -> Any:
        model = model_of(base, torch.float32)
        model.resize_token_embeddings(140, mean_resizing=False)
        return model

    adapter = adapter_on(randomize(larger(), seed=5), lora(), tmp_path / "adapter")
    assert any("embed_tokens" in key for key in load_file(adapter / "adapter_model.safetensors"))
    merged_by_peft(larger(), adapter, tmp_path / "theirs")
    export_checkpoint(None, tmp_path / "ours", adapter=adapter)
    # PEFT has the embeddings of the adapter, and everything else of the base.
    assert differences(tmp_path / "ours", tmp_path / "theirs") == []
    # As after training on a copy in 4 bits, or on a base that has moved since.
    base = make_checkpoint("llama", tmp_path / "plain")
    adapter = adapter_on(model_of(base, torch.float32), lora(), tmp_path / "second")
    (adapter / "tokenizer.json").write_text("of the adapter")
    base = base.rename(tmp_path / "moved")
    (base / "tokenizer.json").write_text("of the base")
    with pytest.raises(CheckpointError, match=r"base of the adapter .* cannot be opened: No such .*STATE"):
        export_checkpoint(None, tmp_path / "ours2", adapter=adapter)
    export_checkpoint(base, tmp_path / "ours2", adapter=adapter, dtype=torch.bfloat16)
    merged_by_peft(model_of(base, torch.float32), adapter, tmp_path / "theirs2")
    ours, theirs = stored_tensors(tmp_path / "ours2"), stored_tensors(tmp_path / "theirs2")
    assert all(torch.equal(ours[key], theirs[key].bfloat16()) for key in theirs), "cast after it was merged"
    assert (tmp_path / "ours2" / "tokenizer.json").read_text() == "of the adapter"


@pytest.fixture(scope="module")
def adapter(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return adapter_on(model_of(folders["llama"], torch.float32), lora(), folder)


def test_bad_input_is_refused_and_destroys_nothing(folders: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an adapter of .* hf-fsdp export --adapter"):
        export_checkpoint(adapter, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"No adapter_config\.json in .* without --adapter"):
        export_checkpoint(None, tmp_path / "out", adapter=folders["llama"])
    assert not (tmp_path / "out").exists()
    source = shutil.copytree(folders["llama"], tmp_path / "source")
    for write in (partial(export_checkpoint, source), partial(export_checkpoint, source, adapter=adapter)):
        with pytest.raises(CheckpointError, match="is what is read"):
            write(source)
    state = shutil.copytree(folders["llama"], tmp_path / "state")
    (state / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("mine")
    for folder, named in ((state, "pytorch_model_fsdp_0"), (tmp_path / "text", "notes.txt")):
        with pytest.raises(CheckpointError, match=rf"not empty, and holds something else.*{named}"):
            export_checkpoint(source, folder)
    former = shutil.copytree(folders["llama"], tmp_path / "former")
    export_checkpoint(source, former, max_shard_size="50KB")
    assert differences(former, source) == []
    _, config = CASES["prompt"]
    prompts = adapter_on(model_of(folders["llama"], torch.float32), config(), tmp_path / "prompts")
    with pytest.raises(ConfigError, match="no adapter in its modules that could be merged"):
        export_checkpoint(None, tmp_path / "out", adapter=prompts)
    with pytest.raises(ConfigError, match=r"PEFT cannot make this LORA adapter: Target modules .*not found"):
        export_checkpoint(folders["gpt2"], tmp_path / "out", adapter=adapter, force=True)
    with pytest.raises(ConfigError, match=r"was trained on '.*llama', and '.*gpt2' has another name.* --force"):
        export_checkpoint(folders["gpt2"], tmp_path / "out", adapter=adapter)
    older = shutil.copytree(adapter, tmp_path / "older")
    content = json.loads((older / "adapter_config.json").read_text())
    content |= {"target_parameters": ["experts.gate_up_proj"], "peft_version": "0.18.1"}
    (older / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"PEFT before 0\.19 wrote .*exchanged.*\(0\.18\.1\) by merge_and_unload"):
        export_checkpoint(None, tmp_path / "out", adapter=older)
    packed = shutil.copytree(folders["llama"], tmp_path / "packed")
    written = json.loads((packed / "config.json").read_text())
    kept = {"llm_int8_skip_modules": ["gate_proj", "up_proj", "down_proj", "lm_head"]}  # their values fill no blocks
    written["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True} | kept
    (packed / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"in 4 bits.*STATE"):
        export_checkpoint(packed, tmp_path / "out", adapter=adapter, force=True)
    with pytest.raises(ConfigError, match="max_shard_size='5X' is no size of a file"):
        export_checkpoint(folders["llama"], tmp_path / "out", max_shard_size="5X")
    assert not (tmp_path / "out").exists()


def test_a_class_or_a_config_that_does_not_fit_loses_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    model = AutoModelForSequenceClassification.from_pretrained(folders["tied"], num_labels=3)
    torch.save(model.state_dict(), state / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError, match=r"No config\.json in"):
        export_checkpoint(state, tmp_path / "out", allow_pickle=True)
    given = {"config": folders["tied"], "allow_pickle": True}
    with pytest.raises(CheckpointError, match=r"for which Qwen3ForCausalLM has no place: score\.weight.*--auto"):
        export_checkpoint(state, tmp_path / "out", **given)
    with pytest.raises(CheckpointError, match=r"another shape.*\n- score\.weight: \[3, 48\] in the files, \[2, 48\]"):
        export_checkpoint(state, tmp_path / "out", auto_class=AutoModelForSequenceClassification, **given)
    model.config.save_pretrained(state)
    export_checkpoint(state, tmp_path / "out", allow_pickle=True, auto_class=AutoModelForSequenceClassification)
    model.save_pretrained(tmp_path / "saved")
    assert differences(tmp_path / "out", tmp_path / "saved") == []
    with pytest.raises(CheckpointError, match=r"does not hold 1 tensors of LlamaForSequence.*: score\.weight"):
        export_checkpoint(folders["llama"], tmp_path / "other", auto_class=AutoModelForSequenceClassification)
    assert not (tmp_path / "other").exists()
