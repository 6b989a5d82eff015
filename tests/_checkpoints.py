"""Tiny real checkpoints of many architectures, written by transformers' own ``save_pretrained``.

Sizes are awkward on purpose: hidden 48, vocabulary 131, odd intermediate sizes and 4 experts, so that 2 and 3 ranks get
uneven and also empty shards. Each is split into several files, with an index.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf
from transformers import PreTrainedModel

__all__ = ["KINDS", "make_checkpoint", "make_model"]

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 67,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}


def _llama() -> PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, tie_word_embeddings=False))


def _tied() -> PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES, head_dim=12, tie_word_embeddings=True))


def _gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=67)
    config.bos_token_id, config.eos_token_id = 1, 2
    return hf.GPT2LMHeadModel(config)


def _mixtral() -> PreTrainedModel:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


def _qwen3_moe() -> PreTrainedModel:
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_MOE, head_dim=12, decoder_sparse_step=1))


def _qwen2_moe() -> PreTrainedModel:
    """Its ``shared_expert_gate`` has one row: every rank but one holds nothing of it."""
    config = hf.Qwen2MoeConfig(**_SIZES, **_MOE, shared_expert_intermediate_size=35, decoder_sparse_step=1)
    return hf.Qwen2MoeForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    """Its router has a persistent buffer, ``e_score_correction_bias``."""
    sizes = _SIZES | {"num_key_value_heads": 4}
    config = hf.DeepseekV3Config(
        **sizes,
        moe_intermediate_size=22,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=9,
        q_lora_rank=11,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=12,
    )
    return hf.DeepseekV3ForCausalLM(config)


def _bert() -> PreTrainedModel:
    sizes = {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


def _t5() -> PreTrainedModel:
    """One embedding under three names."""
    config = hf.T5Config(vocab_size=131, d_model=48, d_kv=12, d_ff=67, num_layers=2, num_heads=4)
    return hf.T5ForConditionalGeneration(config)


def _vit() -> PreTrainedModel:
    sizes = {"hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "tied": _tied,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v3": _deepseek_v3,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
}


def make_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The tiny model of that kind with every parameter and persistent buffer random: none is left zero or one."""
    torch.manual_seed(seed)
    model = KINDS[kind]().to(dtype).eval()
    persistent = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in persistent and tensor.is_floating_point():
                centre = 1.0 if tensor.dim() == 1 and name.endswith("weight") else 0.0  # norms stay near one
                tensor.copy_(centre + 0.05 * torch.randn(tensor.shape))
    return model


def make_checkpoint(kind: str, folder: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the tiny model of that kind to ``folder``, which is returned; several files and an index."""
    make_model(kind, dtype=dtype, seed=seed).save_pretrained(folder, max_shard_size="60KB")
    return Path(folder)
