"""Models without values, and where their values are: in files alone, or in an adapter too."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, opened, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError, warn
from hf_fsdp_tools.loading.adapter_state import restore_adapter
from hf_fsdp_tools.loading.conversion import assume_conversions, persistent_tensors, set_conversions
from hf_fsdp_tools.loading.fill import fill_shards
from hf_fsdp_tools.loading.match import Match, match_checkpoint
from hf_fsdp_tools.loading.opening import Checkpoint, Source, adapter_shapes, base_options_of
from hf_fsdp_tools.loading.vocabulary import resize_vocabulary
from hf_fsdp_tools.modeling.configs import model_class, set_generation_config
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype
from hf_fsdp_tools.modeling.module_tree import plain_name, slots, swap
from hf_fsdp_tools.modeling.packed import forget_quantization, require_floats, stored_quantization
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.sharding.adapters import load_adapter, read_adapter_config
from hf_fsdp_tools.sharding.allocate import with_data
from hf_fsdp_tools.streaming.merging import Adapted, mergeable, with_merged
from hf_fsdp_tools.text import listed, listed_lines

_FIT = (
    "Give the class that was trained with --auto-class (auto_class), and the config that belongs to it with --config "
    "(config)."
)


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A model without values, and which files and adapters hold them."""

    model: PreTrainedModel
    match: Match
    """Which stored tensors fill which tensors of the model, or of the base of an adapter."""
    loaded: Mapping[int, str]
    """The key in `match.loaded` of each tensor that is read from files, by its identity; other tensors hold values."""
    adapted: Adapted = field(default_factory=dict)
    merged: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameter of an adapted module to the parameter of `model` that is its merged value."""
    quantization: Mapping[str, Any] | None = None
    """How the base of an adapter is quantised in its files."""
    copied: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors on meta by stored key, for stored ones that are copied next to those of the model (`requantize`)."""


@agreed("building the model")
def material_of_model(
    checkpoint: Checkpoint, auto_class: Any, dtype: torch.dtype | None, trust_remote_code: bool
) -> ExportSource:
    """The model of a checkpoint, on meta; each tensor has the dtype in which it is stored.

    Every rank must call; the ranks exchange errors.
    """
    model = _build(checkpoint, None, auto_class, trust_remote_code)
    match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    rows = [shape[0] for key, shape, _ in match.mismatched if key in _embeddings(model)]
    if rows:  # tokens were added, and the config is that of the original model
        resize_vocabulary(model, rows[0], None)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    if match.unexpected_keys:
        fact = (
            f"{match.index.name!r} holds {len(match.unexpected_keys)} tensors for which {type(model).__name__} has no "
            f"place: {listed(sorted(match.unexpected_keys))}"
        )
        if match.index.is_model_state:
            raise CheckpointError(f"{fact}. {_FIT}")
        if rank_and_size()[0] == 0:
            warn(f"{fact}. They are left out.")
    for key, stored in match.loaded.items():
        dtypes = {match.index.source_dtype(source, floats=dtype) for source in stored.sources}
        own = dtypes.pop() if len(dtypes) == 1 else None
        tensor = match.state[key]
        if own is not None and own.is_floating_point and own.itemsize > 1 and tensor.is_floating_point():
            tensor.data = tensor.data.to(own)
    set_conversions(model, match.load_map)
    forget_quantization(model)
    assume_conversions(model)
    return _material(model, match)


def material_of_adapter(
    checkpoint: Checkpoint, adapter: Source, auto_class: Any, trust_remote_code: bool, *, force: bool
) -> ExportSource:
    """The base of a PEFT adapter as it will be with the adapter merged into it; the adapter has its values.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    name = adapter.name
    written, shapes = opened("opening the adapter", name, lambda hub: _look_at(Source(name, hub)), dict(adapter.hub))
    with agreed("building the model"):
        if not force:
            _refuse_other_base(name, written.get("base_model_name_or_path") or "", checkpoint.name)
        model = _build(checkpoint, base_options_of(written, shapes), auto_class, trust_remote_code)
        if rows := [shapes[key][0] for key in _embeddings(model) if key in shapes]:
            resize_vocabulary(model, max(rows), None)
        of_adapter = persistent_tensors(model).keys() & shapes.keys()
        _put_on_cpu(model, of_adapter)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        set_conversions(model, match.load_map)
    adapted_model = load_adapter(model, name, **adapter.hub)
    with agreed("preparing the adapter"):
        base, adapted = base_of(adapted_model), mergeable(adapted_model)
        olds = [old for parameters in adapted.values() for old in parameters.values()]
        merged = {old: nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False) for old in olds}
        # What is trained whole has a copy for the adapter's values; the base keeps its own.
        filled = {
            id(match.state[key])
            for key in of_adapter
            if "modules_to_save" not in base.get_submodule(key.rpartition(".")[0])._modules
        }
        saved = with_merged(base, merged)
        quantization = stored_quantization(saved)
        forget_quantization(saved)
        assert isinstance(saved, PreTrainedModel)
        material = _material(saved, match, of_adapter, filled, adapted=adapted, merged=merged)
        return replace(material, quantization=quantization)


def adapted_model(checkpoint: Checkpoint, auto_class: Any, trust_remote_code: bool) -> Any:
    """The `PeftModel` of a training state with an adapter in it: adapter and embeddings have values, all else has none.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    state = checkpoint.adapter_state
    assert state is not None
    with agreed("building the model"):
        model = _build(checkpoint, checkpoint.base_options, auto_class, trust_remote_code)
        embeddings = _embeddings(model)  # of which PEFT saves those that it adapts
        names = () if state.holds_base else state.index.tensors  # biases and the like of the base, which were trained
        trained = [plain_name(name, adapters=True).removeprefix("base_model.model.") for name in names]
        _put_on_cpu(model, {*embeddings, *trained})
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        own = {id(match.state[key]) for key in embeddings}
        loaded = {key: stored for key, stored in match.loaded.items() if id(match.state[key]) in own}
    doing = "reading the embeddings"
    fill_shards(model, match.index, loaded, match, doing=doing, progress=False)
    return restore_adapter(model, state, is_trainable=False)


