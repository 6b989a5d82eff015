"""Configurations within configurations: of the text model, and of generation."""

import copy
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""How configurations name the number of positions."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model within a configuration, itself where there is none; of two, the decoder's."""
    try:
        text: PreTrainedConfig = config.get_text_config()
    except ValueError:  # a text encoder and a decoder, as MusicGen has
        text = config.get_text_config(decoder=True)
    return text


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model; None where its configuration sets no limit (relative positions)."""
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    for part in (text_config(config), config):
        for name in _POSITIONS:
            if isinstance(limit := getattr(part, name, None), int) and limit > 0:
                return limit
    return None


_INNER = {"csm": ("depth_decoder", "depth_decoder_"), "kyutai_speech_to_text": ("codec_model", "codec_")}
"""By model type: a model inside that generates with settings of its own, and how the names of these settings begin in
`generation_config.json`. Source: `from_pretrained` and `save_pretrained` of the two classes, transformers 5.23."""


def set_generation_config(model: Any, config: GenerationConfig | None) -> None:
    """Give a model that generates its settings, and a model inside it the settings that are stored among them."""
    if not model.can_generate():
        return
    if config is not None:
        model.generation_config = copy.deepcopy(config)
    if inner := _INNER.get(model.config.model_type):
        name, prefix = inner
        own = vars(model.generation_config)
        inside = {key.removeprefix(prefix): own.pop(key) for key in list(own) if key.startswith(prefix)}
        vars(getattr(model, name).generation_config).update({"_from_model_config": False, **inside})


def whole_generation_config(model: Any) -> GenerationConfig:
    """The settings of a model that generates as they are stored, those of a model inside it among them."""
    config: GenerationConfig = model.generation_config
    if inner := _INNER.get(model.config.model_type):
        name, prefix = inner
        config = copy.deepcopy(config)
        inside = getattr(model, name).generation_config.to_diff_dict()
        vars(config).update({prefix + key: value for key, value in inside.items() if key != "transformers_version"})
    return config
