"""Tiny configurations: the default configuration of a model type with sizes made small by rule.

A rule is a pattern of names and the largest value that a size of such a name keeps. `SIZES` holds what the rules get
wrong for text and vision-language models, by the type of the configuration or sub-configuration; for other kinds
whoever shrinks them gives more. Sub-configurations are shrunk alike, so that widths that
were equal stay equal.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

LEVELS = ("tiny", "short", "default")
"""How far a configuration is shrunk: all sizes; layers, experts, vocabulary and images only; not at all. The first
that runs is used."""

VOCABULARY, WIDTH, INNER, HEAD, IMAGE = 131, 64, 96, 16, 32

# Sizes of every level but the last.
SHORT: tuple[tuple[str, int], ...] = (
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_modules", 0),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(.*_)?num_(hidden_|encoder_|decoder_)?layers|n_layers?|layers|(encoder|decoder)_layers|(encoder_|resampler_)?depth"
     r"|num_blocks|num_layers_(cross|self)_attention|num_self_attends_per_block|(en|de)coder_num_hidden_layers", 4),
    (r"(num|n|moe_num|num_local|n_routed|num_routed)_(routed_)?experts|num_moe_experts", 4),
    (r"(.*num_)?experts_per_tok(en)?|moe_(k|topk|top_k|router_topk)|top_?k_experts|experts_top_k"
     r"|num_selected_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|limited_topk_group", 1),
    (r"(.*_)?vocab_size|n_vocab|n_tokens|vocab_size_per_layer_input", VOCABULARY),
    (r"max_(.*_)?position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len|context_length", 128),
    (r"max_source_positions|max_target_positions", 64),
    (r"(.*_)?image_size|crop_size|img_size|input_size", IMAGE),
    (r"num_queries|num_denoising|num_proposals|two_stage_num_proposals|num_query_tokens|num_latents|d_latents", 12),
    (r"index_topk", 4),
    (r"train_num_points|mask_(time|feature)_length", 4),
)  # fmt: skip
# Sizes of the first level. A name is matched from the top; None leaves a size alone.
TINY: tuple[tuple[str, int | None], ...] = (
    (r".*(kernel|stride|window|patch|chunk|block|hop|frame|rate|token|label|class|scale|factor|channels?_in).*", None),
    (r"(.*_)?(kv|key_value|key)_?.*heads?", 2),
    (r"mamba_n(um)?_heads", 8),
    (r"(.*_)?(n|num)_?heads?|(.*_)?(attention_)?heads|num_attn_heads|(.*_)?n_head", 4),
    (r"(.*_)?head_(dim|size)|d_kv|dim_(per_)?head|mamba_d_head|(.*_)?lora_rank|rotary_dim", HEAD),
    (r"(.*_)?(intermediate|ffn|ff|mlp|inner|feedforward|feed_forward)(_.*)?_?(size|dim|units)|d_ff"
     r"|n_inner|mlp_dim", INNER),
    (r"(.*_)?codebook_size|codebook_dim", 32),
    (r"state_size|(.*_)?d_state|time_step_rank|ssm_state_size|mamba_dt_rank", 8),
    (r"(.*_)?(size|dim|dims|width|units|channels|features|n_embd|d_model|hidden|filters)|n_embd|d_model", WIDTH),
)  # fmt: skip
TOKEN = re.compile(
    r".*token_(id|index|idx)s?|(bos|eos|pad|sep|cls|mask|boi|eoi|boa|eoa|image|audio|video)_.*(id|index)"
)
NOT_WIDTHS = re.compile(
    r".*(rotary|embeddings$|mel_bins|position|max_|num_mel|freq|num_|pos_emb|_vocab_|image|index_|in_channels|out_channels|stem_|stage_|channel_list).*"
)
MULTIMODAL_ROPE = re.compile(
    r"(glm4v|glm46v|glm_ocr|glm_image|qwen2_vl|qwen2_5_vl|qwen2_5_omni|paddleocr_vl)\w*_?text|qwen2_5_omni_talker|glm4v_moe_text"
)
Sizes = Mapping[str, dict[str, Any]]

SIZES: Sizes = {
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blip-2": {"image_token_index": 130},
    "dbrx": {"attn_config": {"clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "falcon_h1 tiny": {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8},
    "deepseek_ocr2_sam_vision_model tiny": {"downsample_channels": [64, 64]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "dots3_note_text tiny": {"head_dim": 32, "q_lora_rank": 16},
    "ernie4_5_vl_moe_text tiny": {"moe_intermediate_size": [48, 32], "rope_parameters": {"mrope_section": [3, 3, 2]}},
    "hunyuan_vl_text tiny": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}},
    "inkling2": {"quantization_config": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "led": {"attention_window": [8, 8, 8, 8]},
    "lxmert tiny": {"visual_feat_dim": 64, "l_layers": 2, "x_layers": 2, "r_layers": 2},
    "instructblip": {"image_token_index": 130},
    "instructblipvideo": {"video_token_index": 129},
    "llama4_vision_model tiny": {"intermediate_size": 256},
    "mllama_vision_model tiny": {"vision_output_dim": 320},
    "muse_glimmer tiny": {"out_hidden_size": 256},
    "muse_spark tiny": {"out_hidden_size": 256},
    "mistral4 tiny": {"head_dim": 32},
    "radio": {"summary_idxs": [0, 1]},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]},
    "zamba tiny": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2 tiny": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 32},
    "longcat_flash": {"zero_expert_num": 1},
    "mobilebert tiny": {"embedding_size": 32},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "aria tiny": {"projector_patch_to_query_dict": {16: 4}},
    "fast_vlm": {"vision_config": {"architecture": "test_efficientnet", "hidden_size": 256, "model_args": None}},
    "gemma3 tiny": {"mm_tokens_per_image": 4},
    "gemma3n": {"vision_soft_tokens_per_image": 4, "audio_soft_tokens_per_image": 4},
    "gemma3n_audio": {"input_feat_size": 128, "vocab_offset": 116, "vocab_size": 16},
    "gemma3n_vision": {
        "architecture": "test_efficientnet_ln", "hidden_size": 256, "vocab_offset": 100, "vocab_size": 16,
    },
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "glm5_next_text": {"index_topk": 16},
    "reformer tiny": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [4, 8]},
    "vipllava": {"vision_feature_layer": [-2, -3, -4, -5, 2]},
    "glmasr_encoder tiny": {"intermediate_size": 256},
    "shieldgemma2 tiny": {"mm_tokens_per_image": 4},
    "t5gemma2_encoder tiny": {"mm_tokens_per_image": 4},
    "unlimited_ocr_sam_vision_model tiny": {"downsample_channels": [64, 64]},
    "voxtral_encoder tiny": {"intermediate_size": 256},
    "xlnet tiny": {"d_head": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
}  # fmt: skip
"""Sizes of a configuration after shrinking, by its `model_type`, or by `model_type` and level."""

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")
KINDS_OF_LAYERS = (
    "layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types", "attention_layers",
)  # fmt: skip
MOST_LAYERS = 4
INDICES = re.compile(r".*(_index(es)?|_indices|_layer_ids|_layers|_idxs|_layer_indices|index_list)|out_indices")


def shrink(config: Any, level: str, tp_size: int = 1, sizes: Sizes | None = None) -> Any:
    """A configuration of the same class with smaller sizes, and heads and words that so many ranks divide where they
    divide those of the given one, which is not changed. `sizes` hold for types that `SIZES` does not know."""
    if level == "default":
        return copy.deepcopy(config)
    new = _shrink(config.to_dict(), level, _Tokens(), tp_size, {**(sizes or {}), **SIZES})
    for key in ("transformers_version", "architectures", "torch_dtype", "dtype"):
        new.pop(key, None)
    return type(config).from_dict(new)


class _Tokens(dict[int, int]):
    """Ids of special tokens beyond the small vocabulary, by the old ones; equal ids stay equal."""

    def __missing__(self, old: int) -> int:
        self[old] = VOCABULARY - 1 - len(self)
        return self[old]


def _shrink(sizes: dict[str, Any], level: str, tokens: _Tokens, tp_size: int, known: Sizes) -> dict[str, Any]:
    new: dict[str, Any] = {}
    kept = _kept_layers(sizes)
    layers = max((sizes[name] for name in LAYERS if type(sizes.get(name)) is int), default=0)
    for name, value in sizes.items():
        if name == "per_layer_config" and value:
            by_layer = {int(index): item for index, item in value.items()}
            new[name] = {
                i: _shrink(by_layer[old], level, tokens, tp_size, known)
                for i, old in enumerate(kept)
                if by_layer.get(old) is not None
            }
        elif isinstance(value, dict):
            is_config = "model_type" in value or name.endswith("config")
            new[name] = _shrink(value, level, tokens, tp_size, known) if is_config else _rope(name, value, sizes, level)
        elif TOKEN.fullmatch(name):
            new[name] = _token(value, tokens)
        elif isinstance(value, list | tuple) and value:
            new[name] = _list(name, list(value), layers, kept, level)
        elif type(value) is int:
            new[name] = _size(name, value, sizes, len(kept), level, tp_size)
        else:
            new[name] = value
    if "out_indices" in new:  # names follow from the indices
        new.pop("out_features", None)
        new.pop("stage_names", None)
    heads = sizes.get("num_heads")
    if level == "tiny" and isinstance(heads, list | tuple) and type(sizes.get("embed_dim")) is int:
        new["embed_dim"] = 8 * heads[0]  # of each stage twice that of the one before
    if level == "tiny" and type(sizes.get("qk_head_dim")) is int:
        new["qk_head_dim"] = new["qk_nope_head_dim"] + new["qk_rope_head_dim"]
    for key in (sizes.get("model_type"), f"{sizes.get('model_type')} {level}"):
        _lay_over(new, known.get(str(key), {}))
    return new


def _lay_over(sizes: dict[str, Any], other: dict[str, Any]) -> None:
    """Put sizes over others, in dictionaries inside them too."""
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(sizes.get(name), dict) and "model_type" not in value:
            _lay_over(sizes[name], value)
        else:
            sizes[name] = value


def _kept_layers(sizes: dict[str, Any]) -> list[int]:
    """Indices of layers to keep: the first of each kind, at least two, at most `MOST_LAYERS`."""
    lists = [sizes[name] for name in KINDS_OF_LAYERS if isinstance(sizes.get(name), list | tuple)]
    lists = [kinds for kinds in lists if len(kinds) == max(map(len, lists))]
    if not lists:
        return list(range(MOST_LAYERS))
    kinds = [tuple(map(str, layer)) for layer in zip(*lists, strict=True)]
    kept = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:MOST_LAYERS]
    for i in range(len(kinds)):
        if len(kept) < MOST_LAYERS and i not in kept:
            kept.append(i)
    return sorted(kept)


def _ints(values: Iterable[Any]) -> bool:
    return all(type(value) is int for value in values)


def _token(value: Any, tokens: _Tokens) -> Any:
    if isinstance(value, list | tuple):
        return [_token(item, tokens) for item in value]
    return tokens[value] if type(value) is int and value >= VOCABULARY - 31 else value


def _list(name: str, values: list[Any], layers: int, kept: list[int], level: str) -> list[Any]:
    if name == "image_grid_pinpoints":
        return [[IMAGE, IMAGE]]
    if layers > len(kept) and len(values) == layers and kept[-1] < layers:  # one entry per layer
        values = [values[i] for i in kept]
    elif INDICES.fullmatch(name) and name != "encode_proj_layers" and _ints(values) and layers > 2 and min(values) >= 0:
        top = len(kept) if max(values) >= layers else len(kept) - 1
        return sorted({max(top - i, 0) for i in range(len(values))})
    if name in ("depths", "num_block_repeats", "blocks_per_stage", "n_attn_blocks") and _ints(values):
        return [min(value, 2) for value in values]
    if name in ("image_size", "img_size", "crop_size") and _ints(values):
        return [min(value, IMAGE) for value in values]
    widths = re.fullmatch(r"(.*_)?(sizes|dims?|channels|channel_list|embed_dim)(_per_stage)?|stage_.*_channels", name)
    if level == "tiny" and widths and not NOT_WIDTHS.fullmatch(name) and _ints(values):
        divisor = 1
        while all(v % (2 * divisor) == 0 and v // divisor >= 16 for v in values) and max(values) // divisor > 128:
            divisor *= 2
        return [value // divisor for value in values]
    return values


def _size(name: str, value: int, sizes: dict[str, Any], layers: int, level: str, tp_size: int) -> int:
    for pattern, largest in SHORT:
        if re.fullmatch(pattern, name):
            if largest == VOCABULARY and value % tp_size == 0:
                largest += -largest % tp_size
            return min(value, layers if "layers" in name and largest == 4 else largest)
    if level != "tiny":
        return value
    if name == "patch_size":
        return min(value, 8)
    if "key_value_heads" in name and value == sizes.get(name.replace("key_value", "attention")):
        return min(value, max(4, 2 * tp_size))  # as many as queries
    for pattern, most in TINY:
        if re.fullmatch(pattern, name):
            if "heads?" in pattern and most is not None:
                most *= max(tp_size // 2, 1)
            return value if most is None else min(value, most)
    return value


def _rope(name: str, value: dict[str, Any], sizes: dict[str, Any], level: str) -> dict[str, Any]:
    """Settings of rotary embeddings whose lengths follow from the head's dimension; also by type of layer."""
    if level != "tiny" or "rope" not in name:
        return value
    share = value.get("partial_rotary_factor", sizes.get("partial_rotary_factor")) or 1.0
    half = int(HEAD * share) // 2
    if MULTIMODAL_ROPE.fullmatch(sizes.get("model_type") or ""):
        value = {"mrope_section": []} | value
    new: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            new[key] = _rope(name, item, sizes, level)
        elif key == "mrope_section":
            new[key] = [half - 2 * (half // 3), half // 3, half // 3]
        elif key in ("short_factor", "long_factor") and isinstance(item, list):
            new[key] = item[:half]
        else:
            new[key] = item
    return new
