"""The command `hf-fsdp`: show the blocks and the plan of a model, find problems, write a config, make a demo model.

Every command prints text, or with `--json` one JSON value. An error is one message on stderr and exit code 1; wrong
usage is exit code 2. Heavy libraries are imported inside the commands, so that `--help` is fast.
"""

import argparse
import difflib
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.errors import ConfigError, FSDPToolsError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `hf-fsdp` command; return the exit code: 1 for an error, also one that `doctor` finds, else 0.

    Args:
        arguments: without the program's name; None means those of the process.

    Raises:
        SystemExit: with 2 for wrong usage, with 0 after `--help`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    options.command_line = shlex.join(["hf-fsdp", *words])
    try:
        return int(options.run(options) or 0)
    except FSDPToolsError as error:
        if options.traceback:
            raise
        print(f"hf-fsdp: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-fsdp", description="Shard Hugging Face models with PyTorch FSDP.")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_blocks(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_config(commands)
    _add_demo_model(commands)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    about = "hub name, local folder, or path of a config.json"
    parser.add_argument("model", metavar="NAME", nargs="?" if optional else None, help=about)
    parser.add_argument(
        "--auto-class",
        default="AutoModelForCausalLM",
        metavar="CLASS",
        help="transformers class to build: an AutoModel… or a model class (default: %(default)s)",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run model code that comes with the checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")


def _add_blocks(commands: Any) -> None:
    about = "show what repeats in a model: blocks, embeddings, final norm, head, ties (no weights are read)"
    parser = commands.add_parser("blocks", help=about, description=about)
    _add_model_arguments(parser)
    parser.set_defaults(run=_blocks)


def _add_plan(commands: Any) -> None:
    about = "show what would be sharded together, why, and how much is gathered at once (no weights are read)"
    parser = commands.add_parser("plan", help=about, description=about)
    _add_model_arguments(parser)
    about_units = "modules outside blocks above this size are units, such as 2e7"
    parser.add_argument("--min-unit-params", type=float, metavar="N", help=about_units)
    parser.add_argument("--block-types", metavar="A,B", help="class names or fqn patterns of blocks, not detected ones")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the weights, such as bfloat16 (default: the config's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=_plan)


def _add_doctor(commands: Any) -> None:
    about = (
        "check this machine, an Accelerate config, or how a model would be sharded on N processes (no weights, no GPUs)"
    )
    parser = commands.add_parser("doctor", help=about, description=f"{about}; exit code 1 if an error is found")
    _add_model_arguments(parser, optional=True)
    parser.add_argument(
        "--config-file", "--config_file", type=Path, metavar="FILE", help="check this file for `accelerate launch`"
    )
    parser.add_argument(
        "--num-processes", type=int, default=8, metavar="N", help="processes to pretend (default: %(default)s)"
    )
    parser.set_defaults(run=_doctor)


def _add_config(commands: Any) -> None:
    about = "write an Accelerate config for FSDP; without options it describes this machine"
    parser = commands.add_parser("config", help=about, description=about)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the YAML there instead of to stdout")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    place = parser.add_argument_group("machines").add_argument
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="run on CPU with gloo, whatever this machine has")
    kind.add_argument("--gpu", action="store_true", help="run on GPUs, also when written on a machine without")
    place("--num-processes", type=int, metavar="N", help="processes over all machines (default: one per GPU; 2 on CPU)")
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
    parser.set_defaults(run=_config)


def _add_demo_model(commands: Any) -> None:
    about = "make a small Llama checkpoint with a trained tokenizer and its text, without a download"
    parser = commands.add_parser("demo-model", help=about, description=about)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder for the checkpoint")
    parser.add_argument("--dataset", type=Path, metavar="FOLDER", help="also write train.jsonl and eval.jsonl there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    for name, meaning in _DEMO_SIZES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, metavar="N", help=f"number of {meaning}")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    parser.set_defaults(run=_demo_model)


def _blocks(options: argparse.Namespace) -> None:
    model = _meta_model(options, dtype=None)
    from hf_fsdp_tools.planning.blocks import detect_blocks

    blocks = detect_blocks(model)
    print(blocks.to_json() if options.json else blocks)


def _plan(options: argparse.Namespace) -> None:
    model = _meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import HybridPolicy

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = HybridPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
    plan = make_wrap_plan(model, policy=policy)
    if options.output:
        _write(options.output, plan.to_json() + "\n")
    print(plan.to_json() if options.json else plan)
    if options.output and not options.json:
        print(f"wrote {options.output}")


def _doctor(options: argparse.Namespace) -> int:
    if options.config_file is not None:
        return _doctor_of_file(options)
    from hf_fsdp_tools.diagnostics.environment import check_environment, rehearse

    if options.model is None:
        found: Any = check_environment()
    else:
        found = rehearse(_meta_model(options, dtype=None), num_processes=options.num_processes)
    print(found.to_json() if options.json else found)
    return int(found.has_errors)


def _doctor_of_file(options: argparse.Namespace) -> int:
    from hf_fsdp_tools import FSDPConfig

    if options.model is not None:
        raise ConfigError("doctor looks at a model or at a config; give NAME or --config_file, not both")
    findings = FSDPConfig.check_file(options.config_file)
    if options.json:
        value = {"config_file": str(options.config_file), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(value, indent=1))
    else:
        print("\n".join([str(options.config_file), "", *(map(str, findings) if findings else ["no findings"])]))
    return int(any(finding.severity == "error" for finding in findings))


def _config(options: argparse.Namespace) -> None:
    config, reasons = _decide(options)
    text = config.to_accelerate_yaml(command=options.command_line)
    launch = _launch_command(config, options.output)
    if options.output:
        _check_replaceable(options.output)
        _write(options.output, text)
    if options.json:
        output = str(options.output) if options.output else None
        value = {"config": asdict(config), "reasons": reasons, "launch": launch, "output": output, "yaml": text}
        print(json.dumps(value, indent=1))
        return
    report = [*_decisions(config, reasons), f"launch  {launch}"]
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


def _launch_command(config: "FSDPConfig", path: Path | None) -> str:
    words = ["accelerate", "launch", "--config_file", str(path or "FILE")]
    if config.num_machines > 1:
        words += ["--machine_rank", str(config.machine_rank)]
    threads = (os.cpu_count() or 1) // config.num_processes
    if config.use_cpu and threads > 1:  # has no YAML key, and the launcher warns when it has to choose
        words += ["--num_cpu_threads_per_process", str(threads)]
    return shlex.join([*words, "your_script.py"])


def _demo_model(options: argparse.Namespace) -> None:
    _quiet()
    from hf_fsdp_tools.cli.demo import make_demo_model, write_demo_dataset

    sizes = {name: value for name, value in vars(options).items() if name in _DEMO_SIZES}
    folder = make_demo_model(options.folder, seed=options.seed, **sizes)
    data = [str(path) for path in write_demo_dataset(options.dataset)] if options.dataset else []
    weights = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in weights)
    if options.json:
        value = {"folder": str(folder), "weights": [path.name for path in weights], "dataset": data}
        print(json.dumps(value, indent=1))
        return
    print(f"model    {folder}  ({len(weights)} weight file{'s' * (len(weights) != 1)}, {total / 1e6:.1f} MB)")
    print("".join(f"dataset  {path}\n" for path in data), end="")
    print(f"next     hf-fsdp plan {shlex.quote(str(folder))}")


_DEMO_SIZES = {
    "hidden_size": "features",
    "num_layers": "blocks",
    "num_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "vocab_size": "tokens of the tokenizer",
    "max_length": "positions",
}
"""What each parameter of make_demo_model counts, for the help texts."""


def _meta_model(options: argparse.Namespace, *, dtype: str | None) -> Any:
    """The model that the options name, on meta."""
    _quiet()
    from hf_fsdp_tools.hub import local_path

    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return build_meta_model(
        options.model,
        auto_class=_auto_class(options.auto_class),
        dtype=_dtype(dtype),
        trust_remote_code=options.trust_remote_code,
    )


def _auto_class(name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if isinstance(found, type) and (hasattr(found, "from_config") or hasattr(found, "_from_config")):
        return found
    near = difflib.get_close_matches(name, [entry for entry in dir(transformers) if entry[:1].isupper()])
    raise ConfigError(
        f"--auto-class {name} is no model class of transformers; "
        + (f"did you mean {' or '.join(near)}?" if near else "use AutoModel, AutoModelForCausalLM, …")
    )


def _dtype(name: str | None) -> Any:
    import torch

    found = getattr(torch, name.removeprefix("torch."), None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f"--dtype {name} is no floating-point dtype of torch; use bfloat16, float16 or float32")
    return found


def _quiet() -> None:
    """Silence progress bars, log messages and warnings of the libraries that build a model."""
    import huggingface_hub
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity(logging.ERROR)
    warnings.simplefilter("ignore")


def _check_replaceable(path: Path) -> None:
    try:
        ours = not path.exists() or path.read_text(encoding="utf-8").startswith("# Generated by: hf-fsdp")
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise ConfigError(
            f"{path} exists and hf-fsdp did not write it; name another file with --output, or delete this one"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --output") from error
