"""What a reader makes of a folder that a save is changing, or was changing when it was killed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading import index as index_module
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.opening import open_checkpoint
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.saving.save import save_pretrained
from tests._checkpoints import make_checkpoint, stored_tensors


def test_a_save_that_ends_while_the_folder_is_opened_is_opened_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = make_checkpoint("llama", tmp_path / "saved"), make_checkpoint("llama", tmp_path / "other", seed=1)
    model = build_meta_model(other)
    load_weights(model, other)
    parse, calls = index_module.parse_header, []

    def parse_later(file: Path) -> Any:
        if not calls:
            save_pretrained(model, folder, max_shard_size="60KB")
        calls.append(file)
        return parse(file)

    monkeypatch.setattr(index_module, "parse_header", parse_later)
    tensors = CheckpointIndex.open(folder).tensors
    assert {tensor.file for tensor in tensors.values()} == set(folder.glob("model.*-of-*.safetensors"))
    found, expected = stored_tensors(folder), stored_tensors(other)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_damage_is_told_at_once_where_no_save_came_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)
    next(folder.glob("*-00002-of-*")).write_bytes(b"damaged")
    parse, calls = index_module.parse_header, []
    monkeypatch.setattr(index_module, "parse_header", lambda file: calls.append(file) or parse(file))
    with pytest.raises(CheckpointError, match="00002-of"):
        CheckpointIndex.open(folder)
    assert len(calls) == len(set(calls)), "read once"


def test_shards_without_an_index_are_opened_only_if_all_are_there(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    whole = CheckpointIndex.open(folder).tensors.keys()
    (folder / "model.safetensors.index.json").unlink()
    assert CheckpointIndex.open(folder).tensors.keys() == whole
    next(folder.glob("*-00002-of-*")).unlink()
    with pytest.raises(CheckpointError, match=r"holds 3 of 4 files model-\*-of-00004.safetensors and no index"):
        CheckpointIndex.open(folder)


def name_weights(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))


def test_weights_that_the_config_names_come_first_as_in_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "saved")
    whole = CheckpointIndex.open(folder)
    (folder / "model.safetensors.index.json").rename(folder / "named.safetensors.index.json")
    make_checkpoint("llama", tmp_path / "other", seed=1)
    next((tmp_path / "other").glob("*00001-of*")).rename(folder / "model.safetensors")
    assert CheckpointIndex.open(folder).tensors.keys() != whole.tensors.keys()
    name_weights(folder, "named.safetensors.index.json")
    assert CheckpointIndex.open(folder).tensors == whole.tensors
    name_weights(folder, "model.safetensors")
    assert {t.file.name for t in CheckpointIndex.open(folder).tensors.values()} == {"model.safetensors"}
    name_weights(folder, "../other/model-00002-of-00004.safetensors")
    with pytest.raises(CheckpointError, match="expected a file inside the folder"):
        CheckpointIndex.open(folder)


def test_files_that_are_replaced_while_they_are_read_are_refused(tmp_path: Path) -> None:
    folder, other = make_checkpoint("llama", tmp_path / "saved"), make_checkpoint("llama", tmp_path / "other", seed=1)
    index, model = CheckpointIndex.open(folder), build_meta_model(folder)
    load_weights(model, index)
    for file in other.glob("*.safetensors"):
        file.replace(folder / file.name)
    fresh = build_meta_model(folder)
    with pytest.raises(CheckpointError, match="was replaced, written or removed while the checkpoint was read"):
        load_weights(fresh, index)
    assert all(parameter.is_meta for parameter in fresh.parameters())
    load_weights(fresh, folder)


def test_config_and_weights_are_of_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = make_checkpoint("llama", tmp_path / "saved"), make_checkpoint("llama", tmp_path / "other", seed=1)
    model = build_meta_model(other)
    load_weights(model, other)
    model.config.rope_parameters["rope_theta"] = 77.0
    load, calls = opening.load_config, []

    def load_and_save(*args: Any, **options: Any) -> Any:
        config = load(*args, **options)
        if not calls:
            save_pretrained(model, folder, max_shard_size="60KB")
        calls.append(config)
        return config

    monkeypatch.setattr(opening, "load_config", load_and_save)
    found = open_checkpoint(folder)
    assert len(calls) == 2 and found.config.rope_parameters["rope_theta"] == 77.0
    assert {t.file for t in found.index.tensors.values()} == set(folder.glob("model.*-of-*.safetensors"))
