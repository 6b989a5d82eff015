"""On which machines a run is: the options of `hf-fsdp config` and of the recipes, and the config that follows."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig


PORT = 29500
"""Port of several machines where none is given. Source: torch's own default (`torch.distributed.run`)."""

GPUS_PER_MACHINE = 8
"""Of another machine, where more GPUs are asked for and no number of machines is. (assumed: most have 8)"""

ANY_ADDRESS = "ADDRESS-OF-MACHINE-0"
"""In a file for several machines where no address is given: the command that starts each machine gives it."""


def add_machine_options(place: Callable[..., Any]) -> None:
    """Add how many machines and processes there are, and how machines find each other; with `-` and `_` alike."""

    def add(name: str, *others: str, **keywords: Any) -> None:
        under = [each.replace("-", "_").replace("__", "--", 1) for each in (name, *others)]
        place(*dict.fromkeys((name, *others, *under)), **keywords)

    add("--gpus", "--num-gpus", dest="gpus", type=int, metavar="N", help="GPUs over all machines (default: all here)")
    about = "processes over all machines (default: one per GPU; 2 on CPU)"
    add("--num-processes", type=int, metavar="N", help=about)
    add("--num-machines", type=int, metavar="N", help="machines with equally many processes each")
    add("--machine-rank", type=int, metavar="R", help="the machine that is started, from 0")
    add("--main-process-ip", metavar="ADDRESS", help="address of machine 0")
    about = f"port on machine 0 (default: a free one; {PORT} for several machines)"
    add("--main-process-port", type=int, metavar="PORT", help=about)


def decide(options: argparse.Namespace, said: Mapping[str, Any] | None = None) -> tuple["FSDPConfig", dict[str, str]]:
    """The config from the options and this machine, and a reason for each field that is not a plain default."""
    from hf_fsdp_tools import FSDPConfig

    asked = {field: getattr(options, name, None) for name, field in SETTINGS.items()}
    is_off = getattr(options, "offload", None) is False  # the one switch that can be turned off
    asked = {field: value for field, value in asked.items() if value is not None and value is not False}
    asked |= {"offload_params": False} if is_off and (said or {}).get("offload_params") else {}
    gpus, is_elsewhere = asked.pop("gpus", None), bool(getattr(options, "gpu", None))
    if gpus is not None and asked.setdefault("num_processes", gpus) != gpus:
        raise ConfigError(f"--gpus {gpus} and --num-processes {asked['num_processes']}: give one of them")
    if options.cpu and gpus is not None:
        raise ConfigError("--cpu and --gpus: give one of them; --num-processes counts processes on CPUs")
    changes = dict(said or {}) | asked
    on_cpu = options.cpu or (bool(changes.pop("use_cpu", False)) and gpus is None and not is_elsewhere)
    for name in ("num_processes", "num_machines"):
        if (number := changes.get(name, 1)) < 1:
            raise ConfigError(f"{name} is {number}; use a whole number from 1")
    count, machines = changes.get("num_processes"), changes.get("num_machines", 1)
    here, reasons = FSDPConfig.for_machine(gpu_count=0 if on_cpu else None)
    if not on_cpu and count and (is_elsewhere or said is not None or (gpus is not None and here.use_cpu)):
        here, reasons = FSDPConfig.for_machine(gpu_count=count)
    elif not on_cpu:
        _check_gpus(here, count, machines, is_elsewhere)
    if is_elsewhere and not here.use_cpu and count and "num_machines" not in changes and count > GPUS_PER_MACHINE:
        machines = changes["num_machines"] = _machines(count)
        reasons["num_machines"] = f"of {GPUS_PER_MACHINE} GPUs each, assumed; --num-machines says otherwise"
    if here.use_cpu and changes.get("offload_params") and "offload_params" not in asked:
        raise ConfigError(
            "the file keeps weights in the host's memory (offload), and the run would be on the CPU, which has them "
            "there; say with --gpus how many the file's machine has, or leave the offload out with --no-offload"
        )
    if "num_machines" in changes and not count:
        changes["num_processes"] = here.num_processes * machines
        reasons["num_processes"] += f", on each of {machines} machines" if machines > 1 else ""
    if getattr(options, "no_reshard_after_forward", False):
        changes["reshard_after_forward"] = asked["reshard_after_forward"] = False
    told = set(said or {}) - ({"use_cpu"} if (said or {}).get("use_cpu") != here.use_cpu else set())
    reasons |= dict.fromkeys(told, "as the file says") | dict.fromkeys(asked, "asked for")
    if machines > 1:
        for field, value, reason in (
            ("main_process_ip", ANY_ADDRESS, "the launch command gives it"),
            ("main_process_port", PORT, "PyTorch's usual port"),
        ):
            if field not in changes:
                changes[field], reasons[field] = value, reason
    return replace(here, **changes), reasons


def address_words(config: "FSDPConfig") -> list[str]:
    """Options of the launch command that differ between machines, or that the file leaves open."""
    words = ["--machine_rank", str(config.machine_rank)] if config.num_machines > 1 else []
    return [*words, *(["--main_process_ip", "ADDRESS"] if config.main_process_ip == ANY_ADDRESS else [])]


def launcher_words(config: "FSDPConfig") -> list[str]:
    """As `address_words`, and for this machine's CPU the threads of a process, which have no key in a file."""
    threads = (os.cpu_count() or 1) // config.num_processes
    some = config.use_cpu and threads > 1  # the launcher warns when it has to choose
    return [*address_words(config), *(["--num_cpu_threads_per_process", str(threads)] if some else [])]


SETTINGS = {
    "gpus": "gpus",
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_process_ip",
    "main_process_port": "main_process_port",
    "gpu_ids": "gpu_ids",
    "mixed_precision": "mixed_precision",
    "hsdp": "dp_replicate_size",
    "offload": "offload_params",
    "activation_checkpointing": "activation_checkpointing",
    "state_dict_type": "state_dict_type",
}
"""Field of FSDPConfig by option."""

FIELDS = SETTINGS | {"gpus": "num_processes", "cpu": "use_cpu"}
"""What messages call each option, for `common.in_options`."""


def _machines(count: int) -> int:
    """How many machines have so many GPUs."""
    machines, rest = divmod(count, GPUS_PER_MACHINE)
    if rest:
        raise ConfigError(
            f"{count} GPUs are no whole number of machines with {GPUS_PER_MACHINE}; use "
            f"{count - rest} or {count - rest + GPUS_PER_MACHINE}, or say with --num-machines how many there are"
        )
    return machines


def _check_gpus(here: "FSDPConfig", count: int | None, machines: int, is_elsewhere: bool) -> None:
    """Refuse options that need more GPUs than this machine has, unless they say that the config is for another one."""
    if is_elsewhere and here.use_cpu:
        raise ConfigError("--gpu: this machine has no GPU; say with --gpus how many the other machine has")
    needed = (count or 0) // machines
    if not here.use_cpu and needed > here.num_processes:
        raise ConfigError(
            f"{needed} processes on a machine with {here.num_processes} GPU(s): each needs its own; add --gpu if "
            "the file is for another machine, or --cpu"
        )
