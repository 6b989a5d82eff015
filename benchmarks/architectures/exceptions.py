"""What the rules of the census get wrong, by model type, as data."""

from typing import Any

RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
LAST = {"backbone_config": RESNET | {"out_features": ["stage4"]}}
LAST_THREE = {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}}
SERIES = {"kind": "float", "shape": (2, 31)}  # of a time series: context and lags
AHEAD = {"kind": "float", "shape": (2, 24)}

SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), LAST),
    **dict.fromkeys(("deformable_detr", "rt_detr", "rt_detr_v2"), LAST_THREE),
    "bamba": {"attn_layer_indices": [1, 3]},
    "blip-2": {"image_token_index": 130},
    "dbrx": {"attn_config": {"clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "falcon_h1 tiny": {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "dots3_note_text tiny": {"head_dim": 32, "q_lora_rank": 16},
    "hgnet_v2 tiny": {
        "embedding_size": 16, "stem_channels": [3, 16, 16], "stage_in_channels": [16, 16, 32, 64],
        "stage_mid_channels": [8, 8, 16, 16], "stage_out_channels": [16, 32, 64, 128],
        "hidden_sizes": [16, 32, 64, 128],
        "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "d_fine tiny": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64], "hidden_expansion": 1.0},
    "deimv2 tiny": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64]},
    "efficientnet tiny": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "align tiny": {"projection_dim": 80},
    "align_vision_model tiny": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 80},
    "mimi tiny": {"upsample_groups": 64, "vector_quantization_hidden_dimension": 32},
    "pocket_tts_audio_tokenizer tiny": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder tiny": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_encoder tiny": {"upsample_groups": 64},
    "mimi_decoder tiny": {"upsample_groups": 64, "vector_quantization_hidden_dimension": 32},
    "mimi_encoder tiny": {"vector_quantization_hidden_dimension": 32},
    "ernie4_5_vl_moe_text tiny": {"moe_intermediate_size": [48, 32], "rope_parameters": {"mrope_section": [3, 3, 2]}},
    "hunyuan_vl_text tiny": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}},
    "inkling2": {"quantization_config": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "led": {"attention_window": [8, 8, 8, 8]},
    "lxmert tiny": {"visual_feat_dim": 64, "l_layers": 2, "x_layers": 2, "r_layers": 2},
    "instructblip": {"image_token_index": 130},
    "instructblipvideo": {"video_token_index": 129},
    "mistral4 tiny": {"head_dim": 32},
    "radio": {"summary_idxs": [0, 1]},
    **{
        f"vibevoice_{sense}_tokenizer{part}": {"num_filters": 2, "hidden_size": 16}
        for sense in ("acoustic", "semantic")
        for part in ("", "_encoder", "_decoder")
    },
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]},
    "longcat_flash": {"zero_expert_num": 1},
    "mobilebert tiny": {"embedding_size": 32},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "depth_pro": {"intermediate_hook_ids": [3, 1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "gemma3n_audio": {"input_feat_size": 128},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "clvp_encoder tiny": {"num_attention_heads": 2},
    "edgetam_vision_model": {"backbone_channel_list": [2048, 1024, 512, 256]},
    "glm5_next_text": {"index_topk": 16},
    "reformer tiny": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [4, 8]},
    "xlnet tiny": {"d_head": 16},
    "bit tiny": {"num_groups": 8},
    "seggpt": {"merge_index": 0},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "fun_asr_nano tiny": {"adaptor_config": {"intermediate_size": 16}},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "pretrain_image_size": 64},
    "lw_detr": {"num_queries": 12, "group_detr": 2},
}  # fmt: skip
"""Sizes of a configuration after shrinking, by its `model_type`, or by `model_type` and level."""

