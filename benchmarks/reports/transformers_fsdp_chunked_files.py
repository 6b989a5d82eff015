"""transformers 5.23, `DistributedConfig(fsdp_size=2)`: weights that are stored fused and cut on loading come out wrong.

    torchrun --nproc-per-node 2 transformers_fsdp_chunked_files.py

Of a fused q, k, v each rank reads its rows, and `Chunk(dim=0)` then cuts these instead of the whole.
"""

import torch.distributed as dist
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 16, "head_dim": 16}
if dist.get_rank() == 0:
    HrmTextForCausalLM(HrmTextConfig(vocab_size=132, num_layers_per_stack=2, **small)).save_pretrained("fused")
dist.barrier()
plain = dict(HrmTextForCausalLM.from_pretrained("fused").named_parameters())
sharded = HrmTextForCausalLM.from_pretrained(
    "fused", distributed_config=DistributedConfig(fsdp_size=2)
).named_parameters()
wrong = [name for name, shard in sharded if not shard.full_tensor().equal(plain[name])]
print(f"{len(wrong)} of {len(plain)} weights differ from those of plain from_pretrained, {wrong[:1]} first")
dist.destroy_process_group()
