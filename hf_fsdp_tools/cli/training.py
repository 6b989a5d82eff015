"""Options that say what is trained on which machines, for the commands that look ahead, and the setup they make."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import quiet
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.setup import TrainingSetup


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add machines and training, each option named as the field of `TrainingSetup`."""
    place = parser.add_argument_group("machines").add_argument
    place("--gpus", "--num-gpus", "--num-processes", dest="num_gpus", type=int, metavar="N", help="over all machines")
    place("--gpu", metavar="NAME", help="such as a100-40gb, h100-80gb, h200-141gb, rtx-4090 (default: h100-80gb)")
    place("--gpus-per-node", type=int, metavar="N", help="of one machine (default: 8)")
    add_link_options(place)
    run = parser.add_argument_group("training").add_argument
    run("--precision", choices=("bf16", "fp16", "fp32"), help="of computation (default: bf16)")
    add_run_options(run)


def add_link_options(place: Callable[..., Any]) -> None:
    """Add how fast machines and GPUs are linked."""
    place("--network-gbit-s", type=float, metavar="X", help="of one machine, all cards together (default: the usual)")
    about = "GB/s between the GPUs of a machine, as nccl-tests' bus bandwidth (default: the usual)"
    place("--link-gb-s", type=float, metavar="X", help=about)


def add_run_options(run: Callable[..., Any]) -> None:
    """Add what is trained, how, and how much at once."""
    names = ("--batch-size", "--micro-batch", "--per-device-train-batch-size")
    run(*names, dest="batch_size", type=int, metavar="N", help="sequences per GPU and micro-step")
    run("--seq-len", "--max-length", type=int, metavar="N", help="tokens per sequence (default: 4096, or the model's)")
    run("--images", type=int, metavar="N", help="per sequence of a vision-language model (default: 1; 0: text alone)")
    run("--image-size", type=_image_size, metavar="HxW", help="of each (default: the size that the model was made for)")
    run("--gradient-accumulation-steps", type=int, metavar="N", help="micro-steps per optimizer step")
    about = "reduce gradients once, after the last micro-step"
    run("--no-sync-each-batch", dest="sync_each_batch", action="store_const", const=False, help=about)
    run("--master-dtype", choices=("fp32", "bf16", "fp16"), help="of the weights that are updated (default: fp32)")
    run("--reduce-dtype", choices=("fp32", "bf16", "fp16"), help="in which gradients are reduced (default: fp32)")
    run("--optimizer", metavar="NAME", help="adamw, adamw_foreach, adamw_8bit, sgd, sgd_momentum (default: adamw)")
    run("--lora-r", type=int, metavar="R", help="rank of LoRA adapters (default: all parameters are trained)")
    run("--lora-target-modules", metavar="NAMES", help="as in PEFT (default: all-linear)")
    run("--freeze-vision-tower", action="store_const", const=True, help="train what reads images, not what sees them")
    run("--load-in-4bit", action="store_const", const=True, help="NF4 base for LoRA (QLoRA)")
    about = "logits whole, or in pieces as the recipes, TRL and Liger make them (default: chunked for causal models)"
    run("--loss", choices=("full", "chunked"), help=about)
    run("--attn-implementation", choices=("sdpa", "eager", "flash_attention_2"), help="(default: sdpa)")
    run("--compile", action="store_const", const=True, help="torch.compile of each block")


def _image_size(text: str) -> tuple[int, int]:
    """Height and width from "HxW", or from one number for both."""
    try:
        sides = [int(side) for side in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of an image; give height x width, such as 512x512")
    return sides[0], sides[-1]


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    """Add what FSDP does."""
    shard = parser.add_argument_group("sharding").add_argument
    about = "N copies of the model (HSDP)"
    shard("--dp-replicate", "--dp-replicate-size", dest="dp_replicate_size", type=int, metavar="N", help=about)
    shard("--activation-checkpointing", action="store_const", const=True, help="recompute activations in backward")
    shard(
        "--no-reshard-after-forward",
        dest="reshard_after_forward",
        action="store_const",
        const=False,
        help="keep gathered weights until backward",
    )
    shard("--offload", action="store_const", const=True, help="keep shards and optimizer state in host memory")
    shard("--wrapping", choices=("hybrid", "root", "none"), help="units: the plan, one for all, no FSDP")


def given_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `TrainingSetup` that the command line gives."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup

    given = {each.name: getattr(options, each.name, None) for each in fields(TrainingSetup)}
    given = {name: value for name, value in given.items() if value is not None}
    targets = str(given.get("lora_target_modules", ""))
    if "," in targets:
        given["lora_target_modules"] = tuple(name.strip() for name in targets.split(","))
    return given


def setup_of(options: argparse.Namespace) -> "TrainingSetup":
    """The setup that the command line describes."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup

    given = given_fields(options)
    if "seq_len" not in given:
        given["seq_len"] = min(4096, positions_of(options) or 4096)
    setup = TrainingSetup(**given)
    check_machines(setup)
    return setup


def check_machines(setup: "TrainingSetup") -> None:
    """Refuse machines that cannot be."""
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    gpu_named(setup.gpu)
    total, each = setup.num_gpus, setup.gpus_per_node
    if total > each and total % each:
        raise ConfigError(
            f"{total} GPUs are no whole number of machines with {each}; use {total - total % each} or "
            f"{total - total % each + each}, or say with --gpus-per-node how many a machine has"
        )


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments with which the model is built: its class and whether its code may run."""
    quiet()
    return {"trust_remote_code": options.trust_remote_code, "auto_class": options.auto_class}


def positions_of(options: argparse.Namespace) -> int | None:
    """The most tokens per sequence of the model; None where its config names no limit."""
    quiet()
    from hf_fsdp_tools.hub import local_path
    from hf_fsdp_tools.modeling.configs import max_positions
    from hf_fsdp_tools.modeling.meta import load_config

    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    return max_positions(load_config(options.model, trust_remote_code=options.trust_remote_code))


_PATIENCE_S = 15
"""Seconds after which a line is printed where no terminal is. (assumed)"""


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line of progress: on a terminal each over the last, gone at the end; elsewhere one, once work takes a while.

    Meanwhile Python looks for cycles in its objects rarely.

    A dry run makes millions of objects that live on; looking through all of them again and again took a fifth of a
    search (measured).
    """
    is_shown, thresholds = sys.stderr.isatty(), gc.get_threshold()
    started, is_silent = time.monotonic(), True

    def say(text: str) -> None:
        nonlocal is_silent
        if is_shown:
            print(f"\r\x1b[2K{text[:99]}", end="", file=sys.stderr, flush=True)
        elif text and is_silent and time.monotonic() - started > _PATIENCE_S:
            print(f"{text} (this may take minutes)", file=sys.stderr, flush=True)
            is_silent = False

    gc.set_threshold(200_000, 50, 1_000)
    try:
        yield say
    finally:
        gc.set_threshold(*thresholds)
        say("")
