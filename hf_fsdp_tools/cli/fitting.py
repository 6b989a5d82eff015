"""`hf-fsdp config NAME`: the recommended setting as an Accelerate config and as the arguments of a recipe."""

import argparse
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.launch import recipes
from hf_fsdp_tools.cli.training import (
    add_link_options,
    add_run_options,
    check_machines,
    given_fields,
    model_of,
    positions_of,
    progress,
)
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig
    from hf_fsdp_tools.foresight.recommendation import Recommendation
    from hf_fsdp_tools.foresight.setup import TrainingSetup


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add what the search for the fastest setting is told."""
    add = parser.add_argument_group(
        "with NAME: what is trained; sharding and batch are searched unless given"
    ).add_argument
    add("--global-batch-size", type=int, metavar="N", help="sequences per optimizer step over all GPUs")
    add("--longest", action="store_true", help="look for the longest sequence that fits, instead of --seq-len")
    add("--margin", type=float, metavar="X", help="part of the GPU's memory that stays free")
    about = "which the launch command starts (default: finetune)"
    add("--recipe", choices=sorted(each.replace("_", "-") for each in recipes()), metavar="NAME", help=about)
    add_link_options(add)
    add_run_options(add)


def recommend(options: argparse.Namespace, config: "FSDPConfig") -> "Recommendation":
    """The fastest setting of the model that fits on the machines of a config.

    Options that say how the model is sharded are kept; others are searched.

    Raises:
        ConfigError: nothing fits, or the estimates do not know such a run (on the CPU).
    """
    if config.use_cpu:
        raise ConfigError(
            f"{options.model}: what fits on the CPU is not known; leave it out, or say for which GPUs: --gpu h100-80gb "
            "--gpus 8"
        )
    from hf_fsdp_tools.foresight.recommend import recommend_config

    fields = _fixed(options, config)
    with progress() as say:
        return recommend_config(
            options.model,
            global_batch_size=options.global_batch_size,
            model_kwargs=model_of(options),
            say=say,
            **({} if options.margin is None else {"margin": options.margin}),
            **fields,
        )


def _fixed(options: argparse.Namespace, config: "FSDPConfig") -> dict[str, Any]:
    """Fields of `TrainingSetup` that stay as they are."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup

    gpu = options.gpu if isinstance(options.gpu, str) else _gpu_here()
    fields = {name: value for name, value in given_fields(options).items() if name not in _OWN}
    if options.recipe == "accelerate-loop":  # the one recipe whose loop makes whole logits
        fields = {"loss": "full"} | fields
    fields |= {"gpu": gpu, "num_gpus": config.num_processes}
    fields["gpus_per_node"] = config.num_processes // config.num_machines
    fields["precision"] = {"no": "fp32"}.get(config.mixed_precision, config.mixed_precision)
    asked = {
        "dp_replicate_size": options.hsdp,
        "offload": options.offload,
        "activation_checkpointing": options.activation_checkpointing or None,
        "reshard_after_forward": False if options.no_reshard_after_forward else None,
    }
    fields |= {name: value for name, value in asked.items() if value is not None}
    if options.longest and "seq_len" in fields:
        raise ConfigError("--longest looks for the length that --seq-len gives; leave one of them out")
    if "seq_len" not in fields:
        fields["seq_len"] = None if options.longest else min(4096, positions_of(options) or 4096)
    check_machines(TrainingSetup(**{name: value for name, value in fields.items() if value is not None}))
    return fields


_OWN = ("gpu", "offload", "activation_checkpointing")
"""Options of `hf-fsdp config` that mean more or less than the field of `TrainingSetup` of their name."""


def _gpu_here() -> str:
    """Name of this machine's GPU."""
    from hf_fsdp_tools.accelerator import device_title, find_accelerator
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    device = find_accelerator()
    title = None if device is None else device_title(device)
    if title is None:
        raise ConfigError("which GPUs? Say --gpu and its name, such as --gpu h100-80gb")
    return gpu_named(title).name


def recipe_words(model: str, setup: "TrainingSetup") -> list[str]:
    """Arguments of a recipe for a setting, in TRL's words."""
    words = ["--model_name_or_path", model, "--dataset_name", "DATASET"]
    words += ["--max_length", str(setup.seq_len), "--per_device_train_batch_size", str(setup.batch_size)]
    words += ["--gradient_accumulation_steps", str(setup.gradient_accumulation_steps)]
    if setup.optimizer != "adamw":
        from hf_fsdp_tools.foresight.fsdp2.optimizer import OPTIMIZERS

        words += ["--optim", *OPTIMIZERS[setup.optimizer][0].split()]
    if setup.gradient_accumulation_steps > 1 and not setup.sync_each_batch:
        words += ["--accelerator_config", '{"gradient_accumulation_kwargs": {"sync_each_batch": false}}']
    if setup.lora_r is not None:
        targets = setup.lora_target_modules
        names = [targets] if isinstance(targets, str) else list(targets)
        words += ["--use_peft", "--lora_r", str(setup.lora_r), "--lora_target_modules", *names]
    if setup.load_in_4bit:
        words += ["--load_in_4bit"]
    if setup.attn_implementation != "sdpa":
        words += ["--attn_implementation", setup.attn_implementation]
    if setup.compile:
        words += ["--torch_compile"]
    return words
