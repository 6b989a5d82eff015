"""Which of the stored tensors that a class of transformers says to ignore are heads, and how their files are held."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import T5EncoderModel

from hf_fsdp_tools import save_pretrained
from hf_fsdp_tools.loading.heads import Heads, WithHeads
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import add_heads, make_checkpoint, make_model, stored_tensors, tiny_config
from tests.api import CheckpointIndex, main

LAYER = "self_attn.q_a_proj.weight"
FOUND = {
    # model type, class: keys that are stored beside the model's, and whether they are a head's
    ("deepseek_v3", None): {f"model.layers.61.{LAYER}": True, "model.layers.61.enorm.bias": True,
                            f"model.layers.62.{LAYER}": False, "model.layers.1.self_attn.rotary_emb.inv_freq": False},
    ("glm4_moe", None): {"model.layers.92.mlp.experts.0.up_proj.weight": True, "model.layers.46.eh_proj.weight": True,
                         "model.layers.50.eh_proj.weight": False},
    ("mimo_v2_flash", None): {"model.mtp.layers.0.eh_proj.weight": True},
    ("ernie4_5_moe", None): {"model.mtp_block.0.self_attn.q_proj.weight": True, "model.mtp_emb_norm.0.weight": True},
    ("qwen3_5_text", None): {"mtp.fc.weight": True, "model.visual.blocks.0.attn.qkv.weight": False},
    ("t5", T5EncoderModel): {"decoder.block.0.layer.0.SelfAttention.q.weight": False},
    ("gpt2", None): {"h.0.attn.masked_bias": False, "transformer.h.1.attn.bias": False},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "auto_class"), FOUND, ids=str)
def test_heads_are_told_from_what_nobody_needs(kind: str, auto_class: object, tmp_path: Path) -> None:
    model = build_meta_model(tiny_config(kind), auto_class=auto_class)
    state = {k: torch.zeros(t.shape, dtype=t.dtype) for k, t in model.state_dict().items()}
    stored = FOUND[kind, auto_class]
    save_file(state | {key: torch.ones(2, 3) for key in stored}, tmp_path / "model.safetensors", {"format": "pt"})
    report = load_weights(model, tmp_path / "model.safetensors", progress=False, ignore_mismatched_sizes=True)
    assert report.carried_keys == tuple(sorted(key for key, is_head in stored.items() if is_head))
    assert report.carried_bytes == 24 * len(report.carried_keys)


@pytest.fixture
def with_head(tmp_path: Path) -> Path:
    folder = make_checkpoint("deepseek_v3", tmp_path / "source")
    add_heads(folder, {"model.layers.61.eh_proj.weight": torch.randn(48, 96)})
    return folder


def test_the_command_copies_or_leaves_out_heads_and_what_a_model_saves_itself_is_not_carried(
    with_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ([], ["--no-heads"]):
        assert main(["export", *option, str(with_head), str(tmp_path / f"out{option}")]) == 0
        told = capsys.readouterr().err
        saved, stored = stored_tensors(tmp_path / f"out{option}"), stored_tensors(with_head)
        assert (saved.keys() == stored.keys()) == (option == []) == ("Heads are left out" not in told)
    # As where layers were added to a model, which then has what was a head.
    model = make_model("deepseek_v3")
    index = CheckpointIndex.open(with_head)
    load_weights(model, with_head, progress=False)
    WithHeads.put(model, heads=Heads(index, index))
    with torch.no_grad():
        model.lm_head.weight.fill_(7)
    save_pretrained(model, tmp_path / "saved")
    saved = stored_tensors(tmp_path / "saved")
    assert saved.keys() == index.tensors.keys() and (saved["lm_head.weight"] == 7).all()


def test_heads_that_are_absent_or_of_another_vocabulary_are_told(with_head: Path, tmp_path: Path) -> None:
    dcp.save({"model": make_model("deepseek_v3").state_dict()}, checkpoint_id=tmp_path / "state", no_dist=True)
    model = build_meta_model(with_head)
    model.config.num_nextn_predict_layers = 1
    told = r"Heads are not in '.*state', a training state, .* promises: num_nextn_predict_layers = 1\. Servers may"
    with pytest.warns(UserWarning, match=told):
        load_weights(model, tmp_path / "state", progress=False)
    shapes = {"eh_proj": (48, 96), "shared_head.head": (131, 48)}
    add_heads(with_head, {f"model.layers.61.{name}.weight": torch.ones(shape) for name, shape in shapes.items()})
    model = build_meta_model(with_head)
    model.resize_token_embeddings(140, mean_resizing=False)
    told = r"heads keep tables of the vocabulary as it was: model\.layers\.61\.shared_head\.head\.weight\. Servers may"
    with pytest.warns(UserWarning, match=told):
        load_weights(model, with_head, progress=False, added_tokens="mean")
