"""TRL 1.16, FSDP2: the gradient of the head is that of one rank's rows, where the head is a unit of its own.

    torchrun --nproc-per-node 2 trl_fused_head.py

`add_fused_lm_head` takes `lm_head.weight.full_tensor()`, whose backward pass cuts the local gradient and reduces none.
Accelerate makes such a unit where it finds no final norm in the base model (HRM); else head and norm are one unit.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

dist.init_process_group("gloo")
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
plain, rows = LlamaForCausalLM(LlamaConfig(vocab_size=132, **small)), torch.randint(0, 132, (2, 12))
sharded = copy.deepcopy(plain)
add_fused_lm_head(sharded)
for module in (sharded.lm_head, sharded):
    fully_shard(module)
for row in rows:
    (plain(input_ids=row[None], labels=row[None]).loss / 2).backward()
own = rows[dist.get_rank()][None]
sharded(input_ids=own, labels=own, fused_lm_head=True).loss.backward()
right, found = plain.lm_head.weight.grad, sharded.lm_head.weight.grad.full_tensor()
print("largest difference", (found - right).abs().max().item(), "of", right.abs().max().item())
dist.destroy_process_group()
