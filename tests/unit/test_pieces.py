"""Where the elements of a tensor come from: chunks, strided views and their parts in shards, against torch itself;
conversions on tensors without data, against transformers on real ones, for each operation and whole architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_fsdp_tools import save_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import randomize, stored_tensors, tiny_config

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


def model_class(config: Any) -> type[transformers.PreTrainedModel]:
    """The class that a user would load: with a head where transformers has one."""
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        if type(config) in auto_class._model_mapping:
            found = auto_class._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise AssertionError(f"no auto class for {type(config).__name__}")


FEW = ("mixtral", "deepseek_v3", "jamba", "minimax_m2", "nemotron_h", "ernie4_5_moe", "olmo_hybrid", "gte", "t5")
TYPES = [pytest.param(t, marks=[] if t in FEW else [pytest.mark.nightly]) for t in CONVERTED + RENAMED]


@pytest.mark.parametrize("model_type", TYPES)
def test_an_architecture_loads_and_saves_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """One process, no shards: the same values and reports, every byte read in place, and the same files written."""
    if model_type not in transformers.CONFIG_MAPPING:  # 5.17, which is supported too, lacks some of 5.23
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
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
