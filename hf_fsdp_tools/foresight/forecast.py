"""From a model's name to the events of a step: the way that estimates of memory and time share, with its cache."""

from collections import OrderedDict
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.dry_run import trace_model
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.step import Step, compose
from hf_fsdp_tools.foresight.trace import Trace
from hf_fsdp_tools.planning.plan import WrapPlan

__all__ = ["Forecast", "Source", "step_of"]

Source: TypeAlias = str | PathLike[str] | PreTrainedConfig | nn.Module
"""What a model is made from: hub name, folder, `config.json`, configuration, or the model itself."""

_NOT_TRACED = (
    "num_gpus",
    "gpu",
    "gpus_per_node",
    "network_gbit_s",
    "dp_replicate_size",
    "gradient_accumulation_steps",
    "reduce_dtype",
    "optimizer",
    "max_grad_norm",
    "reshard_after_forward",
    "offload",
)
"""Fields of `TrainingSetup` that no trace depends on: what-ifs over them need no dry run."""

_MOST_TRACES = 8
"""How many models with their traces are kept; one of a large model takes some tens of MB. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A training before it runs."""

    setup: TrainingSetup
    """What was asked for."""
    plan: WrapPlan
    """The model's units."""
    trace: Trace
    """One micro-step of the model."""
    step: Step
    """One optimizer step under FSDP2; of more than three micro-steps three, since those after the second are alike."""

    @property
    def model_class(self) -> str:
        """Name of the model's class."""
        return self.plan.model_class


_traces: "OrderedDict[tuple[object, ...], tuple[object, WrapPlan, Trace]]" = OrderedDict()


def step_of(name_or_model: Source, setup: TrainingSetup, **model_kwargs: Any) -> Forecast:
    """The events of one optimizer step of a training.

    The model and its trace are kept in this process, so that another number of GPUs, another optimizer, accumulation,
    offload or resharding takes less than a second.

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device, which must not be
            changed afterwards.
        setup: of the training.
        model_kwargs: as in `build_meta_model`.

    Any rank may call; nothing is communicated, and no accelerator is used.

    Raises:
        CheckpointError, ConfigError, WrapPlanError: as `build` and `trace_model`.
    """
    key = _key(name_or_model, setup, model_kwargs)
    if key in _traces:
        _traces.move_to_end(key)
    else:
        model, plan = build(name_or_model, setup, **model_kwargs)
        # The source is kept too, so that no other object gets its address.
        _traces[key] = (name_or_model, plan, trace_model(model, plan, setup))
        while len(_traces) > _MOST_TRACES:
            _traces.popitem(last=False)
    _, plan, trace = _traces[key]
    few = replace(setup, gradient_accumulation_steps=min(setup.gradient_accumulation_steps, 3))
    return Forecast(setup=setup, plan=plan, trace=trace, step=compose(trace, plan, few))


def _key(name_or_model: Source, setup: TrainingSetup, model_kwargs: dict[str, Any]) -> tuple[object, ...]:
    """What a trace depends on."""
    is_named = isinstance(name_or_model, str | PathLike)
    source = str(name_or_model) if is_named else id(name_or_model)
    own = {each.name: getattr(setup, each.name) for each in fields(setup) if each.name not in _NOT_TRACED}
    return source, repr(sorted(model_kwargs.items())), repr(own)
