"""The demo checkpoint is what a hub checkpoint looks like, its data are real, and both are the same each time."""

import pytest
import torch

from tests._dist import fake_ranks
from tests.api import make_demo_model

SMALL = {"hidden_size": 16, "num_layers": 2, "vocab_size": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_demo_model(tmp_path_factory.mktemp("demo") / "new" / "model", **SMALL, max_shard_size="20KB")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes_and_nothing_is_overwritten(folder, tmp_path):
    state = torch.random.get_rng_state()
    assert contents(make_demo_model(tmp_path / "again", **SMALL, max_shard_size="20KB")) == contents(folder)
    assert torch.equal(torch.random.get_rng_state(), state)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make_demo_model(folder, **SMALL, max_shard_size="20KB") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (tmp_path / "config.json").write_text("{}")
    make_demo_model(tmp_path, **SMALL)
    assert (tmp_path / "config.json").read_bytes() == b"{}" and not list(tmp_path.glob("*.safetensors"))
    # Here the process that comes first on a second machine.
    fake_ranks(2, rank=1)
    made = make_demo_model(tmp_path / "model", **SMALL, max_shard_size="20KB")
    vision = make_demo_model(tmp_path / "vision", "vision_model", hidden_size=16)
    assert set(contents(made)) == set(contents(folder))
    assert {"config.json", "model.safetensors"} <= set(contents(vision))
