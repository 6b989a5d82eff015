"""The index of a checkpoint: what it says of good ones, and of those that change while they are read; keys that are
missing, unexpected or of other shapes are those that transformers reports; which names of a training state are the
model's, and which the adapter's."""

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
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from hf_fsdp_tools import CheckpointError, save_pretrained
from hf_fsdp_tools.loading import index as index_module
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.loading.formats.dcp import is_wrapped, model_part, peft_part
from hf_fsdp_tools.loading.formats.safetensors import DTYPES, parse_header
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests._checkpoints import make_checkpoint, make_model, stored_tensors
from tests.api import CheckpointIndex

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


def test_every_dtype_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    tensors = {str(d): torch.zeros(3, dtype=d) for d in DTYPES.values() if d != torch.float8_e8m0fnu}
    save_file(tensors | {"e": torch.zeros(0, 3)}, file := tmp_path / "weights.safetensors")
    found = CheckpointIndex.open(tmp_path).tensors
    assert {key: tensor.dtype for key, tensor in found.items() if key != "e"} == {
        k: t.dtype for k, t in tensors.items()
    }
    assert found["e"].num_bytes == 0 and CheckpointIndex.open(file).tensors == found


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
    assert bool(tables) == any(info.values())
    mismatched = {(key, tuple(a), tuple(b)) for key, a, b in expected["mismatched_keys"]}
    assert info == {**expected, "mismatched_keys": mismatched}
    state, values = model.state_dict(keep_vars=True), reference.state_dict()
    drawn = {id(state[key]) for key in report.initialized_keys}  # tied tensors have several keys
    assert all(id(tensor) in drawn or torch.equal(tensor, values[key]) for key, tensor in state.items())


# ---- names in training states ----

KEYS = ("model.embed.weight", "model.layers.0.q_proj.weight", "model.layers.0.norm.weight", "lm_head.weight")


def named(*paths: Any) -> dict[str, str]:
    tensors = {(path,) if isinstance(path, str) else path: path for path in paths}
    return model_part(tensors, KEYS, "state")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "model.", "a.b.c."])
def test_whatever_is_around_a_model_is_taken_from_its_names(prefix: str) -> None:
    assert named(*(prefix + key for key in KEYS)).keys() == set(KEYS)
    assert named(*(("job", prefix + key) for key in KEYS), "step", "optim.exp_avg").keys() == set(KEYS)


def test_what_the_model_does_not_know_stays_and_names_of_a_file_are_the_hubs() -> None:
    assert named(*(f"net.{key}" for key in KEYS), "net.extra.bias", "v_head.bias").keys() == {
        *KEYS, "extra.bias", "v_head.bias",
    }  # fmt: skip
    bare = [key.removeprefix("model.") for key in KEYS[:3]]
    assert named(*bare).keys() == set(bare), "transformers adds the prefix"
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
    own = named(*bases, *added)
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
