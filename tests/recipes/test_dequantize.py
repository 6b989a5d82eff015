"""`recipes/dequantize.py`: a plain checkpoint of a quantised one, by transformers or by what each layer computes."""

import runpy
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests._checkpoints import randomize, stored_tensors

SCRIPT = Path(__file__).parents[2] / "recipes" / "dequantize.py"


@pytest.mark.parametrize("by", ["transformers", "layers"])
def test_a_plain_checkpoint_of_a_quantised_one(tmp_path, monkeypatch, by):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    # Where it can, a layer on a CPU rounds its scales to bf16 before it computes.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = hf.Qwen2ForCausalLM(hf.Qwen2Config(vocab_size=131, num_key_value_heads=2, **sizes))
    randomize(plain).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "quantised")
    expected = model.dequantize(torch.float32).state_dict()
    if by == "layers":
        # as transformers does for methods that it cannot dequantise
        monkeypatch.setattr(hf.PreTrainedModel, "dequantize", Mock(side_effect=NotImplementedError))
    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", Mock())  # these checkpoints have none
    given = [str(tmp_path / "quantised"), str(tmp_path / "out"), "--dtype=float32", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["dequantize.py", *given])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert all(tensor.dtype == torch.float32 for tensor in stored_tensors(tmp_path / "out").values())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(found.config, "quantization_config")
    for key, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
