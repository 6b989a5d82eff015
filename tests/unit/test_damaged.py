"""Files that are damaged, or legal and absurd: one error that names file, fact and cure, in bounded time and length."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hf_fsdp_tools.checkpoint.formats.dcp import METADATA
from hf_fsdp_tools.checkpoint.load import load_weights
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.pretrained import open_checkpoint
from tests._checkpoints import make_checkpoint, make_model, pickled_copy

Damage = Callable[[Path], object]

MOST_CHARACTERS = 1500


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in three formats."""
    root = tmp_path_factory.mktemp("good")
    files = make_checkpoint("llama", root / "files")
    dcp.save({"model": make_model("llama").state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
    shutil.copy(files / "config.json", root / "dcp")
    return {"files": files, "dcp": root / "dcp", "bin": pickled_copy(files, root / "bin", files=1)}


def use(folder: Path) -> None:
    """Open, build and load, as `from_pretrained` does."""
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    model = build_meta_model(checkpoint.config, stored_tensors=len(checkpoint.index.tensors))
    load_weights(model, checkpoint.index)


def config(**changed: Any) -> Damage:
    """The config with other values."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return damage


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """One file of weights, whose header was changed."""

    def damage(folder: Path) -> None:
        tensors = {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}
        for file in folder.glob("model*"):
            file.unlink()
        entries: dict[str, Any] = {}
        data = b""
        for key, tensor in tensors.items():
            raw = tensor.numpy().tobytes()
            entries[key] = {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
        change(entries)
        text = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)

    return damage


def metadata(change: Callable[[Metadata], object]) -> Damage:
    """The metadata of a DCP folder with other parts."""

    def damage(folder: Path) -> None:
        content = pickle.loads((folder / METADATA).read_bytes())
        change(content)
        (folder / METADATA).write_bytes(pickle.dumps(content))

    return damage


KEY = "model.lm_head.weight"


def place_of(content: Metadata) -> Any:
    return next(place for key, place in content.storage_data.items() if key.fqn == KEY)


def entry_of(content: Metadata) -> Any:
    return content.state_dict_metadata[KEY]


def doubled(times: int) -> list[Any]:
    """A list of two references to a list of two references to … : 2**times lists for whoever follows all of them."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def rename(entries: dict[str, Any], new: str) -> None:
    entries[new] = entries.pop("lm_head.weight")


def record(name: str, num_bytes: int) -> Damage:
    """A record of the pickled file is zeros, deflated to a thousandth."""

    def damage(folder: Path) -> None:
        file = folder / "pytorch_model.bin"
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_STORED) as new:
            for entry in old.infolist():
                if not entry.filename.endswith(name):
                    new.writestr(entry.filename, old.read(entry))
            new.writestr(f"archive/{name}", bytes(num_bytes), zipfile.ZIP_DEFLATED)
        (folder / "new").replace(file)

    return damage


def nested(depth: int) -> str:
    return '{"model_type": "llama", "a": ' + "[" * depth + "]" * depth + "}"


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "config nested deeply": ("files", text("config.json", nested(100_000)), r"config\.json: is not JSON: Recursion"),
    "config a list": ("files", text("config.json", "[1]"), r"config\.json: expected a JSON object, found \[1\]"),
    "sizes beyond 64 bits": ("files", config(hidden_size=10**30), r"configuration of .*cannot be used.*config\.json"),
    "negative sizes": ("files", config(hidden_size=-48), r"configuration of .*cannot be used.*config\.json"),
    "sizes that are texts": ("files", config(hidden_size="abc"), r"configuration of .*hidden_size.*config\.json"),
    "no attention heads": ("files", config(num_attention_heads=0), r"configuration of .*ZeroDivision.*config\.json"),
    "unknown rope": (
        "files",
        config(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
        r"configuration of .*'nonsense'.*config\.json",
    ),
    "unknown dtype": ("files", config(dtype="float99"), r"config\.json: names the dtype 'float99'"),
    "a function as dtype": ("files", config(dtype="load"), r"config\.json: names the dtype 'load'"),
    "ten million layers": (
        "files",
        config(num_hidden_layers=10**7),
        r"more than 10,420 modules \(num_hidden_layers is 10000000\); the files hold 21 tensors\. Use the config\.json",
    ),
    "generation config a list": (
        "files",
        text("generation_config.json", "[]"),
        r"generation_config\.json: expected a JSON object, found \[\]",
    ),
    "generation config no JSON": (
        "files",
        text("generation_config.json", "{ no json"),
        r"generation_config\.json: is not JSON",
    ),
    "a name of 50 MB": (
        "files",
        header(lambda entries: rename(entries, "a" * 50_000_000)),
        r"model\.safetensors: 'aaa.*aaa' has 50,000,000 characters; a name has at most 4,096",
    ),
    "a dtype of 50 MB": (
        "files",
        header(lambda entries: entries["lm_head.weight"].update(dtype="b" * 50_000_000)),
        r"'lm_head\.weight': dtype 'bbb.*' is not supported",
    ),
    "a place that is a text": (
        "dcp",
        metadata(lambda content: setattr(place_of(content), "offset", "7")),
        r"\.metadata: 'model\.lm_head\.weight': expected a byte range as DCP writes it, found \('7', \d+\)",
    ),
    "no properties": (
        "dcp",
        metadata(lambda content: setattr(entry_of(content), "properties", None)),
        r"\.metadata: 'model\.lm_head\.weight': expected a dtype as DCP writes it, found None",
    ),
    "no size": (
        "dcp",
        metadata(lambda content: setattr(entry_of(content), "size", None)),
        r"'model\.lm_head\.weight': expected a size as DCP writes it, found None",
    ),
    "chunks of other dimensions": (
        "dcp",
        metadata(lambda content: setattr(entry_of(content).chunks[0], "sizes", torch.Size([3]))),
        r"'model\.lm_head\.weight': expected a chunk as DCP writes it",
    ),
    "chunks that are a number": (
        "dcp",
        metadata(lambda content: setattr(entry_of(content), "chunks", 5)),
        r"expected a list of chunks as DCP writes it, found 5",
    ),
    "storage that is a list": (
        "dcp",
        metadata(lambda content: setattr(content, "storage_data", [1])),
        r"storage_data is a list, expected a dict",
    ),
    "a path of nested lists": (
        "dcp",
        metadata(lambda content: content.planner_data.update({KEY: ("model", doubled(40))})),
        r"'model\.lm_head\.weight': expected a path as DCP writes it, found \('model', ",
    ),
    "a file name of nested lists": (
        "dcp",
        metadata(lambda content: setattr(place_of(content), "relative_path", doubled(40))),
        r"expected a place as DCP writes it",
    ),
    "a name in DCP that is a number": (
        "dcp",
        metadata(lambda content: content.state_dict_metadata.update({0: entry_of(content)})),
        r"\.metadata: 0 is no name of a tensor",
    ),
    "a place under a name that is a number": (
        "dcp",
        metadata(lambda content: content.storage_data.update({MetadataIndex(3): place_of(content)})),  # type: ignore[arg-type]
        r"expected a key of storage_data as DCP writes it",
    ),
    "a byte order of 50 MB, deflated": (
        "bin",
        record("byteorder", 50_000_000),
        r"'archive/byteorder' is compressed \(50,000,000 bytes in [\d,]+\), expected an uncompressed record",
    ),
    "a pickle of 50 MB, deflated": ("bin", record("data.pkl", 50_000_000), r"'archive/data\.pkl' is compressed"),
}
"""The format, what is done to it, and what the error says."""


@pytest.mark.parametrize("name", DAMAGED)
def test_one_error_names_file_fact_and_cure(good: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, damage, said = DAMAGED[name]
    folder = Path(shutil.copytree(good[kind], tmp_path / "damaged"))
    damage(folder)
    with pytest.raises((CheckpointError, ConfigError), match=said) as caught:
        use(folder)
    message = str(caught.value)
    assert str(folder) in message and len(message) < MOST_CHARACTERS and message.count("\n") < 5, message


@pytest.mark.parametrize("kind", ["files", "dcp", "bin"])
def test_what_is_not_damaged_loads(good: dict[str, Path], kind: str) -> None:
    use(good[kind])
