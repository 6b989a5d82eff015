"""A recipe uploads what it made: the folder that a user finds on disk, and a model card."""

import pytest

from hf_fsdp_tools.scripting.demo import make_demo_model
from tests._hub import fake_hub
from tests.recipes._launch import ROOT, launch, write_split

pytest.importorskip("trl")


def test_a_recipe_uploads_what_it_made(tmp_path):
    model = make_demo_model(tmp_path / "model", hidden_size=64, num_layers=2)
    data = write_split(tmp_path / "rows", [{"text": "some words of a row " * 8}] * 8)
    words = ["--model_name_or_path", str(model), "--dataset_name", data, "--max_length", "32", "--max_steps", "2"]
    words += ["--output_dir", "out", "--push_to_hub", "true", "--hub_model_id", "me/tuned", "--eval_strategy", "no"]
    with fake_hub({}, root=tmp_path / "hub") as hub:
        reached = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret", "HF_HUB_DISABLE_XET": "1"}
        done = launch(tmp_path, *words, script=ROOT / "recipes" / "finetune.py", variables=reached)
        assert done.returncode == 0, done.stderr[-3000:]
        uploaded = hub.files("me/tuned")
    made = tmp_path / "out"
    names = {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert names <= set(uploaded), sorted(uploaded)
    for name in names - {"README.md"}:
        assert uploaded[name] == (made / name).read_bytes(), name
    assert b"SFT" in uploaded["README.md"]
    assert f"uploaded         {hub.url}/me/tuned\n" in done.stdout
