"""What a recipe trains with its options, as a `TrainingSetup`, and which options make it train a setup."""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_fsdp_tools.accelerator import device_title
from hf_fsdp_tools.axes import size_names
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.modeling.configs import model_class
from hf_fsdp_tools.scripting.recipes import DEFAULT_RECIPE, RECIPES
from hf_fsdp_tools.sharding.recompute import Recompute

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_ANSWERS = 8
"""To each prompt in GRPO (TRL's `num_generations`), all of them written at once."""

_NOT_ESTIMATED = (
    "use_dora", "lora_target_parameters", "lora_modules_to_save", "ema_decay", "label_smoothing_factor",
)  # fmt: skip
"""Options that take memory of which an estimate knows nothing."""

SAVING = ("use_liger_kernel", "activation_offloading")
"""Options that take less memory than is estimated."""


def setup_of(recipe: str, *arguments: Any, **machine: Any) -> TrainingSetup:
    """What a recipe trains with the objects of `parse_arguments`, or others with these attributes, on a machine.

    Fields of `TrainingSetup` in `machine` count where the launch config or the data decide them.

    Raises:
        ConfigError: an option takes memory that is not estimated, or a value cannot be.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> setup = setup_of("dpo", script, training, model_args, gpu="h100-80gb", num_processes=8)
        >>> setup.per_device_train_batch_size, setup.rows_per_example
        (1, 2)
    """
    own = RECIPES[recipe]

    def get(name: str, otherwise: Any = None) -> Any:
        return next((getattr(each, name) for each in arguments if hasattr(each, name)), otherwise)

    adapts, columns, lengths = bool(get("use_peft")), get("dataset_columns"), [get(name) for name in own.lengths]
    if unknown := [*(name for name in _NOT_ESTIMATED if get(name)), *own.lengths[: None in lengths]]:
        raise ConfigError(f"what --{unknown[0]} {get(unknown[0])} takes is not estimated.")
    accelerate = get("accelerator_config") or {}
    accelerate = accelerate if isinstance(accelerate, dict) else vars(accelerate)
    targets, dtype = get("lora_target_modules") if adapts else "all-linear", get("dtype") or "float32"
    targets = targets if isinstance(targets, str | None) else tuple(targets)
    values = {
        "max_length": max(lengths) * (2 if own.lengths == ("max_completion_length",) else 1),
        "per_device_train_batch_size": get("per_device_train_batch_size"),
        "rows_per_example": len(columns.split(",")) if columns else own.rows,
        "gradient_accumulation_steps": get("gradient_accumulation_steps", 1),
        "sync_each_batch": (accelerate.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", True),
        "optimizer": _optimizer(get("optim", "adamw_torch" if own.options else "adamw_torch_fused"), get("optim_args")),
        "max_grad_norm": get("max_grad_norm", 1.0) or None,
        "clip_by_last_norm": bool(get("clip_by_last_norm")),
        "freeze_vision_tower": bool(get("freeze_vision_tower")),
        "compile": bool(get("torch_compile")),
        "attn_implementation": get("attn_implementation") or "sdpa",
        "frozen_models": _frozen(recipe, adapts, get),
        "untimed": "" if get("precompute_ref_log_probs") else own.untimed,
        "lora_r": get("lora_r") if adapts else None,
        "lora_dropout": get("lora_dropout") if adapts else 0.0,
        "lora_target_modules": targets[0] if targets == ("all-linear",) else targets,
        "load_in_4bit": bool(get("load_in_4bit")),
        "dequantize": get("dequantize", True),
        "master_dtype": "fp32" if adapts else _DTYPES.get(dtype, dtype),
        "reduce_dtype": "fp32",
        "wrapping": "plan",
        "loss": None,
    }
    recomputes = bool(machine.get("activation_checkpointing") or get("gradient_checkpointing"))
    return TrainingSetup(**(machine | values | {"activation_checkpointing": recomputes} | dict(own.fields)))


def check_generates(config: Any, name: str, *, trust_remote_code: bool = False) -> None:
    """Refuse a model that writes no text (an encoder), or reads a question apart, where next tokens are trained."""
    kind = model_class(config, trust_remote_code=trust_remote_code)
    cure = "Give a causal language model, or train a classifier of it (the recipe classify)"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} is an encoder and a decoder ({config.model_type}), no model of the next token. {cure}."
        )
    if hasattr(kind, "can_generate") and not kind.can_generate():
        raise ConfigError(f"{name} is a {kind.__name__}, which generates no text. {cure}.")


def machine_of(accelerator: Any) -> dict[str, Any]:
    """The fields of `TrainingSetup` that an Accelerator decides."""
    from hf_fsdp_tools.foresight.memory import ALLOCATORS

    plugin = accelerator.state.fsdp_plugin
    parallelism = accelerator.parallelism_config or plugin.copies
    recompute, precision = plugin.recompute, accelerator.mixed_precision
    values = {name: getattr(parallelism, name, None) or 1 for name in size_names()}
    values |= {f"activation_checkpointing_{name}": value for name, value in vars(recompute or Recompute()).items()}
    return values | {
        "gpu": gpu_named(device_title(accelerator.device) or "").name,
        "num_processes": accelerator.num_processes,
        "gpus_per_node": rank_on_node()[1],
        "mixed_precision": {"no": "fp32", "fp8": "bf16"}.get(precision, precision),
        "ep_size": plugin.ep_size,
        "sequence_parallel": plugin.sequence_parallel,
        "reshard_after_forward": plugin.reshard_after_forward is not False,
        "offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "activation_checkpointing": recompute is not None,
        "expandable_segments": any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATORS),
    }


