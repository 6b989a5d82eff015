"""A batch of the right shapes for any architecture, with images: what the model's image processor makes of a picture,
how many tokens stand for it, and the values that follow from the batch (where images stand, grids, positions, masks).

Code of models for images reads them. Weights and activations have no values; code that reads theirs cannot be followed.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

# From the module itself: in `transformers`, version 5.17 has these only where torchvision is installed.
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    AutoImageProcessor,
    get_image_processor_class_from_name,
)

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.kernels import MAKES_NOTHING, tensors_in
from hf_fsdp_tools.foresight.tracing.repeats import short_copy
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.text import first_line

_SIDE = 512  # Height and width of a picture where neither the setup nor the configuration says one. (assumed)

_NAMED = {name: name for name in ("patch_size", "temporal_patch_size", "image_grid_pinpoints")}
_NAMED |= {"merge_size": "spatial_merge_size"}
"""Settings of image processors that configurations have, and their names there."""


class NoImagesError(Exception):
    """No images can be made for a model that takes some; the message says why."""


@dataclass(frozen=True)
class Images:
    """The images of a batch."""

    tensors: Mapping[str, torch.Tensor]  # Arguments of the model, for all sequences; all pixels are 1
    count: int  # Images of each sequence
    tokens: int  # That stand for each image, and are replaced by its features
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
    made, tokens = _look(model, count, setup.image_size or (_side(config) or _SIDE,) * 2)
    if (needed := count * (tokens + 2) + 1) > setup.seq_len:
        fact = f"{count} × {tokens:,} tokens of images with marks are {needed:,}, and seq_len is {setup.seq_len:,}"
        if setup.images is None:
            raise NoImagesError(fact)
        raise ConfigError(f"{fact}. Give a seq_len of {needed:,} or more, or fewer or smaller images.")
    ids = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    tensors = {name: _repeated(value, setup.batch_size) for name, value in made.items() if name in takes}
    return Images(tensors, count, tokens, next((one for one in ids if isinstance(one, int)), 0))


@lru_cache(maxsize=8)  # the vision tower runs once for all batches of a search
def _look(model: Any, count: int, size: tuple[int, int]) -> tuple[dict[str, torch.Tensor], int]:
    """What a processor makes of the images of one sequence, and how many tokens stand for each."""
    try:
        from PIL import Image

        made = _processor(model.config)([[Image.new("RGB", size[::-1])] * count], return_tensors="pt")
        tensors = {name: _repeated(value, 1) for name, value in made.items() if isinstance(value, torch.Tensor)}
        return tensors, _features(model, tensors) // count
    except Exception as error:  # of transformers' code for any kind of model: the text is followed all the same
        raise NoImagesError(f"{type(error).__name__}: {first_line(error)}") from error


def _side(config: Any) -> int | None:
    """Height and width of the images for which a vision tower was made; None if it takes any."""
    side = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    side = max(side) if isinstance(side, list | tuple) else side
    return side if isinstance(side, int) and side > 0 else None


def _processor(config: Any) -> Any:
    """The checkpoint's image processor, or that of its kind with the sizes of its configuration."""
    if name := getattr(config, "name_or_path", ""):
        path = local_path(name)
        with suppress(OSError, ValueError):  # the checkpoint has none
            return AutoImageProcessor.from_pretrained(path.parent if path and path.is_file() else name, backend="pil")
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if not names:
        raise LookupError(f"transformers has no image processor for {config.model_type}")
    kind: Any = get_image_processor_class_from_name(names.get("pil") or next(iter(names.values())))
    plain, settings = kind(), dict[str, Any]()
    for name, own in _NAMED.items():
        value = getattr(config, own, getattr(getattr(config, "vision_config", None), own, None))
        if value is not None and hasattr(plain, name):
            is_pair = isinstance(getattr(plain, name), dict) and isinstance(value, int)
            settings[name] = {"height": value, "width": value} if is_pair else value
    side = 0 if "image_grid_thw" in plain.model_input_names else _side(config) or 0
    tile = dict(getattr(plain, "max_image_size", None) or {}).get("longest_edge")
    for name in ("size", "crop_size", "max_image_size") if side else ():
        sizes = dict(getattr(plain, name, None) or {})
        times = sizes["longest_edge"] // tile if tile and name == "size" else 1  # tiles of a picture
        settings |= {name: {key: side * times for key, size in sizes.items() if size}} if sizes else {}
    return kind(**settings)


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """A tensor of one sequence for several; pixels are 1, since models leave out those that are 0."""
    if tensor.is_floating_point():
        return tensor.new_ones(()).expand(times * tensor.shape[0], *tensor.shape[1:])
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _features(model: nn.Module, made: Mapping[str, torch.Tensor]) -> int:
    """How many tokens the features of images stand for."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), known_values() as values:
        twin: Any = short_copy(model, ())
        give_memory(twin, {name: torch.float32 for name, one in twin.named_parameters() if one.is_floating_point()})
        takes = inspect.signature(twin.get_image_features).parameters
        output = twin.get_image_features(**{key: values.as_fake(made[key]) for key in made if key in takes})
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


_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""How classes end whose labels are one class for each sequence or image."""


