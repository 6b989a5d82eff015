"""The model of a training, on meta, and its plan."""

from dataclasses import replace
from os import PathLike
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan

__all__ = ["build"]


def build(
    name_or_model: str | PathLike[str] | PreTrainedConfig | nn.Module, setup: TrainingSetup, **model_kwargs: Any
) -> tuple[nn.Module, WrapPlan]:
    """The model of a training on meta, and the plan of its units.

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device.
        setup: attention, precision and wrapping are read.
        model_kwargs: as in `build_meta_model` (`auto_class`, `revision`, …).

    Any rank may call; nothing is communicated.

    Raises:
        CheckpointError, ConfigError: as `build_meta_model`.
        WrapPlanError: the policy does not fit the model.
    """
    if isinstance(name_or_model, nn.Module):
        model = name_or_model
    else:
        # Where sdpa is asked for, transformers chooses it for the models that have it.
        attention = None if setup.attn_implementation == "sdpa" else setup.attn_implementation
        model = build_meta_model(name_or_model, attn_implementation=attention, **model_kwargs)
    plan = make_wrap_plan(model, policy=setup.policy)
    if setup.wrapping != "hybrid":
        root = replace(
            plan.units[-1],
            num_params=sum(unit.num_params for unit in plan.units),
            num_bytes=sum(unit.num_bytes for unit in plan.units),
            reason="the whole model in one unit",
        )
        plan = replace(plan, units=(root,))
    return model, plan
