"""transformers 5.24: Llama4ForConditionalGeneration raises in every forward pass; 5.23's does not."""

import torch
import transformers
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig, Llama4VisionConfig

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
text = Llama4TextConfig(**sizes, intermediate_size_mlp=64, num_key_value_heads=1, head_dim=16, vocab_size=64)
text.num_local_experts, text.pad_token_id = 2, 0
config = Llama4Config(vision_config=Llama4VisionConfig(**sizes), text_config=text)
model = Llama4ForConditionalGeneration._from_config(config).eval()
try:
    print(transformers.__version__, "logits of", tuple(model(input_ids=torch.arange(3, 13)[None]).logits.shape))
except AttributeError as error:
    print(transformers.__version__, error)
