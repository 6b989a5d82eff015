"""transformers 5.23, `DistributedConfig(fsdp_size=2)`: the last rank's rows of a tied embedding are stale after a step.

    torchrun --nproc-per-node 2 transformers_fsdp_tied_head.py

The embedding and the head become two parameters of FSDP2 (they are tied after `fully_shard`). Where the vocabulary does
not divide by the ranks, each pads a copy of its own, and the optimizer steps one of them. GPT-2 has 50,257 words.
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
plain = LlamaForCausalLM(LlamaConfig(vocab_size=131, tie_word_embeddings=True, **small))
if dist.get_rank() == 0:
    plain.save_pretrained("tied")
dist.barrier()
sharded = LlamaForCausalLM.from_pretrained("tied", distributed_config=DistributedConfig(fsdp_size=2))
ids = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(0))
for model in (plain, sharded):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        print("plain" if model is plain else "sharded", step, loss.item())
dist.destroy_process_group()
