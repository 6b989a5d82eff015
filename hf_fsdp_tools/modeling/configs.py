"""Configurations within configurations."""

from transformers import PreTrainedConfig

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""How configurations name the number of positions."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model within a configuration, itself where there is none; of two, the decoder's."""
    try:
        found: PreTrainedConfig = config.get_text_config()
    except ValueError:  # a text encoder and a decoder, as MusicGen has
        found = config.get_text_config(decoder=True)
    return found


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model; None where its configuration sets no limit (relative positions)."""
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    for part in (text_config(config), config):
        for name in _POSITIONS:
            if isinstance(limit := getattr(part, name, None), int) and limit > 0:
                return limit
    return None
