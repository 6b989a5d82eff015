"""What the rules of `hf_fsdp_tools.proof.shrink` get wrong of models for images, sound and other signals.

For `shrink` and `tiny_case`, by the type of the configuration or sub-configuration, or by type and level.
"""

from typing import Any

RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
LAST = {"backbone_config": RESNET | {"out_features": ["stage4"]}}
LAST_THREE = {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}}

SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), LAST),
    **dict.fromkeys(("deformable_detr", "rt_detr", "rt_detr_v2"), LAST_THREE),
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
    **{
        f"vibevoice_{sense}_tokenizer{part}": {"num_filters": 2, "hidden_size": 16}
        for sense in ("acoustic", "semantic")
        for part in ("", "_encoder", "_decoder")
    },
    "depth_pro": {"intermediate_hook_ids": [3, 1]},
    "clvp_encoder tiny": {"num_attention_heads": 2},
    "edgetam_vision_model": {"backbone_channel_list": [2048, 1024, 512, 256]},
    "bit tiny": {"num_groups": 8},
    **{f"wavtokenizer{part} tiny": {"codebook_dim": 64} for part in ("", "_encoder")},
    "dory tiny": {
        "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "seggpt": {"merge_index": 0},
    "fun_asr_nano tiny": {"adaptor_config": {"intermediate_size": 16}},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "pretrain_image_size": 64},
    "lw_detr": {"num_queries": 12, "group_detr": 2},
}  # fmt: skip
