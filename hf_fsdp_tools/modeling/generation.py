"""The generation settings of a model, among which transformers stores those of a model inside it."""

import copy
from typing import Any

from transformers import GenerationConfig

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
        given = {key.removeprefix(prefix): own.pop(key) for key in list(own) if key.startswith(prefix)}
        vars(getattr(model, name).generation_config).update({"_from_model_config": False, **given})


def whole_generation_config(model: Any) -> GenerationConfig:
    """The settings of a model that generates as they are stored, those of a model inside it among them."""
    config: GenerationConfig = model.generation_config
    if inner := _INNER.get(model.config.model_type):
        name, prefix = inner
        config = copy.deepcopy(config)
        given = getattr(model, name).generation_config.to_diff_dict()
        vars(config).update({prefix + key: value for key, value in given.items() if key != "transformers_version"})
    return config
