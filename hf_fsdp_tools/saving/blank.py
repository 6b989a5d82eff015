"""Models without values for a checkpoint that is to be written anew: of the files alone, or with an adapter in them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, opened, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.loading.adapter_state import restore_adapter
from hf_fsdp_tools.loading.conversion import assume_conversions, persistent_tensors, set_conversions
from hf_fsdp_tools.loading.fill import fill_shards
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT, STAGING_BYTES
from hf_fsdp_tools.loading.match import Match, match_checkpoint
from hf_fsdp_tools.loading.opening import Checkpoint
from hf_fsdp_tools.loading.vocabulary import resize_vocabulary
from hf_fsdp_tools.modeling.configs import set_generation_config
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype
from hf_fsdp_tools.modeling.model_class import model_class
from hf_fsdp_tools.modeling.quantization import forget_quantization
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.saving.merge_adapter import adapted_parameters, mergeable, with_merged
from hf_fsdp_tools.sharding.adapter_files import read_adapter_config
from hf_fsdp_tools.sharding.adapters import load_adapter
from hf_fsdp_tools.text import listed, listed_lines

_FIT = (
    "Give the class that was trained with --auto-class (auto_class), and the config that belongs to it with --config "
    "(config)."
)

_TASKS = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""Auto class of the base by PEFT's `task_type`, as PEFT's own auto classes have it, where the head differs from that of
language models."""

_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
"""Weights of heads of transformers' classifiers, with one row per label."""


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A model without values, and which files and adapters hold them."""

    model: PreTrainedModel
    """What is to be saved."""

    match: Match
    """Which stored tensors fill which tensors of the model, or of the base of an adapter."""

    wrappers: tuple[nn.Module, ...] = ()
    """Adapted modules of the base."""

    merged: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameter of an adapted module to the parameter of `model` that is its merged value."""

    held: frozenset[str] = frozenset()
    """Keys of the base whose values an adapter holds in place of the files."""


def blank_model(
    checkpoint: Checkpoint, *, auto_class: Any, dtype: torch.dtype | None, trust_remote_code: bool
) -> Blank:
    """The model of a checkpoint, on meta; each tensor has the dtype in which it is stored.

    No rank communicates.
    """
    auto_class = model_class(checkpoint.config, auto_class, trust_remote_code=trust_remote_code, as_stored=True)
    model = _build(checkpoint, auto_class, checkpoint.index.dtype, trust_remote_code, {})
    match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    rows = {key: shape[0] for key, shape, _ in match.mismatched if key in _embeddings(model)}
    if rows:  # tokens were added, and the config is that of the original model
        resize_vocabulary(model, next(iter(rows.values())), None)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    _refuse_other_shapes(match, frozenset())
    if match.unexpected_keys:
        told = (
            f"{match.index.name!r} holds {len(match.unexpected_keys)} tensors for which {type(model).__name__} has no "
            f"place: {listed(sorted(match.unexpected_keys))}"
        )
        if match.index.is_model_state:
            raise CheckpointError(f"{told}. {_FIT}")
        if rank_and_size()[0] == 0:
            warnings.warn(f"{told}. They are left out.", stacklevel=2)
    quantized = {key for key, stored in match.index.tensors.items() if isinstance(stored, QuantizedTensor)}
    for key, made_of in match.loaded.items():
        found = {match.index.source_dtype(source) for source in made_of.sources}
        chosen = {dtype} if dtype is not None and made_of.sources & quantized else found
        own, tensor = next(iter(chosen), None), match.state[key]
        if len(chosen) == 1 and own is not None and own.is_floating_point and tensor.is_floating_point():
            tensor.data = tensor.data.to(own if own.itemsize > 1 else None)
    set_conversions(model, match.load_map)
    forget_quantization(model)
    assume_conversions(model)
    return Blank(model=model, match=match)


