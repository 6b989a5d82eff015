"""transformers 5.23: an optimizer's state is not read again where a parameter had no gradient (Llava's last layer).

torchrun --nproc-per-node 2 transformers_fsdp_resume.py
"""

import torch
import torch.distributed as dist
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed

dist.init_process_group("gloo")
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
vision, text = CLIPVisionConfig(image_size=16, patch_size=8, **small), LlamaConfig(vocab_size=132, **small)
if dist.get_rank() == 0:
    LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=131)
    ).save_pretrained("llava")
dist.barrier()
model = LlavaForConditionalGeneration.from_pretrained("llava", distributed_config=DistributedConfig(fsdp_size=2))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.tensor([[131] * 4 + [5, 6, 7, 8]])
model(input_ids=ids, labels=ids, pixel_values=torch.randn(1, 3, 16, 16)).loss.backward()
optimizer.step(), optimizer.zero_grad()
save_optimizer_distributed(model, optimizer, "llava-optimizer")
load_optimizer_distributed(model, torch.optim.AdamW(model.parameters()), "llava-optimizer")
