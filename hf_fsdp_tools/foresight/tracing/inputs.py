"""A batch of the right shapes for any architecture."""

import inspect
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.images import Images

_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""How classes end whose labels are one class for each sequence or image."""


def make_batch(model: nn.Module, setup: TrainingSetup, images: Images | None = None) -> dict[str, Any]:
    """Arguments of the model's forward pass for one micro-step of training: tensors on the CPU, with any values.

    Sequences are full and not packed, so that no mask is given.
    """
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    shape = (setup.batch_size, setup.seq_len)
    batch: dict[str, Any]
    match getattr(model, "main_input_name", "input_ids"):
        case "input_ids":
            batch = {"input_ids": _integers(*shape)} | (_with_images(model, setup, images) if images else {})
        case "pixel_values":
            sides = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
            batch = {"pixel_values": torch.zeros(setup.batch_size, config.num_channels, *sides)}
        case "input_features" if hasattr(config, "max_source_positions"):
            frames = 2 * config.max_source_positions  # the encoder's convolutions halve them
            batch = {"input_features": torch.zeros(setup.batch_size, config.num_mel_bins, frames)}
        case other:
            raise ConfigError(f"{type(model).__name__} takes {other}, of which no batch can be made here.")
    if "start_positions" in takes:
        batch |= {"start_positions": _integers(setup.batch_size), "end_positions": _integers(setup.batch_size)}
    elif "labels" in takes:
        is_one = type(model).__name__.endswith(_ONE_LABEL)
        batch["labels"] = _integers(setup.batch_size) if is_one else _integers(*shape)
    else:
        raise ConfigError(
            f"{type(model).__name__} takes no labels, so it gives no loss to train with. Choose another auto_class."
        )
    return batch


def _with_images(model: nn.Module, setup: TrainingSetup, images: Images) -> dict[str, torch.Tensor]:
    """Tokens that stand for images, each image between marks, and the images' tensors for all sequences."""
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    ids, is_image = (_integers(setup.batch_size, setup.seq_len) for _ in range(2))
    for place in range(1, images.count * (images.tokens + 2), images.tokens + 2):
        start, end = place + 1, place + 1 + images.tokens
        ids[:, place] = getattr(config, "vision_start_token_id", None) or 0
        ids[:, start:end] = images.token_id
        is_image[:, start:end] = 1
    batch = {"input_ids": ids}
    batch |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    batch |= images.tensors
    if "cross_attention_mask" in takes and (tiles := images.tensors.get("aspect_ratio_mask")) is not None:
        batch["cross_attention_mask"] = torch.ones(*ids.shape, *tiles.shape[1:], dtype=torch.int64)
    return batch


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)
