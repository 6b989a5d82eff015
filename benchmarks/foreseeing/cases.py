"""The trainings whose memory is counted and estimated, as data: a model and a setup each, in three sizes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers as hf
from transformers import PreTrainedConfig

from hf_fsdp_tools.foresight.setup import TrainingSetup


@dataclass(frozen=True)
class Size:
    """The dimensions that models of one size share."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    max_length: int
    batch_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES = {
    "tiny": Size(64, 160, 4, 4, 2, 512, 32, 2),
    "small": Size(384, 1024, 6, 6, 2, 8192, 192, 2),
    "large": Size(4096, 14336, 32, 32, 8, 128256, 2048, 1),
}
"""tiny: for tests; small: 12 to 60 million parameters, to be computed on a CPU; large: 7 to 8 billion, for a GPU of
140 GB."""


def _of_decoder(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden, "intermediate_size": size.inner,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.key_heads,
        "head_dim": size.head_dim, "max_position_embeddings": max(4096, size.max_length),
    }  # fmt: skip


def _llama(size: Size) -> PreTrainedConfig:
    return hf.LlamaConfig(**_of_decoder(size), tie_word_embeddings=False)


def _qwen3(size: Size) -> PreTrainedConfig:
    return hf.Qwen3Config(**_of_decoder(size), tie_word_embeddings=True)


def _gemma3(size: Size) -> PreTrainedConfig:
    """Window and full attention in turn, large tied vocabulary."""
    sizes = _of_decoder(size) | {"num_hidden_layers": max(size.layers, 6)}
    window = {"sliding_window": size.max_length // 2, "query_pre_attn_scalar": size.head_dim}
    return hf.Gemma3TextConfig(**sizes, **window, tie_word_embeddings=True)


def _gpt2(size: Size) -> PreTrainedConfig:
    """Without dropout, whose masks have another dtype on CPUs."""
    sizes = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "vocab_size": size.vocabulary}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hf.GPT2Config(**sizes, **none, n_positions=max(1024, size.max_length), bos_token_id=1, eos_token_id=2)


def _qwen3_moe(size: Size) -> PreTrainedConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": size.inner // 4}
    return hf.Qwen3MoeConfig(**_of_decoder(size), **experts, decoder_sparse_step=1, tie_word_embeddings=False)


def _gpt_oss(size: Size) -> PreTrainedConfig:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": size.inner // 4 // 32 * 32}
    return hf.GptOssConfig(**_of_decoder(size) | experts)


def _stored_as(config: Callable[[Size], PreTrainedConfig], **quantization: Any) -> Callable[[Size], PreTrainedConfig]:
    """The configuration of a checkpoint that is quantised."""

    def made(size: Size) -> PreTrainedConfig:
        own = config(size)
        own.quantization_config = quantization
        return own

    return made


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT4 = {"config_groups": {"all": {"targets": ["Linear"], "weights": _INT4}}, "ignore": ["lm_head"]}
_INT4 |= {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _t5(size: Size) -> PreTrainedConfig:
    sizes = {"d_model": size.hidden, "d_kv": size.head_dim, "d_ff": size.inner, "vocab_size": size.vocabulary}
    sizes |= {"num_layers": size.layers, "num_heads": size.heads}
    return hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)