def _build(
    checkpoint: Checkpoint, base_options: Mapping[str, Any] | None, auto_class: Any, trust_remote_code: bool
) -> PreTrainedModel:
    """A model on meta: of the class for an adapter's task, of its base when it was made, or of the config."""
    options, of_adapter = {"auto_class": auto_class} if auto_class else {}, base_options is not None
    options = {**(base_options or {}), **options}
    if "auto_class" not in options:
        options["auto_class"] = model_class(checkpoint.config, trust_remote_code=trust_remote_code, as_stored=True)
    dtype = (config_dtype(checkpoint.config) if of_adapter else None) or checkpoint.index.dtype
    options |= {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = build_meta_model(checkpoint.config, **options)
    require_floats(
        model,
        f"{checkpoint.name!r} holds weights in 4 bits (bitsandbytes), which can neither be written in another "
        "layout nor take an adapter without rounding it. Give the plain model that it was made of; of an adapter, "
        "as STATE (base).",
    )
    set_generation_config(model, checkpoint.generation_config)
    return model


def _refuse_other_base(adapter: str, trained_on: str, given: str) -> None:
    """Refuse a base of another name than the adapter's. A model keeps the last part of its name in another folder; a
    folder that is gone may have been renamed, and is not spoken of."""
    ends = []
    for name in (trained_on, given):
        cached = [part.rsplit("--", 1)[-1] for part in Path(name).parts if part.startswith("models--")]
        ends.append((cached or [Path(name).name])[-1].lower())
    is_gone = trained_on.startswith((".", "/", "~")) and not Path(trained_on).exists()
    if trained_on and ends[0] != ends[1] and not is_gone:
        raise ConfigError(
            f"The adapter {adapter!r} was trained on {trained_on!r}, and {given!r} has another name. Give that base, "
            "or merge all the same, as into the plain form of a base in 4 bits, with --force (force=True)."
        )


def _look_at(adapter: Source) -> tuple[Mapping[str, Any], dict[str, tuple[int, ...]]]:
    """An adapter's config, and the shapes of its tensors by the keys of the base."""
    folder, _ = adapter.folder("adapter_*")
    written = read_adapter_config(folder)
    if written is None:
        raise CheckpointError(
            f"No adapter_config.json in {str(folder)!r}. Give a folder that save_pretrained wrote for an adapter, or a "
            "hub name; a model alone is written as a checkpoint without --adapter (adapter=)."
        )
    return written, adapter_shapes(folder)


# ---- tensors ----


def _material(
    model: PreTrainedModel, match: Match, of_adapter: Collection[str] = (), filled: Collection[int] = (), **merged: Any
) -> ExportSource:
    """Refuse tensors that have another shape in the files than in the model and not in the adapter, or no value."""
    wrong = [(key, list(a), list(b)) for key, a, b in match.mismatched if key not in of_adapter]
    if wrong:
        rows = listed_lines(f"{key}: {a} in the files, {b} by the config" for key, a, b in wrong)
        raise CheckpointError(
            f"{len(wrong)} tensors of {match.index.name!r} have another shape than config and class say:\n{rows}\n"
            f"{_FIT}"
        )
    needed = {*map(id, persistent_tensors(model).values()), *map(id, merged.get("merged", ()))}.difference(filled)
    if missing := sorted(key for key in match.to_initialize if id(match.state[key]) in needed):
        raise CheckpointError(
            f"{match.index.name!r} does not hold {len(missing)} tensors of {type(model).__name__}: {listed(missing)}. "
            f"{_FIT}"
        )
    loaded = {id(match.state[key]): key for key in match.loaded if id(match.state[key]) not in filled}
    return ExportSource(model=model, match=match, loaded=loaded, **merged)


def _embeddings(model: PreTrainedModel) -> list[str]:
    """The keys of the input embedding's weight."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        # transformers' answer for models of images and sound, which have no table of tokens
        return []
    return [key for key, tensor in persistent_tensors(model).items() if tensor is weight]


def _put_on_cpu(model: nn.Module, filled: Collection[str]) -> None:
    """Give meta tensors a place on the CPU, where PEFT adapts them: memory for those filled, one element for others."""
    ids = {id(tensor) for key, tensor in persistent_tensors(model).items() if key in filled}
    new: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in [tensor for _, _, tensor in slots(model) if tensor.is_meta]:
        one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        value = one.contiguous() if id(tensor) in ids else one
        new[tensor] = with_data(tensor, value) if isinstance(tensor, nn.Parameter) else value
    swap(model, new)
