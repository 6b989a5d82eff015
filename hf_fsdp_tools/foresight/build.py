"""The model of a training, on meta, and its plan."""

from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import build_meta_model, load_config
from hf_fsdp_tools.modeling.tree_copy import base_of, copy_tree, is_adapted
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.adapters import add_lora
from hf_fsdp_tools.sharding.added import plan_with_adapters

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes of a `TrainingSetup`."""

_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")


def build(
    name_or_model: str | PathLike[str] | PreTrainedConfig | nn.Module, setup: TrainingSetup, **model_kwargs: Any
) -> tuple[nn.Module, WrapPlan]:
    """The model of a training on meta, and the plan of its units."""
    own = name_or_model if isinstance(name_or_model, nn.Module) else None
    model = _built(name_or_model, setup, model_kwargs) if own is None else own
    if setup.freeze_vision_tower:
        model = model if own is None else _on_meta(model)
        _image_encoder(model).requires_grad_(False)
    if setup.lora_r is not None and not is_adapted(model):
        model = model if own is None else _on_meta(model)
        targets = setup.lora_target_modules
        names = targets if isinstance(targets, str) else list(targets)
        model = add_lora(model, r=setup.lora_r, target_modules=names, dropout=setup.lora_dropout)
    base = base_of(model)
    _check_length(base, setup)
    plan = plan_with_adapters(base, setup.policy)
    if setup.wrapping != "hybrid":
        root = replace(
            plan.units[-1],
            num_params=sum(unit.num_params for unit in plan.units),
            num_bytes=sum(unit.num_bytes for unit in plan.units),
            reason="the whole model in one unit",
        )
        plan = replace(plan, units=(root,))
    return base, plan


def _image_encoder(model: nn.Module) -> nn.Module:
    find = getattr(base_of(model), "get_encoder", None)
    encoder = find(modality="image") if find is not None else None
    if not isinstance(encoder, nn.Module) or encoder is base_of(model):
        raise ConfigError(f"{type(model).__name__} has no vision tower to freeze. Leave out freeze_vision_tower.")
    return encoder


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters of its own, on meta."""
    own = {
        parameter: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: None if value is None else own[value] for key, value in module._parameters.items()}

    return copy_tree(model, parameters=parameters).model


def _check_length(model: nn.Module, setup: TrainingSetup) -> None:
    config = getattr(model, "config", None)
    limit = max_positions(config) if isinstance(config, PreTrainedConfig) else None
    if limit is not None and setup.seq_len > limit:
        raise ConfigError(
            f"seq_len {setup.seq_len:,} is beyond the {limit:,} positions of {type(model).__name__}. Use {limit:,} or "
            "less, or give a configuration with more positions."
        )


def _built(
    source: str | PathLike[str] | PreTrainedConfig, setup: TrainingSetup, model_kwargs: dict[str, Any]
) -> nn.Module:
    hub = {key: value for key, value in model_kwargs.items() if key in _HUB}
    config = load_config(source, **hub)
    if getattr(config.get_text_config(), "num_hidden_layers", None) == 0:
        raise ConfigError("num_hidden_layers of the configuration is 0, so the model has no blocks. Give 1 or more.")
    options = {key: value for key, value in model_kwargs.items() if key not in _HUB}
    if setup.attn_implementation == "eager":  # transformers chooses sdpa for the models that have it
        options.setdefault("attn_implementation", setup.attn_implementation)
    frozen = setup.lora_r is not None or setup.load_in_4bit
    options.setdefault("dtype", DTYPES[setup.precision if frozen else setup.master_dtype])
    if setup.load_in_4bit:
        options.setdefault(
            "quantization_config",
            transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=DTYPES[setup.precision],
                bnb_4bit_quant_storage=DTYPES[setup.precision],
            ),
        )
    own_code = bool(hub.get("trust_remote_code"))
    model: nn.Module = build_meta_model(config, trust_remote_code=own_code, **options)
    return model
