"""A batch of the right shapes for any architecture, with images: what the model's image processor makes of a picture,
and how many tokens stand for it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

# Of the module itself: in `transformers`, version 5.17 has these only where torchvision is installed.
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    AutoImageProcessor,
    get_image_processor_class_from_name,
)

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.kernels import imitate_4bit
from hf_fsdp_tools.foresight.tracing.repeats import short_copy
from hf_fsdp_tools.foresight.tracing.values import followed_values
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.text import first_line

_SIDE = 512  # Height and width of a picture where neither the setup nor the configuration says one. (assumed)

# Settings of image processors that configurations call by another name, and those that they repeat.
_SAME = {"max_image_tiles": "max_num_tiles", "merge_size": "spatial_merge_size"}
_NAMED = ("patch_size", "temporal_patch_size", "image_grid_pinpoints", *_SAME)

# What a processor makes of the images of one sequence, and how many tokens stand for each.
Look = tuple[dict[str, torch.Tensor], int]

_looks: WeakKeyDictionary[nn.Module, dict[tuple[int, int, int], Look]] = WeakKeyDictionary()
"""By model and by number, height and width of images: the vision tower runs once for all batches of a search."""


class NoImagesError(Exception):
    """No images can be made for a model that takes some; the message says why."""


@dataclass(frozen=True)
class Images:
    """The images of a batch."""

    tensors: Mapping[str, torch.Tensor]
    """Arguments of the model, for all sequences. Pixels are all 1, in one element that is expanded."""
    count: int  # Images of each sequence
    tokens: int  # That stand for each image, and are replaced by its features; 0 where text attends to images
    token_id: int


def images_of(model: nn.Module, setup: TrainingSetup) -> Images | None:
    """The images of a batch; None for a model of text alone, or where none are asked for.

    A picture goes through the checkpoint's own image processor where there is one, or through that of the model's kind
    with the sizes of the configuration. The model's vision tower, without data, says how many tokens stand for it.
    """
    takes = inspect.signature(type(model).forward).parameters
    if "pixel_values" not in takes and (setup.images or setup.image_size):
        setting = f"images={setup.images}" if setup.images else f"image_size={setup.image_size}"
        raise ConfigError(f"{setting}: {type(model).__name__} takes no images. Leave out images and image_size.")
    if setup.images == 0 or "pixel_values" not in takes or getattr(model, "main_input_name", "") != "input_ids":
        return None
    config: Any = model.config
    count = setup.images or 1
    height, width = setup.image_size or (_side(config) or _SIDE,) * 2
    looks = _looks.setdefault(model, {})
    if (count, height, width) not in looks:
        looks[count, height, width] = _look(model, count, (height, width))
    made, tokens = looks[count, height, width]
    ids = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    token_id = next((one for one in ids if isinstance(one, int)), 0)
    tensors = {name: _repeated(value, setup.batch_size) for name, value in made.items() if name in takes}
    images = Images(tensors, count, tokens, token_id)
    if (needed := count * (tokens + 2) + 1) > setup.seq_len:
        fact = f"{count} × {tokens:,} tokens of images with marks are {needed:,}, and seq_len is {setup.seq_len:,}"
        if setup.images is None:
            raise NoImagesError(fact)
        raise ConfigError(f"{fact}. Give a seq_len of {needed:,} or more, or fewer or smaller images.")
    return images


def _look(model: Any, count: int, size: tuple[int, int]) -> Look:
    config = model.config
    try:
        from PIL import Image

        name = getattr(config, "name_or_path", "")
        processor = (_saved_processor(name) if name else None) or _usual_processor(config)
        made = processor([[Image.new("RGB", size[::-1])] * count], return_tensors="pt")
        tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        for name, value in tensors.items():
            if value.is_floating_point():  # pixels are 1, since models leave out those that are 0
                tensors[name] = value[:0].new_ones(()).expand_as(value)
        tokens, rest = divmod(_rows(model, tensors), count)
    except Exception as error:  # of transformers' code for any kind of model: the text is followed all the same
        raise NoImagesError(f"{type(error).__name__}: {first_line(error)}") from error
    if rest:
        raise NoImagesError(f"{count} equal images have {count * tokens + rest} features")
    return tensors, tokens


def _side(config: PreTrainedConfig) -> int | None:
    """Height and width of the images for which a vision tower was made; None if it takes any."""
    side = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    side = max(side) if isinstance(side, list | tuple) else side
    return side if isinstance(side, int) and side > 0 else None


@lru_cache(maxsize=8)
def _saved_processor(name: str) -> Any:
    path = local_path(name)
    folder = path.parent if path is not None and path.is_file() else path
    try:
        return AutoImageProcessor.from_pretrained(name if folder is None else folder, backend="pil")
    except (OSError, ValueError):  # the checkpoint has none
        return None


def _usual_processor(config: PreTrainedConfig) -> Any:
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if not names:
        raise LookupError(f"transformers has no image processor for {config.model_type}")
    name = names.get("pil") or next(iter(names.values()))
    kind: Any = get_image_processor_class_from_name(name)
    plain = kind()
    configs = (config, getattr(config, "vision_config", None) or config)
    settings: dict[str, Any] = {}
    for name in _NAMED:
        values = [getattr(each, own, None) for each in configs for own in (name, _SAME.get(name, name))]
        value = next((one for one in values if one is not None), None)
        if hasattr(plain, name) and value is not None:
            is_pair = isinstance(getattr(plain, name), dict) and isinstance(value, int)
            settings[name] = {"height": value, "width": value} if is_pair else value
    if (side := _side(config)) is not None and "image_grid_thw" not in plain.model_input_names:
        settings |= _sizes(plain, side)
    return kind(**settings)


def _sizes(plain: Any, side: int) -> dict[str, dict[str, int]]:
    """Sizes of an image processor for another side of images; its own tell which there are."""
    own = {name: dict(size) for name in ("size", "crop_size", "max_image_size") if (size := getattr(plain, name, None))}
    tile = next(iter((own.get("max_image_size") or {}).values()), None)
    factors = {name: size["longest_edge"] // tile if tile and name == "size" else 1 for name, size in own.items()}
    return {
        name: {key: value if key == "shortest_edge" and "longest_edge" in size else side * factors[name]
               for key, value in size.items() if value}
        for name, size in own.items()
    }  # fmt: skip


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """A tensor of one sequence for several."""
    if tensor.is_floating_point():
        return tensor.new_ones(()).expand(times * tensor.shape[0], *tensor.shape[1:])
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _rows(model: nn.Module, made: Mapping[str, torch.Tensor]) -> int:
    """How many tokens the features of images stand for; 0 for a model whose text attends to them."""
    find: Any = getattr(type(model), "get_image_features", None)
    if find is None:
        return 0
    takes = inspect.signature(find).parameters
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        twin: Any = short_copy(model, ())
        give_memory(twin, {name: torch.float32 for name, one in twin.named_parameters() if one.is_floating_point()})
        imitate_4bit(twin)
        with followed_values() as values:
            batch = {name: values.as_fake(value) for name, value in made.items() if name in takes}
            output = twin.get_image_features(**batch)
        features = tree_leaves(getattr(output, "pooler_output", output))
        width = int(twin.get_input_embeddings().weight.shape[-1])
        return sum(one.numel() for one in features if isinstance(one, torch.Tensor)) // width


def give_memory(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Put memory of the CPU without data in the place of a copy's tensors; for a `FakeTensorMode`."""
    fakes: dict[torch.Tensor, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        data = torch.empty(parameter.shape, dtype=dtypes.get(name, parameter.dtype), device="cpu")
        fakes[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        fakes[parameter].__dict__.update(parameter.__dict__)
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                module._parameters[key] = fakes[weight]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


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
