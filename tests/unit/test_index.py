"""The index of a checkpoint: what it says about good ones, and one clear error for every bad one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import save

from hf_fsdp_tools import CheckpointError, from_pretrained, save_pretrained
from hf_fsdp_tools.loading import index as index_module
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.loading.formats.safetensors import DTYPES, parse_header
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests._checkpoints import make_checkpoint, stored_tensors
from tests.api import CheckpointIndex

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def stored(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header (bytes as they are, anything else as JSON)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def refused(folder: Path, said: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        CheckpointIndex.open(folder, **options)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 1000


def test_every_entry_says_where_the_bytes_are(tmp_path: Path) -> None:
    index = CheckpointIndex.open(make_checkpoint("mixtral", tmp_path))
    assert len({t.file for t in index.tensors.values()}) > 3
    for key, stored in index.tensors.items():
        with safe_open(stored.file, "pt") as file:
            tensor = file.get_tensor(key)
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
        assert raw == tensor.numpy().tobytes()
    assert index.num_bytes == sum(t.num_bytes for t in index.tensors.values())
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in {t.file for t in index.tensors.values()})
    assert index.header_bytes == headers + (tmp_path / "model.safetensors.index.json").stat().st_size
    assert index.dtype == torch.float32


def test_every_dtype_empty_tensors_and_empty_files_are_fine_and_nothing_is_not(tmp_path: Path) -> None:
    refused(tmp_path / "absent", r"No such folder.*Give a folder")
    refused(tmp_path, r"No weights in .*found nothing.*Give the folder")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"No weights in .*found config\.json")
    refused(tmp_path, "No such folder", subfolder="inner")
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


TWICE = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "key twice": (stored(TWICE), "key 'a' occurs twice"),
    "a dtype of 4 bits": (stored({"a": entry(dtype="F4", shape=(16,))}, bytes(8)), "F4 is not supported; supported"),
    "hole": (stored({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), "SafetensorError"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs.*Run `git lfs pull`"),
    "a long name": (stored({"." * 10**5: entry()}, bytes(8)), "names a tensor by 100,000 characters"),
    "endless": ((2**63).to_bytes(8, "little"), "cannot be read as safetensors"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_hostile_header_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name][0])
    refused(tmp_path, rf"model\.safetensors(.|\n)*{BAD_FILES[name][1]}")


def test_shards_without_an_index_are_opened_if_all_are_there_and_all_problems_are_listed(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    whole = CheckpointIndex.open(folder).tensors.keys()
    (folder / INDEX).unlink()
    assert CheckpointIndex.open(folder).tensors.keys() == whole
    next(folder.glob("*-00002-of-*")).unlink()
    refused(folder, r"holds 3 of 4 files model-\*-of-00004.safetensors and no index")
    make_checkpoint("llama", tmp_path)
    for file in sorted(tmp_path.glob("*.safetensors"))[:2]:
        os.truncate(file, file.stat().st_size - 1)
    refused(tmp_path, r"2 problems(.|\n)*00001(.|\n)*00002")


INDEX = "model.safetensors.index.json"
BAD_INDICES: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "absent file": (lambda m: {"weight_map": m | {"a": "gone.safetensors"}}, "'gone.safetensors' for 1 tensor.*there"),
    "absent key": (lambda m: {"weight_map": m | {"ghost": "x.safetensors"}}, "names 'ghost' in 'x.safetensors'"),
    "leaves the folder": (lambda m: {"weight_map": m | {"a": "../x.safetensors"}}, "inside the folder"),
    "map of numbers": (lambda m: {"weight_map": {"a": 1}}, "expected a 'weight_map'"),
    "not a weight file": (lambda m: {"weight_map": m | {"a": "x.bin"}}, "expected a safetensors file"),
    "not an object": (lambda m: [1], r"expected a JSON object, found \[1\]"),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_a_bad_index_file_is_one_error(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    make, said = BAD_INDICES[name]
    (tmp_path / INDEX).write_text(json.dumps(make({"a": "x.safetensors", "b": "y.safetensors"})))
    refused(tmp_path, said)


def test_an_index_that_is_no_json_and_files_that_are_none(tmp_path: Path) -> None:
    index, file = tmp_path / INDEX, tmp_path / "x.safetensors"
    index.write_bytes(b"\xff\xff{")
    refused(tmp_path, r"json: is not valid JSON: UnicodeDecodeError.*The file is damaged")
    index.write_text(json.dumps({"weight_map": {"a": file.name}}))
    file.symlink_to(tmp_path / "blob")
    refused(tmp_path, r"'x\.safetensors' \(a link to '.*blob'\) .*is not there\. Download")
    file.unlink()
    file.mkdir()
    refused(tmp_path, "which is not there")
    file.rmdir()
    index.rename(tmp_path / "__0_0.distcp")
    refused(tmp_path, r"found __0_0.distcp. Its \.metadata is missing: copy it too")
    file.symlink_to(file)
    refused(tmp_path, "Cannot read")
    for make in (Path.mkdir, os.mkfifo):
        file.unlink() if file.is_symlink() else file.rmdir()
        make(file)
        refused(tmp_path, "is no regular file")
    file.unlink()
    with open(file, "wb") as stream:
        stream.truncate(2**43)
    refused(tmp_path, r"x\.safetensors: cannot be (read|mapped)")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    refused(tmp_path, r"y\.safetensors: holds 'a', which x\.safetensors holds too; keep one")


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
    refused(folder, "expected a file inside the folder")


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


@pytest.mark.parametrize(
    ("files", "cure"),
    [
        (["model_world_size_2_rank_0.pt", "fsdp_config.json", "huggingface/config.json"], "verl.model_merger merge"),
        (["latest", "zero_to_fp32.py", "global_step3/mp_rank_00_model_states.pt"], r"zero_to_fp32\.py \. OUT"),
        (["model/model.safetensors", "optim/.metadata"], "folder 'model' inside, as NeMo AutoModel's are"),
        (["model/.metadata", "model/__0_0.distcp"], "folder 'model' inside, as NeMo AutoModel's are"),
        (["model.gguf"], "gguf_file=name"),
        (["last.ckpt"], r"Lightning wrote these files.*allow_pickle=True"),
        (["rng_state.pth", "optimizer.pt"], "Give the folder that save_pretrained wrote"),
    ],
)
def test_folders_of_other_tools_are_refused_by_name(tmp_path: Path, files: list[str], cure: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for allow_pickle in (False, True):
        refused(tmp_path, rf"No weights in .*{cure}", allow_pickle=allow_pickle)


def test_a_file_of_gguf_and_an_adapter_of_mlx_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(tmp_path / "model.gguf", r"is a file of GGUF.*gguf_file=name")
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora", "model": "base", "num_layers": 2}')
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"adapter of MLX-LM.*mlx_lm\.fuse --model BASE"):
        from_pretrained(tmp_path)
