"""The index of a checkpoint: what it says of good ones, and of those that change while they are read; keys that are
missing, unexpected or of other shapes are those that transformers reports."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import save

from hf_fsdp_tools import CheckpointError, save_pretrained
from hf_fsdp_tools.loading import index as index_module
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.loading.formats.safetensors import DTYPES, parse_header
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests._checkpoints import make_checkpoint, make_model, stored_tensors
from tests.api import CheckpointIndex

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


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


Tensors = dict[str, torch.Tensor]
MISMATCHED = {"ignore_mismatched_sizes": True}


class Quiet(hf.LlamaForCausalLM):
    _keys_to_ignore_on_load_missing: ClassVar = [r"q_proj"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"adapter"]


def drop(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: t for key, t in tensors.items() if not any(part in key for part in parts)}


def add(*keys: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: torch.ones(3) for key in keys}


def same(tensors: Tensors) -> Tensors:
    return tensors


CASES: dict[str, tuple[str, Callable[[Tensors], Tensors], Any, dict[str, Any]]] = {
    # name: (kind of checkpoint, what is changed, class that loads it, arguments)
    "nothing wrong": ("llama", same, hf.AutoModelForCausalLM, {}),
    "head to base": ("llama", same, hf.AutoModel, {}),
    "base to head": ("base", same, hf.AutoModelForCausalLM, {}),
    "tied, embedding missing": ("tied", drop("embed_tokens"), hf.AutoModelForCausalLM, {}),
    "a layer missing, keys too many": ("deepseek_v3",
         lambda t: add("model.layers.7.mlp.up_proj.weight", "junk")(drop("layers.1.")(t)),
         hf.AutoModelForSequenceClassification, {"num_labels": 5}),
    "a whole expert layer missing": ("mixtral", drop("1.mlp", "1.block_sparse_moe"), hf.AutoModelForCausalLM, {}),
    "ignored keys": ("llama", lambda t: add("adapter.x", "model.other.x")(drop("q_proj", "k_proj")(t)), Quiet, {}),
    "half of T5": ("t5", same, hf.T5EncoderModel, {}),
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


@contextmanager
def warnings_of_transformers() -> Iterator[list[str]]:
    """What transformers' models log while the block runs."""
    logger = logging.getLogger("transformers.modeling_utils")
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", CASES)
def test_the_same_keys_as_transformers(tmp_path: Path, name: str) -> None:
    kind, change, auto_class, arguments = CASES[name]
    folder = checkpoint(kind, change, tmp_path)
    with warnings_of_transformers() as expected_warnings:
        reference, expected = auto_class.from_pretrained(folder, output_loading_info=True, **arguments)
    ignore = arguments.get("ignore_mismatched_sizes", False)
    config = {key: value for key, value in arguments.items() if key != "ignore_mismatched_sizes"}
    model = build_meta_model(folder, auto_class=auto_class, **config)
    with warnings_of_transformers() as found_warnings:
        report = load_weights(model, folder, ignore_mismatched_sizes=ignore)
    tables, shown = (
        # its rows come from sets; ours leaves a terminal's codes out where no terminal is
        [sorted(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) for text in texts if "LOAD REPORT" in text]
        for texts in (expected_warnings, found_warnings)
    )
    assert shown == tables
    info = report.loading_info()
    assert set(json.loads(report.to_json())["missing_keys"]) == info["missing_keys"]
    assert bool(tables) == any(info.values())
    mismatched = {(key, tuple(a), tuple(b)) for key, a, b in expected["mismatched_keys"]}
    assert info == {**expected, "mismatched_keys": mismatched}
    state, values = model.state_dict(keep_vars=True), reference.state_dict()
    drawn = {id(state[key]) for key in report.initialized_keys}  # tied tensors have several keys
    assert all(id(tensor) in drawn or torch.equal(tensor, values[key]) for key, tensor in state.items())
    # strict: whatever is reported is refused
    again = build_meta_model(folder, auto_class=auto_class, **config)
    if info["missing_keys"] or info["unexpected_keys"]:
        with pytest.raises(CheckpointError, match="does not hold exactly what the model needs") as caught:
            load_weights(again, folder, strict=True, ignore_mismatched_sizes=ignore)
        assert all(key in str(caught.value) for key in info["missing_keys"] | info["unexpected_keys"])
    else:
        load_weights(again, folder, strict=True)
