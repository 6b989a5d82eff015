"""The command `hf-fsdp config`: an Accelerate config for this machine or another, with a reason for each choice; with a
model, the fastest that fits."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import write
from hf_fsdp_tools.cli.fitting import add_search_options, recommend
from hf_fsdp_tools.cli.training import add_model_options
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig

__all__ = ["add_config"]


def add_config(commands: Any) -> None:
    """Add the command `config`."""
    about = "write an Accelerate config for FSDP: with NAME the fastest that fits, else one for this machine"
    parser = commands.add_parser("config", help=about, description=about)
    add_model_options(parser, optional=True)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the YAML there instead of to stdout")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    place = parser.add_argument_group("machines").add_argument
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="run on CPU with gloo, whatever this machine has")
    about = "run on GPUs, also when written on a machine without; with NAME also which, such as h100-80gb"
    kind.add_argument("--gpu", nargs="?", const=True, metavar="NAME", help=about)
    about = "processes over all machines (default: one per GPU; 2 on CPU)"
    place("--num-processes", "--gpus", "--num-gpus", dest="num_processes", type=int, metavar="N", help=about)
    place("--num-machines", type=int, metavar="N", help="machines with equally many processes each")
    place("--machine-rank", type=int, metavar="R", help="the machine this file is for, from 0")
    place("--main-process-ip", metavar="ADDRESS", help="address of machine 0")
    place("--main-process-port", type=int, metavar="PORT", help="port on machine 0 (default: a free one)")
    place("--gpu-ids", metavar="0,1", help="GPUs to use (default: all)")
    model = parser.add_argument_group("model and training").add_argument
    model(
        "--mixed-precision", choices=("no", "bf16", "fp16"), help="compute dtype (default: bf16 on GPUs that have it)"
    )
    model("--fsdp-version", type=int, choices=(1, 2), help="2: fully_shard; 1: deprecated upstream")
    model("--hsdp", type=int, metavar="N", help="N copies of the model, each sharded over its part of the processes")
    model(
        "--no-reshard-after-forward",
        action="store_true",
        help="keep gathered weights until backward: faster, more memory",
    )
    model("--offload", action="store_true", help="keep shards and optimizer state in host memory")
    model(
        "--activation-checkpointing", action="store_true", help="recompute activations in backward: slower, less memory"
    )
    model(
        "--state-dict-type",
        choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
        help="how training checkpoints are written (default: SHARDED_STATE_DICT)",
    )
    add_search_options(parser)
    parser.set_defaults(run=_config)


def _config(options: argparse.Namespace) -> None:
    config, reasons = _decide(options)
    found = None if options.model is None else recommend(options, config)
    if found is not None:
        config = replace(config, **found.config)
    text = config.to_accelerate_yaml(command=options.command_line, notes=() if found is None else found.notes)
    launch = _launch_command(config, options.output, () if found is None else found.arguments)
    if options.output:
        _check_replaceable(options.output)
        write(options.output, text)
    if options.json:
        output = str(options.output) if options.output else None
        value = {"config": asdict(config), "reasons": reasons, "launch": launch, "output": output, "yaml": text}
        if found is not None:
            value["recommendation"] = json.loads(found.recommendation.to_json())
        print(json.dumps(value, indent=1))
        return
    decisions = _decisions(config, reasons) if found is None else [str(found.recommendation), ""]
    report = [*decisions, f"launch  {launch}"]
    if options.output:
        print("\n".join([*report[:-1], f"wrote   {options.output}", report[-1]]))
    else:  # stdout has the YAML alone, so that it can be redirected into a file
        print(text, end="")
        print("\n".join(report), file=sys.stderr)


def _decide(options: argparse.Namespace) -> tuple["FSDPConfig", dict[str, str]]:
    """The config from the options and this machine, and a reason for each field that is not a plain default."""
    from hf_fsdp_tools import FSDPConfig

    if options.cpu:
        config, reasons = FSDPConfig.for_machine(gpu_count=0)
    elif options.gpu and options.num_processes:
        config, reasons = FSDPConfig.for_machine(gpu_count=options.num_processes)
    else:
        config, reasons = FSDPConfig.for_machine()
        _check_gpus(options, config)
    given = {field: getattr(options, name) for name, field in _SETTINGS.items()}
    changes = {field: value for field, value in given.items() if value is not None and value is not False}
    if options.num_machines and not options.num_processes:
        changes["num_processes"] = config.num_processes * options.num_machines
    if options.no_reshard_after_forward:
        changes["reshard_after_forward"] = False
    reasons |= {field: "asked for" for field in changes}
    if options.fsdp_version == 1:  # with NO_WRAP it would gather the whole model at once
        changes["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        reasons["auto_wrap_policy"] = "under FSDP1 it is Accelerate that wraps"
    return replace(config, **changes), reasons


_SETTINGS = {
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_process_ip",
    "main_process_port": "main_process_port",
    "gpu_ids": "gpu_ids",
    "mixed_precision": "mixed_precision",
    "fsdp_version": "fsdp_version",
    "hsdp": "dp_replicate_size",
    "offload": "offload_params",
    "activation_checkpointing": "activation_checkpointing",
    "state_dict_type": "state_dict_type",
}
"""Field of FSDPConfig by option of `hf-fsdp config`."""


def _check_gpus(options: argparse.Namespace, here: "FSDPConfig") -> None:
    """Refuse options that need more GPUs than this machine has, unless they say that the config is for another one."""
    if options.gpu and here.use_cpu:
        raise ConfigError("--gpu: this machine has no GPU; say with --num-processes how many the other machine has")
    needed = (options.num_processes or 0) // (options.num_machines or 1)
    if not here.use_cpu and needed > here.num_processes:
        raise ConfigError(
            f"{needed} processes on a machine with {here.num_processes} GPU(s): each needs its own; add --gpu if "
            "the file is for another machine, or --cpu"
        )


def _decisions(config: "FSDPConfig", reasons: dict[str, str]) -> list[str]:
    """Aligned lines of setting, value and reason, of the settings that have a reason."""
    names = ["use_cpu", "num_processes", "mixed_precision"]
    rows = [(name, getattr(config, name), reasons[name]) for name in [*names, *sorted(set(reasons) - set(names))]]
    rows[0] = ("device", "CPU, gloo" if config.use_cpu else "CUDA, NCCL", rows[0][2])
    widths = [max(len(str(row[column])) for row in rows) for column in range(2)]
    return [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {reason}" for name, value, reason in rows]


def _launch_command(config: "FSDPConfig", path: Path | None, arguments: Sequence[str] = ()) -> str:
    words = ["accelerate", "launch", "--config_file", str(path or "FILE")]
    if config.num_machines > 1:
        words += ["--machine_rank", str(config.machine_rank)]
    threads = (os.cpu_count() or 1) // config.num_processes
    if config.use_cpu and threads > 1:  # has no YAML key, and the launcher warns when it has to choose
        words += ["--num_cpu_threads_per_process", str(threads)]
    return shlex.join([*words, *(arguments or ("your_script.py",))])


def _check_replaceable(path: Path) -> None:
    try:
        ours = not path.exists() or path.read_text(encoding="utf-8").startswith("# Generated by: hf-fsdp")
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise ConfigError(
            f"{path} exists and hf-fsdp did not write it; name another file with --output, or delete this one"
        )
