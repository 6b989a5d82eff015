"""What a recipe trains with its options, as a `TrainingSetup`, and which options make it train a setup."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from hf_fsdp_tools.accelerator import device_title
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.sharding.recompute import Recompute
from hf_fsdp_tools.text import comment

DEFAULT_RECIPE = "finetune"

_CLASSIFIER = "AutoModelForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe makes of its options, as far as memory and time depend on it."""

    auto_class: str | None = None  # None: the class that the config names
    rows: int = 1  # In each example
    lengths: tuple[str, ...] = ("max_length",)
    """Options for the tokens of a row; "max_completion_length" is half of it, for a prompt may take as many."""
    fields: dict[str, Any] = field(default_factory=dict)  # Of `TrainingSetup`, which no option changes
    options: tuple[str, ...] = ()  # All that change memory; () is all of TRL's and the Trainer's
    frozen: str = ""  # The option for a model beside the one that is trained
    rates: tuple[float, float] = (1e-5, 2e-4)
    """Learning rates of all parameters and of an adapter to begin with. (usual values; none is searched)"""
    note: str = ""  # What an estimate leaves out


_WRITES: dict[str, Any] = {"lengths": ("max_completion_length",), "rates": (1e-6, 1e-5)}
_WRITES["note"] = "not counted: what writes the texts (keys and values, weights that stay gathered), and its time"

_OF_LOOP: tuple[str, ...] = ("model_name_or_path", "dataset_name", "max_length", "per_device_train_batch_size", "optim")
_OF_LOOP += ("gradient_accumulation_steps",)

RECIPES = {
    "accelerate-loop": Recipe(fields={"loss": "full", "sync_each_batch": True}, options=_OF_LOOP, rates=(2e-5, 2e-5)),
    "classify": Recipe(auto_class=_CLASSIFIER),
    "distill": Recipe(**_WRITES, frozen="teacher_model_name_or_path"),
    "dpo": Recipe(rows=2, rates=(5e-7, 5e-6)),
    "embed": Recipe(auto_class=_CLASSIFIER, rows=2),  # whose small head stands for the mean of the tokens
    "finetune": Recipe(),
    "grpo": Recipe(**_WRITES, frozen="reward_model_name_or_path"),
    "pretrain": Recipe(),
    "reward": Recipe(auto_class=_CLASSIFIER, rows=2),
    "seq2seq": Recipe(
        auto_class="AutoModelForSeq2SeqLM", lengths=("max_length", "max_target_length"), rates=(1e-4, 5e-4)
    ),
    "tokens": Recipe(auto_class="AutoModelForTokenClassification", rates=(2e-5, 2e-4)),
    "vision-language": Recipe(auto_class="AutoModelForImageTextToText"),
}

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_ANSWERS = 8
"""To each prompt in GRPO (TRL's `num_generations`), all of them written at once."""

_NOT_ESTIMATED = ("use_dora", "lora_target_parameters", "lora_modules_to_save", "ema_decay")
"""Options that take memory of which an estimate knows nothing."""


