"""The one vocabulary of all commands: options and their values, the machines and the setup that follow from them."""

import argparse
import gc
import logging
import math
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.axes import AXES, with_degrees
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.recipes import RECIPES
from hf_fsdp_tools.text import did_you_mean, terminal_width

if TYPE_CHECKING:
    from hf_fsdp_tools import LaunchConfig
    from hf_fsdp_tools.foresight.setup import TrainingSetup


def _typed(read: Callable[[str], Any], is_right: Callable[[Any], bool], wrong: str) -> Callable[[str], Any]:
    """A type for argparse."""

    def typed(text: str) -> Any:
        with suppress(ValueError, KeyError):
            if is_right(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is {wrong}")

    return typed


count = _typed(int, lambda number: number >= 1, "no whole number from 1")
amount = _typed(float, lambda number: 0 < number < math.inf, "no number above 0")
_truth = _typed({"true": True, "false": False}.__getitem__, lambda _: True, "neither true nor false")
_N: dict[str, Any] = {"type": count, "metavar": "N"}
_X: dict[str, Any] = {"type": amount, "metavar": "X"}
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_FLAG: dict[str, Any] = {"action": "store_const", "const": True}  # None where it is left out


def _width() -> int:
    """Characters in a line of help."""
    return min(terminal_width() or 80, 110)


def examples(*commands: str) -> str:
    """The end of a command's help."""
    wrap = partial(textwrap.wrap, width=_width() - 4, break_on_hyphens=False)
    return "\n".join(["examples:", *("  " + " \\\n      ".join(wrap(f"hf-fsdp {each}")) for each in commands)])


def column(name: str, about: str) -> str:
    """A row of help of two columns, the second at least 20 characters from the left."""
    head = f"{name:<20}" if len(name) <= 20 else f"{name.rstrip()}\n{'':20}"
    return head + textwrap.fill(about, _width() - 20).replace("\n", f"\n{'':20}")


def filled(text: str) -> str:
    """A text whose paragraphs fit the terminal; rows of two columns stay as they are."""
    parts = re.split(r"(?m)((?:^\S.*\n?)+)", text)  # every second is a paragraph
    parts[1::2] = [textwrap.fill(part, _width()) + "\n" * part.endswith("\n") for part in parts[1::2]]
    return "".join(parts)


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the model, its class, whether its code may run, and `--json`."""
    about = "hub name, local folder, or path of a config.json"
    parser.add_argument("model", metavar="NAME", nargs="?" if optional else None, help=about)
    add_class_and_json(parser.add_argument)


def add_class_and_json(add: Callable[..., Any]) -> None:
    """Add the model's class, whether its code may run, and `--json`."""
    about = (
        "class of the model (default: the one that the config names): AutoModelFor followed by CausalLM, Seq2SeqLM, "
        "SequenceClassification, ImageTextToText, …; AutoModel; or a model class of transformers"
    )
    add("--auto-class", metavar="CLASS", help=about)
    add("--trust-remote-code", action="store_true", help="run model code that comes with the checkpoint")
    add_json(add)


def add_json(add: Callable[..., Any]) -> None:
    """Add `--json`."""
    add("--json", action="store_true", help="print one JSON value instead of text")


def refuse(options: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Refuse options of these names that were given, since they would change nothing."""
    for action in options.command._actions:
        if action.dest in names and vars(options).get(action.dest) not in (action.default, None, ()):
            raise ConfigError(f"{action.option_strings[0]} {reason}")


def prepare_model(options: argparse.Namespace) -> dict[str, Any]:
    """Silence the libraries that build a model, say when the hub is asked, and return how the model is built."""
    import huggingface_hub
    import transformers

    from hf_fsdp_tools.hub import local_path

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which PEFT imports
    warnings.simplefilter("ignore")
    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    return {"trust_remote_code": options.trust_remote_code, "auto_class": options.auto_class}


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work of which it takes the result; None is no file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    above = next((each for each in path.absolute().parents if each.exists()), None)
    if above is not None and not above.is_dir():
        raise ConfigError(f"{path} cannot be written: {above} is a file, not a folder; name another file")


def write(path: Path, text: str) -> None:
    """Write a text file, in a new folder if need be."""
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from None


# ---- machines ----


_GPUS_PER_MACHINE = 8
"""GPUs of another machine where more are wanted and no number of machines is given. (assumed: most have 8)"""

ANY_ADDRESS = "ADDRESS-OF-MACHINE-0"
"""Address in a file for several machines where none is given: the command that starts each machine gives it."""


def add_machine_options(add: Callable[..., Any], *, processes: str, gpu: str) -> None:
    """Add how many processes and machines there are and of what kind, with what is usual."""
    add("--num-processes", **_N, help=f"number of processes over all machines, one for each GPU (default: {processes})")
    add("--num-machines", **_N, help=f"number of machines (default: {_GPUS_PER_MACHINE} GPUs each)")
    add("--gpu", metavar="NAME", help=f"kind of GPU, as `hf-fsdp gpus` lists them (default: {gpu})")
    about = "dtype of computation (default: bf16 on GPUs that have it)"
    add("--mixed-precision", choices=("no", "bf16", "fp16", "fp8"), help=about)


def add_link_options(add: Callable[..., Any]) -> None:
    """Add how fast machines and GPUs are linked."""
    usual = "(default: as `hf-fsdp gpus` says)"
    add("--network-gbit-s", **_X, help=f"network of one machine in Gbit/s, all cards together {usual}")
    add("--link-gb-s", **_X, help=f"link between the GPUs of a machine in GB/s, as nccl-tests' bus bandwidth {usual}")


def add_degrees(add: Callable[..., Any]) -> None:
    """Add the degrees of parallelism."""
    for axis in AXES:
        add(f"--{axis.size.replace('_', '-')}", **_N, help=f"{axis.about} (default: 1)")
    add(
        "--sequence-parallel", **_SWITCH, help="with --tp-size: between shared layers, a GPU holds its own tokens alone"
    )


def add_sharding_options(add: Callable[..., Any]) -> None:
    """Add what FSDP does."""
    add_degrees(add)
    recompute = "activation checkpointing"
    add("--activation-checkpointing", **_SWITCH, help="recompute activations in the backward pass: slower, less memory")
    add("--activation-checkpointing-every-n-layers", **_N, help=f"{recompute} of the first of every N blocks alone")
    about = f"{recompute} that keeps the inputs of blocks in host memory"
    add("--activation-checkpointing-offload", **_SWITCH, help=about)
    about = "operators whose results checkpointed blocks keep: matmul, attention, or torch's names"
    add("--activation-checkpointing-save-ops", type=_names, metavar="A,B", help=about)
    add("--reshard-after-forward", **_SWITCH, help="free gathered weights until the backward pass: slower, less memory")
    add("--offload-params", **_SWITCH, help="keep shards and optimizer state in host memory")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def decide(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> tuple["LaunchConfig", dict[str, str]]:
    """The config of these machines, and a reason for each field that is not a plain default.

    The defaults of the machine, the values of a translated file and the options, of which the later goes first.
    """
    from hf_fsdp_tools import LaunchConfig

    typed = {each.name: options.get(each.name) for each in fields(with_degrees(LaunchConfig))}
    typed = {name: value for name, value in typed.items() if value is not None and value != ()}
    changes = {**(file or {}), **typed}
    num, machines, is_elsewhere = changes.get("num_processes"), changes.get("num_machines"), bool(options.get("gpu"))
    is_asked, is_file_for_cpu = options.get("cpu"), changes.pop("use_cpu", False)
    if is_asked or (is_file_for_cpu and not is_elsewhere):
        defaults, reasons = LaunchConfig.for_machine(gpu_count=0)
        reasons["use_cpu"] = "asked for" if is_asked else "as the file says"
    elif num and (is_elsewhere or file is not None):
        defaults, reasons = LaunchConfig.for_machine(gpu_count=num)
    else:
        defaults, reasons = LaunchConfig.for_machine()
        _check_gpus(defaults, (num or 0) // (machines or 1), is_elsewhere or file is not None)
    if is_elsewhere and machines is None and num and num > _GPUS_PER_MACHINE:
        machines = changes["num_machines"] = machines_of(num)
        reasons["num_machines"] = f"of {_GPUS_PER_MACHINE} GPUs each, assumed; --num-machines says otherwise"
    if machines and not num:
        changes["num_processes"] = defaults.num_processes * machines
        reasons["num_processes"] += f", on each of {machines} machines" if machines > 1 else ""
    reasons |= dict.fromkeys(changes.keys() & (file or {}).keys(), "as the file says")
    reasons |= dict.fromkeys(typed, "asked for")
    if (machines or 1) > 1:
        reasons = {
            "main_process_ip": "the launch command gives it",
            "main_process_port": "PyTorch's usual port",
        } | reasons
        changes = {"main_process_ip": ANY_ADDRESS, "main_process_port": 29500} | changes
    return replace(defaults, **changes), reasons


def address_words(config: "LaunchConfig") -> list[str]:
    """Options of the launch command that differ between machines, or that the file leaves open."""
    words = ["--machine_rank", str(config.machine_rank)] if config.num_machines > 1 else []
    return [*words, *(["--main_process_ip", "ADDRESS"] if config.main_process_ip == ANY_ADDRESS else [])]


def machines_of(num_processes: int) -> int:
    """How many machines have so many GPUs, where nobody says how many each has."""
    machines, rest = divmod(num_processes, _GPUS_PER_MACHINE)
    if machines and rest:
        fewer = num_processes - rest
        raise ConfigError(
            f"{num_processes} GPUs are no whole number of machines with {_GPUS_PER_MACHINE}; use {fewer} or "
            f"{fewer + _GPUS_PER_MACHINE}, or say with --num-machines how many"
        )
    return max(1, machines)


def _check_gpus(defaults: "LaunchConfig", needed: int, is_elsewhere: bool) -> None:
    """Refuse options that need more GPUs than this machine has, or leave open how many another has."""
    if is_elsewhere and defaults.use_cpu:
        raise ConfigError(
            "this machine has no GPU; say with --num-processes how many the other machine has, or --cpu for none"
        )
    if not defaults.use_cpu and needed > defaults.num_processes:
        raise ConfigError(
            f"{needed} processes on a machine with {defaults.num_processes} GPU(s): each needs its own; say with "
            f"--gpu for which other machine the file is, or use --num-processes {defaults.num_processes}, or --cpu"
        )


# ---- what is trained ----


def add_training_options(add: Callable[..., Any], recipes: Iterable[str]) -> None:
    """Add what is trained, how, and how much at once, in the words of TRL and the Trainer where they have one."""
    names = sorted(each.replace("_", "-") for each in recipes)
    about = "recipe that trains (default in `estimate`: your own loop or Trainer; in `search`: finetune); if given, "
    about += "`search --output` writes one preset for it, and else a launch config"
    add("--recipe", type=partial(_recipe, names), metavar="NAME", help=about)
    add("--per-device-train-batch-size", **_N, help="sequences per GPU and micro-batch")
    add("--max-length", **_N, help="tokens per sequence (default: 4096, or the model's most)")
    add("--gradient-accumulation-steps", **_N, help="micro-batches per optimizer step")
    about = "images in a sequence of a vision-language model (default: 1; 0: text alone)"
    add("--images", type=int, metavar="N", help=about)
    about = "size of an image (default: the one that the model was made for)"
    add("--image-size", type=_image_size, metavar="HxW", help=about)
    add("--sync-each-batch", **_SWITCH, help="reduce gradients in each micro-batch (default), or once after the last")
    dtypes = {"choices": ("fp32", "bf16", "fp16")}
    add("--master-dtype", **dtypes, help="dtype of the weights that are updated (default: fp32)")
    add("--reduce-dtype", **dtypes, help="dtype in which gradients are reduced (default: fp32)")
    about = "optimizer: adamw (default), adamw_foreach, adamw_8bit, muon, sgd or sgd_momentum"
    add("--optimizer", metavar="NAME", help=about)
    add("--lora-r", type=count, metavar="R", help="rank of LoRA adapters (default: all parameters are trained)")
    add("--lora-target-modules", metavar="A,B", help="modules that LoRA adapts (default: all-linear)")
    about = "dropout of LoRA (default: 0, which `search` writes; TRL's own is 0.05)"
    add("--lora-dropout", type=float, metavar="X", help=about)
    about = "frozen models that are loaded too, in shards: a teacher, a reference"
    add("--frozen-models", type=_names, metavar="A,B", help=about)
    add("--freeze-vision-tower", **_FLAG, help="train all but the image encoder")
    add("--load-in-4bit", **_FLAG, help="base of LoRA in 4 bits (QLoRA)")
    add("--dequantize", type=_truth, metavar="BOOL", help="false: LoRA on a base as it is stored (default: true)")
    about = "chunked loss (recipes, TRL, Liger; default for causal models) or full logits (transformers' own loss)"
    add("--loss", choices=("chunked", "full"), help=about)
    kernels = ("sdpa", "eager", "flash_attention_2")
    add("--attn-implementation", choices=kernels, help="attention kernels (default: sdpa)")
    about = "compile each block (default: false; `search` compares both)"
    add("--torch-compile", dest="compile", **_SWITCH, help=about)


def _recipe(names: Sequence[str], text: str) -> str:
    """A recipe's name, by a type for argparse, which names the nearest."""
    name = text.lower().replace("_", "-")
    if name not in names:
        name = {"sft": "finetune", "rm": "reward", "vlm": "vision-language"}.get(name, name)
        near = f": did you mean {name}?" if name in names else did_you_mean(name, names)
        raise argparse.ArgumentTypeError(f"{text!r} is no recipe{near}")
    return name


def _image_size(text: str) -> tuple[int, int]:
    """Height and width from "HxW", or from one number for both."""
    sides = [int(side) for side in text.lower().split("x") if side.isdigit()]
    if len(sides) != text.lower().count("x") + 1 or len(sides) > 2 or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of an image; give height x width, such as 512x512")
    return sides[0], sides[-1]


COMPUTES = {"no": "fp32", "fp8": "bf16"}
"""The dtype as which estimates count a mixed precision of another name."""
FLOAT8 = "estimated as bf16, which gathers more and multiplies more slowly"
"""What estimates make of FP8."""


def explicit_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `TrainingSetup` that the command line gives; on machines of 8 GPUs, unless it says otherwise."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    known = {each.name for each in fields(with_degrees(TrainingSetup))}
    values = {name: value for name, value in vars(options).items() if name in known and value is not None}
    if (precision := values.get("mixed_precision")) in COMPUTES:
        values["mixed_precision"] = COMPUTES[precision]
    if options.lora_r is None:
        refuse(options, ("lora_target_modules", "lora_dropout"), "is for an adapter: add --lora-r, such as 16")
    else:
        why = "is for a training of all weights, and LoRA's are fp32: leave it or --lora-r out"
        refuse(options, ("master_dtype",), why)
    names = _names(values.get("lora_target_modules") or "")
    if len(names) > 1 or "".join(names).isidentifier():  # of one name, anything else makes it a pattern
        values["lora_target_modules"] = names
    if options.gpu is not None:
        gpu_named(options.gpu)
    total = values.get("num_processes", 1)
    machines = machines_of(total) if options.num_machines is None else options.num_machines
    if total % machines:
        raise ConfigError(f"--num-processes {total} is no multiple of --num-machines {machines}")
    if options.num_machines is not None:
        values["gpus_per_node"] = total // machines
    return values


def described(options: argparse.Namespace, values: dict[str, Any], recipe: str | None) -> "TrainingSetup":
    """The setup of these fields, as a recipe trains it if one is named: by the options that it would be started with,
    so that what is estimated is what is run. The options get the class of the recipe's model."""
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.modeling.configs import max_positions
    from hf_fsdp_tools.modeling.meta import load_config
    from hf_fsdp_tools.scripting.setups import check_generates, options_of, setup_of

    prepare_model(options)
    config = load_config(options.model, trust_remote_code=options.trust_remote_code)
    wanted = TrainingSetup(**({"max_length": min(4096, max_positions(config) or 4096)} | values))
    if recipe is None:
        return wanted
    own, problem = RECIPES[recipe], f"does not go with --recipe {recipe}"
    if own.auto_class is None and options.auto_class is None:
        check_generates(config, options.model, trust_remote_code=options.trust_remote_code)
    if options.auto_class not in (None, own.auto_class):
        refuse(options, ("auto_class",), f"{problem}, which makes {own.auto_class or 'what the config names'}")
    if recipe == "distill" and not wanted.frozen_models:
        raise ConfigError("--recipe distill needs its teacher: --frozen-models NAME")
    options.auto_class = own.auto_class
    started = argparse.Namespace(**options_of(recipe, options.model, wanted))
    setup = setup_of(recipe, started, **vars(wanted))
    for name in values:
        if (value := getattr(setup, name)) != getattr(wanted, name):
            has = f", which has {value}" if value else ""
            refuse(options, (name,), f"{problem}{has}; `hf-fsdp estimate` without --recipe takes it")
    return setup


SHOWN = threading.Event()
"""Whether a command shows what it does: until then, `main` says after some seconds that libraries load."""

FIRST_S, _NEXT_S = 2.0, 30.0
"""After so many seconds a command that is silent says what it does; where no terminal is, again after so many more."""


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line of progress on a terminal, each over the last, gone at the end; elsewhere a line now and then.

    Meanwhile Python looks for cycles in its objects rarely: a dry run makes millions of objects that live on, and
    looking through all of them again and again took a fifth of a search (measured).
    """
    SHOWN.set()
    is_terminal, thresholds, over, latest = sys.stderr.isatty(), gc.get_threshold(), threading.Event(), ["estimating"]

    def say(text: str) -> None:
        latest[:] = [text]
        if is_terminal:
            print(f"\r\x1b[2K{text[:99]}", end="", file=sys.stderr, flush=True)

    def say_now_and_then() -> None:
        pause = FIRST_S
        while not over.wait(pause):
            print(f"hf-fsdp: {latest[0]}", file=sys.stderr, flush=True)
            pause = _NEXT_S

    if not is_terminal:
        threading.Thread(target=say_now_and_then, daemon=True).start()
    gc.set_threshold(200_000, 50, 1_000)
    try:
        yield say
    finally:
        over.set()
        gc.set_threshold(*thresholds)
        say("")
