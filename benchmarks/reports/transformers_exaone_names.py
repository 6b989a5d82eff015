"""transformers 5.24: EXAONE opened by its own class and saved has Llama's configuration and EXAONE's names of weights;
opened again, all weights are random."""

import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
config = AutoConfig.for_model("exaone", num_key_value_heads=2, vocab_size=64, **small)
with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
    AutoModelForCausalLM.from_config(config).save_pretrained(first)
    model = LlamaForCausalLM.from_pretrained(first)  # the class to which EXAONE belongs since 5.24
    model.save_pretrained(second)
    again = AutoModelForCausalLM.from_pretrained(second)
    wrong = [name for name, weight in again.named_parameters() if not torch.equal(weight, model.get_parameter(name))]
print(f"{len(wrong)} of {len(list(again.parameters()))} weights differ")
