"""Files of torch.save: every tensor is found where its bytes are, and nothing of a file is run."""

import math
import os
import pickle
import random
import shutil
import zipfile
from collections import OrderedDict
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
from hf_fsdp_tools.loading.formats.dcp import parse_dcp
from hf_fsdp_tools.loading.formats.pickled import parse_pickled
from tests._checkpoints import Runs, make_checkpoint, pickled_copy, plain_model
from tests.api import METADATA, CheckpointIndex, StoredTensor, load_pickled, refuse_damage


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
    file = tmp_path / "x.bin"
    torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, file)
    rewritten = rezipped(file, tmp_path / "y.bin", zipfile.ZIP_STORED)  # no padding, no data descriptors
    try:
        stored = [tensor for _, tensor in parse_pickled(rewritten)[0]]
    except CheckpointError as error:
        assert "uncompressed record" in str(error)
    else:
        assert [read_back(t).tolist() for t in stored] == [[0.0] * 4, [1.0] * 4]


def rezipped(source: Path, target: Path, method: int, **changed: bytes) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, changed.get(entry.filename.split("/")[-1], old.read(entry)))
    return target


def tensor(*shape: int, strides: bytes) -> bytes:
    """A pickled dict of one tensor."""
    numel, sizes = bytes((75, math.prod(shape))), b"(" + b"".join(bytes((75, n)) for n in shape) + b"t"
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu" + numel + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + sizes + b"(" + strides + b"t\x89"
    return b"}X\1\0\0\0a" + call + b"ccollections\nOrderedDict\n)RtRs"


def saved(beside: Path) -> Path:
    torch.save(state_dict(), beside.with_name("good.bin"))
    return beside.with_name("good.bin")


REFUSED: dict[str, tuple[Any, str]] = {
    "an older format": (
        lambda file: torch.save(state_dict(), file, _use_new_zipfile_serialization=False),
        r"is no archive as torch\.save writes it.*torch\.save\(torch\.load",
    ),
    "code": (
        lambda file: torch.save({"a": torch.ones(2), "b": Runs(file.with_name("ran"))}, file),
        "could run code, so it was not opened .*GLOBAL.*allow its classes.*Convert weights to safetensors",
    ),
    "expanded": (lambda file: torch.save({"a": torch.ones(3).expand(4, 3)}, file), "'a' is an expanded .*contiguous"),
    "a number": (lambda file: torch.save({"a": torch.ones(3), "epoch": 3}, file), r"no tensors: 'epoch' \(int\); ex"),
    "big-endian": (lambda file: rezipped(saved(file), file, zipfile.ZIP_STORED, byteorder=b"big"), "big"),
    "a pipe": (os.mkfifo, "is no regular file"),
    "compressed": (lambda file: rezipped(saved(file), file, zipfile.ZIP_DEFLATED), "is compressed, expected"),
    "a stride below 0": (
        lambda file: pickled(file, tensor(2, 3, strides=b"J\xfd\xff\xff\xffK\1"), **{"data/0": bytes(24)}),
        r"a size or stride below 0",
    ),
    "a large byte order": (
        lambda file: pickled(file, b"}", byteorder=bytes(10**8 + 1)),
        "has 100,000,001 bytes, and is",
    ),
    "an archive behind others": (
        lambda file: file.write_bytes(b"0" + rezipped(saved(file), file, zipfile.ZIP_STORED).read_bytes()),
        "has bytes in front of its archive",
    ),
}


DOUBLED = b")q\0" + b"".join(bytes((104, i, 104, i, 0x86, 113, i + 1)) for i in range(60))
ENDLESS = {
    "a key of 2^60 parts": (b"}" + DOUBLED + b"Ns", "are repeated until they hold more than"),
    "an item of 2^60 parts": (b"c__builtin__\nset\n]" + DOUBLED + b"a\x85R", "are repeated until"),
    "a deep key": (b"})" + b"\x85" * 300_000 + b"Ns", "more than 100 tuples are in each other"),
    "a key doubled in place": (b"})" + b"2\x86" * 60 + b"Ns", "operation 0x32 is none that torch or DCP writes"),
    "gigabytes of zeros": (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", "bytearray is called otherwise than"),
    "gigabytes in a list": (b"c__builtin__\nbytearray\n]J\xff\xff\xff\x7faR", "bytearray is called otherwise than"),
    "a slow codec": (b"c_codecs\nencode\nX\1\0\0\0aX\x08\0\0\0punycode\x86R", "encode is called otherwise than"),
    "a memo of gigabytes": (b"Nr\xff\xff\xff\x7f", "place 2,147,483,647 of its memo is beyond its end"),
    "many dimensions": (
        b"ctorch._utils\n_rebuild_tensor_v2\nN(" + b"K\1" * 99 + b"t\x86R",
        "or more than 64 dimensions",
    ),
    "nothing on the stack": (b"(\x86", "takes values from where there are none"),
}
"""Pickles that torch's restricted unpickler, and that of DCP's metadata, would not be done with."""


def pickled(file: Path, content: bytes, **records: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, record in {"data.pkl": b"\x80\2" + content + b".", "version": b"3\n", **records}.items():
            archive.writestr(f"archive/{name}", record)


@pytest.mark.parametrize(("content", "said"), [*ENDLESS.values()], ids=[*ENDLESS])
def test_a_pickle_without_an_end_is_refused_before_it_is_read(tmp_path: Path, content: bytes, said: str) -> None:
    pickled(tmp_path / "x.bin", content)
    with pytest.raises(CheckpointError, match=rf"x\.bin: cannot be opened: .*{said}.*download it again"):
        load_pickled(tmp_path / "x.bin", safe=TORCH_SAFE_GLOBALS)
    (tmp_path / METADATA).write_bytes(b"\x80\2" + content + b".")
    with pytest.raises(CheckpointError, match=rf"\.metadata: cannot be read as .*{said}.*Save it again"):
        parse_dcp(tmp_path)


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


@pytest.mark.parametrize(("make", "said"), [*REFUSED.values()], ids=[*REFUSED])
def test_what_is_refused_and_why(tmp_path: Path, make: Any, said: str) -> None:
    make(tmp_path / "bad.bin")
    with pytest.raises(CheckpointError, match=said) as caught:
        parse_pickled(tmp_path / "bad.bin")
    assert str(tmp_path / "bad.bin") in str(caught.value)
    assert not (tmp_path / "ran").exists(), "code of the file was run"


def test_training_states_are_checked_and_usual_ones_read(tmp_path: Path) -> None:
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save(Runs(tmp_path / "ran"), tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name}: .*could run code"):
            refuse_damage(tmp_path)
        (tmp_path / name).unlink()
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