def estimate_of(model: Any, arguments: Sequence[Any], accelerator: Any, **model_kwargs: Any) -> dict[str, Any]:
    """What a training on rows of `finetune` takes with its arguments on the GPUs of an Accelerator, as values for JSON;
    without data, in some seconds for a large model. `model_kwargs` has `loss` too."""
    from hf_fsdp_tools.scripting.aside import estimated

    loss = model_kwargs.pop("loss", None)
    setup = replace(setup_of(DEFAULT_RECIPE, *arguments, **machine_of(accelerator)), loss=loss)
    with torch.random.fork_rng(devices=()), warnings.catch_warnings(action="ignore"):
        return estimated(model, setup, model_kwargs)[1]


def _optimizer(optim: Any, arguments: str | None) -> str:
    from hf_fsdp_tools.foresight.fsdp2.step import OPTIMIZERS

    word = str(getattr(optim, "value", optim))
    if word == "sgd" and "momentum" in (arguments or ""):
        return "sgd_momentum"
    return next((name for name, (words, _) in OPTIMIZERS.items() if words == word), word)


def _frozen(recipe: str, adapts: bool, get: Callable[[str], Any]) -> tuple[str, ...]:
    """The models that a recipe holds next to the one that it trains: a reference, a teacher, one that rewards."""
    has_reference = (recipe == "dpo" and not get("precompute_ref_log_probs")) or (recipe == "grpo" and get("beta"))
    names = [RECIPES[recipe].frozen, "model_name_or_path" if has_reference and not adapts else ""]
    return tuple(value for name in names if name and (value := get(name)))


def options_of(recipe: str, model: str, setup: TrainingSetup) -> dict[str, Any]:
    """Options with which a recipe trains a setup, in TRL's and the Trainer's words; for `setup_of` the way back."""
    from hf_fsdp_tools.foresight.fsdp2.step import OPTIMIZERS

    own, steps, adapts = RECIPES[recipe], setup.gradient_accumulation_steps, setup.lora_r is not None
    optim, *optim_args = OPTIMIZERS.get(setup.optimizer, (setup.optimizer,))[0].split(" --optim_args ")
    part = gcd(_ANSWERS, setup.per_device_train_batch_size * steps * setup.rows_at_once)
    unsynced = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    targets = setup.lora_target_modules
    names = [targets] if isinstance(targets, str) else list(targets or ())
    dtype = {short: name for name, short in _DTYPES.items()}[setup.master_dtype]
    values = {
        "model_name_or_path": model,
        "dataset_name": "DATASET",
        own.frozen: setup.frozen_models[0] if own.frozen and setup.frozen_models else None,
        **{name: setup.max_length // (2 if "completion" in name else 1) for name in own.lengths},
        "per_device_train_batch_size": setup.per_device_train_batch_size,
        "gradient_accumulation_steps": steps,
        "optim": optim if setup.optimizer != "adamw" else None,
        "optim_args": "".join(optim_args) or None,
        "steps_per_generation": steps * _ANSWERS // part if recipe == "grpo" and part < _ANSWERS else None,
        "accelerator_config": unsynced if steps > 1 and not setup.sync_each_batch else None,
        "use_peft": adapts or None,
        "lora_r": setup.lora_r,
        "lora_target_modules": names if adapts else None,
        "lora_dropout": setup.lora_dropout if adapts else None,  # for TRL's own each layer keeps an input and a mask
        "dtype": dtype if not adapts and setup.master_dtype != "fp32" else None,
        "load_in_4bit": setup.load_in_4bit or None,
        "dequantize": None if setup.dequantize else False,
        "attn_implementation": setup.attn_implementation if setup.attn_implementation != "sdpa" else None,
        "freeze_vision_tower": setup.freeze_vision_tower if recipe == "vision-language" else None,
        "torch_compile": setup.compile or None,
    }
    known = own.options or values
    return {name: value for name, value in values.items() if value is not None and name in known}


def recipe_words(values: dict[str, Any]) -> list[str]:
    """The same as words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict | bool) else str(value))
    return words


def run_values(values: dict[str, Any], setup: TrainingSetup, *, recipe: str) -> dict[str, Any]:
    """`options_of` with values to begin with of what is not searched, for a file or a line of words."""
    values = values | {"learning_rate": RECIPES[recipe].rates[setup.lora_r is not None]}
    values |= {} if recipe == "accelerate-loop" else {"lr_scheduler_type": "cosine", "warmup_steps": 10}
    return values | ({} if setup.lora_r is None else {"lora_alpha": 2 * setup.lora_r})