def _qwen2_5_vl(size: Size) -> PreTrainedConfig:
    depth = max(2, size.layers // 2)
    vision: dict[str, Any] = {"depth": depth, "hidden_size": size.hidden // 2}
    vision |= {
        "intermediate_size": size.hidden // 2 * 2,
        "num_heads": size.heads // 2,
        "out_hidden_size": size.hidden,
        "window_size": 56,
    }
    vision |= {"fullatt_block_indexes": [depth - 1]}
    rope = {"rope_type": "default", "mrope_section": [size.head_dim // 8, *[size.head_dim // 16 * 3] * 2]}
    text = _of_decoder(size) | {"rope_parameters": rope | {"rope_theta": 1e6}}
    text.pop("head_dim")
    tokens = {"image_token_id": 9, "video_token_id": 10, "vision_start_token_id": 11, "vision_end_token_id": 12}
    return hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)


def _vision(size: Size) -> dict[str, Any]:
    """A tower for images of 56 × 56 in patches of 14."""
    sizes = {"hidden_size": size.hidden // 2, "intermediate_size": size.hidden, "image_size": 56, "patch_size": 14}
    return sizes | {"num_hidden_layers": max(2, size.layers // 2), "num_attention_heads": size.heads // 2}


def _llava(size: Size) -> PreTrainedConfig:
    """Hidden states of a block before the last, without its first token, through two layers to the text."""
    text = _of_decoder(size) | {"model_type": "llama"}
    vision = _vision(size) | {"model_type": "clip_vision_model", "projection_dim": size.hidden}
    return hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=9, tie_word_embeddings=False)


def _gemma3_vl(size: Size) -> PreTrainedConfig:
    """Images whose tokens attend to each other, in text of windows."""
    text = _of_decoder(size) | {"sliding_window": size.max_length // 2, "query_pre_attn_scalar": size.head_dim}
    vision = _vision(size)
    return hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=9)


EVERY, ON_HOST, KEPT = (f"activation_checkpointing_{name}" for name in ("every_n_layers", "offload", "save_ops"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    name: str  # As in the tables
    config: Callable[[Size], PreTrainedConfig]  # The model of a size
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `TrainingSetup` beside the batch and the number of GPUs."""
    auto_class: Any = hf.AutoModelForCausalLM  # transformers' class of the model
    ranks: int = 2  # Ranks of a run on CPUs
    on: tuple[str, ...] = ("cpu", "cuda")
    """Devices that can run it."""

    def sized(self, size: str, num_processes: int) -> TrainingSetup:
        """The setup with the batch of a size, unless it has its own."""
        dims = SIZES[size]
        batch = {"per_device_train_batch_size": dims.batch_size, "max_length": dims.max_length}
        return TrainingSetup(**batch | self.settings, num_processes=num_processes)


CASES = (
    Case(name="dense", config=_llama),
    Case(name="dense, fp32", config=_llama, settings=dict(mixed_precision="fp32")),
    Case(name="dense, pure bf16", config=_llama, settings=dict(master_dtype="bf16", reduce_dtype="bf16")),
    Case(name="dense, 4 ranks, eager attention", config=_llama, settings=dict(attn_implementation="eager"), ranks=4),
    Case(name="tied", config=_qwen3),
    Case(name="tied, window attention", config=_gemma3),
    Case(name="GPT-2", config=_gpt2),
    Case(name="MoE", config=_qwen3_moe),
    Case(name="encoder-decoder", config=_t5, auto_class=hf.AutoModelForSeq2SeqLM),
    *(
        Case(
            name=f"VLM, {name}",
            config=config,
            auto_class=hf.AutoModelForImageTextToText,
            settings=dict(images=1, image_size=(56, 84)) | settings,
        )
        for name, config, settings in (
            ("text alone", _qwen2_5_vl, dict(images=0)),
            ("Qwen2.5-VL", _qwen2_5_vl, {}),
            ("Qwen2.5-VL, 2 images, tower frozen", _qwen2_5_vl, dict(images=2, freeze_vision_tower=True)),
            ("LLaVA", _llava, {}),
            ("LLaVA, LoRA, checkpointing", _llava, dict(lora_r=16, activation_checkpointing=True)),
            ("Gemma 3", _gemma3_vl, {}),
        )
    ),
    Case(name="LoRA", config=_llama, settings=dict(lora_r=16)),
    Case(name="LoRA, checkpointing", config=_qwen3, settings=dict(lora_r=16, activation_checkpointing=True)),
    *(
        Case(
            name=f"{name} that stays",
            config=config,
            settings=dict(lora_r=16, dequantize=False, activation_checkpointing=True) | settings,
        )
        for name, config, settings in (
            ("FP8", _stored_as(_llama, quant_method="fp8", weight_block_size=[32, 32]), {}),
            ("FP8 experts", _stored_as(_qwen3_moe, quant_method="fp8", weight_block_size=[8, 8]), {}),
            ("MXFP4", _stored_as(_gpt_oss, quant_method="mxfp4"), dict(attn_implementation="eager")),
            ("int4", _stored_as(_llama, **_INT4), {}),
            ("shared FP8", _stored_as(_llama, quant_method="fp8", weight_block_size=[8, 8]), dict(tp_size=2)),
            (
                "shared FP8 experts",
                _stored_as(_qwen3_moe, quant_method="fp8", weight_block_size=[8, 8]),
                dict(ep_size=2),
            ),
        )
    ),
    Case(name="checkpointing", config=_llama, settings=dict(activation_checkpointing=True)),
    *(
        Case(name=f"checkpointing, {name}", config=_llama, settings={"activation_checkpointing": True} | more)
        for name, more in (
            ("every 2nd block", {EVERY: 2}),
            ("offloaded", {ON_HOST: True}),
            ("every 3rd block offloaded, products kept", {EVERY: 3, ON_HOST: True, KEPT: ("matmul",)}),
        )
    ),
    Case(name="accumulation", config=_llama, settings=dict(gradient_accumulation_steps=3)),
    Case(name="root only", config=_llama, settings=dict(wrapping="root")),
    Case(name="root only, checkpointing", config=_llama, settings=dict(wrapping="root", activation_checkpointing=True)),
    Case(name="HSDP", config=_llama, settings=dict(dp_replicate_size=2), ranks=4),
    Case(name="shared rows", config=_qwen3, settings=dict(cp_size=2)),
    Case(
        name="shared rows, 4 ranks, checkpointing",
        config=_llama,
        ranks=4,
        settings=dict(cp_size=2, activation_checkpointing=True),
    ),
    Case(name="shared layers", config=_llama, settings=dict(tp_size=2)),
    Case(name="shared layers, 4 ranks", config=_llama, ranks=4, settings=dict(tp_size=2)),
    Case(name="shared experts", config=_qwen3_moe, settings=dict(ep_size=2)),
    Case(name="shared layers and experts, 4 ranks", config=_qwen3_moe, ranks=4, settings=dict(tp_size=2, ep_size=4)),
    Case(name="no reshard", config=_llama, settings=dict(reshard_after_forward=False)),
    Case(
        name="foreach AdamW, no clipping", config=_llama, settings=dict(optimizer="adamw_foreach", max_grad_norm=None)
    ),
    Case(name="SGD", config=_llama, settings=dict(optimizer="sgd")),
    Case(name="CPU offload", config=_llama, settings=dict(offload_params=True), on=("cuda",)),
)


def case_named(name: str) -> Case:
    """The case of a name."""
    return next(case for case in CASES if case.name == name)
