"""Names in training states, and tensors in parts of files: which are the model's, and one clear error for bad ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.loading.formats.dcp import is_wrapped, model_part, peft_part
from tests.api import CheckpointIndex

KEYS = ("model.embed.weight", "model.layers.0.q_proj.weight", "model.layers.0.norm.weight", "lm_head.weight")


def found(*paths: Any) -> dict[str, str]:
    tensors = {(path,) if isinstance(path, str) else path: path for path in paths}
    return model_part(tensors, KEYS, "state")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "model.", "a.b.c."])
def test_whatever_is_around_a_model_is_taken_from_its_names(prefix: str) -> None:
    assert found(*(prefix + key for key in KEYS)).keys() == set(KEYS)
    assert found(*(("job", prefix + key) for key in KEYS), "step", "optim.exp_avg").keys() == set(KEYS)


def test_what_the_model_does_not_know_stays_and_names_of_a_file_are_the_hubs() -> None:
    assert found(*(f"net.{key}" for key in KEYS), "net.extra.bias", "v_head.bias").keys() == {
        *KEYS, "extra.bias", "v_head.bias",
    }  # fmt: skip
    bare = [key.removeprefix("model.") for key in KEYS[:3]]
    assert found(*bare).keys() == set(bare), "transformers adds the prefix"
    own = ["module.a.weight", "module.b.weight"]
    assert model_part({(key,): key for key in own}, own, "state").keys() == set(own), "a model's own name"
    both = ("embed.weight", "model.embed.weight", "model.layers.0.norm.weight")
    assert model_part({(key,): key for key in both}, bare, "state").keys() == set(both), "no two become one"
    for names in ("model.layers._orig_mod.a", "module.a module.b", "base_model.model.a", "pretrained_model.a v_head.b"):
        assert is_wrapped(names.split()) is True, names
    for names in ("module.a b", "model.q.base_layer.weight model.q.lora_A.speech.weight", ""):
        assert is_wrapped(names.split()) is False, names


BASE, ADAPTER = ("base_model.model.model.", "base_model.model.")


def split(*names: str) -> tuple[set[str], set[str]] | None:
    both = peft_part({("model", name): name for name in names}, lambda: ("lora_",))
    return None if both is None else ({path[-1] for path in both[0]}, set(both[1]))


def test_base_and_adapter_are_told_apart_by_the_wrappers_of_peft() -> None:
    norm, tail = f"{BASE}layers.0.norm.weight", f"{ADAPTER}lm_head"
    query, experts = f"{BASE}layers.0.q_proj", f"{BASE}layers.0.experts"
    bases = {
        norm, f"{query}.base_layer.weight", f"{query}.base_layer.bias", f"{experts}.base_layer.base_layer.gate",
        f"{tail}.original_module.weight", f"{BASE}embed.token_adapter.base_layer.weight",
    }  # fmt: skip
    added = {
        f"{query}.lora_A.default.weight", f"{query}.lora_magnitude_vector.default.weight",
        f"{experts}.lora_A.default.weight", f"{experts}.base_layer.lora_A.default.weight",
        f"{tail}.modules_to_save.default.weight", f"{BASE}embed.token_adapter.trainable_tokens_delta.default",
        "base_model.vera_A.default",
    }  # fmt: skip
    assert split(*bases, *added) == (bases, added)
    own = found(*bases, *added)
    assert {"model.layers.0.norm.weight", "model.layers.0.experts.gate", "lm_head.weight"} <= own.keys()
    alone = {f"{query}.lora_A.weight", f"{tail}.weight", f"{BASE}embed.base_layer.weight"}
    assert split(*(f"_orig_mod.module.{name}" for name in alone)) is not None
    assert split(*alone) == (set(), alone), "an adapter of an embedding is saved with its base"
    assert split(f"{tail}.weight") == (set(), {f"{tail}.weight"})
    assert split("model.norm.weight", "model.q.base_layer.weight") is None
    prompts = {"prompt_encoder.default.embedding.weight"}
    assert split(*prompts, "base_model.model.embed.weight") == ({"base_model.model.embed.weight"}, prompts)


def write_parts(folder: Path, parts: dict[str, dict[str, torch.Tensor]], starts: Any) -> Path:
    folder.mkdir()
    for name, tensors in parts.items():
        said = starts[name] if isinstance(starts.get(name), str) else json.dumps(starts.get(name, {}))
        save_file(tensors, folder / f"shard-{name}.safetensors", metadata={"DCP_SHARDING_INFO": said})
    return folder


WHOLE = torch.arange(24.0).reshape(4, 6)
TWO = {"1": {"w": WHOLE[:, :4].contiguous()}, "2": {"w": WHOLE[:, 4:].contiguous()}}
STARTS = {"1": {"w": {"saved_offsets": [0, 0]}}, "2": {"w": {"saved_offsets": [0, 4]}}}


def test_parts_are_one_tensor_and_what_one_process_writes_is_a_plain_file(tmp_path: Path) -> None:
    index = CheckpointIndex.open(write_parts(tmp_path / "x", TWO, STARTS))
    tensor = index.tensors["w"]
    assert tensor.shape == (4, 6) and index.num_bytes == WHOLE.numel() * 4
    made = torch.zeros(4, 6)
    for piece in tensor.pieces():
        stored = index.source(piece.source)
        raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
        part = tuple(slice(s, s + n) for s, n in zip(piece.box.start, piece.box.length, strict=True))
        made[part] = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(piece.box.length)
    assert torch.equal(made, WHOLE)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({"w": WHOLE, "s": torch.tensor(3)}, storage_writer=writer, no_dist=True)
    tensors = CheckpointIndex.open(tmp_path).tensors
    assert {key: tensor.shape for key, tensor in tensors.items()} == {"w": (4, 6), "s": ()}
    assert all(hasattr(tensor, "offset") for tensor in tensors.values())


def changed(name: str, value: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (TWO, {**STARTS, name: value})


BAD_PARTS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "no json": (changed("1", "{"), "shard-1.safetensors: is not valid JSON"),
    "no offsets": (changed("1", {"w": {}}), r"'w': DCP_SHARDING_INFO is .*expected saved_offsets for \[4, 4\]"),
    "a hole": (changed("2", {"w": {"saved_offsets": [0, 5]}}), "leave something out or overlap"),
    "two dtypes": (
        lambda: ({**TWO, "2": {"w": TWO["2"]["w"].half()}}, STARTS),
        r"do not belong together: float32 \[4, 4\] in shard-1\.safetensors, float16 .*several saves",
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_parts_are_one_error(tmp_path: Path, name: str) -> None:
    make, said = BAD_PARTS[name]
    with pytest.raises(CheckpointError, match=said) as caught:
        CheckpointIndex.open(write_parts(tmp_path / "x", *make()))
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 1000
