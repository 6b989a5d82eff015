"""Accelerate 1.15, FSDP2: `prepare` or the first step stops for three kinds of models (buffer, unit, tied).

    torchrun --nproc-per-node 2 accelerate_fsdp2_prepare.py buffer

buffer   `cpu_ram_efficient_loading` broadcasts a saved buffer as if it were a shard: no attribute 'device_mesh'
unit     BERT's table of words is sharded twice: its embeddings are in `_no_split_modules` and a unit already
tied     T5's shared table comes into another unit than those of encoder and decoder

`fsdp2_prepare_model` is what `Accelerator.prepare` runs; an Accelerator drops FSDP on CPUs.
"""

import sys
from types import SimpleNamespace

import torch
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, DeepseekV3Config, T5Config

kind, sizes = sys.argv[1], {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
config = DeepseekV3Config(**sizes, num_key_value_heads=2, first_k_dense_replace=1, n_routed_experts=8, n_group=2)
others = {"unit": BertConfig(**sizes, is_decoder=True), "tied": T5Config(**sizes, decoder_start_token_id=0)}
make = AutoModelForSeq2SeqLM if kind == "tied" else AutoModelForCausalLM
settings = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": True}
state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **settings))
accelerator = SimpleNamespace(state=state, device=torch.device("cpu"), mixed_precision="no")
accelerator.is_main_process = PartialState(cpu=True).is_main_process
model = fsdp2_prepare_model(accelerator, make.from_config(others.get(kind, config)))
print(model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
