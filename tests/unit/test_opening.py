"""What a checkpoint holds beside its weights, or is not to be changed in them, in a world of one."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, ChineseCLIPModel, CsmForConditionalGeneration

from hf_fsdp_tools import from_pretrained, save_pretrained
from hf_fsdp_tools.steps import open_checkpoint
from tests._checkpoints import full_state
from tests._round_trip import differences, resave
from tests.api import build_case, shrink
from tests.census.defaults import build_config
from tests.census.sizes import SIZES


def test_an_adapter_beside_a_model_is_put_on_it_as_transformers_does(folders: dict[str, Path], tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.save_pretrained(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path)
    found = full_state(from_pretrained(tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    named = {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}
    assert named.keys() == expected.keys() and any("lora_" in name for name in named)
    assert all(torch.equal(named[name], tensor) for name, tensor in expected.items())


def test_settings_by_which_models_generate_are_kept(tmp_path: Path, folders) -> None:
    model_class, inner = CsmForConditionalGeneration, "depth_decoder"
    model: Any = build_case(model_class, shrink(build_config("csm"), "tiny", sizes=SIZES))
    getattr(model, inner).generation_config.update(max_length=37)
    model.save_pretrained(tmp_path / "stored")
    assert "37" in (tmp_path / "stored" / "generation_config.json").read_text()
    opened: Any = from_pretrained(tmp_path / "stored", auto_class=model_class)
    again = model_class.from_pretrained(tmp_path / "stored")
    for part in (lambda m: m, lambda m: getattr(m, inner)):
        assert part(opened).generation_config.to_dict() == part(again).generation_config.to_dict()
    save_pretrained(opened, tmp_path / "ours")
    again.save_pretrained(tmp_path / "theirs")
    assert differences(tmp_path / "ours", tmp_path / "theirs") == []
    shutil.copytree(folders["t5"], tmp_path / "older")
    (tmp_path / "older" / "generation_config.json").unlink()
    file = tmp_path / "older" / "config.json"
    older = {"num_beams": 3, "max_length": 17, "no_repeat_ngram_size": 2, "forced_bos_token_id": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | older))
    opened: Any = from_pretrained(tmp_path / "older")
    again = type(opened).from_pretrained(tmp_path / "older")
    assert opened.generation_config.to_dict() == again.generation_config.to_dict()
    save_pretrained(opened, tmp_path / "saved")
    assert older.items() <= json.loads((tmp_path / "saved" / "generation_config.json").read_text()).items()


def test_settings_lie_beside_the_config_that_is_given(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of weights that have neither, such as the state of a loop."""
    home, weights = tmp_path / "home", tmp_path / "weights"
    shutil.copytree(folders["llama"], home)
    weights.mkdir()
    for file in home.glob("*.safetensors*"):
        file.rename(weights / file.name)
    transformers.GenerationConfig(max_length=37, use_cache=True).save_pretrained(home)
    found = open_checkpoint(weights, config=home).generation_config
    assert found is not None and found.max_length == 37 and found.use_cache


def test_a_stored_row_for_padding_stays(tmp_path: Path) -> None:
    """transformers' initialiser of this model zeroes that row of loaded weights, and of whole tensors alone."""
    model = build_case(ChineseCLIPModel, shrink(build_config("chinese_clip"), "tiny"))
    embedding = model.text_model.embeddings.word_embeddings
    with torch.no_grad():
        embedding.weight[embedding.padding_idx] = 1.5
    model.save_pretrained(tmp_path / "stored")
    resave(ChineseCLIPModel, tmp_path / "stored", tmp_path / "saved")
    assert differences(tmp_path / "stored", tmp_path / "saved") == []
