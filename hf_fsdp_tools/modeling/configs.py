"""Configurations within configurations."""

from transformers import PreTrainedConfig

__all__ = ["text_config"]


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model within a configuration, itself where there is none; of two, the decoder's."""
    try:
        found: PreTrainedConfig = config.get_text_config()
    except ValueError:  # a text encoder and a decoder, as MusicGen has
        found = config.get_text_config(decoder=True)
    return found
