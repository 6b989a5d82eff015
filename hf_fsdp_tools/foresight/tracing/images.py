"""A batch of the right shapes for any architecture, with images: what the model's image processor makes of a picture,
how many tokens stand for it, and the values that follow from the batch (places of images, grids, positions, masks)."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.models.auto import image_processing_auto as auto  # `transformers` 5.17 has it with torchvision alone

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.kernels import MAKES_NOTHING, tensors_in
from hf_fsdp_tools.foresight.tracing.repeats import short_copy
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.text import first_line

_SIDE = 512  # Height and width of a picture where neither the setup nor the configuration says one. (assumed)
_NAMED = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
"""Settings of image processors that configurations of vision towers have, and their names there."""


class NoImagesError(Exception):
    """No images can be made for a model that takes some; the message says why."""


@dataclass(frozen=True)
class Images:
    """The images of a batch."""

    tensors: Mapping[str, torch.Tensor]  # Arguments of the model, for one sequence
    count: int  # Images of each sequence
    tokens: int  # That stand for each image, and are replaced by its features


def images_of(model: nn.Module, setup: TrainingSetup) -> Images | None:
    """The images of a batch; None for a model of text alone, or where none are asked for. A picture goes through the
    image processor, and the model's vision tower, without data, says how many tokens stand for it."""
    takes = inspect.signature(type(model).forward).parameters
    if "pixel_values" not in takes and (setup.images or setup.image_size):
        setting = f"images={setup.images}" if setup.images else f"image_size={setup.image_size}"
        raise ConfigError(f"{setting}: {type(model).__name__} takes no images. Leave out images and image_size.")
    if setup.images == 0 or "pixel_values" not in takes or getattr(model, "main_input_name", "") != "input_ids":
        return None
    count = setup.images or 1
    made, tokens = _look(model, count, setup.image_size)
    if (needed := count * (tokens + 2) + 1) > setup.max_length:
        fact = (
            f"{count} × {tokens:,} tokens of images with marks are {needed:,}, and max_length is {setup.max_length:,}"
        )
        if setup.images is None:
            raise NoImagesError(fact)
        raise ConfigError(f"{fact}. Give a max_length of {needed:,} or more, or fewer or smaller images.")
    return Images({key: made[key] for key in made if key in takes}, count, tokens)


@lru_cache(maxsize=8)  # the vision tower runs once for all batches of a search
def _look(model: Any, count: int, size: tuple[int, int] | None) -> tuple[dict[str, torch.Tensor], int]:
    """What a processor makes of the images of one sequence, and how many tokens stand for each."""
    tower = getattr(model.config, "vision_config", model.config)
    side = getattr(tower, "image_size", None)
    side = max(side) if isinstance(side, list | tuple) else side or 0  # 0: the tower takes any
    height, width = size or (side or _SIDE,) * 2
    try:
        from PIL import Image

        made = _processor(model.config, tower, side)([[Image.new("RGB", (width, height))] * count], return_tensors="pt")
        tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        return tensors, _features(model, tensors) // count
    except Exception as error:  # of transformers' code for any kind of model: the text is followed all the same
        raise NoImagesError(f"{type(error).__name__}: {first_line(error)}") from error


def _processor(config: Any, tower: Any, side: int) -> Any:
    """The checkpoint's image processor, or that of its kind with the sizes of its configuration."""
    if name := getattr(config, "name_or_path", ""):
        path = local_path(name)
        with suppress(OSError, ValueError):  # the checkpoint has none
            return auto.AutoImageProcessor.from_pretrained(
                path.parent if path and path.is_file() else name, backend="pil"
            )
    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]
    kind: Any = auto.get_image_processor_class_from_name(names.get("pil") or next(iter(names.values())))
    plain = kind()
    settings = {
        name: getattr(tower, own) for name, own in _NAMED.items() if hasattr(plain, name) and hasattr(tower, own)
    }
    for name in ("size", "crop_size") if side and "image_grid_thw" not in plain.model_input_names else ():
        if sizes := dict(getattr(plain, name, None) or {}):
            settings[name] = {key: side for key, own in sizes.items() if own}
    return kind(**settings)


