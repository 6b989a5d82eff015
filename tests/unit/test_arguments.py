"""The arguments that scripts give to `AutoModel….from_pretrained`: taken, left out where they ask for nothing, or
refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, ParallelDims, WrapPolicy, from_pretrained
from hf_fsdp_tools.modeling.arguments import sort_arguments
from tests._checkpoints import make_checkpoint
from tests.api import sharding_of

IDLE = {
    "from_tf": False, "low_cpu_mem_usage": True, "device_map": None, "use_safetensors": True, "revision": "main",
    "token": None, "cache_dir": None, "local_files_only": False, "weights_only": True, "tp_plan": None,
    "key_mapping": None, "max_memory": None, "variant": None, "attn_implementation": "eager",
}  # fmt: skip
"""What transformers' run_clm.py, run_glue.py, open-instruct, axolotl and alignment-handbook give."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama", dtype=torch.bfloat16)


def test_a_script_changes_one_line_or_names_the_model_as_transformers_does(folder):
    config = AutoConfig.from_pretrained(folder)
    ours = from_pretrained(folder, config=config, torch_dtype="float32", **IDLE)
    plain = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    for key, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, plain.state_dict()[key]), key
    assert ours.config is not config and ours.config._attn_implementation == "eager"
    model = from_pretrained(pretrained_model_name_or_path=folder, device_map={"": torch.device("cpu")})
    assert model.config.vocab_size == AutoConfig.from_pretrained(folder).vocab_size
    with pytest.raises(ConfigError, match=r"got neither of name_or_path.*Give one: a folder"):
        from_pretrained(dtype="auto")


UNDERSTOOD: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "dtype auto": ({"dtype": "auto"}, lambda model: model.dtype == torch.bfloat16),
    "dtype": ({"dtype": "float16"}, lambda model: model.dtype == torch.float16),
    "torch_dtype": ({"torch_dtype": "fp32", "dtype": torch.float32}, lambda model: model.dtype == torch.float32),
    "auto_class": ({"auto_class": "AutoModel"}, lambda model: type(model).__name__ == "LlamaModel"),
    "policy": ({"policy": "LlamaAttention"}, lambda model: "LlamaAttention" in str(sharding_of(model).plan)),
    "mesh": ({"mesh": ParallelDims()}, lambda model: sharding_of(model).mesh.ndim == 1),
    "mp_policy": ({"mp_policy": "bf16"}, lambda model: sharding_of(model).mp_policy.param_dtype == torch.bfloat16),
    "offload": ({"offload_policy": True}, lambda m: isinstance(sharding_of(m).offload_policy, CPUOffloadPolicy)),
    "peft_config": ({"peft_config": {"r": 3}}, lambda model: model.peft_config["default"].r == 3),
    "compile": ({"compile": "eager"}, lambda model: sharding_of(model).compile == {"backend": "eager"}),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_short_forms_are_understood(folder, name):
    arguments, holds = UNDERSTOOD[name]
    assert holds(from_pretrained(folder, **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": {"": 1}, "variant": "fp16"}, r"cannot honour device_map=\{'': 1\}; variant='fp16'\. Leave it"),
        ({"use_safetensors": False}, "use_safetensors=False .*allow_pickle=True"),
        ({"load_in_8bit": True}, "cannot honour load_in_8bit=True"),
        ({"pretrained_model_name_or_path": "x"}, "got both of name_or_path and pretrained_model_name_or_path"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is no floating-point dtype"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "two names of one thing"),
        ({"acelerator": None}, r"no argument 'acelerator': did you mean accelerator\?"),
        ({"seed": 1}, r"load_weights has: pass load_kwargs={'seed': …}\."),
        ({"load_kwargs": {"stagin_bytes": 3}}, "load_weights has no argument stagin_bytes"),
        ({"auto_class": "AutoModelForCasualLM"}, r"no model class of transformers.*AutoModelForCausalLM"),
        ({"policy": WrapPolicy}, r"policy is .*: it must be a WrapPolicy\(…\)"),
        ({"mp_policy": 3}, "mp_policy is 3: it must be a MixedPrecisionPolicy"),
        ({"peft_config": {"rank": 8}}, "LoraConfig of PEFT has no 'rank'"),
        ({"peft_config": {"peft_type": "LORRA"}}, r"peft_type 'LORRA', which PEFT lacks: did you mean LORA"),
        ({"compile": "inducter"}, r"compile='inducter' is no backend of torch.compile: did you mean inductor\?"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_named(folder, arguments, message):
    with pytest.raises(ConfigError, match=message):
        from_pretrained(folder, **arguments)


@pytest.mark.parametrize(
    ("device_map", "device", "is_here"),
    [
        ({"": "cuda:2"}, "cuda:2", True),
        ({"": torch.device("cpu")}, "cpu", True),
        ("auto", "cuda:0", True),  # of a process alone
        ({"": 0}, "cuda:2", False),
        ({"": 2, "lm_head": 3}, "cuda:2", False),
        ("balanced", "cuda:0", False),
    ],
)
def test_a_device_map_that_names_this_process_asks_for_nothing(device_map, device, is_here):
    if is_here:
        assert sort_arguments({"device_map": device_map}, torch.device(device)) == ({}, {}, {})
        return
    with pytest.raises(ConfigError, match="cannot honour device_map"):
        sort_arguments({"device_map": device_map}, torch.device(device))
