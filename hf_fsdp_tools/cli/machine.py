"""The machines of a run: options of the commands, and the config that follows from them."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import amount, count
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig


GPUS_PER_MACHINE = 8
"""GPUs of another machine where more are wanted and no number of machines is given. (assumed: most have 8)"""

_ANY_ADDRESS = "ADDRESS-OF-MACHINE-0"
"""Address in a file for several machines where none is given: the command that starts each machine gives it."""


def add_machine_options(add: Callable[..., Any]) -> None:
    """Add how many processes and machines there are, of what kind, and how fast they are linked."""
    add("--num-processes", type=count, metavar="N", help="runs N processes over all machines, one for each GPU")
    add("--num-machines", type=count, metavar="N", help="runs on N machines, with equally many processes each")
    add("--gpu", metavar="NAME", help="plans for this kind of GPU: a100-40gb, h100-80gb, h200-141gb, rtx-4090, …")
    about = "sets the Gbit/s of one machine, all network cards together (default: the usual)"
    add("--network-gbit-s", type=amount, metavar="X", help=about)
    about = "sets the GB/s between the GPUs of a machine, as nccl-tests' bus bandwidth (default: the usual)"
    add("--link-gb-s", type=amount, metavar="X", help=about)
    about = "sets the dtype of computation (default: bf16 on GPUs that have it)"
    add("--mixed-precision", choices=("no", "bf16", "fp16"), help=about)


def add_sharding_options(add: Callable[..., Any]) -> None:
    """Add what FSDP does."""
    add("--dp-replicate-size", type=count, metavar="N", help="keeps N copies of the model, each sharded (HSDP)")
    switch = {"action": argparse.BooleanOptionalAction}
    add("--activation-checkpointing", **switch, help="recomputes activations in backward: slower, less memory")
    add("--reshard-after-forward", **switch, help="frees gathered weights until backward: slower, less memory")
    add("--offload-params", **switch, help="keeps shards and optimizer state in host memory")


def decide(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> tuple["FSDPConfig", dict[str, str]]:
    """The config of these machines, and a reason for each field that is not a plain default.

    The defaults of the machine, the values of a translated file and the options, of which the later goes first.
    """
    from hf_fsdp_tools import FSDPConfig

    typed = {each.name: options.get(each.name) for each in fields(FSDPConfig)}
    typed = {name: value for name, value in typed.items() if value is not None and value != ()}
    changes = {**(file or {}), **typed}
    num, machines, is_elsewhere = changes.get("num_processes"), changes.get("num_machines"), bool(options.get("gpu"))
    is_file_for_cpu = changes.pop("use_cpu", False)
    if options.get("cpu") or (is_file_for_cpu and not is_elsewhere):
        defaults, reasons = FSDPConfig.for_machine(gpu_count=0)
    elif num and (is_elsewhere or file is not None):
        defaults, reasons = FSDPConfig.for_machine(gpu_count=num)
    else:
        defaults, reasons = FSDPConfig.for_machine()
        _check_gpus(defaults, (num or 0) // (machines or 1), is_elsewhere)
    if is_elsewhere and machines is None and num and num > GPUS_PER_MACHINE:
        machines = changes["num_machines"] = machines_of(num)
        reasons["num_machines"] = f"of {GPUS_PER_MACHINE} GPUs each, assumed; --num-machines says otherwise"
    if machines and not num:
        changes["num_processes"] = defaults.num_processes * machines
        reasons["num_processes"] += f", on each of {machines} machines" if machines > 1 else ""
    reasons |= dict.fromkeys(changes.keys() & (file or {}).keys(), "as the file says")
    reasons |= dict.fromkeys(typed, "asked for")
    if (machines or 1) > 1:
        for name, value, reason in (
            ("main_process_ip", _ANY_ADDRESS, "the launch command gives it"),
            ("main_process_port", 29500, "PyTorch's usual port"),
        ):
            if name not in changes:
                changes[name], reasons[name] = value, reason
    return replace(defaults, **changes), reasons


def address_words(config: "FSDPConfig") -> list[str]:
    """Options of the launch command that differ between machines, or that the file leaves open."""
    words = ["--machine_rank", str(config.machine_rank)] if config.num_machines > 1 else []
    return [*words, *(["--main_process_ip", "ADDRESS"] if config.main_process_ip == _ANY_ADDRESS else [])]


def machines_of(num_processes: int) -> int:
    """How many machines have so many GPUs, where nobody says how many each has."""
    machines, rest = divmod(num_processes, GPUS_PER_MACHINE)
    if machines and rest:
        raise ConfigError(
            f"{num_processes} GPUs are no whole number of machines with {GPUS_PER_MACHINE}; use "
            f"{num_processes - rest} or {num_processes - rest + GPUS_PER_MACHINE}, or say with --num-machines how many "
            "there are"
        )
    return max(1, machines)


def _check_gpus(defaults: "FSDPConfig", needed: int, is_elsewhere: bool) -> None:
    """Refuse options that need more GPUs than this machine has, or leave open how many another has."""
    if is_elsewhere and defaults.use_cpu:
        raise ConfigError("--gpu: this machine has no GPU; say with --num-processes how many the other machine has")
    if not defaults.use_cpu and needed > defaults.num_processes:
        raise ConfigError(
            f"{needed} processes on a machine with {defaults.num_processes} GPU(s): each needs its own; say with "
            f"--gpu for which other machine the file is, or use --num-processes {defaults.num_processes}, or --cpu"
        )
