"""Default configurations and model classes of every model type that transformers registers."""

import operator
from collections.abc import Callable
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The head that a model type is mainly used with: the first mapping that knows the type. Seq2seq comes first for
# encoder-decoders, whose ForCausalLM is only the decoder half.
MAIN_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_PRETRAINING", "MODEL_FOR_MASKED_LM", "MODEL_FOR_CTC",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_UNIVERSAL_SEGMENTATION",
    "MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_TEXT_TO_WAVEFORM", "MODEL_FOR_TEXT_TO_SPECTROGRAM", "MODEL",
)  # fmt: skip
ROLES = {"base": "MODEL", "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION", "token": "MODEL_FOR_TOKEN_CLASSIFICATION"}

# Arguments for configurations whose defaults cannot be built, as the documentation or a released checkpoint has them.
REPAIRS: dict[str, dict[str, Any]] = {
    **{name: {"prediction_length": 24} for name in ("autoformer", "informer", "time_series_transformer")},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")},
    **{name: {"pad_token_id": 0} for name in ("dots3_note", "llama4")},
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    },
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_hidden_layers": 12}},
    "diffusion_gemma": {
        "vision_config": {},
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "emu3": {"pad_token_id": 0, "vocabulary_map": {"<|extra_200|>": 1, "<image>": 2}},
    **{name: {"vision_config": {}, "audio_config": {}} for name in ("gemma4", "gemma4_unified")},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "nemotron_h_omni": {"image_token_id": 131070, "video_token_id": 131069, "audio_token_id": 131068},
    "nemotron": {"num_key_value_heads": 8},
    **{
        f"qwen{name}_thinker": {"vision_start_token_id": 151652, "audio_start_token_id": 151647}
        for name in ("2_5_omni", "3_omni_moe")
    },
    "step3p7": {"text_config": {"sliding_window": 512}},
    "reformer": {"is_decoder": True},
    "voxtral": {"audio_token_id": 24},
    "xmod": {"default_language": "en_XX"},
    "vitmatte": {"fusion_hidden_sizes": [256, 128, 64, 32]},
    "wav2vec2-bert": {"vocab_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2},
}
QWEN4_INDEXER = {
    "indexer_budget": 2048, "indexer_compress_ratio": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
}  # fmt: skip
ROPE_BY_TYPE = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")}
REPAIRED_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "moonshine_streaming": {"num_key_value_heads": 8},
    "cohere_compass": {"text_config.rope_parameters": ROPE_BY_TYPE},
    "cohere_compass_text": {"rope_parameters": ROPE_BY_TYPE},
    "qwen3_omni_moe": {"talker_config.text_config.shared_expert_intermediate_size": 768},
    "qwen4_exp": {f"text_config.{name}": value for name, value in QWEN4_INDEXER.items()},
    "qwen4_exp_text": QWEN4_INDEXER,
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "dbrx": {"attn_config.rope_theta": 1e4},
}


def class_names(mapping: str, model_type: str) -> list[str]:
    found = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").get(model_type, ())
    return [found] if isinstance(found, str) else list(found)


def classes_of(model_type: str, config: Any) -> dict[str, list[str]]:
    """The model classes of a type by role; for the main role every candidate, the best first; no class in two roles."""
    order = list(MAIN_MAPPINGS)
    if getattr(config, "is_encoder_decoder", False):
        order = ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ", *order]
    every = [name.removesuffix("_MAPPING_NAMES") for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    order += [name for name in every if name.startswith("MODEL") and name not in order]
    main = list(dict.fromkeys(name for mapping in order for name in class_names(mapping, model_type)))
    found = {"main": main} if main else {}
    for role, mapping in ROLES.items():
        names = class_names(mapping, model_type)[:1]
        if names and names != main[:1]:
            found[role] = names
    return found


def classes_by_default(model_type: str) -> dict[str, list[str]]:
    """The model classes of a type by role, whether or not its default configuration can be built."""
    try:
        config = build_config(model_type)
    except Exception:
        config = None
    return classes_of(model_type, config)


def build_config(model_type: str) -> Any:
    """The default configuration of a type, or a documented one where the default cannot be built."""
    config_class = CONFIG_MAPPING[model_type]
    t = transformers

    def sound() -> dict[str, Any]:
        return {"text_encoder": t.T5Config(), "audio_encoder": t.EncodecConfig()}

    composed: dict[str, Callable[[], Any]] = {
        "encoder-decoder": lambda: config_class.from_encoder_decoder_configs(t.BertConfig(), t.BertConfig()),
        "vision-encoder-decoder": lambda: config_class.from_encoder_decoder_configs(t.ViTConfig(), t.GPT2Config()),
        "speech-encoder-decoder": lambda: config_class.from_encoder_decoder_configs(t.Wav2Vec2Config(), t.BertConfig()),
        "vision-text-dual-encoder": lambda: config_class.from_vision_text_configs(t.ViTConfig(), t.BertConfig()),
        "rag": lambda: config_class.from_question_encoder_generator_configs(t.DPRConfig(), t.BartConfig()),
        "musicgen": lambda: config_class(**sound(), decoder=t.MusicgenDecoderConfig()),
        "musicgen_melody": lambda: config_class(**sound(), decoder=t.MusicgenMelodyDecoderConfig()),
    }
    if model_type in composed:
        return composed[model_type]()
    config = config_class(**REPAIRS.get(model_type, {}))
    for name, value in REPAIRED_ATTRIBUTES.get(model_type, {}).items():
        part, _, attribute = name.rpartition(".")
        setattr(operator.attrgetter(part)(config) if part else config, attribute, value)
    return config
