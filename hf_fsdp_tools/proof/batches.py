"""Random batches for a model, by rule from the signature of its forward pass and its configuration.

`candidates` gives several batches, the fullest first: with images, sound and labels, then with less. A model that
reads images or sound among words gets as many placeholders as it makes features.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

ROWS, WORDS, DECODER_WORDS = 2, 12, 6
MOST_WORDS = 100
"""Words are below; the tokens that stand for images and sound are not."""
_VISION = (
    "vision_config", "vision", "image_config", "encoder", "backbone_config", "thinker_config", "vision_encoder_config",
    "vit_config", "vq_config",
)  # fmt: skip
_AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "encoder", "speech_config")
_MEL_BINS = (
    "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", "num_mels", "input_features_dim",
    "input_feat_size",
)  # fmt: skip
_MEL_BINS_FIRST = "whisper|qwen2audio|voxtral|audioflamingo|qwen3asr|omni|moss|glmasr|musicflamingo"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor of a batch, or a constant: `kind` is float, int, ones, words, same (as another input) or value."""

    kind: str
    shape: tuple[int, ...] = ()
    high: int = 2
    low: int = 0
    value: Any = None
    without: frozenset[int] = frozenset()


Batch = dict[str, Spec]


def random_batch(batch: Batch, seed: int) -> dict[str, Any]:
    """The tensors of a batch from `candidates`; other values for another seed, the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, spec in batch.items():
        if spec.kind == "float":
            made[name] = torch.randn(spec.shape, generator=generator)
        elif spec.kind == "int":
            made[name] = torch.randint(spec.low, max(spec.high, spec.low + 1), spec.shape, generator=generator)
        elif spec.kind == "ones":
            made[name] = torch.ones(spec.shape, dtype=torch.long)
        elif spec.kind == "words":  # no special tokens, but placeholders of images and sound in front
            usual = torch.tensor([i for i in range(spec.low, spec.high) if i not in spec.without] or [spec.low])
            words = usual[torch.randint(len(usual), spec.shape, generator=generator)]
            for start, length, token in spec.value:
                words[:, start : start + length] = token
            made[name] = words
        elif spec.kind == "same":
            made[name] = made[spec.value].clone()
        else:
            made[name] = spec.value
    return made


def candidates(model: nn.Module, words: int = WORDS) -> Iterator[Batch]:
    """Batches of rows of so many words that a plain model on the CPU may take, the fullest first."""
    names = list(inspect.signature(model.forward).parameters)
    full = _senses(model, names)
    text = _words(model, names, words)
    typed = {"mm_token_type_ids": Spec(kind="int", shape=(ROWS, words), high=1)}  # Molmo 2 does not train without
    typed = text | typed if text and "mm_token_type_ids" in names else {}
    tiles = 2 if hasattr(model.config, "image_grid_pinpoints") else 1  # the image, and all of it
    described = [senses | _with_placeholders(model, text, senses) for senses in _variants(full, names, tiles)]
    for batch in (*described, full, text, full | text, typed):
        for labels in (_labels(model, names, batch), {}):
            if batch | labels:
                yield batch | labels


def _config(model: nn.Module, *names: str) -> list[Any]:
    config: Any = model.config
    return [config, *(getattr(config, name) for name in names if getattr(config, name, None) is not None)]


def _first(configs: list[Any], *names: str, default: Any = None) -> Any:
    for config in configs:
        for name in names:
            value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
            if value is not None:
                return value
    return default


def _words(model: nn.Module, names: list[str], length: int) -> Batch:
    config: Any = model.config
    text = [config.get_text_config(decoder=True), *_config(model, "text_config", "text", "decoder")]
    size = _first(text, "vocab_size", "n_tokens", "n_vocab", default=100)
    special = frozenset(_special(config.to_dict()))
    ids = _word_spec(length, size, special)
    batch: Batch = {}
    if "input_ids" in names:
        batch["input_ids"] = ids
        if "attention_mask" in names:
            batch["attention_mask"] = Spec(kind="ones", shape=(ROWS, length))
    if "qformer_input_ids" in names:
        batch["qformer_input_ids"] = ids
    if "cross_attention_mask" in names:
        tiles = _first(_config(model, "vision_config"), "max_num_tiles", default=1)
        batch["cross_attention_mask"] = Spec(kind="ones", shape=(ROWS, length, 1, tiles))
    if "decoder_input_ids" in names and not getattr(config, "use_decoder_only_language_model", False):
        decoder = _first(_config(model, "decoder", "text_config"), "vocab_size", default=size)
        batch["decoder_input_ids"] = _word_spec(DECODER_WORDS, decoder, special)
    return batch


def _word_spec(length: int, vocabulary: int, special: frozenset[int]) -> Spec:
    high = max(min(vocabulary - 1, MOST_WORDS), 6)
    return Spec(kind="words", shape=(ROWS, length), low=5, high=high, value=(), without=special)


def _special(sizes: dict[str, Any]) -> Iterator[int]:
    """The ids of all special tokens of a configuration."""
    for name, value in sizes.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif re.search("token_?(id|index|idx)|_(id|index)s?$", str(name)):
            yield from (item for item in (value if isinstance(value, list | tuple) else [value]) if type(item) is int)


def _senses(model: nn.Module, names: list[str]) -> Batch:
    """Images, videos and sound."""
    vision = _config(model, *_VISION)[::-1]
    vision += [sub for config in vision if (sub := getattr(config, "vision_config", None)) is not None]
    audio = _config(model, *_AUDIO)[::-1]
    mels = _first(audio, *_MEL_BINS, default=80)
    ticks = 2 * _first(audio, "max_source_positions", "n_window", default=32)
    batch = _images(model, names, vision) if "pixel_values" in names else {}
    if "input_features" in names:
        bins_first = re.search(_MEL_BINS_FIRST, type(model).__name__.lower())  # otherwise time is
        batch["input_features"] = Spec(kind="float", shape=(ROWS, mels, ticks) if bins_first else (ROWS, ticks, mels))
        for mask in ("feature_attention_mask", "input_features_mask"):
            if mask in names:
                batch[mask] = Spec(kind="value", value=torch.ones(ROWS, ticks, dtype=torch.bool))
    if "input_values" in names:
        batch["input_values"] = Spec(kind="float", shape=(ROWS, 1920))
    return batch


_GRIDS = ("image_grid_thw", "image_grid_hws", "image_grid_hw", "grid_thw", "spatial_shapes")


def _images(model: nn.Module, names: list[str], vision: list[Any]) -> Batch:
    """One image for each row: as its patches where their grid or places are an input too."""
    height, width = _pair(_first(vision, "image_size", "img_size", "crop_size", default=64))
    channels = _first(vision, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    patch = _pair(_first(vision, "patch_size", default=8))[0]
    merge = _first(vision, "spatial_merge_size", "merge_size", default=2)
    batch: Batch = {}
    grid = next((name for name in _GRIDS if name in names), None)
    place = next((name for name in ("image_position_ids", "pixel_position_ids") if name in names), None)
    if place:
        patch = _first(vision, "model_patch_size", default=patch)
        side = 2 * _first(vision, "pooling_kernel_size", default=1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
        batch["pixel_values"] = Spec(kind="float", shape=(ROWS, side * side, channels * patch * patch))
        batch[place] = Spec(kind="value", value=places.expand(ROWS, -1, -1))
    elif grid == "spatial_shapes":
        batch["pixel_values"] = Spec(kind="float", shape=(ROWS, 16, channels * patch * patch))
        batch[grid] = Spec(kind="value", value=torch.tensor([[4, 4]] * ROWS))
        batch["pixel_attention_mask"] = Spec(kind="ones", shape=(ROWS, 16))
    elif grid:
        depth = _first(vision, "temporal_patch_size", "patch_temporal", default=1)
        side = 4 * max(1, (merge if isinstance(merge, int) else 2) // 2)
        batch["pixel_values"] = Spec(kind="float", shape=(ROWS * side * side, channels * depth * patch * patch))
        sizes = [1, side, side] if "thw" in grid else [side, side]
        batch[grid] = Spec(kind="value", value=torch.tensor([sizes] * ROWS))
        for name in {"image_merge_sizes", "merge_sizes"} & {*names}:
            batch[name] = Spec(kind="value", value=torch.tensor([2] * ROWS))
    elif re.search("Video|Vivit|Timesformer|VJEPA", type(model).__name__) and "Llava" not in type(model).__name__:
        frames = _first(vision, "num_frames", "frames_per_clip", default=4)
        batch["pixel_values"] = Spec(kind="float", shape=(ROWS, frames, channels, height, width))
    else:
        batch["pixel_values"] = Spec(kind="float", shape=(ROWS, channels, height, width))
        if "aspect_ratio_ids" in names:  # one image of so many tiles
            tiles = _first(vision, "max_num_tiles", default=1)
            batch["pixel_values"] = Spec(kind="float", shape=(ROWS, 1, tiles, channels, height, width))
            batch["aspect_ratio_ids"] = Spec(kind="ones", shape=(ROWS, 1))
            batch["aspect_ratio_mask"] = Spec(kind="ones", shape=(ROWS, 1, tiles))
        if "image_sizes" in names:
            batch["image_sizes"] = Spec(kind="value", value=torch.tensor([[height, width]] * ROWS))
    return batch


def _variants(senses: Batch, names: list[str], tiles: int) -> Iterator[Batch]:
    """The same senses in the shapes that models take them in: images without their sizes and as lists of tiles, patches
    as small images; then images alone, and sound alone."""
    yield senses
    pixels = senses.get("pixel_values")
    if pixels is None:
        return
    bare = {name: spec for name, spec in senses.items() if name != "image_sizes"}
    if len(pixels.shape) == 4:
        tiled = {"pixel_values": replace(pixels, shape=(ROWS, tiles, *pixels.shape[1:]))}
        mask = {"pixel_attention_mask": Spec(kind="value", value=torch.ones(ROWS, tiles, dtype=torch.bool))}
        yield from (bare, senses | tiled, bare | tiled) if "image_sizes" in senses else (senses | tiled,)
        if "pixel_attention_mask" in names:
            yield bare | tiled | mask
    elif len(pixels.shape) == 2:
        count, size = pixels.shape
        side = round((size / 3) ** 0.5)
        yield senses | {"pixel_values": replace(pixels, shape=(count, 3, side, side))}
        yield senses | {"pixel_values": replace(pixels, shape=(count, 2 * side, 2 * side, 3))}
    sound = [name for name in senses if name.startswith("input_") or name == "feature_attention_mask"]
    if sound:
        yield from _variants({name: spec for name, spec in senses.items() if name not in sound}, names, tiles)
        yield {name: senses[name] for name in sound}


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = list(size.values())
    if isinstance(size, list | tuple):
        return (int(size[-2]), int(size[-1])) if len(size) > 1 else (int(size[0]), int(size[0]))
    return int(size), int(size)


FEATURES = (
    ("get_image_features", ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "spatial_shapes",
      "image_grid_hw", "image_position_ids", "image_merge_sizes"),
     ("image_token_id", "image_token_index", "im_token_id", "image_pad_token_id", "media_placeholder_token_id",
      "img_context_token_id", "image_soft_token_id")),
    ("get_audio_features", ("input_features", "input_features_mask", "feature_attention_mask", "input_values"),
     ("audio_token_id", "audio_token_index", "audio_pad_token_id")),
)  # fmt: skip


def _with_placeholders(model: nn.Module, words: Batch, senses: Batch) -> Batch:
    """Words with as many placeholders as there are features of images and sound."""
    if "input_ids" not in words:
        return words
    places, start = [], 1
    for method, inputs, tokens in FEATURES:
        token = _first(_config(model, "text_config", "thinker_config"), *tokens)
        given = {name: spec for name, spec in senses.items() if name in inputs}
        function = getattr(model, method, None) or getattr(getattr(model, "model", None), method, None)
        if not given or token is None or function is None:
            continue
        try:
            accepted = inspect.signature(function).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            made = {k: v for k, v in random_batch(given, 0).items() if k in accepted or takes_all}
            with torch.no_grad():
                features = function(**made)
            length = _num_features(features, model) // ROWS
        except Exception:
            continue
        places.append((start, length, token))
        start += length
    spec = words["input_ids"]
    total = start - 1 + spec.shape[1]
    longer = {"input_ids": replace(spec, shape=(ROWS, total), value=tuple(places))}
    if "attention_mask" in words:
        longer["attention_mask"] = Spec(kind="ones", shape=(ROWS, total))
    types = torch.zeros(ROWS, total, dtype=torch.long)
    for start, length, _ in places:
        types[:, start : start + length] = 1
    parameters = inspect.signature(model.forward).parameters
    if places and "mm_token_type_ids" in parameters:
        longer["mm_token_type_ids"] = Spec(kind="value", value=types)
    kind = type(model).__name__
    if places and "Gemma" in kind and "token_type_ids" in parameters:  # PaliGemma's mark what is predicted
        longer["token_type_ids"] = Spec(kind="value", value=1 - types if "PaliGemma" in kind else types)
    return words | longer


def _num_features(features: Any, model: nn.Module) -> int:
    """How many vectors the features are."""
    given = (getattr(features, name, None) for name in ("pooler_output", "last_hidden_state", "deepstack_features"))
    found = next((each for each in given if each is not None), features)
    if isinstance(found, list) and isinstance(found[0], tuple):  # of each layer of words that they are added to
        found = found[0][1]
    if isinstance(found, list | tuple):
        return sum(_num_features(item, model) for item in found if item is not None)
    return int(found.shape[:-1].numel())


def _labels(model: nn.Module, names: list[str], batch: Batch) -> Batch:
    kind = type(model).__name__
    config: Any = model.config
    if {"start_positions", "end_positions"} <= set(names):
        return dict.fromkeys(("start_positions", "end_positions"), Spec(kind="int", shape=(ROWS,), high=WORDS))
    if "labels" not in names:
        return {"return_loss": Spec(kind="value", value=True)} if "return_loss" in names else {}
    classes = getattr(config, "num_labels", 2) or 2
    if re.search("(Sequence|Image|Audio|Video|SceneText)Classification", kind):
        return {"labels": Spec(kind="int", shape=(ROWS,), high=classes)}
    if "TokenClassification" in kind and "input_ids" in batch:
        return {"labels": Spec(kind="int", shape=batch["input_ids"].shape, high=classes)}
    if re.search("CTC|RNNT|TDT", kind):
        size = min(getattr(config, "vocab_size", 20) or 20, 30)
        return {"labels": Spec(kind="int", shape=(ROWS, 2), low=1, high=size - 1)}
    if "decoder_input_ids" in batch and not re.search("Dual|Model$", kind):
        return {"labels": Spec(kind="same", value="decoder_input_ids")}
    if "input_ids" in batch and re.search("LM|Generation|Reasoning|PreTraining|Head|ImageTextToText", kind):
        return {"labels": Spec(kind="same", value="input_ids")}
    return {}
