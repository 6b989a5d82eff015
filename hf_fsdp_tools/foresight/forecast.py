"""From a model's name to the events of a step: the way that estimates of memory and time share, with its cache."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any, TypeAlias, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.events import Trace
from hf_fsdp_tools.foresight.fsdp2.step import Step, compose
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.simulation import Timing, simulate
from hf_fsdp_tools.foresight.tracing.chunked_loss import predicts_words
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from hf_fsdp_tools.planning.plan import WrapPlan

Value = TypeVar("Value")

Source: TypeAlias = str | PathLike[str] | PreTrainedConfig | nn.Module
"""What a model is made from: hub name, folder, `config.json`, configuration, or the model itself."""

_NOT_TRACED = (
    "num_gpus",
    "gpu",
    "gpus_per_node",
    "network_gbit_s",
    "link_gb_s",
    "dp_replicate_size",
    "gradient_accumulation_steps",
    "sync_each_batch",
    "reduce_dtype",
    "optimizer",
    "max_grad_norm",
    "reshard_after_forward",
    "offload",
)
"""Fields of `TrainingSetup` that no trace depends on: what-ifs over them need no dry run."""

_MOST_TRACES = 16  # Kept in this process; one of a large model takes some tens of MB. (assumed)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A training before it runs."""

    setup: TrainingSetup
    """`loss` is that of the model where none was named."""
    plan: WrapPlan
    trace: Trace
    step: Step
    """One optimizer step under FSDP2; of more than three micro-steps three, since those after the second are alike."""

    @property
    def model_class(self) -> str:
        return self.plan.model_class

    @cached_property
    def timing(self) -> Timing:
        """When the work of the step runs, in the latest software."""
        return simulate(self.step.events, self.setup)


_NOT_BUILT = (*_NOT_TRACED, "batch_size", "images", "image_size", "activation_checkpointing", "compile", "loss")
"""Fields of `TrainingSetup` that no model depends on: it is built once for all of them."""

_MOST_MODELS = 2  # How many models on meta are kept. (assumed)

_models: "OrderedDict[tuple[object, ...], tuple[object, nn.Module, WrapPlan]]" = OrderedDict()
_traces: "OrderedDict[tuple[object, ...], tuple[object, WrapPlan, Trace, TrainingSetup]]" = OrderedDict()


def step_of(name_or_model: Source, setup: TrainingSetup, **model_kwargs: Any) -> Forecast:
    """The events of one optimizer step of a training; the model and its trace are kept in this process for the next."""

    # The source is kept too, so that no other object gets its address.
    def built() -> tuple[object, nn.Module, WrapPlan]:
        return (name_or_model, *build(name_or_model, setup, **model_kwargs))

    def traced() -> tuple[object, WrapPlan, Trace, TrainingSetup]:
        key = _key(name_or_model, setup, model_kwargs, _NOT_BUILT)
        _, model, plan = _kept(_models, key, _MOST_MODELS, built)
        settled = replace(setup, loss=setup.loss or ("chunked" if predicts_words(model) else "full"))
        return name_or_model, plan, trace_model(model, plan, settled), settled

    key = _key(name_or_model, setup, model_kwargs, _NOT_TRACED)
    _, plan, trace, settled = _kept(_traces, key, _MOST_TRACES, traced)
    setup = replace(setup, loss=settled.loss)
    few = replace(setup, gradient_accumulation_steps=min(setup.gradient_accumulation_steps, 3))
    return Forecast(setup=setup, plan=plan, trace=trace, step=compose(trace, plan, few))


def _kept(
    kept: "OrderedDict[tuple[object, ...], Value]", key: tuple[object, ...], most: int, make: Callable[[], Value]
) -> Value:
    """The value of a key, made if it is not kept; of many, those are kept that were asked for last."""
    if key not in kept:
        kept[key] = make()
        while len(kept) > most:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def _key(
    name_or_model: Source, setup: TrainingSetup, model_kwargs: dict[str, Any], without: Collection[str]
) -> tuple[object, ...]:
    """What a model or a trace depends on."""
    is_named = isinstance(name_or_model, str | PathLike)
    source = str(name_or_model) if is_named else id(name_or_model)
    own = {each.name: getattr(setup, each.name) for each in fields(setup) if each.name not in without}
    return source, repr(sorted(model_kwargs.items())), repr(own)
