"""Configurations of well-known models, with the numbers of their `config.json`: documents are made without a network.

Each gives the model's shapes; what does not change them (dropout, special tokens) is left at transformers' defaults.
"""

from transformers import (
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

__all__ = ["CONFIGS"]


def _llama(hidden_size: int, intermediate_size: int, layers: int, heads: int, theta: float = 500000.0) -> LlamaConfig:
    """A model of the Llama 3.1 family."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
    "Qwen3-8B": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40960,
    ),
    "Mixtral-8x7B": MixtralConfig(max_position_embeddings=32768),
    "GPT-2": GPT2Config(),
}
"""By name."""