def blank_merged(
    checkpoint: Checkpoint,
    adapter: str,
    hub_kwargs: Mapping[str, Any],
    *,
    auto_class: Any,
    trust_remote_code: bool,
) -> Blank:
    """The base of a PEFT adapter as it will be with the adapter merged into it; the adapter has its values.

    PEFT adapts and later merges the base by its own code, so parameters of the base are on the CPU. Until they are read
    each has a single element for all, which takes no memory.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    read = partial(_look_at, adapter)
    written, shapes = opened("opening the adapter", adapter, read, hub_kwargs)
    with agreed("building the model"):
        auto_class = auto_class or _class_for(written, checkpoint.config, trust_remote_code)
        heads = [shapes[key][0] for key in _HEADS if written.get("task_type") in _TASKS and key in shapes]
        labels = {"num_labels": heads[0]} if heads else {}
        dtype = config_dtype(checkpoint.config) or checkpoint.index.dtype
        model = _build(checkpoint, auto_class, dtype, trust_remote_code, labels)
        rows = {n for key in _embeddings(model) if (n := _held_rows(key, shapes)) is not None}
        if rows:
            resize_vocabulary(model, max(rows), None)
        held = frozenset(key for key in persistent_tensors(model) if shapes.keys() & {key, _inside(key)})
        _put_on_cpu(model, held)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        _refuse_other_shapes(match, held)
        set_conversions(model, match.load_map)
    adapted = load_adapter(model, adapter, **hub_kwargs)
    with agreed("preparing the adapter"):
        wrappers = tuple(mergeable(adapted))
        base = base_of(adapted)
        merged = {
            old: nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False)
            for wrapper in wrappers
            for _, old in adapted_parameters(wrapper)
        }
        # What is trained whole has a copy for the adapter's values; the base keeps its own.
        trained = {key for key in held if "modules_to_save" in base.get_submodule(key.rpartition(".")[0])._modules}
        filled = {id(match.state[key]) for key in held - trained}
        saved = with_merged(base, merged)
    assert isinstance(saved, PreTrainedModel)
    held = frozenset(key for key, tensor in match.state.items() if id(tensor) in filled)  # with tied names
    return Blank(model=saved, match=match, wrappers=wrappers, merged=merged, held=held)


def blank_adapted(checkpoint: Checkpoint, *, auto_class: Any, trust_remote_code: bool) -> Any:
    """The `PeftModel` of a training state with an adapter in it: adapter and embeddings have values, all else has none.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    state = checkpoint.adapter_state
    assert state is not None
    with agreed("building the model"):
        written = read_adapter_config(Path(state.config)) or {}
        auto_class = auto_class or _class_for(written, checkpoint.config, trust_remote_code)
        dtype = config_dtype(checkpoint.config) or checkpoint.index.dtype
        model = _build(checkpoint, auto_class, dtype, trust_remote_code, {})
        held = frozenset(_embeddings(model))  # of which PEFT saves those that it adapts
        _put_on_cpu(model, held)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        own = {id(match.state[key]) for key in held}
        loaded = {key: stored for key, stored in match.loaded.items() if id(match.state[key]) in own}
    fill_shards(
        model,
        replace(match, loaded=loaded),
        doing="reading the embeddings",
        staging_bytes=STAGING_BYTES,
        in_flight=REQUESTS_IN_FLIGHT,
        progress=False,
    )
    return restore_adapter(model, state, is_trainable=False)


# ---- classes ----


def _class_for(written: Mapping[str, Any], config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class of an adapter's base: for its task, or as it was when the adapter was made, or as the config says."""
    task = _TASKS.get(str(written.get("task_type")))
    if task is not None:
        return getattr(transformers, task)
    made_on = (written.get("auto_mapping") or {}).get("base_model_class")
    own = getattr(transformers, made_on, None) if isinstance(made_on, str) else None
    if isinstance(own, type) and issubclass(own, PreTrainedModel):
        return own
    return model_class(config, trust_remote_code=trust_remote_code, as_stored=True)


def _build(
    checkpoint: Checkpoint,
    auto_class: Any,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    model_kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    model = build_meta_model(
        checkpoint.config,
        auto_class=auto_class,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **model_kwargs,
    )
    if packed_linears(model):
        raise ConfigError(
            f"{checkpoint.name!r} holds weights in 4 bits (bitsandbytes), which can neither be written in another "
            "layout nor take an adapter without rounding it. Give the plain model that it was made of; of an adapter, "
            "with --base (base)."
        )
    set_generation_config(model, checkpoint.generation_config)
    return model


# ---- tensors ----


def _refuse_other_shapes(match: Match, held: frozenset[str]) -> None:
    wrong = [(key, list(a), list(b)) for key, a, b in match.mismatched if key not in held]
    if wrong:
        rows = listed_lines(f"{key}: {a} in the files, {b} by the config" for key, a, b in wrong)
        raise CheckpointError(
            f"{len(wrong)} tensors of {match.index.name!r} have another shape than config and class say:\n{rows}\n"
            f"{_FIT}"
        )


def _embeddings(model: PreTrainedModel) -> list[str]:
    """The keys of the input embedding's weight."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        # transformers' answer for models of images and sound, which have no table of tokens
        return []
    return [key for key, tensor in persistent_tensors(model).items() if tensor is weight]


def _inside(key: str) -> str:
    """The key of a parameter of a module that PEFT has wrapped."""
    module, _, name = key.rpartition(".")
    return f"{module}.base_layer.{name}"


def _held_rows(key: str, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many tokens an adapter has an embedding for; None where it holds no embedding."""
    shape = shapes.get(key) or shapes.get(_inside(key))
    return shape[0] if shape else None


def _put_on_cpu(model: nn.Module, held: frozenset[str]) -> None:
    """Give meta tensors a place on the CPU: real memory if an adapter fills them, one element for all if not."""
    keys = {id(tensor): key for key, tensor in persistent_tensors(model).items() if key in held}
    made: dict[int, Any] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                    value = torch.zeros(tensor.shape, dtype=tensor.dtype) if id(tensor) in keys else one
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(value, requires_grad=False) if is_parameter else value
                    new.__dict__.update(tensor.__dict__)
                    made[id(tensor)] = (tensor, new)
                store[name] = made[id(tensor)][1]


# ---- adapters ----


def _look_at(adapter: str, hub_kwargs: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, tuple[int, ...]]]:
    """An adapter's config, and the shapes of its tensors under the names of the base's modules."""
    path = local_path(adapter)
    folder = (
        fetch(adapter, "adapter_*", **hub_kwargs)[0] if path is None else path / (hub_kwargs.get("subfolder") or "")
    )
    written = read_adapter_config(folder)
    if written is None:
        raise CheckpointError(
            f"No adapter_config.json in {str(folder)!r}. Give a folder that save_pretrained wrote for an adapter, or a "
            "hub name."
        )
    files = [folder / name for name in ("adapter_model.safetensors", "adapter_model.bin")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return written, {}  # opening it says so
    stored = CheckpointIndex.open(file, allow_pickle=True).tensors
    return written, {key.removeprefix("base_model.model."): tuple(tensor.shape) for key, tensor in stored.items()}
