"""The arguments that scripts give to `AutoModel….from_pretrained`: taken, left out where they ask for nothing, or
refused by name."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_fsdp_tools import ConfigError, from_pretrained
from hf_fsdp_tools.modeling.arguments import one_dtype, sort_arguments
from tests._checkpoints import make_checkpoint

IDLE = {
    "from_tf": False, "low_cpu_mem_usage": True, "device_map": None, "use_safetensors": True, "revision": "main",
    "token": None, "cache_dir": None, "local_files_only": False, "weights_only": True, "tp_plan": None,
    "key_mapping": None, "max_memory": None, "variant": None, "attn_implementation": "eager",
}  # fmt: skip
"""What transformers' run_clm.py, run_glue.py, open-instruct, axolotl and alignment-handbook give."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama", dtype=torch.bfloat16)


def test_a_script_changes_one_line(folder):
    config = AutoConfig.from_pretrained(folder)
    ours = from_pretrained(folder, config=config, torch_dtype="float32", **IDLE)
    plain = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    for key, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.full_tensor(), plain.state_dict()[key]), key
    assert ours.config is not config and ours.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": torch.float32}, torch.float32),
        ({"torch_dtype": "float32", "dtype": torch.float32}, torch.float32),
    ],
)
def test_dtypes_by_either_name(folder, given, dtype):
    assert {p.dtype for p in from_pretrained(folder, **given).parameters()} == {dtype}


def test_a_config_by_name_and_another_shape(folder, tmp_path):
    other = tmp_path / "config.json"
    other.write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}))
    assert from_pretrained(folder, config=other).config.rms_norm_eps == 0.5
    head = from_pretrained(folder, auto_class=AutoModelForSequenceClassification, num_labels=3)
    from hf_fsdp_tools import save_pretrained

    save_pretrained(head, tmp_path / "head")
    with pytest.raises(ValueError, match="ignore_mismatched_sizes=True"):
        from_pretrained(tmp_path / "head", auto_class=AutoModelForSequenceClassification, num_labels=5)
    again = from_pretrained(
        tmp_path / "head", auto_class=AutoModelForSequenceClassification, num_labels=5, ignore_mismatched_sizes=True
    )
    assert again.score.weight.shape == (5, 48)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_map": "auto", "revision": "main"}, r"cannot honour device_map='auto' \(The mesh and the offload"),
        ({"use_safetensors": False, "variant": "fp16"}, "use_safetensors=False .*allow_pickle=True.*; variant='fp16'"),
        ({"dtype": "float99"}, "dtype='float99' is no floating-point dtype"),
        ({"dtype": torch.int8}, "dtype='int8' is no floating-point dtype"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "two names of one thing"),
        ({"nonsense": 3}, "nonsense fits neither the config nor the model"),
        ({"load_kwargs": {"stagin_bytes": 3}}, "load_weights has no argument stagin_bytes"),
    ],
)
def test_what_cannot_be_honoured_is_named_alone(folder, given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        from_pretrained(folder, **given)
    assert "revision" not in str(caught.value)


def test_arguments_are_sorted_without_a_model():
    given = sort_arguments({"revision": "v1", "ignore_mismatched_sizes": True, "num_labels": 3, "device_map": None})
    assert (given.hub, given.load) == ({"revision": "v1"}, {"ignore_mismatched_sizes": True})
    assert given.model == {"num_labels": 3}
    assert one_dtype(None, None) is None and one_dtype("auto", None) == "auto"
