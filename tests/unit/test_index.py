"""The index of a checkpoint: what it says of good ones, and of those that change while they are read; keys that are
missing, unexpected or of other shapes are those that transformers reports; and tensors of pickled files."""

import json
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from hf_fsdp_tools import CheckpointError, from_pretrained, save_pretrained
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests._checkpoints import make_checkpoint, make_model, pickled_copy, randomize, stored_tensors, tiny_config
from tests.api import METADATA, CheckpointIndex, StoredTensor, parse_dcp, parse_pickled

Damage = Callable[[Path], object]
"""What is done to a folder."""


def config(name: str = "config.json", **changed: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return damage


def stored(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header (bytes as they are, anything else as JSON)."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


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
    (tmp_path / "model.safetensors.index.json").unlink()
    assert CheckpointIndex.open(tmp_path).tensors == index.tensors, "shards without an index, if all are there"


def test_a_save_that_ends_while_the_folder_is_opened_is_opened_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between config and weights, which are of one save."""
    folder, other = make_checkpoint("llama", tmp_path / "saved"), make_checkpoint("llama", tmp_path / "other", seed=1)
    model = build_meta_model(other)
    load_weights(model, other)
    model.config.rope_parameters["rope_theta"] = 77.0
    read, calls = opening.load_config, []

    def read_and_save(*args: Any, **options: Any) -> Any:
        before = read(*args, **options)
        if not calls:
            save_pretrained(model, folder, max_shard_size="60KB")
        calls.append(args)
        return before

    monkeypatch.setattr(opening, "load_config", read_and_save)
    found = open_checkpoint(folder)
    assert len(calls) >= 2 and found.config.rope_parameters["rope_theta"] == 77.0
    assert {t.file for t in found.index.tensors.values()} == set(folder.glob("model.*-of-*.safetensors"))
    saved, expected = stored_tensors(folder), stored_tensors(other)
    assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in expected)


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


Tensors = dict[str, torch.Tensor]
MISMATCHED = {"ignore_mismatched_sizes": True}


class Quiet(hf.LlamaForCausalLM):
    _keys_to_ignore_on_load_missing: ClassVar = [r"q_proj"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"adapter"]


def drop(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: t for key, t in tensors.items() if not any(part in key for part in parts)}


def add(*keys: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: torch.ones(3) for key in keys}


CASES: dict[str, tuple[str, Callable[[Tensors], Tensors], Any, dict[str, Any]]] = {
    # name: (kind of checkpoint, what is changed, class that loads it, arguments)
    "nothing wrong": ("llama", dict, hf.AutoModelForCausalLM, {}),
    "base to head": ("base", dict, hf.AutoModelForCausalLM, {}),
    "a layer missing, keys too many": ("deepseek_v3",
         lambda t: add("model.layers.7.mlp.up_proj.weight", "junk")(drop("layers.1.")(t)),
         hf.AutoModelForSequenceClassification, {"num_labels": 5}),
    "ignored keys": ("llama", lambda t: add("adapter.x", "model.other.x")(drop("q_proj", "k_proj")(t)), Quiet, {}),
    "half of T5": ("t5", dict, hf.T5EncoderModel, {}),
    "other shapes": ("llama", drop("layers.0.mlp"), hf.AutoModelForCausalLM, {"vocab_size": 77, **MISMATCHED}),
    "old names of norms": ("bert",
         lambda t: {key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in t.items()},
         hf.BertForSequenceClassification, {}),
}  # fmt: skip


def checkpoint(kind: str, change: Callable[[Tensors], Tensors], folder: Path) -> Path:
    model = make_model("llama").model if kind == "base" else make_model(kind)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_same_keys_as_transformers(tmp_path: Path, name: str) -> None:
    kind, change, auto_class, arguments = CASES[name]
    folder = checkpoint(kind, change, tmp_path)
    reference, expected = auto_class.from_pretrained(folder, output_loading_info=True, **arguments)
    ignore = arguments.get("ignore_mismatched_sizes", False)
    config = {key: value for key, value in arguments.items() if key != "ignore_mismatched_sizes"}
    model = build_meta_model(folder, auto_class=auto_class, **config)
    report = load_weights(model, folder, ignore_mismatched_sizes=ignore)
    mismatched = {(key, tuple(a), tuple(b)) for key, a, b in expected["mismatched_keys"]}
    assert report.loading_info() == {**expected, "mismatched_keys": mismatched}
    state, values = model.state_dict(keep_vars=True), reference.state_dict()
    drawn = {id(state[key]) for key in report.initialized_keys}  # tied tensors have several keys
    assert all(id(tensor) in drawn or torch.equal(tensor, values[key]) for key, tensor in state.items())


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


BAD_PARTS: dict[str, tuple[Any, Any, str]] = {
    "no json": (TWO, STARTS | {"1": "{"}, "shard-1.safetensors: is not valid JSON"),
    "no offsets": (TWO, STARTS | {"1": {"w": {}}}, r"'w': DCP_SHARDING_INFO is .*expected saved_offsets for \[4, 4\]"),
    "a hole": (TWO, STARTS | {"2": {"w": {"saved_offsets": [0, 5]}}}, "leave something out or overlap"),
    "two dtypes": (
        TWO | {"2": {"w": TWO["2"]["w"].half()}},
        STARTS,
        r"do not belong together: float32 \[4, 4\] in shard-1\.safetensors, float16 .*several saves",
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_parts_are_one_error(tmp_path: Path, name: str) -> None:
    parts, starts, said = BAD_PARTS[name]
    with pytest.raises(CheckpointError, match=said) as caught:
        CheckpointIndex.open(write_parts(tmp_path / "x", parts, starts))
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 1000


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
    kinds = [
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata._MEM_FORMAT_ENCODING,
        PurePosixPath,
        torch.serialization._get_layout,
    ]
    kinds.append(metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST)
    body = pickle.dumps(metadata.Metadata({}), 2)[2:]
    before = [dict(vars(kind)) for kind in kinds]
    (tmp_path / METADATA).write_bytes(b"\x80\2" + CHANGES[what] + body)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read as the metadata"):
        parse_dcp(tmp_path)
    assert [dict(vars(kind)) for kind in kinds] == before
    (tmp_path / METADATA).write_bytes(b"\x80\2" + body)
    parse_dcp(tmp_path)


def test_bin_files_are_read_only_when_asked(tmp_path: Path) -> None:
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


def test_a_state_dict_inside_a_checkpoint_of_lightning_is_found(tmp_path: Path) -> None:
    """Names begin with the attribute of the module that holds the model; optimizer states stay out."""
    folder = make_checkpoint("llama", tmp_path)
    state = {f"net.{key}": tensor for key, tensor in stored_tensors(folder).items()}
    content = {"state_dict": state, "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}], "epoch": 3}
    torch.save(content, tmp_path / "last.ckpt")
    loaded = from_pretrained(tmp_path / "last.ckpt", allow_pickle=True, load_kwargs={"progress": False}).state_dict()
    assert all(torch.equal(tensor, loaded[key.removeprefix("net.")]) for key, tensor in state.items())


# fmt: off
CONVERTED = [  # stored in another layout than the model has
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "phimoe",
    "jamba", "minimax", "minimax_m2", "nemotron_h", "olmoe", "glm4_moe", "glm4v_moe",
    "flex_olmo", "ernie4_5_moe", "exaone_moe", "longcat_flash", "afmoe", "hy_v3", "kimi_k25",
    "qwen3_vl_moe", "olmo_hybrid", "nomic_bert", "gte", "dinov2", "sapiens2",
]
RENAMED = [  # stored as the model has it, some keys renamed
    "gpt2", "gpt_oss", "llama4_text", "qwen2_vl", "gemma3", "llava", "clip", "whisper", "t5", "vit", "bloom", "mllama",
    "bert", "wav2vec2", "deberta-v2",
]
# fmt: on


def model_class(config: Any) -> type[hf.PreTrainedModel]:
    """The class that a user would load: with a head where transformers has one."""
    for auto_class in (hf.AutoModelForCausalLM, hf.AutoModelForImageTextToText, hf.AutoModel):
        if type(config) in auto_class._model_mapping:
            found = auto_class._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise AssertionError(f"no auto class for {type(config).__name__}")


FEW = ("mixtral", "deepseek_v3", "jamba", "minimax_m2", "nemotron_h", "ernie4_5_moe", "olmo_hybrid", "gte", "t5")
TYPES = [pytest.param(t, marks=[] if t in FEW else [pytest.mark.nightly]) for t in CONVERTED + RENAMED]


@pytest.mark.parametrize("model_type", TYPES)
def test_an_architecture_loads_and_saves_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """One process, no shards: the same values and reports, every byte read in place, and the same files written."""
    if model_type not in hf.CONFIG_MAPPING:  # 5.17, which is supported too, lacks some of 5.23
        pytest.skip(f"transformers {hf.__version__} has no {model_type}")
    config = tiny_config(model_type)
    cls = model_class(config)
    randomize(cls(config)).save_pretrained(tmp_path / "stored", max_shard_size="200KB")
    reference, info = cls.from_pretrained(tmp_path / "stored", output_loading_info=True)
    model = build_meta_model(tmp_path / "stored", auto_class=cls)
    report = load_weights(model, tmp_path / "stored")

    expected, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    for (key, tensor), (_, ours) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(ours, tensor), key
    assert set(report.missing_keys) == set(info["missing_keys"])
    assert set(report.unexpected_keys) == set(info["unexpected_keys"])
    assert report.converted_bytes == 0 and report.read_ratio == 1.0

    reference.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", max_shard_size="200KB")
    theirs, ours_ = stored_tensors(tmp_path / "theirs"), stored_tensors(tmp_path / "ours")
    assert theirs.keys() == ours_.keys()
    assert all(torch.equal(ours_[k], t) and ours_[k].dtype == t.dtype for k, t in theirs.items())
