"""Checkpoints that were released quantised, by sizes and quantization_config of their `config.json`, and what is
foreseen of LoRA on them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import transformers as hf
from transformers import PreTrainedConfig

from hf_fsdp_tools.foresight.memory import MARGIN, estimate_memory
from hf_fsdp_tools.foresight.throughput import throughput_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""The linear layers of attention, to which the adapters are added."""

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _compressed(format: str, weights: dict[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": list(ignore), "quantization_status": "compressed",
    }  # fmt: skip


def _of(config: PreTrainedConfig, quantization: dict[str, Any]) -> PreTrainedConfig:
    config.quantization_config = quantization
    return config


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_OF_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_LATENT_1T = {
    "vocab_size": 163840, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 262144,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip

RELEASED: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {
    "gpt-oss-20b (MXFP4)": (_of(hf.GptOssConfig(num_hidden_layers=24, num_local_experts=32), _MXFP4), ATTENTION),
    "gpt-oss-120b (MXFP4)": (_of(hf.GptOssConfig(num_hidden_layers=36, num_local_experts=128), _MXFP4), ATTENTION),
    "Llama-3.3-70B (FP8 per row)": (
        _of(hf.LlamaConfig(**_LLAMA), _compressed("float-quantized", _OF_ROWS, ["lm_head"])),
        ATTENTION,
    ),
    "Qwen3-235B-A22B (FP8)": (
        _of(hf.Qwen3MoeConfig(**_QWEN), _FP8 | {"modules_to_not_convert": ["lm_head"]}),
        ATTENTION,
    ),
    "DeepSeek-V3 (FP8)": (_of(hf.DeepseekV3Config(), _FP8), LATENT),
    "Kimi-K2-Thinking (int4 experts)": (
        _of(
            hf.DeepseekV3Config(**_LATENT_1T),
            _compressed(
                "pack-quantized",
                _INT4,
                ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
            ),
        ),
        LATENT,
    ),
}
"""By name: the configuration, and the layers to which the adapters are added."""

GPUS = {"h100-80gb": (1, 2, 4, 8, 16, 32), "h200-141gb": (1, 8)}


def foreseen_rows(names: Sequence[str], gpus: Mapping[str, Sequence[int]] = GPUS) -> Iterator[list[str]]:
    """Yield a row for each model and base, stored and dequantised: GB per GPU for each kind and number of GPUs, and the
    seconds of a step on the most GPUs of the first kind.

    The allocator has expandable segments. A figure that leaves less than a tenth of the GPU free is in parentheses.
    """
    for name in names:
        config, targets = RELEASED[name]
        for dequantize in (False, True):
            cells, step = [], ""
            for gpu, counts in gpus.items():
                for count in counts:
                    memory = estimate_memory(
                        config, num_gpus=count, gpu=gpu, seq_len=4096, batch_size=1, activation_checkpointing=True,
                        lora_r=16, lora_target_modules=targets, dequantize=dequantize,
                        attn_implementation="eager" if config.model_type == "gpt_oss" else "sdpa",
                    )  # fmt: skip
                    total = memory.peak_expandable + sum(memory.outside.values())
                    fits = total <= memory.limit_bytes * (1 - MARGIN)
                    cells.append(f"{total / 1e9:,.0f}" if fits else f"({total / 1e9:,.0f})")
                step = step or f"{throughput_of(memory).step_seconds:,.1f}"
            yield [name, "dequantised" if dequantize else "as stored", *cells, step]


HEADS = ["LoRA on", "base", *(f"{count} {gpu[:4].upper()}" for gpu in GPUS for count in GPUS[gpu]), "step, s"]