def _features(model: nn.Module, made: Mapping[str, torch.Tensor]) -> int:
    """How many tokens the features of images stand for."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Values():  # type: ignore[no-untyped-call]
        twin: Any = short_copy(model, ())
        give_memory(twin, {name: torch.float32 for name, one in twin.named_parameters() if one.is_floating_point()})
        takes = inspect.signature(twin.get_image_features).parameters
        output = twin.get_image_features(**{key: made[key] for key in made if key in takes})
        width = int(twin.get_input_embeddings().weight.shape[-1])
        return sum(one.numel() for one in tensors_in(getattr(output, "pooler_output", output))) // width


def give_memory(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Put memory of the CPU without data in the place of a copy's tensors; for a `FakeTensorMode`."""
    fakes: dict[torch.Tensor, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        data = torch.empty(parameter.shape, dtype=dtypes.get(name, parameter.dtype), device="cpu")
        fakes[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        fakes[parameter].__dict__.update(parameter.__dict__)
    for module in model.modules():
        for key, weight in module._parameters.items():
            module._parameters[key] = None if weight is None else fakes[weight]
        for key, buffer in module._buffers.items():
            empty = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            module._buffers[key] = empty


def batch_of(model: nn.Module, setup: TrainingSetup, images: Images | None = None) -> dict[str, Any]:
    """Arguments of the model's forward pass for one micro-batch of training, with any values. Sequences are full and
    not packed, so that no mask is given. Each image stands between marks."""
    config: Any = model.config
    takes, rows = inspect.signature(type(model).forward).parameters, setup.per_device_train_batch_size
    ids = torch.zeros(rows, setup.max_length, dtype=torch.int64)
    batch: dict[str, Any]
    match getattr(model, "main_input_name", "input_ids"):
        case "input_ids":
            made = images.tensors if images else {}
            batch = {"input_ids": ids} | {key: made[key].repeat(rows, *[1] * (made[key].dim() - 1)) for key in made}
        case "pixel_values":
            sides = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
            batch = {"pixel_values": torch.zeros(rows, config.num_channels, *sides)}
        case "input_features" if hasattr(config, "max_source_positions"):
            # the encoder's convolutions halve them
            batch = {"input_features": torch.zeros(rows, config.num_mel_bins, 2 * config.max_source_positions)}
        case other:
            raise ConfigError(f"{type(model).__name__} takes {other}, of which no batch can be made here.")
    if images:
        is_image = torch.zeros_like(ids)
        image_ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
        for place in range(1, images.count * (images.tokens + 2), images.tokens + 2):
            where = slice(place + 1, place + 1 + images.tokens)
            ids[:, place] = getattr(config, "vision_start_token_id", None) or 0
            is_image[:, where] = 1
        ids[is_image == 1] = next((one for one in image_ids if isinstance(one, int)), 0)
        batch |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    if "start_positions" in takes:
        return batch | {name: torch.zeros(rows, dtype=torch.int64) for name in ("start_positions", "end_positions")}
    if "labels" not in takes:
        raise ConfigError(f"{type(model).__name__} takes no labels, so it gives no loss. Choose another auto_class.")
    kinds = ("Sequence", "Image", "Audio")  # of which each is one class
    is_one_label = type(model).__name__.endswith(tuple(f"For{kind}Classification" for kind in kinds))
    if is_one_label and isinstance(end := getattr(config, "eos_token_id", None), int):
        ids[:, -1] = end  # where classifiers with an encoder and a decoder read the class
    return batch | {"labels": torch.zeros((rows,) if is_one_label else (rows, setup.max_length), dtype=torch.int64)}


_MOST_BYTES = 2**26  # A larger result is not followed: token ids are, masks of long sequences squared not. (assumed)


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within a `FakeTensorMode`, lets what follows from the batch be real tensors, whose values can be read: token ids,
    positions, masks. What is large, or made of weights and activations, has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, inputs, name = kwargs or {}, tensors_in((args, kwargs)), func.overloadpacket.__name__
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_known = (
            not is_random and name not in MAKES_NOTHING and not any(isinstance(one, FakeTensor) for one in inputs)
        )
        if not is_known and func._schema.is_mutable and not isinstance(args[0], FakeTensor | list | tuple):
            raise DataDependentOutputException(func)  # something unknown is written into values
        try:  # torch's fake tensors write into real ones
            result = () if is_known and func._schema.is_mutable else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not is_known:
                return _shaped_by_a_mask(func, args, kwargs)
            result = ()  # of no more elements than it reads
        made = tensors_in(result)
        if not is_known or any(one.nbytes > _MOST_BYTES or (not inputs and one.is_floating_point()) for one in made):
            return result
        with _disable_current_modes():
            return func(*args, **kwargs)


def _shaped_by_a_mask(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that chooses elements without values by a mask with values."""
    name = func.overloadpacket.__name__
    if name == "masked_scatter_backward":
        return args[0].new_empty(args[2])
    if name == "index":
        places: list[torch.Tensor | None] = []  # numbers in the place of masks
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if is_mask and not isinstance(index, FakeTensor):
                with _disable_current_modes():
                    number = int(index.sum())
                places += [torch.empty(number, dtype=torch.int64)] * index.dim()
            else:
                places.append(index)
        args = (args[0], places)
    return func(*args, **kwargs)  # without the values of a mask it fails again, and names the operation
