"""Configurations of well-known models, with the numbers of their `config.json`: documents are made without a network.

Each gives the model's shapes; what does not change them (dropout, special tokens) is left at transformers' defaults.
"""

from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    M2M100Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    XLMRobertaConfig,
)

__all__ = ["CONFIGS"]


def _llama(hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool = False) -> LlamaConfig:
    """A model of the Llama 3.1 and 3.2 families; the small ones have one table for tokens and head."""
    return LlamaConfig(
        dtype="bfloat16",
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
    )


def _qwen3(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool = False, vocab_size: int = 151936
) -> Qwen3Config:
    """A dense model of the Qwen3 family."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def _gemma4(**sizes: Any) -> Gemma4Config:
    """A large model of the Gemma 4 family: no embedding for each layer, global layers of which keys are values."""
    return Gemma4Config(
        text_config={"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024, **sizes},
        audio_config=None,
    )


_NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""Its layers: state spaces, experts, attention."""

_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}

CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, tied=True),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-Embedding-4B": _qwen3(2560, 9728, 36, 32, tied=True, vocab_size=151665),
    "Qwen3-Embedding-8B": _qwen3(4096, 12288, 36, 32, vocab_size=151665),
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
    "gemma-3-1b-pt": Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
    ),
    "Mistral-7B-v0.3": MistralConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=None,
        max_position_embeddings=32768,
    ),
    "gpt-oss-20b": GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=131072,
        quantization_config=_MXFP4,
    ),
    "phi-4": Phi3Config(
        vocab_size=100352,
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        pad_token_id=100349,
    ),
    "Qwen3.5-27B": Qwen3_5Config(
        text_config={
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "max_position_embeddings": 262144,
        },
        vision_config={"out_hidden_size": 5120},
    ),
    "Qwen3.6-35B-A3B": Qwen3_5MoeConfig(text_config={"max_position_embeddings": 262144}),
    "gemma-4-31B": _gemma4(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
    "gemma-4-26B-A4B": _gemma4(
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "GLM-4.5-Air": Glm4MoeConfig(
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        max_position_embeddings=131072,
    ),
    "Mistral-Small-4-119B-2603": Mistral4Config(architectures=["Mistral4ForCausalLM"]),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NemotronHConfig(
        hidden_size=2688,
        layers_block_type=[
            {"M": "linear_attention", "E": "moe", "*": "full_attention"}[each] for each in _NEMOTRON_3_NANO
        ],
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        num_key_value_heads=2,
        max_position_embeddings=262144,
    ),
    "Qwen2.5-VL-7B-Instruct": Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    ),
    "flan-t5-xl": T5Config(
        vocab_size=32128,
        d_model=2048,
        d_ff=5120,
        num_layers=24,
        num_heads=32,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    ),
    "nllb-200-3.3B": M2M100Config(
        vocab_size=256206,
        d_model=2048,
        encoder_layers=24,
        decoder_layers=24,
        encoder_ffn_dim=8192,
        decoder_ffn_dim=8192,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        decoder_start_token_id=2,
    ),
    "xlm-roberta-large": XLMRobertaConfig(
        vocab_size=250002,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
    ),
    "Mixtral-8x7B": MixtralConfig(max_position_embeddings=32768),
    "GPT-2": GPT2Config(),
    "DeepSeek-V3": DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]),
}
"""By name."""
