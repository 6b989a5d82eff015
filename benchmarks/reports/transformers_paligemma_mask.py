"""transformers 5.23: PaliGemma without token_type_ids attends to later tokens with sdpa, and not with eager."""

import torch
from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
text = GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=64)
vision = SiglipVisionConfig(**sizes, image_size=32, patch_size=16, projection_dim=32)
config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=63, projection_dim=32)
ids = torch.arange(3, 13)[None]
for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
    first = model(input_ids=ids[:, :5]).logits[0, 0]
    longer = model(input_ids=ids).logits[0, 0]
    print(attention, "later tokens change the logits of the first:", not torch.allclose(first, longer))