def setup_of(recipe: str, *arguments: Any, **machine: Any) -> TrainingSetup:
    """What a recipe trains with its arguments, on a machine.

    Args:
        recipe: its name on the command line.
        arguments: the objects of `parse_arguments`, or others with these attributes.
        machine: fields of `TrainingSetup`, of which those count that the launch config or the data decide.

    Raises:
        ConfigError: an option takes memory that is not estimated, or a value cannot be.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> setup = setup_of("dpo", script, training, model_args, gpu="h100-80gb", num_gpus=8)
        >>> setup.batch_size, setup.rows_per_example
        (1, 2)
    """
    own = RECIPES[recipe]

    def get(name: str, otherwise: Any = None) -> Any:
        return next((getattr(each, name) for each in arguments if hasattr(each, name)), otherwise)

    adapts, columns, lengths = bool(get("use_peft")), get("dataset_columns"), [get(name) for name in own.lengths]
    unknown = [*(name for name in _NOT_ESTIMATED if get(name)), *own.lengths[: None in lengths]]
    if unknown:
        raise ConfigError(f"what --{unknown[0]} {get(unknown[0])} takes is not estimated.")
    accelerate = get("accelerator_config") or {}
    accelerate = accelerate if isinstance(accelerate, dict) else vars(accelerate)
    targets, dtype = get("lora_target_modules") if adapts else "all-linear", get("dtype") or "float32"
    targets = targets if isinstance(targets, str | None) else tuple(targets)
    values = {
        "seq_len": max(lengths) * (2 if own.lengths == ("max_completion_length",) else 1),
        "batch_size": get("per_device_train_batch_size"),
        "rows_per_example": len(columns.split(",")) if columns else own.rows,
        "gradient_accumulation_steps": get("gradient_accumulation_steps", 1),
        "sync_each_batch": (accelerate.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", True),
        "optimizer": _optimizer(
            get("optim", "adamw_torch_fused" if not own.options else "adamw_torch"), get("optim_args")
        ),
        "max_grad_norm": get("max_grad_norm", 1.0) or None,
        "freeze_vision_tower": bool(get("freeze_vision_tower")),
        "compile": bool(get("torch_compile")),
        "attn_implementation": get("attn_implementation") or "sdpa",
        "frozen_models": _frozen(recipe, adapts, get),
        "lora_r": get("lora_r") if adapts else None,
        "lora_dropout": get("lora_dropout") if adapts else 0.0,
        "lora_target_modules": targets[0] if targets == ("all-linear",) else targets,
        "load_in_4bit": bool(get("load_in_4bit")),
        "dequantize": get("dequantize", True),
        "master_dtype": "fp32" if adapts else _DTYPES.get(dtype, dtype),
        "reduce_dtype": "fp32",
        "wrapping": "hybrid",
        "loss": None,
    }
    recomputes = bool(machine.get("activation_checkpointing") or get("gradient_checkpointing"))
    return TrainingSetup(**(machine | values | {"activation_checkpointing": recomputes} | own.fields))


def machine_of(accelerator: Any) -> dict[str, Any]:
    """The fields of `TrainingSetup` that an Accelerator decides."""
    plugin, sizes = (
        accelerator.state.fsdp_plugin,
        accelerator.parallelism_config or accelerator.state.fsdp_plugin.copies,
    )
    recompute, precision = plugin.recompute, accelerator.mixed_precision
    values = {name: getattr(sizes, name, None) or 1 for name in ("dp_replicate_size", "cp_size", "tp_size")}
    values |= {f"activation_checkpointing_{name}": value for name, value in vars(recompute or Recompute()).items()}
    return values | {
        "gpu": gpu_named(device_title(accelerator.device) or "").name,
        "num_gpus": accelerator.num_processes,
        "gpus_per_node": rank_on_node()[1],
        "precision": {"no": "fp32", "fp8": "bf16"}.get(precision, precision),
        "ep_size": plugin.ep_size,
        "reshard_after_forward": plugin.reshard_after_forward is not False,
        "offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "activation_checkpointing": recompute is not None,
    }


def _optimizer(optim: Any, arguments: str | None) -> str:
    from hf_fsdp_tools.foresight.fsdp2.optimizer import OPTIMIZERS

    word = str(getattr(optim, "value", optim))
    if word == "sgd" and "momentum" in (arguments or ""):
        return "sgd_momentum"
    return next((name for name, (words, _) in OPTIMIZERS.items() if words == word), word)


def _frozen(recipe: str, adapts: bool, get: Callable[[str], Any]) -> tuple[str, ...]:
    """The models that a recipe holds beside the one that it trains: a reference, a teacher, one that rewards."""
    has_reference = (recipe == "dpo" and not get("precompute_ref_log_probs")) or (recipe == "grpo" and get("beta"))
    names = [RECIPES[recipe].frozen, "model_name_or_path" if has_reference and not adapts else ""]
    return tuple(value for name in names if name and (value := get(name)))


def options_of(recipe: str, model: str, setup: TrainingSetup) -> dict[str, Any]:
    """Options with which a recipe trains a setup, in TRL's and the Trainer's words; for `setup_of` the way back."""
    own = RECIPES[recipe]
    values: dict[str, Any] = {"model_name_or_path": model, "dataset_name": "DATASET"}
    values |= {own.frozen: setup.frozen_models[0]} if own.frozen and setup.frozen_models else {}
    values |= {name: setup.seq_len // (2 if "completion" in name else 1) for name in own.lengths}
    values["per_device_train_batch_size"] = setup.batch_size
    values["gradient_accumulation_steps"] = setup.gradient_accumulation_steps
    if setup.optimizer != "adamw":
        from hf_fsdp_tools.foresight.fsdp2.optimizer import OPTIMIZERS

        values["optim"], *rest = OPTIMIZERS.get(setup.optimizer, (setup.optimizer,))[0].split(" --optim_args ")
        values |= {"optim_args": rest[0]} if rest else {}
    part = gcd(_ANSWERS, setup.batch_size * setup.gradient_accumulation_steps * setup.rows_at_once)
    if recipe == "grpo" and part < _ANSWERS:
        values["steps_per_generation"] = setup.gradient_accumulation_steps * _ANSWERS // part
    if setup.gradient_accumulation_steps > 1 and not setup.sync_each_batch:
        values["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    if setup.lora_r is not None:
        targets = setup.lora_target_modules
        names = [targets] if isinstance(targets, str) else list(targets or ())
        values |= {"use_peft": True, "lora_r": setup.lora_r, "lora_target_modules": names}
        values["lora_dropout"] = setup.lora_dropout  # TRL's own is 0.05, for which each layer keeps an input and a mask
    elif setup.master_dtype != "fp32":
        values["dtype"] = next(name for name, short in _DTYPES.items() if short == setup.master_dtype)
    values |= {"load_in_4bit": True} if setup.load_in_4bit else {}
    values |= {} if setup.dequantize else {"dequantize": False}
    values |= {"attn_implementation": setup.attn_implementation} if setup.attn_implementation != "sdpa" else {}
    values |= {"freeze_vision_tower": setup.freeze_vision_tower} if recipe == "vision-language" else {}
    values |= {"torch_compile": True} if setup.compile else {}
    return {name: value for name, value in values.items() if not own.options or name in own.options}


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


def run_file_of(launch_file: Path) -> Path:
    """The file of the recipe's options that belongs to a launch file: eight.run.yaml to eight.yaml."""
    return launch_file.with_suffix(".run.yaml")


def run_values(values: dict[str, Any], setup: TrainingSetup, *, recipe: str) -> dict[str, Any]:
    """`options_of` with values to begin with of what is not searched, for a file or a line of words."""
    values = values | {"learning_rate": RECIPES[recipe].rates[setup.lora_r is not None]}
    values |= {} if recipe == "accelerate-loop" else {"lr_scheduler_type": "cosine", "warmup_steps": 10}
    return values | ({} if setup.lora_r is None else {"lora_alpha": 2 * setup.lora_r})


def run_file(values: dict[str, Any], *, recipe: str, command: str, launch: str) -> str:
    """Text of the file for `--config` of a recipe.

    Args:
        values: of `run_values`.
        recipe: its name on the command line.
        command: that makes the file, for the comment.
        launch: the command that starts the recipe with it.
    """
    import yaml

    values = {name: value for name, value in values.items() if name != "dataset_name"}
    lines = [comment(f"Generated by: {command}"), comment(f"Start it with: {launch}")]
    lines.append(
        "# Searched: length, batch, accumulation and what saves memory. To be chosen: the learning rate and below."
    )
    if recipe == "finetune":
        lines.append("# Rows that are shorter: packing: true fills each with several (docs/data.md).")
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False)])