def batch_of(model: nn.Module, setup: TrainingSetup, images: Images | None = None) -> dict[str, Any]:
    """Arguments of the model's forward pass for one micro-step of training: tensors on the CPU, with any values.

    Sequences are full and not packed, so that no mask is given.
    """
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    shape = (setup.batch_size, setup.seq_len)
    batch: dict[str, Any]
    match getattr(model, "main_input_name", "input_ids"):
        case "input_ids":
            batch = {"input_ids": _integers(*shape)} | (_with_images(config, takes, shape, images) if images else {})
        case "pixel_values":
            sides = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
            batch = {"pixel_values": torch.zeros(setup.batch_size, config.num_channels, *sides)}
        case "input_features" if hasattr(config, "max_source_positions"):
            frames = 2 * config.max_source_positions  # the encoder's convolutions halve them
            batch = {"input_features": torch.zeros(setup.batch_size, config.num_mel_bins, frames)}
        case other:
            raise ConfigError(f"{type(model).__name__} takes {other}, of which no batch can be made here.")
    if "start_positions" in takes:
        return batch | {name: _integers(setup.batch_size) for name in ("start_positions", "end_positions")}
    if "labels" not in takes:
        raise ConfigError(
            f"{type(model).__name__} takes no labels, so it gives no loss to train with. Choose another auto_class."
        )
    return batch | {"labels": _integers(*shape[: 1 if type(model).__name__.endswith(_ONE_LABEL) else 2])}


def _with_images(config: Any, takes: Any, shape: tuple[int, int], images: Images) -> dict[str, torch.Tensor]:
    """Tokens that stand for images, each image between marks, and the images' tensors for all sequences."""
    ids, is_image = _integers(*shape), _integers(*shape)
    for place in range(1, images.count * (images.tokens + 2), images.tokens + 2):
        where = slice(place + 1, place + 1 + images.tokens)
        ids[:, place] = getattr(config, "vision_start_token_id", None) or 0
        ids[:, where], is_image[:, where] = images.token_id, 1
    batch = {"input_ids": ids, **images.tensors}
    batch |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    return batch


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# ---- values ----

_MOST_BYTES = 2**26  # A larger result is not followed: token ids are, masks of long sequences squared not. (assumed)


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Runs operations whose inputs have values a second time on real tensors, and answers where values are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._known: Any = WeakTensorKeyDictionary()
        """Fake tensor -> real one; views of one memory are views of one real memory."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; None if they are not known."""
        real: torch.Tensor | None = self._known.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return real

    def as_fake(self, real: Any) -> Any:
        """Fake tensors with the values of real ones, nested alike; a fake tensor as it is."""
        if isinstance(real, FakeTensor):
            return real
        fake = tree_map_only(torch.Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), real)
        self._keep(fake, real)
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        follows = not is_random and func.overloadpacket.__name__ not in MAKES_NOTHING
        is_known = follows and all(self.of(one) is not None for one in inputs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not is_known:
                return self._shaped_by_a_mask(func, args, kwargs)
            return self.as_fake(self._real(func, args, kwargs))
        if not is_known and func._schema.is_mutable and (written := self.of(args[0])) is not None:
            address = written.untyped_storage()._cdata  # into which something unknown is written
            for one in [fake for fake, real in self._known.items() if real.untyped_storage()._cdata == address]:
                del self._known[one]
        elif is_known and all(one.untyped_storage().nbytes() <= _MOST_BYTES for one in tensors_in(result)):
            self._keep(result, self._real(func, args, kwargs))
        return result

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            return func(*tree_map_only(torch.Tensor, self.of, args), **tree_map_only(torch.Tensor, self.of, kwargs))

    def _keep(self, fake: Any, real: Any) -> None:
        for one, value in zip(tree_leaves(fake), tree_leaves(real), strict=True):
            if isinstance(one, FakeTensor):
                self._known[one] = value

    def _shaped_by_a_mask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that chooses elements without values by a mask with values."""
        name = func.overloadpacket.__name__
        if name == "masked_scatter_backward":
            return args[0].new_empty(args[2])
        if name == "index":
            places: list[torch.Tensor | None] = []  # numbers in the place of masks
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                if is_mask and (mask := self.of(index)) is not None:
                    index = torch.empty(_count(mask, mask.shape), dtype=torch.int64)
                    places += [index] * (mask.dim() - 1)
                places.append(index)
            args = (args[0], places)
        return func(*args, **kwargs)  # without the values of a mask it fails again, and names the operation


class _Lists(TorchFunctionMode):
    """`torch.tensor` of tensors without dimensions takes their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (tree_map_only(FakeTensor, lambda one: one.item(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def known_values() -> Iterator[Values]:
    """A block, within a `FakeTensorMode`, in which values that follow from the batch can be read."""
    kind: Any = FakeTensor
    plain = kind.tolist

    def tolist(fake: FakeTensor) -> Any:
        real = values.of(fake)
        return plain(fake) if real is None else real.tolist()

    # torch's own reads one element after the other: seconds for the tokens of a long sequence
    with replaced(kind, tolist=tolist), _Lists(), Values() as values:
        yield values


def _count(mask: torch.Tensor, shape: torch.Size) -> int:
    """How many elements of a shape a real mask chooses."""
    with _disable_current_modes():
        return int(mask.expand(shape).sum())
