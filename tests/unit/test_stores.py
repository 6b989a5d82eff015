"""Stores of fsspec in one process: what is a name of one, what its stub is, and which rank writes which slab."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, save_pretrained, stores
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import assert_same_model, make_checkpoint, make_model, plain_model
from tests.api import CheckpointIndex, deal, main

QUIET = {"load_kwargs": {"progress": False}}


@pytest.fixture
def store(folders: dict[str, Path]) -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.put(str(folders["llama"]), "/run", recursive=True)
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_names_of_stores_and_folders_and_a_config_above_a_state(tmp_path: Path, store: Any, folders: Any) -> None:
    assert stores.as_url("s3://bucket/run/") == "s3://bucket/run"
    assert [stores.as_url(name) for name in ("run", "./a/b", "/a", "C:/a", "file:///a", "org/model")] == [None] * 6
    with pytest.raises(ConfigError, match="as a text: 's3://bucket/run'"):
        stores.as_url(Path("s3://bucket/run"))
    with pytest.raises(ConfigError, match=r"export writes to a folder, and 's3://bucket/run' is in a store"):
        stores.local_folder("s3://bucket/run", "export writes to a folder,")
    model = make_model("llama")
    save_pretrained(model, f"file://{tmp_path}/saved")
    assert_same_model(from_pretrained(f"file://{tmp_path}/saved", **QUIET), model)
    state = tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0"
    dcp.save({"model": make_model("llama").state_dict()}, checkpoint_id=state, no_dist=True)
    shutil.copy(folders["llama"] / "config.json", tmp_path)
    store.put(str(tmp_path), "/state", recursive=True)
    assert_same_model(from_pretrained("memory://state/checkpoint-5", **QUIET), make_model("llama"))


def test_a_stub_is_made_anew_where_a_checkpoint_changed(store: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    first = stores.stub_of("memory://run")
    assert stores.stub_of("memory://run") == first
    sizes = {file.name: file.stat().st_size for file in folders["llama"].iterdir()}
    assert {file.name: file.stat().st_size for file in first.iterdir()} == sizes
    assert sum(file.stat().st_blocks for file in first.glob("*.safetensors")) * 512 < sum(sizes.values())
    store.put(str(make_checkpoint("llama", tmp_path / "next", seed=3)) + "/", "/run/", recursive=True)
    with stores.pinned():
        assert (second := stores.stub_of("memory://run")) != first
        store.rm("/run", recursive=True)
        assert stores.stub_of("memory://run") == second, "one version in a block"
    store.put(str(folders["llama"]) + "/", "/run/", recursive=True)
    assert first.exists(), "a load may be reading it"
    third = stores.stub_of("memory://run")
    assert second.exists() and third.exists() and not first.exists(), "not one for each save, until the process ends"
    assert not any(file.is_relative_to(first) for file in stores._objects)
    store.rm("/run", recursive=True)
    with pytest.raises(CheckpointError, match="No checkpoint at 'memory://run'"):
        stores.stub_of("memory://run")


def test_no_password_of_a_url_is_written_or_shown(
    store: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://me:hunter2@host/run"
    store.put(str(folders["llama"]), "/me:hunter2@host/run", recursive=True)
    model = from_pretrained(url, peft_config={"peft_type": "LORA", "target_modules": ["q_proj"]}, **QUIET)
    save_pretrained(model, tmp_path)
    assert save_pretrained(model, "memory://me:hunter2@host/new").folder == "memory://host/new"
    with pytest.raises(CheckpointError, match="'memory://host/run' holds a model") as caught:
        save_pretrained(model, url)
    store.pipe_file("/me:hunter2@host/run/config.json", b"{")
    with pytest.raises(CheckpointError, match=r"memory://host/run/config.json") as opened:
        from_pretrained(url, **QUIET)
    said = "'me:hunter2@host' is no bucket: memory://me:hunter2@host/?signature=hunter2"
    monkeypatch.setattr(store, "ls", Mock(side_effect=OSError(said)))
    with pytest.raises(CheckpointError, match="Cannot list 'memory://host/run': OSError: 'host' is no") as listed:
        from_pretrained(url, **QUIET)
    written = [file.read_text() for file in tmp_path.iterdir() if file.suffix in (".json", ".md")]
    assert len(written) > 1 and "hunter2" not in f"{written} {caught.value} {opened.value} {listed.value}"


def test_folders_of_killed_runs_are_removed_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    with stores.temporary_folder() as running, stores.temporary_folder() as other:
        left = tmp_path / f"{running.name[:-4]}left"
        link = tmp_path / f"{running.name[:-4]}link"
        link.symlink_to(tmp_path / "mine")
        for folder in (left, tmp_path / f"{running.name[:-4]}new"):
            (folder / "state").mkdir(parents=True)
        for folder in (left, running):
            os.utime(folder, (0, 0))
        with stores.temporary_folder():
            names = {path.name for path in tmp_path.iterdir()}
    assert not left.exists() and {running.name, other.name, f"{running.name[:-4]}new", "mine", link.name} < names


@pytest.mark.parametrize(
    "entry",
    [{"name": "/run/a\0.bin", "size": 1}, {"name": f"/run/{'a' * 300}.bin", "size": 1}, {"name": "/run/b.bin"}]
    + [{"name": "/run/b.bin", "size": size} for size in (-1, 2**62, "x", [1])],
)
def test_a_store_that_lies_is_one_error(store: Any, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    files = store.ls("/run", detail=True)
    monkeypatch.setattr(store, "ls", lambda *args, **options: [*files, {"type": "file", **entry}])
    with pytest.raises(CheckpointError, match=r"Cannot (list|open) 'memory://run'"):
        stores.stub_of("memory://run")


def test_a_place_in_errors_and_a_file_that_is_replaced_meanwhile(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    index, model = CheckpointIndex.open("memory://run"), build_meta_model("memory://run")
    for name in [name for name in store.store if name.endswith(".safetensors")]:
        store.pipe_file(name, store.cat_file(name) + b" ")
    with pytest.raises(CheckpointError, match="was replaced"):
        load_weights(model, index, progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert main(["plan", "memory://run"]) in (0, None)
    assert "LlamaDecoderLayer" in capsys.readouterr().out
    store.pipe_file("/run/model.safetensors.index.json", b"{")
    with pytest.raises(CheckpointError, match=r"memory://run/model.safetensors.index.json: is not valid JSON"):
        from_pretrained("memory://run", **QUIET)
    store.pipe_file("/run/model.safetensors", (2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"memory://run/model.safetensors: cannot be read as safetensors"):
        from_pretrained("memory://run", **QUIET)


def test_one_process_saves_to_a_store_and_undoes_what_fails(store: Any, folders: dict[str, Path]) -> None:
    before = dict(store.store)
    contents = {name: file.getvalue() for name, file in before.items()}
    model = from_pretrained("memory://run", **QUIET)
    model.config.rope_theta, put = 7.0, store.pipe_file

    def failing(path: str, *args: Any, **kwargs: Any) -> None:
        if path.endswith("index.json"):
            raise PermissionError("the store is read-only")
        put(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(store), "pipe_file", staticmethod(failing))
        with pytest.raises(CheckpointError, match=r"memory://run/model.safetensors.index.json.*read-only"):
            save_pretrained(model, "memory://run", dtype=torch.bfloat16)
    assert {name: file.getvalue() for name, file in store.store.items()} == contents
    report = save_pretrained(model, "memory://run", max_shard_size="60KB", staging_bytes=2**14)
    assert report.bytes_written > report.total_bytes == sum(t.nbytes for t in model.state_dict().values())
    assert_same_model(from_pretrained("memory://run", **QUIET), plain_model("llama", folders["llama"]))


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1), st.integers(1, 4))
def test_each_file_is_written_by_one_rank_and_no_rank_writes_much_more(sizes: dict[str, int], num_ranks: int) -> None:
    files = deal(sizes, num_ranks)
    assert sorted(file for own in files for file in own) == sorted(sizes)
    loads = [sum(sizes[file] for file in own) for own in files]
    assert max(loads) - min(loads) <= max(sizes.values())
