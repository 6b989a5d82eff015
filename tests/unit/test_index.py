"""The index of a checkpoint: what it says of good ones, and of those that change while they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import save

from hf_fsdp_tools import CheckpointError, save_pretrained
from hf_fsdp_tools.loading import index as index_module
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.loading.formats.safetensors import DTYPES, parse_header
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests._checkpoints import make_checkpoint, stored_tensors
from tests.api import CheckpointIndex
from tests.unit.test_refused_files import config, stored

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def test_every_entry_says_where_the_bytes_are(tmp_path: Path) -> None:
    index = CheckpointIndex.open(make_checkpoint("mixtral", tmp_path))
    assert len({t.file for t in index.tensors.values()}) > 3
    for key, place in index.tensors.items():
        with safe_open(place.file, "pt") as file:
            tensor = file.get_tensor(key)
        assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
        raw = place.file.read_bytes()[place.offset : place.offset + place.num_bytes]
        assert raw == tensor.numpy().tobytes()
    assert index.num_bytes == sum(t.num_bytes for t in index.tensors.values())
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in {t.file for t in index.tensors.values()})
    assert index.header_bytes == headers + (tmp_path / "model.safetensors.index.json").stat().st_size
    assert index.dtype == torch.float32


def test_every_dtype_empty_tensors_and_empty_files_are_fine(tmp_path: Path) -> None:
    tensors = {str(d): torch.zeros(3, dtype=d) for d in DTYPES.values() if d != torch.float8_e8m0fnu}
    save_file(tensors, tmp_path / "model.safetensors")
    found = CheckpointIndex.open(tmp_path).tensors
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in tensors.items()}
    save_file({"e": torch.zeros(0, 3), "x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert CheckpointIndex.open(tmp_path).tensors["e"].num_bytes == 0
    for name in ("model.safetensors", "weights.safetensors"):
        save_file(TENSORS, file := tmp_path / name)
        assert CheckpointIndex.open(tmp_path).tensors == CheckpointIndex.open(file).tensors
        assert set(CheckpointIndex.open(tmp_path).tensors) == set(TENSORS)
        file.unlink()
    (tmp_path / "none.safetensors").write_bytes(stored({}))
    assert parse_header(tmp_path / "none.safetensors") == ([], 10)


def test_shards_without_an_index_are_opened_if_all_are_there(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    whole = CheckpointIndex.open(folder).tensors.keys()
    (folder / "model.safetensors.index.json").unlink()
    assert CheckpointIndex.open(folder).tensors.keys() == whole


@pytest.mark.parametrize(("module", "name"), [(index_module, "parse_header"), (opening, "load_config")])
def test_a_save_that_ends_while_the_folder_is_opened_is_opened_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """While the headers are read, or between config and weights, which are of one save."""
    folder, other = make_checkpoint("llama", tmp_path / "saved"), make_checkpoint("llama", tmp_path / "other", seed=1)
    model = build_meta_model(other)
    load_weights(model, other)
    model.config.rope_parameters["rope_theta"] = 77.0
    read, calls = getattr(module, name), []

    def read_and_save(*args: Any, **options: Any) -> Any:
        before = read(*args, **options) if module is opening else None
        if not calls:
            save_pretrained(model, folder, max_shard_size="60KB")
        calls.append(args)
        return before or read(*args, **options)

    monkeypatch.setattr(module, name, read_and_save)
    found = open_checkpoint(folder)
    assert len(calls) >= 2 and found.config.rope_parameters["rope_theta"] == 77.0
    assert {t.file for t in found.index.tensors.values()} == set(folder.glob("model.*-of-*.safetensors"))
    saved, expected = stored_tensors(folder), stored_tensors(other)
    assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in expected)


def test_weights_that_the_config_names_come_first_as_in_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "saved")
    whole = CheckpointIndex.open(folder)
    (folder / "model.safetensors.index.json").rename(folder / "named.safetensors.index.json")
    make_checkpoint("llama", tmp_path / "other", seed=1)
    next((tmp_path / "other").glob("*00001-of*")).rename(folder / "model.safetensors")
    assert CheckpointIndex.open(folder).tensors.keys() != whole.tensors.keys()
    config(transformers_weights="named.safetensors.index.json")(folder)
    assert CheckpointIndex.open(folder).tensors == whole.tensors
    config(transformers_weights="model.safetensors")(folder)
    assert {t.file.name for t in CheckpointIndex.open(folder).tensors.values()} == {"model.safetensors"}


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
    save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / "dcp")
    index = CheckpointIndex.open(tmp_path / "dcp")
    index.refuse_changed()
    save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="was replaced, written or removed while the checkpoint was read"):
        index.refuse_changed()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
dtypes = st.sampled_from(["F32", "BF16", "U8"]) | json_values
entries = st.fixed_dictionaries({"dtype": dtypes, "shape": json_values, "data_offsets": json_values})


@settings(max_examples=25)
@given(
    header=st.dictionaries(st.text(max_size=4), entries | json_values, max_size=4).map(lambda h: json.dumps(h).encode())
    | st.binary(max_size=60),
    data=st.binary(max_size=20),
)
def test_no_header_does_anything_but_parse_or_raise(tmp_path: Path, header: bytes, data: bytes) -> None:
    file = tmp_path / "fuzz.safetensors"
    file.write_bytes(stored(header, data))
    try:
        located, start = parse_header(file)
        tensors = [tensor for _, tensor in located]
    except CheckpointError as error:
        assert str(file) in str(error)
        return
    assert start == 8 + len(header)
    assert sum(t.num_bytes for t in tensors) == len(data)
