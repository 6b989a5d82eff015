"""What is trained, for the commands that look ahead: its options, and the setup that they make."""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import count, prepare_model
from hf_fsdp_tools.cli.machine import machines_of
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.setup import TrainingSetup


def add_training_options(add: Callable[..., Any]) -> None:
    """Add what is trained, how, and how much at once, in the words of TRL and the Trainer where they have one."""
    about = "takes N sequences per GPU and micro-step"
    add("--per-device-train-batch-size", dest="batch_size", type=count, metavar="N", help=about)
    about = "takes N tokens per sequence (default: 4096, or the model's most)"
    add("--max-length", dest="seq_len", type=count, metavar="N", help=about)
    add("--gradient-accumulation-steps", type=count, metavar="N", help="makes N micro-steps per optimizer step")
    about = "puts N images into a sequence of a vision-language model (default: 1; 0: text alone)"
    add("--images", type=int, metavar="N", help=about)
    about = "sets the size of an image (default: the one that the model was made for)"
    add("--image-size", type=_image_size, metavar="HxW", help=about)
    about = "reduces gradients in each micro-step (default), or once after the last"
    add("--sync-each-batch", action=argparse.BooleanOptionalAction, help=about)
    dtypes = {"choices": ("fp32", "bf16", "fp16")}
    add("--master-dtype", **dtypes, help="sets the dtype of the weights that are updated (default: fp32)")
    add("--reduce-dtype", **dtypes, help="sets the dtype in which gradients are reduced (default: fp32)")
    about = "steps with adamw (default), adamw_foreach, adamw_8bit, sgd or sgd_momentum"
    add("--optimizer", metavar="NAME", help=about)
    add("--lora-r", type=count, metavar="R", help="trains LoRA adapters of rank R (default: all parameters)")
    add("--lora-target-modules", metavar="A,B", help="adapts these modules, as in PEFT (default: all-linear)")
    add("--freeze-vision-tower", action="store_const", const=True, help="does not train the image encoder")
    add("--load-in-4bit", action="store_const", const=True, help="holds the base of LoRA in 4 bits (QLoRA)")
    about = "makes logits in pieces (the recipes, TRL, Liger; default for causal models) or whole (transformers' loss)"
    add("--loss", choices=("chunked", "full"), help=about)
    kernels = ("sdpa", "eager", "flash_attention_2")
    add("--attn-implementation", choices=kernels, help="uses these attention kernels (default: sdpa)")
    about = "compiles each block"
    add("--torch-compile", dest="compile", action="store_const", const=True, help=about)


def _image_size(text: str) -> tuple[int, int]:
    """Height and width from "HxW", or from one number for both."""
    sides = [int(side) for side in text.lower().split("x") if side.isdigit()]
    if len(sides) != text.lower().count("x") + 1 or len(sides) > 2 or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of an image; give height x width, such as 512x512")
    return sides[0], sides[-1]


_NAMES = {"num_processes": "num_gpus", "offload_params": "offload", "mixed_precision": "precision"}
"""Field of `TrainingSetup` by option, where Accelerate's word is another."""


def explicit_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `TrainingSetup` that the command line gives; on machines of 8 GPUs, unless it says otherwise."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    known = {each.name for each in fields(TrainingSetup)}
    values = {_NAMES.get(name, name): value for name, value in vars(options).items() if value is not None}
    values = {name: value for name, value in values.items() if name in known}
    if values.get("precision") == "no":
        values["precision"] = "fp32"
    if "," in str(values.get("lora_target_modules", "")):
        values["lora_target_modules"] = tuple(name.strip() for name in values["lora_target_modules"].split(","))
    if options.gpu is not None:
        gpu_named(options.gpu)
    total = values.get("num_gpus", 1)
    machines = machines_of(total) if options.num_machines is None else options.num_machines
    if total % machines:
        raise ConfigError(f"--num-processes {total} is no multiple of --num-machines {machines}")
    if options.num_machines is not None:
        values["gpus_per_node"] = total // machines
    return values


def setup_of(options: argparse.Namespace) -> "TrainingSetup":
    """The setup that the command line describes."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup

    return TrainingSetup(**({"seq_len": usual_length(options)} | explicit_fields(options)))


def usual_length(options: argparse.Namespace) -> int:
    """4,096 tokens, or the most that the model's config names where that is less."""
    prepare_model(options)
    from hf_fsdp_tools.modeling.configs import max_positions
    from hf_fsdp_tools.modeling.meta import load_config

    config = load_config(options.model, trust_remote_code=options.trust_remote_code)
    return min(4096, max_positions(config) or 4096)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line of progress on a terminal, each over the last, gone at the end.

    Meanwhile Python looks for cycles in its objects rarely: a dry run makes millions of objects that live on, and
    looking through all of them again and again took a fifth of a search (measured).
    """
    is_shown, thresholds = sys.stderr.isatty(), gc.get_threshold()

    def say(text: str) -> None:
        if is_shown:
            print(f"\r\x1b[2K{text[:99]}", end="", file=sys.stderr, flush=True)

    gc.set_threshold(200_000, 50, 1_000)
    try:
        yield say
    finally:
        gc.set_threshold(*thresholds)
        say("")