INPUTS: dict[str, dict[str, Any]] = {
    **{
        name: {
            "past_values": SERIES,
            "past_time_features": {"kind": "float", "shape": (2, 31, 0)},
            "past_observed_mask": {"kind": "ones", "shape": (2, 31)},
            "future_values": AHEAD,
            "future_time_features": {"kind": "float", "shape": (2, 24, 0)},
        }
        for name in ("autoformer", "informer", "time_series_transformer")
    },
    "decision_transformer": {
        "states": {"kind": "float", "shape": (2, 8, 17)},
        "actions": {"kind": "float", "shape": (2, 8, 4)},
        "rewards": {"kind": "float", "shape": (2, 8, 1)},
        "returns_to_go": {"kind": "float", "shape": (2, 8, 1)},
        "timesteps": {"kind": "int", "shape": (2, 8), "high": 100},
        "attention_mask": {"kind": "ones", "shape": (2, 8)},
    },
    "audio-spectrogram-transformer": {"input_values": {"kind": "float", "shape": (2, 1024, 128)}},
    "blip_2_qformer": {
        "query_embeds": {"kind": "float", "shape": (2, 12, 64)},
        "encoder_hidden_states": {"kind": "float", "shape": (2, 9, 64)},
    },
    "depth_pro": {"pixel_values": {"kind": "float", "shape": (2, 3, 32, 32)}},
    **{name: {"input_features": {"kind": "float", "shape": (2, 1, 1001, 64)}} for name in ("clap", "clap_audio_model")},
    "gemma4_audio": {"input_features": {"kind": "float", "shape": (2, 32, 128)}},
    "gemma3n_audio": {
        "audio_mel": {"kind": "float", "shape": (2, 32, 128)},
        "audio_mel_mask": {"kind": "false", "shape": (2, 32)},
    },
    "gemma4_vision": {
        "pixel_values": {"kind": "float", "shape": (2, 9, 192)},
        "pixel_position_ids": {"kind": "tensor", "value": [[[i // 3, i % 3] for i in range(9)]] * 2},
    },
    **{
        name: {"input_features": {"kind": "float", "shape": (2, 16, 320)}}
        for name in ("granite_speech5_ctc", "granite_speech5_encoder")
    },
    "fastspeech2_conformer_with_hifigan": {"input_ids": {"kind": "int", "shape": (2, 8), "low": 1, "high": 70}},
    "efficientloftr": {"pixel_values": {"kind": "float", "shape": (2, 2, 3, 64, 64)}},
    "dia": {"decoder_input_ids": {"kind": "int", "shape": (2, 6, 9), "low": 1, "high": 100}, "labels": None},
    "idefics": {
        "pixel_values": {"kind": "float", "shape": (2, 1, 3, 32, 32)},
        "image_attention_mask": {"kind": "ones", "shape": (2, 12, 1)},
    },
    **{
        name: {
            "qformer_input_ids": {"kind": "int", "shape": (2, 8), "low": 5, "high": 100},
            "qformer_attention_mask": {"kind": "ones", "shape": (2, 8)},
            "decoder_input_ids": None,
        }
        for name in ("instructblip", "instructblipvideo")
    },
    "kimi_k25_vision": {"pixel_values": {"kind": "float", "shape": (32, 3, 8, 8)}},
    "kyutai_speech_to_text": {
        "input_ids": {"kind": "int", "shape": (2, 12, 33), "low": 1, "high": 30},
        "labels": None,
    },
    "lightglue": {"pixel_values": {"kind": "float", "shape": (2, 2, 3, 64, 64)}},
    "lxmert": {
        "visual_feats": {"kind": "float", "shape": (2, 5, 64)},
        "visual_pos": {"kind": "float", "shape": (2, 5, 4)},
    },
    "patchtst": {"past_values": {"kind": "float", "shape": (2, 32, 1)}},
    "patchtsmixer": {"past_values": {"kind": "float", "shape": (2, 32, 1)}, "return_loss": None},
    "pix2struct": {
        "flattened_patches": {"kind": "patches", "shape": (2, 16, 770)},
        "attention_mask": {"kind": "ones", "shape": (2, 16)},
    },
    **{name: {"input_values": {"kind": "float", "shape": (2, 1, 1920)}} for name in ("pe_audio", "pe_audio_encoder")},
    **{
        f"pocket_tts_audio_tokenizer{part}": {"input_values": {"kind": "float", "shape": (2, 1, 3840)}}
        for part in ("", "_encoder")
    },
    "muse_spark_audio": {"input_values": {"kind": "float", "shape": (2, 1920)}},
    "nemotron3_5_transcribe_audio": {
        "input_features": {"kind": "float", "shape": (2, 64, 128)},
        "input_features_mask": {"kind": "ones", "shape": (2, 64)},
    },
    "qwen3_asr_encoder": {
        "input_features": {"kind": "float", "shape": (2, 128, 100)},
        "input_features_mask": {"kind": "ones", "shape": (2, 100)},
    },
    "oneformer": {"task_inputs": {"kind": "int", "shape": (2, 77), "low": 1, "high": 100}},
    "musicgen": {"decoder_input_ids": {"kind": "int", "shape": (8, 4), "low": 1, "high": 100}, "labels": None},
    "musicgen_melody": {"decoder_input_ids": {"kind": "int", "shape": (8, 4), "low": 1, "high": 100}, "labels": None},
    "mimi_encoder": {"input_values": {"kind": "float", "shape": (2, 1, 3840)}},
    "mimi": {"input_values": {"kind": "float", "shape": (2, 1, 3840)}},
    "seggpt": {
        "pixel_values": {"kind": "float", "shape": (2, 3, 16, 32)},
        "labels": None,
        "prompt_pixel_values": {"kind": "float", "shape": (2, 3, 16, 32)},
        "prompt_masks": {"kind": "float", "shape": (2, 3, 16, 32)},
    },
    "dac": {"input_values": {"kind": "float", "shape": (2, 1, 2048)}},
    "encodec": {"input_values": {"kind": "float", "shape": (2, 1, 2048)}},
    "fun_asr_nano_encoder": {
        "input_features": {"kind": "float", "shape": (2, 16, 560)},
        "input_features_mask": {"kind": "ones", "shape": (2, 16)},
    },
}  # fmt: skip
"""Inputs in place of those by rule, by model type: arguments of a `Spec`, None to leave one out."""

CLASSES: dict[str, list[str]] = {
    "musicgen": ["MusicgenForConditionalGeneration"],
    "musicgen_melody": ["MusicgenMelodyForConditionalGeneration"],
    "patchtst": ["PatchTSTForPretraining"],
    "patchtsmixer": ["PatchTSMixerForPretraining"],
}
"""Model classes in place of those by rule, the best first."""
