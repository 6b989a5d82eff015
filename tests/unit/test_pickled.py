"""Files of torch.save: every tensor is found where its bytes are, and nothing of a file is run."""

import pickle
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp

from hf_fsdp_tools import CheckpointError, from_pretrained
from hf_fsdp_tools.loading import index as index_module
from tests._checkpoints import make_checkpoint, pickled_copy, plain_model
from tests.api import METADATA, CheckpointIndex, StoredTensor, load_pickled, parse_dcp, parse_pickled


def state_dict() -> dict[str, Any]:
    base = torch.randn(4, 6)
    return OrderedDict(
        a=base,
        tied=base,
        transposed=base.t(),
        rows=base[1:3],
        column=base[:, 2],
        parameter=torch.nn.Parameter(torch.ones(2)),
        half=torch.arange(3, dtype=torch.bfloat16),
        eight=torch.arange(3.0).to(torch.float8_e4m3fn),
        numbers=torch.arange(7),
        flags=torch.tensor([True, False]),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(3),
        one=torch.arange(5).expand(1, -1),
    )


def read_back(stored: StoredTensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(stored.file.read_bytes()), dtype=torch.uint8)[stored.offset :]
    if not stored.num_bytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    data = raw[: raw.numel() // stored.dtype.itemsize * stored.dtype.itemsize].clone().view(stored.dtype)
    (piece,) = stored.pieces()
    return data.as_strided(piece.view.length, piece.view.strides)


def rezipped(method: int = zipfile.ZIP_STORED, before: bytes = b"", **changed: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, folder / "good.bin")
        with zipfile.ZipFile(folder / "good.bin") as old, zipfile.ZipFile(folder / "x.bin", "w", method) as new:
            for each in old.infolist():
                new.writestr(each.filename, changed.get(each.filename.split("/")[-1], old.read(each)))
        (folder / "x.bin").write_bytes(before + (folder / "x.bin").read_bytes())

    return make


def test_every_tensor_is_where_the_index_says_and_no_place_that_torch_works_out_wrongly(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    expected = state_dict()
    torch.save(expected, file)
    located, num_bytes = parse_pickled(file)
    stored = [tensor for _, tensor in located]
    assert [path for path, _ in located] == [(key,) for key in expected] and [t.key for t in stored] == list(expected)
    for tensor in stored:
        want = expected[tensor.key].detach()
        assert tensor.dtype == want.dtype and tensor.shape == want.shape
        assert torch.equal(read_back(tensor).to(torch.float64), want.to(torch.float64)), tensor.key
    assert stored[0].offset == stored[1].offset and stored[2].strides == (1, 6) and stored[-1].strides is None
    assert num_bytes < file.stat().st_size * 3  # each part of the directory at most a few times
    torch.save({"a": torch.zeros(2**21)}, file)  # 8 MiB
    assert parse_pickled(file)[1] < 200_000, "the data is not read"
    # torch computes where storages lie from how its own writer works; another writer may put something between.
    rezipped()(tmp_path)  # no padding, no data descriptors
    try:
        stored = [tensor for _, tensor in parse_pickled(tmp_path / "x.bin")[0]]
    except CheckpointError as error:
        assert "uncompressed record" in str(error)
    else:
        assert [read_back(t).tolist() for t in stored] == [[0.0] * 4, [1.0] * 4]


DCP = "torch.distributed.checkpoint.metadata"
CHANGES = {
    "a class": f"c{DCP}\nMetadataIndex\n".encode() + b"N}X\x08\0\0\0__hash__Ns\x86b",
    "a class by its place": f"c{DCP}\nMetadata\nq\1]h\1".encode() + b"N}X\x08\0\0\0__init__Ns\x86b",
    "a path's class": b"cpathlib\nPurePosixPath\nN}X\1\0\0\0aNs\x86b",
    "a function": b"ctorch.serialization\n_get_layout\nN}X\1\0\0\0aNs\x86b",
    "a member": f"c{DCP}\n_MEM_FORMAT_ENCODING\n".encode() + b"K\1\x85R}X\7\0\0\0_value_K\7sb",
    "a key in a key": f"c{DCP}\nMetadataIndex\n".encode() + b"q\1}h\1h\1N\x85R\x85RNs",
}
"""What pickle's BUILD would set for good, of that which the metadata may name; and what a hash walks through."""


@pytest.mark.parametrize("what", CHANGES)
def test_refused_metadata_changes_nothing(tmp_path: Path, what: str) -> None:
    kinds = [dcp.Metadata, dcp.MetadataIndex, dcp._MEM_FORMAT_ENCODING, PurePosixPath, torch.serialization._get_layout]
    kinds.append(dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST)
    body = pickle.dumps(dcp.Metadata({}), 2)[2:]
    before = [dict(vars(kind)) for kind in kinds]
    (tmp_path / METADATA).write_bytes(b"\x80\2" + CHANGES[what] + body)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read as the metadata"):
        parse_dcp(tmp_path)
    assert [dict(vars(kind)) for kind in kinds] == before
    (tmp_path / METADATA).write_bytes(b"\x80\2" + body)
    parse_dcp(tmp_path)


def test_usual_training_states_are_read(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "sets": ({str(i) for i in range(20_000)}, set(range(20_000))),
        "numbers": {i: float(i) for i in range(20_000)},
        "pairs": [(i, i) for i in range(20_000)],
        "ordered": OrderedDict(a=1),
        "large": 2**128,
        "bytes": (b"abc", bytearray(), bytearray(b"abc")),
        "seen": Decimal(3),
    }
    torch.save(state, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"Decimal.*allow its classes: torch\.serialization\.add_safe_globals"):
        load_pickled(tmp_path / "x", device="cpu", safe=TORCH_SAFE_GLOBALS)
    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([Decimal, np.ndarray]):
        found = load_pickled(tmp_path / "x", device="cpu", safe=TORCH_SAFE_GLOBALS).content
        assert np.ndarray in torch.serialization.get_safe_globals(), "what the user allows stays allowed"
    assert all(found[key] == state[key] for key in state.keys() - {"numpy", "cpu"})
    assert np.array_equal(found["numpy"][1], state["numpy"][1]) and torch.equal(found["cpu"], state["cpu"])
    assert set(torch.serialization.get_safe_globals()) == set(before)


@settings(max_examples=50)
@given(position=st.integers(0, 3000), value=st.integers(0, 255))
@example(position=2078, value=85)  # torch 2.13 raises an EOFError without a text
def test_one_changed_byte_never_crashes(tmp_path: Path, position: int, value: int) -> None:
    file = tmp_path / "fuzz.bin"
    torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, file)
    content = bytearray(file.read_bytes())
    content[position % len(content)] = value
    file.write_bytes(content)
    try:
        stored = [tensor for _, tensor in parse_pickled(file)[0]]
    except CheckpointError:
        return
    assert all(0 <= t.offset <= t.offset + t.num_bytes <= len(content) for t in stored)


def test_bin_files_are_read_and_asked_for_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path / "st")
    for files in (1, 3):
        legacy = pickled_copy(folder, tmp_path / f"bin{files}", files=files)
        with pytest.raises(CheckpointError, match=r"only pickled weights.*allow_pickle=True.*convert"):
            CheckpointIndex.open(legacy)
        index = CheckpointIndex.open(legacy, allow_pickle=True)
        assert index.tensors.keys() == CheckpointIndex.open(folder).tensors.keys()
        assert len({t.file for t in index.tensors.values()}) == files
    file = tmp_path / "bin1" / "pytorch_model.bin"
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        CheckpointIndex.open(file)
    assert CheckpointIndex.open(file, allow_pickle=True).num_bytes == index.num_bytes
    shutil.copy(file, folder)
    assert {t.file.suffix for t in CheckpointIndex.open(folder, allow_pickle=True).tensors.values()} == {".safetensors"}
    legacy = pickled_copy(make_checkpoint("llama", tmp_path / "again"), tmp_path / "bin", files=2)
    asked: list[list[str]] = []

    def fetch(_: str, *patterns: str, **__: object) -> tuple[Path, dict[str, object]]:
        asked.append(list(patterns))
        return legacy, {"revision": "c0ffee"}

    monkeypatch.setattr(index_module, "fetch", fetch)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        CheckpointIndex.open("org/model")
    assert not any("bin" in pattern for patterns in asked for pattern in patterns)
    asked.clear()
    assert CheckpointIndex.open("org/model", allow_pickle=True).commit == "c0ffee"
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    listing = "pytorch_model.bin.index.json"
    assert asked[2:] == [["pytorch_model.bin", listing], [listing, *names]]


@pytest.mark.parametrize("name", ["last.ckpt", "lit_model.pth"])
def test_a_state_dict_inside_a_checkpoint_of_lightning_is_found(tmp_path: Path, name: str) -> None:
    """Lightning's names begin with the attribute of the module that holds the model; optimizer states stay out."""
    folder = make_checkpoint("llama", tmp_path / "st")
    model = plain_model("llama", folder)
    is_lightning = name == "last.ckpt"
    state = {f"net.{key}" if is_lightning else key: tensor for key, tensor in model.state_dict().items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {"state_dict": state, "optimizer_states": [optimizer]} if is_lightning else {"model": state}
    (tmp_path / name).mkdir()
    shutil.copy(folder / "config.json", tmp_path / name)
    torch.save(content | {"optimizer": optimizer, "epoch": 3}, file := tmp_path / name / name)
    loaded = from_pretrained(file, allow_pickle=True, load_kwargs={"progress": False})
    found: dict[str, Any] = loaded.state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in model.state_dict().items())
