"""transformers 5.23, `DistributedConfig(fsdp_size=2)`: a buffer that no file holds is never filled (Falcon-H1's).

torchrun --nproc-per-node 2 transformers_fsdp_buffers.py
"""

import torch
import torch.distributed as dist
from transformers import FalconH1Config, FalconH1ForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
small |= {"num_key_value_heads": 2, "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 8}
if dist.get_rank() == 0:
    FalconH1ForCausalLM(FalconH1Config(vocab_size=132, **small)).save_pretrained("falcon")
dist.barrier()
ids = torch.arange(12)[None]
for config in (None, DistributedConfig(fsdp_size=2)):
    model = FalconH1ForCausalLM.from_pretrained("falcon", distributed_config=config)
    buffer = model.model.layers[0].mamba.mup_vector.flatten()[:4].tolist()
    print("sharded" if config else "plain", model(input_ids=ids, labels=ids).loss.item(), buffer)
dist.destroy_process_group()
