"""From a model's name to the events of a step: the way that estimates of memory and time share, with its cache."""

import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar, TypeAlias, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.axes import product, size_names
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.sequence_parallel import note_regions
from hf_fsdp_tools.foresight.events import Trace
from hf_fsdp_tools.foresight.fsdp2.step import Step, compose
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from hf_fsdp_tools.foresight.tracing.kernels import predicts_words
from hf_fsdp_tools.foresight.tracing.parts import cut_parts, mark_parts
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.loading.quantized.by_config import keep_by_config
from hf_fsdp_tools.modeling.configs import has_angles, max_positions
from hf_fsdp_tools.modeling.meta import build_meta_model, copy_on_meta, load_config
from hf_fsdp_tools.modeling.tree_copy import base_of, is_adapted
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.adapters import add_lora
from hf_fsdp_tools.sharding.added import plan_with_adapters
from hf_fsdp_tools.sharding.recompute import Recompute

Value = TypeVar("Value")
Source: TypeAlias = str | PathLike[str] | PreTrainedConfig | nn.Module
"""What a model is made from: hub name, folder, `config.json`, configuration, or the model itself."""
_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
_NOT_TRACED = (
    "num_processes", "gpu", "gpus_per_node", "network_gbit_s", "link_gb_s", "dp_replicate_size", "optimizer",
    "max_grad_norm", "clip_by_last_norm", "gradient_accumulation_steps", "sync_each_batch", "reduce_dtype",
    "reshard_after_forward", "offload_params", "expandable_segments", "untimed",
)  # fmt: skip
"""Fields of `TrainingSetup` that no trace depends on: what-ifs over them need no dry run."""
_NOT_BUILT = (
    *_NOT_TRACED, "per_device_train_batch_size", "rows_per_example", "frozen_models", "images", "image_size",
    "activation_checkpointing", *(f"activation_checkpointing_{name}" for name in vars(Recompute())), "compile", "loss",
)  # fmt: skip
"""Fields of `TrainingSetup` that no model depends on: it is built once for all of them."""
_MOST_MODELS, _MOST_TRACES = 2, 16  # Kept in this process: traces of a large model take tens of MB. (assumed)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is estimated of a training, which `print` and `to_json` show."""

    _derived: ClassVar[tuple[str, ...]] = ()  # What JSON has next to the fields

    def to_json(self) -> str:
        """All of it as JSON text: fields and what follows from them, sizes in bytes; null is what is not estimated."""
        shown = {name: getattr(self, name) for name in (*[each.name for each in fields(self)], *self._derived)}
        shown = {name: None if value == math.inf else value for name, value in shown.items() if name != "forecast"}
        return json.dumps(shown, default=lambda value: asdict(value) if is_dataclass(value) else repr(value))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A training before it runs."""

    setup: TrainingSetup  # `loss` is that of the model where none was named
    plan: WrapPlan
    trace: Trace
    step: Step
    """One optimizer step under FSDP2; of more than three micro-batches three, as those after the second are alike."""


_Key: TypeAlias = tuple[object, ...]
_Traced: TypeAlias = tuple[WrapPlan, Any, Trace]  # A plan, the kind of loss, and a micro-batch
_models: dict[_Key, tuple[nn.Module, WrapPlan]] = {}
_traces: dict[_Key, _Traced] = {}


def step_of(name_or_model: Source, setup: TrainingSetup, **model_kwargs: Any) -> Forecast:
    """The events of one optimizer step of a training; the model and its trace are kept in this process for the next."""
    source = [_content(each) for each in (name_or_model, *setup.frozen_models)]

    def key(sources: list[str], without: Collection[str]) -> _Key:
        """What a model or a trace depends on."""
        own = {each.name: getattr(setup, each.name) for each in fields(setup) if each.name not in without}
        return *sources, repr(sorted(model_kwargs.items())), repr(own)

    def traced() -> _Traced:
        made = partial(build, name_or_model, setup, **model_kwargs)
        model, plan = _kept(_models, key(source[:1], _NOT_BUILT), _MOST_MODELS, made)
        loss = setup.loss or ("chunked" if predicts_words(model) else "full")
        rows = setup.per_device_train_batch_size * setup.rows_per_example
        trace = trace_model(model, plan, replace(setup, per_device_train_batch_size=rows, loss=loss))
        if setup.frozen_models:
            kwargs = {key: value for key, value in model_kwargs.items() if key != "auto_class"}
            plain = replace(setup, lora_r=None, load_in_4bit=False, dequantize=True, master_dtype=setup.mixed_precision)
            held = (_built(name, plain, kwargs).parameters() for name in setup.frozen_models)
            trace = replace(trace, frozen_bytes=sum(each.nbytes for some in held for each in some))
        return plan, loss, trace

    own = (setup.is_plain, *key(source, _NOT_TRACED))
    plan, loss, trace = _kept(_traces, own, _MOST_TRACES, traced)
    setup = replace(setup, loss=loss)
    few = replace(setup, gradient_accumulation_steps=min(setup.gradient_accumulation_steps, 3))
    return Forecast(setup=setup, plan=plan, trace=trace, step=compose(trace, plan, few))


def _content(source: Source) -> str:
    """What a model is made of, as text that changes with it: config.json of a folder, the modules of a model."""
    if isinstance(source, PreTrainedConfig):
        return f"{type(source)} {source.to_json_string(use_diff=False)}"
    if isinstance(source, nn.Module):
        tensors = [*source.named_parameters(), *source.named_buffers()]
        sizes = [(name, each.shape, each.dtype, each.requires_grad) for name, each in tensors]
        return f"{type(source)} {source} {sizes} {getattr(source, 'config', None)}"
    path = local_path(str(source))
    file = path / "config.json" if path is not None and path.is_dir() else path
    return f"{source} {file.read_bytes() if file is not None and file.is_file() else b''!r}"


def _kept(kept: dict[_Key, Value], key: _Key, most: int, make: Callable[[], Value]) -> Value:
    """The value of a key, made if it is not kept; of many, those are kept that were asked for last."""
    kept[key] = value = kept.pop(key) if key in kept else make()
    while len(kept) > most:
        del kept[next(iter(kept))]
    return value


def build(name_or_model: Source, setup: TrainingSetup, **model_kwargs: Any) -> tuple[nn.Module, WrapPlan]:
    """The model of a training on meta, and the plan of its units."""
    if is_own := isinstance(name_or_model, nn.Module):
        model = copy_on_meta(name_or_model)
    else:
        model = _built(name_or_model, setup, model_kwargs)
    if not setup.dequantize:
        keep_by_config(model, has_values=is_own)
    if is_divided := product(setup, size_names("divide")) > 1:
        mark_parts(base_of(model), setup)
    if setup.freeze_vision_tower:
        encoder: Any = getattr(base_of(model), "get_encoder", lambda **_: None)(modality="image")
        if encoder is None or encoder is base_of(model):
            raise ConfigError(f"{type(model).__name__} has no vision tower to freeze. Leave out freeze_vision_tower.")
        encoder.requires_grad_(False)
    if setup.lora_r is not None and not is_adapted(model):
        targets = setup.lora_target_modules
        names = targets if isinstance(targets, str | None) else list(targets)
        model = add_lora(model, r=setup.lora_r, target_modules=names, dropout=setup.lora_dropout)
    base = base_of(model)
    config = getattr(base, "config", None)
    limit = max_positions(config) if isinstance(config, PreTrainedConfig) else None
    if limit is not None and setup.max_length > limit and not has_angles(config):
        fact = f"max_length {setup.max_length:,} is beyond the {limit:,} positions of {type(base).__name__}."
        raise ConfigError(f"{fact} Give fewer tokens, or a configuration with more positions.")
    plan = plan_with_adapters(base, setup.policy)
    if is_divided:
        cut_parts(model)
    if setup.sequence_parallel:
        note_regions(base, setup.tp_size, setup.cp_size)
    if setup.wrapping != "plan":
        sizes: Any = {name: sum(getattr(unit, name) for unit in plan.units) for name in ("num_params", "num_bytes")}
        plan = replace(plan, units=(replace(plan.units[-1], reason="the whole model in one unit", **sizes),))
    return base, plan


def _built(source: str | PathLike[str] | PreTrainedConfig, setup: TrainingSetup, model_kwargs: dict[str, Any]) -> Any:
    hub = {key: value for key, value in model_kwargs.items() if key in _HUB}
    config = load_config(source, **hub)
    if getattr(config.get_text_config(), "num_hidden_layers", None) == 0:
        raise ConfigError("num_hidden_layers of the configuration is 0, so the model has no blocks. Give 1 or more.")
    dtype = DTYPES[setup.mixed_precision]
    options: dict[str, Any] = {"dtype": DTYPES[setup.master_dtype] if setup.lora_r is None else dtype}
    if setup.attn_implementation == "eager":  # transformers chooses sdpa for the models that have it
        options["attn_implementation"] = "eager"
    if setup.load_in_4bit:
        names = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} | dict.fromkeys(names, dtype)
        options["quantization_config"] = transformers.BitsAndBytesConfig(**four_bits)
    options |= {key: value for key, value in model_kwargs.items() if key not in _HUB}
    model: Any = build_meta_model(config, trust_remote_code=bool(hub.get("trust_remote_code")), **options)
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # without one, a classifier of texts takes one row alone; recipes take the tokenizer's
    return model
