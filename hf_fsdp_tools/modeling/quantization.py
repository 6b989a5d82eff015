"""What a config says about how a checkpoint is quantised, kept apart from the plain model that is built of it."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.modeling.configs import text_config
from hf_fsdp_tools.modeling.notes import add_to_note, note_of


def set_aside_quantization(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Take the quantisation out of a config, which then describes a plain model; None where there is none.

    That of bitsandbytes stays: its layers are built (`make_quantizer`), or refused when files are matched.
    """
    quantization = None
    for part in _parts_of(config):
        content = _as_mapping(getattr(part, "quantization_config", None))
        if content is not None and not _is_of_bitsandbytes(content):
            quantization = content if quantization is None else quantization
            del part.quantization_config
    return quantization


def note_quantization(model: nn.Module, quantization: Mapping[str, Any] | None) -> None:
    """Note on a model how the checkpoint of its config is quantised, until that checkpoint is loaded."""
    add_to_note(model, stored_quantization=quantization)


def stored_quantization(model: nn.Module) -> Mapping[str, Any] | None:
    """How the checkpoint of a model is quantised, by the note on the model or else by its config; None if it is not.

    4 bits of bitsandbytes do not count: the model has layers for them, whatever its checkpoint holds.
    """
    if (noted := note_of(model).stored_quantization) is not None:
        return noted
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return _as_mapping(getattr(config, "quantization_config", None))
    found = (_as_mapping(getattr(part, "quantization_config", None)) for part in _parts_of(config))
    return next((content for content in found if content is not None and not content.get("load_in_4bit")), None)


def forget_quantization(model: nn.Module) -> None:
    """Make the model a plain one to everybody who asks, as transformers does after it has dequantised."""
    note_quantization(model, None)
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        set_aside_quantization(config)


def _parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    text = text_config(config)
    return [config] if text is config else [config, text]


def _as_mapping(quantization: Any) -> Mapping[str, Any] | None:
    if quantization is None or isinstance(quantization, Mapping):
        return quantization
    if not hasattr(quantization, "to_dict"):  # whatever a file may say
        return {"quant_method": quantization}
    content: Mapping[str, Any] = quantization.to_dict()
    return content


def _is_of_bitsandbytes(content: Mapping[str, Any]) -> bool:
    return bool(content.get("load_in_4bit") or content.get("load_in_8bit")) or content.get("quant_method") in (
        "bitsandbytes",
        "bitsandbytes_4bit",
        "bitsandbytes_8bit",
    )
