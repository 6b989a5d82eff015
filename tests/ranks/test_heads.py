"""Heads that transformers drops on load are in every folder that is saved, byte for byte as they were stored."""

import json
import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import add_adapter, export_checkpoint, from_pretrained, save_pretrained, wait_for_saves
from hf_fsdp_tools.saving import save
from tests._checkpoints import (
    QUANTIZED,
    add_heads,
    assert_same_tensors,
    make_quantized,
    randomize,
    refusal,
    stored_tensors,
    tiny_config,
)  # fmt: skip
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._training import ShardedTrainer, arguments, make_rows
from tests.api import WithHeads, all_ranks

HEADS = {"deepseek_v3": "model.layers.61.", "glm4_moe": "model.layers.92.", "qwen3_next": "mtp.layers.0."}
SIZE = "60KB"
Tensors = dict[str, torch.Tensor]


def head_like(stored: Tensors, to: str, dtype: torch.dtype) -> Tensors:
    """A layer as the last one of a checkpoint, with other values, and what only heads have; a scalar among it."""
    generator = torch.Generator().manual_seed(5)
    of_layer = {key.partition(".layers.3.")[2]: tensor for key, tensor in stored.items() if ".layers.3." in key}
    width = stored["model.embed_tokens.weight"].shape[1]
    shapes = {name: tuple(tensor.shape) for name, tensor in of_layer.items()}
    shapes |= {"eh_proj.weight": (width, 2 * width), "enorm.weight": (width,), "gate": ()}
    shapes["shared_head.head.weight"] = tuple(stored["model.embed_tokens.weight"].shape)
    heads = {to + name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return heads | {f"{to}steps": torch.arange(7), f"{to}enorm.bias": torch.ones(3, dtype=torch.float64)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, to in HEADS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        model = randomize(AutoModelForCausalLM.from_config(tiny_config(kind)))
        dtype = torch.float32 if kind == "deepseek_v3" else torch.bfloat16
        model.to(dtype).save_pretrained(made[kind], max_shard_size=SIZE)
        stored = stored_tensors(made[kind])
        add_heads(made[kind], head_like(stored, to, dtype), num_nextn_predict_layers=1)
    return made


def heads_of(folder: Path) -> Tensors:
    return {key: t for key, t in stored_tensors(folder).items() if key.startswith(tuple(HEADS.values()))}


def assert_carried(folder: Path, source: Path) -> None:
    """The heads are those of the source, and index, sizes and config fit; plain transformers opens the folder."""
    found, tensors = heads_of(folder), stored_tensors(folder)
    assert found
    assert_same_tensors(found, heads_of(source))
    listing = folder / "model.safetensors.index.json"
    if listing.exists():
        content = json.loads(listing.read_text())
        assert content["weight_map"].keys() == tensors.keys()
        assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        numbers = [t.numel() for key, t in tensors.items() if key in found or "correction_bias" not in key]  # a buffer
        assert content["metadata"]["total_parameters"] == sum(numbers)
    if dist.get_rank() == 0:
        assert json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers", 1) == 1
        model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        for key, tensor in model.state_dict().items():
            if key in tensors:
                assert torch.equal(tensor, tensors[key].to(tensor.dtype)), key


def saved_now_and_in_the_background(folders: dict[str, Path], tmp: Path) -> None:
    """Each rank writes a part, a few rows at a time."""
    kind = "deepseek_v3"
    model, report = from_pretrained(folders[kind], output_loading_info=True)
    heads = heads_of(folders[kind])
    assert set(report.carried_keys) == heads.keys() and not report.unexpected_keys
    assert report.carried_bytes == sum(tensor.nbytes for tensor in heads.values())
    sizes = calls_of(save, "read_into", lambda _, places, *__: [memory.nbytes for memory, _, _ in places])
    with patch.object(save, "_SLAB_BYTES", 2048), sizes as calls:
        save_pretrained(model, tmp / kind, max_shard_size=SIZE)
    read = [size for call in calls for size in call]
    shares = all_ranks(sum(read))
    assert sum(shares) == report.carried_bytes and max(shares) < 0.6 * report.carried_bytes and max(read) <= 2048
    assert_carried(tmp / kind, folders[kind])
    save_pretrained(model, tmp / f"{kind} later", blocking=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    wait_for_saves()
    assert_carried(tmp / f"{kind} later", folders[kind])
    assert_same_tensors(stored_tensors(tmp / f"{kind} later"), stored_tensors(tmp / kind))
    save_pretrained(model, tmp / f"{kind} cast", dtype=torch.float16)
    half = {key: t.half() if t.is_floating_point() else t for key, t in heads.items()}
    assert_same_tensors(heads_of(tmp / f"{kind} cast"), half)


def a_trainers_checkpoints(folders: dict[str, Path], tmp: Path) -> None:
    """In the folder that a run goes on from, too, which the run deletes; exported by each number of ranks."""
    source, run = folders["glm4_moe"], tmp / "run"
    for steps in (1, 2):
        args = arguments(run, max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=1)
        trainer = ShardedTrainer(from_pretrained(source, dtype=torch.float32), args, train_dataset=make_rows(4))
        trainer.fsdp_settings.blocking = steps == 1
        trainer.train(resume_from_checkpoint=steps == 2)
        assert_carried(run / f"checkpoint-{steps}", source)
    assert not (run / "checkpoint-1").exists()
    export_checkpoint(run / "checkpoint-2", tmp / "exported", max_shard_size=SIZE)
    assert_carried(tmp / "exported", source)


def merged(folders: dict[str, Path], tmp: Path) -> None:
    source = folders["deepseek_v3"]
    model = add_adapter(from_pretrained(source), LoraConfig(target_modules=["q_a_proj"], init_lora_weights=False))
    save_pretrained(model, tmp / "adapter")
    save_pretrained(model, tmp / "merged", merge_adapters=True)
    export_checkpoint(None, tmp / "merged by export", adapter=tmp / "adapter")
    for name in ("merged", "merged by export"):
        assert_carried(tmp / name, source)
    assert_same_tensors(stored_tensors(tmp / "merged by export"), stored_tensors(tmp / "merged"))
    assert all("61" not in key for key in stored_tensors(tmp / "adapter"))


def left_out(folders: dict[str, Path], tmp: Path) -> None:
    source = folders["deepseek_v3"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, report = from_pretrained(source, carry_heads=False, output_loading_info=True)
        save_pretrained(model, tmp / "without")
        export_checkpoint(source, tmp / "exported without", carry_heads=False)
    here = [warning for warning in caught if "Heads" in str(warning.message)]
    assert len(here) == (2 if dist.get_rank() == 0 else 0), here
    assert all("saves hold none, which config.json promises" in str(warning.message) for warning in here), here
    assert not report.carried_keys
    for name in ("without", "exported without"):
        assert not heads_of(tmp / name) and len(stored_tensors(tmp / name)) > 20


def sources_that_go_or_change(folders: dict[str, Path], tmp: Path) -> None:
    """Saved over, then deleted: it is copied all the same. Written in place: all refuse, and the older save stays."""
    source, own = folders["qwen3_next"], tmp / "own"
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(source)
        model.save_pretrained(own, max_shard_size=SIZE)
        add_heads(own, {key: tensor.clone() for key, tensor in heads_of(source).items()})
    all_ranks(None)
    model = from_pretrained(own)
    for _ in range(2):
        save_pretrained(model, own, max_shard_size=SIZE)
    assert_carried(own, source)
    all_ranks(None)
    if dist.get_rank() == 0:
        for file in own.glob("*.safetensors"):
            file.unlink()
    save_pretrained(model, tmp / "after", max_shard_size=SIZE)
    assert_carried(tmp / "after", source)
    model = from_pretrained(tmp / "after")
    before = {file.name: file.read_bytes() for file in (tmp / "after").iterdir()}
    all_ranks(None)
    file = next(iter(WithHeads.of(model).heads._open))
    if dist.get_rank() == 0:
        os.utime(file)
    all_ranks(None)
    text = refusal(partial(save_pretrained, model, tmp / "after"))
    assert f"{file}: was written after the model was loaded" in text and "carry_heads=False" in text
    assert before == {file.name: file.read_bytes() for file in (tmp / "after").iterdir()}
    save_pretrained(model, tmp / "rest", carry_heads=False)
    assert not heads_of(tmp / "rest")


def dequantised(folders: dict[str, Path], tmp: Path) -> None:
    """To the dtype of the rest; what is stored plain stays as it is."""
    source = tmp / "fp8"
    _, store, _ = QUANTIZED["fp8 and fp4 experts"]
    generator = torch.Generator().manual_seed(7)
    plain = {
        "model.layers.61.self_attn.o_proj.weight": torch.randn(48, 64, generator=generator),
        "model.layers.61.mlp.experts.0.up_proj.weight": torch.randn(32, 48, generator=generator),
    }
    norm = torch.randn(48, generator=generator)
    if dist.get_rank() == 0:
        make_quantized("fp8 and fp4 experts", source)
        stored: Tensors = {"model.layers.61.enorm.weight": norm}
        stored["model.layers.61.self_attn.o_proj.input_scale"] = torch.ones(1)  # no plain model needs it
        for key, tensor in plain.items():
            stored |= store(key, tensor)
        add_heads(source, {key: tensor.contiguous() for key, tensor in stored.items()})
    all_ranks(None)
    save_pretrained(from_pretrained(source, dequantize=False), tmp / "as stored")
    assert_same_tensors(heads_of(tmp / "as stored"), heads_of(source))
    for dtype in (torch.bfloat16, torch.float32):
        with patch.object(save, "_SLAB_BYTES", 1500):
            save_pretrained(from_pretrained(source, dtype=dtype), tmp / f"{dtype}")
        heads = heads_of(tmp / f"{dtype}")
        assert heads.keys() == {*plain, "model.layers.61.enorm.weight"}
        assert torch.equal(heads.pop("model.layers.61.enorm.weight"), norm)
        for key, tensor in heads.items():
            apart = (tensor.float() - plain[key]).norm() / plain[key].norm()
            assert tensor.dtype == dtype and 0 < apart < (0.2 if "experts" in key else 0.05), (key, apart)
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_a_proj"], init_lora_weights=False)
    save_pretrained(add_adapter(from_pretrained(source), lora), tmp / "adapter of attention")
    errors = all_ranks(dict(kept(tmp, "kept")))
    assert errors[0] and errors[0] == errors[1]
    assert_same_tensors(heads_of(tmp / "kept"), heads_of(source))


def kept(tmp: Path, name: str) -> Mapping[str, float]:
    """Merge the adapter into the quantised base, in its format; the errors."""
    options = {"adapter": tmp / "adapter of attention", "keep_stored_format": True, "max_shard_size": SIZE}
    return export_checkpoint(None, tmp / name, **options).requantized


CASES = (
    saved_now_and_in_the_background, a_trainers_checkpoints, merged, left_out, sources_that_go_or_change, dequantised,
)  # fmt: skip


def test_heads_survive(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(run_cases, 2, CASES, folders, tmp_path)
    alone = kept(tmp_path, "kept alone")  # what two ranks have made together
    assert list(alone) == sorted(alone) and max(alone.values()) < 0.03
    assert_same_tensors(stored_tensors(tmp_path / "kept alone"), stored_tensors(tmp_path / "kept"))
