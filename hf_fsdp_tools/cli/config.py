"""The command `hf-fsdp config`: an Accelerate config for this machine or another, with a reason for each choice; with a
model, the fastest that fits."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.launch import cpu_words, recipes
from hf_fsdp_tools.cli.options import (
    SETUP_FIELDS,
    add_machine_options,
    add_model,
    add_sharding_options,
    add_training_options,
    address_words,
    check_writable,
    count,
    decide,
    explicit_fields,
    prepare_model,
    progress,
    usual_length,
    write,
)
from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools import FSDPConfig
    from hf_fsdp_tools.foresight.recommend import Recommendation
    from hf_fsdp_tools.foresight.setup import TrainingSetup


def add_config(commands: Any) -> None:
    """Add the command `config`."""
    about = "write an Accelerate config for FSDP: with NAME the fastest that fits, else one for this machine"
    parser = commands.add_parser("config", help=about, description=about)
    add_model(parser, optional=True)
    about = "translates this file: of `accelerate config` (FSDP, DDP, DeepSpeed), or DeepSpeed's JSON"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help=about)
    parser.add_argument("--output", type=Path, metavar="FILE", help="writes the YAML there instead of to stdout")
    about = "also writes the batch script for `sbatch`, beside the file of --output"
    parser.add_argument("--slurm", action="store_true", help=about)
    parser.add_argument("--force", action="store_true", help="writes over a file that says something else")
    machines = parser.add_argument_group("machines").add_argument
    machines("--cpu", action="store_true", help="runs on CPU with gloo, whatever this machine has")
    add_machine_options(machines)
    machines("--machine-rank", type=int, metavar="R", help="writes the file of this machine, from 0")
    machines("--main-process-ip", metavar="ADDRESS", help="has the processes meet at this address of machine 0")
    about = "has them meet at this port (default: a free one; 29500 for several machines)"
    machines("--main-process-port", type=count, metavar="PORT", help=about)
    machines("--gpu-ids", metavar="0,1", help="uses these GPUs (default: all)")
    shard = parser.add_argument_group("sharding (with NAME searched unless given)").add_argument
    add_sharding_options(shard)
    kinds = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    shard("--state-dict-type", choices=kinds, help="writes training checkpoints so (default: SHARDED_STATE_DICT)")
    train = parser.add_argument_group("with NAME: what is trained (batches are searched unless given)").add_argument
    train("--global-batch-size", type=count, metavar="N", help="takes N sequences per optimizer step over all GPUs")
    train("--longest", action="store_true", help="looks for the longest sequence that fits, instead of --max-length")
    train("--margin", type=float, metavar="X", help="leaves this part of the GPU's memory free, such as 0.1")
    names = sorted(each.replace("_", "-") for each in recipes())
    about = "starts this recipe in the launch command (default: finetune)"
    train("--recipe", choices=names, metavar="NAME", help=about)
    add_training_options(train)
    parser.set_defaults(run=_config)


def _config(options: argparse.Namespace) -> None:
    from hf_fsdp_tools import FSDPConfig
    from hf_fsdp_tools.foresight.recommend import EXPANDABLE

    if options.output is None and options.slurm:
        raise ConfigError("--slurm writes the batch script beside the config: name that with --output")
    if options.cpu and options.gpu is not None:
        raise ConfigError("--cpu and --gpu: give one of them")
    if options.source is not None and options.model is not None:
        raise ConfigError(f"{options.model} is searched for what --from gives; leave one of them out")
    check_writable(options.output)
    translation = None if options.source is None else FSDPConfig.translate_file(options.source)
    config, reasons = decide(vars(options), None if translation is None else translation.fields)
    best = None if options.model is None else _recommend(options, config)
    if best is None:
        start = [*config.launch_variables, "accelerate", "launch"]
        script = ["your_script.py", *([] if translation is None else translation.words)]
        reason_lines = _reason_lines(config, reasons)
    else:
        start, script = ["hf-fsdp", options.recipe or "finetune"], _recipe_words(options.model, best.setup)
        reason_lines = str(best).splitlines()
        if "num_machines" in reasons and config.num_machines > 1:
            reason_lines.append(f"machines  {config.num_machines} {reasons['num_machines']}")
        searched = {field: "; ".join(lines) for field, lines in best.reasons.items()}
        degrees = ("dp_replicate_size", "cp_size", "tp_size", "ep_size")
        recomputed = ("", "_every_n_layers", "_offload")
        names = [*degrees, "reshard_after_forward", "offload_params"]
        names += [f"activation_checkpointing{each}" for each in recomputed]
        searched_names = {name: SETUP_FIELDS.get(name, name) for name in names}
        reasons |= {name: searched[field] for name, field in searched_names.items() if field in searched}
        config = replace(config, **{name: getattr(best.setup, field) for name, field in searched_names.items()})
    memory = [] if best is None or not best.expandable_bytes else [EXPANDABLE]
    start += ["--config_file", str(options.output or "FILE")]
    notes = [f"Start it with: {shlex.join([*memory, *start, *address_words(config), *script])}", "", *reason_lines]
    text = config.to_accelerate_yaml(command=options.command_line, notes=notes)
    written = _write(options, text, _batch_script(config, [*start, *script], options.command_line, memory))
    launch = shlex.join([*memory, *start, *address_words(config), *cpu_words(config), *script])
    if options.slurm:
        launch = f"sbatch {shlex.quote(str(options.output.with_suffix('.sbatch')))}"
    if options.json:
        value: dict[str, Any] = {"config": asdict(config), "reasons": reasons, "launch": launch, "yaml": text}
        value["output"] = str(options.output) if options.output else None
        if best is not None:
            value["recommendation"] = json.loads(best.to_json())
        if translation is not None:
            value["translated"] = [dict(zip(("key", "value", "became"), row, strict=True)) for row in translation.rows]
        print(json.dumps(value, indent=1))
        return
    rows: list[str] = []
    if translation is not None:  # long values are shortened
        short = ((key, f"{value[:23]}…" if len(value) > 24 else value, end) for key, value, end in translation.rows)
        rows = [*_aligned([*short]), ""]
    report = [*rows, *reason_lines, *[""] * (best is not None), *written, f"launch  {launch}"]
    if not options.output:  # stdout has the YAML alone, so that it can be redirected into a file
        print(text, end="")
    print("\n".join(report), file=sys.stdout if options.output else sys.stderr)


def _write(options: argparse.Namespace, text: str, script: str) -> list[str]:
    """Write the config, and with `--slurm` the batch script beside it; return a line for each."""
    if options.output is None:
        return []
    texts = {options.output: text} | ({options.output.with_suffix(".sbatch"): script} if options.slurm else {})
    for path, content in texts.items():
        if not options.force and path.exists() and path.read_text(encoding="utf-8", errors="replace") != content:
            raise ConfigError(f"{path} exists and holds something else; --force writes over it, --output names another")
    note = "" if options.output.parent.exists() else " (a new folder)"
    for path, content in texts.items():
        write(path, content)
    return [f"wrote   {path}{note}" for path in texts]


def _reason_lines(config: "FSDPConfig", reasons: dict[str, str]) -> list[str]:
    """Aligned lines of setting, value and reason, of the settings that have a reason."""
    names = ["use_cpu", "num_processes", "mixed_precision"]
    rows = [(name, getattr(config, name), reasons[name]) for name in [*names, *sorted(set(reasons) - set(names))]]
    rows[0] = ("device", "CPU, gloo" if config.use_cpu else "CUDA, NCCL", rows[0][2])
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, Any, str]]) -> list[str]:
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in range(2)]
    return [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {text}" for name, value, text in rows]


def _recommend(options: argparse.Namespace, config: "FSDPConfig") -> "Recommendation":
    """The fastest setting of the model that fits on the machines of a config, of what the options leave open."""
    if config.use_cpu:
        raise ConfigError(
            f"{options.model}: what fits on the CPU is not known; leave it out, or say for which GPUs: --gpu h100-80gb "
            "--num-processes 8"
        )
    if options.longest and options.seq_len is not None:
        raise ConfigError("--longest looks for the length that --max-length gives; leave one of them out")
    from hf_fsdp_tools.accelerator import device_title, find_accelerator
    from hf_fsdp_tools.foresight.recommend import recommend_config
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    device = find_accelerator()
    name = options.gpu or (None if device is None else device_title(device))
    if name is None:
        raise ConfigError("which GPUs? Say --gpu and its name, such as --gpu h100-80gb")
    values = explicit_fields(options) | {"gpu": gpu_named(name).name, "num_gpus": config.num_processes}
    values["gpus_per_node"] = config.num_processes // config.num_machines
    values["precision"] = {"no": "fp32"}.get(config.mixed_precision, config.mixed_precision)
    if options.recipe == "accelerate-loop":  # the one recipe whose loop makes whole logits
        values.setdefault("loss", "full")
    if options.margin is not None:
        values["margin"] = options.margin
    values.setdefault("seq_len", None if options.longest else usual_length(options))
    with progress() as say:
        return recommend_config(
            options.model,
            global_batch_size=options.global_batch_size,
            model_kwargs=prepare_model(options),
            say=say,
            **values,
        )


def _recipe_words(model: str, setup: "TrainingSetup") -> list[str]:
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
    words += ["--load_in_4bit"] if setup.load_in_4bit else []
    words += [] if setup.dequantize else ["--dequantize", "false"]
    words += ["--attn_implementation", setup.attn_implementation] if setup.attn_implementation != "sdpa" else []
    return [*words, *(["--torch_compile"] if setup.compile else [])]


# ---- SLURM ----


_CPUS_PER_PROCESS = 8
"""CPU cores that are asked for per process: the process itself, its loader's workers, NCCL's threads. (assumed)"""

_SCRIPT = """\
#!/bin/bash
# Generated by: {command}
# Start it with: sbatch {script} [MORE ARGUMENTS OF THE SCRIPT]
#SBATCH --job-name={name}
#SBATCH --nodes={machines}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --cpus-per-task={cpus}
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Add what your cluster asks for: --partition, --account, --qos.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# The hub's cache lies on a disk that all machines share: a model is downloaded once.
export HF_HOME="${{HF_HOME:-$SLURM_SUBMIT_DIR/hf-home}}"
# Activate your environment here, such as: source .venv/bin/activate
{memory}{rendezvous}
# One launcher per machine, which starts one process per device; SLURM_NODEID counts the machines.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c \\
    '{launch}"$@"' bash "$@"
"""

_RENDEZVOUS = r"""
# The first machine of the job is where the processes find each other, at a port of this job's own.
MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MAIN_ADDRESS="${MAIN_ADDRESS%%$'\n'*}" MAIN_PORT="$((20000 + SLURM_JOB_ID % 20000))"
"""

_PLACE = '--machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT" '


def _batch_script(config: "FSDPConfig", launch: Sequence[str], command: str, memory: Sequence[str]) -> str:
    """Text for `sbatch`; `memory` are variables that save memory."""
    place = list(launch).index("--config_file") + 2
    path = launch[place - 1]
    before, after = shlex.join(launch[:place]), shlex.join(launch[place:])
    line = f"{before} {_PLACE if config.num_machines > 1 else ''}{after} "
    each = config.num_processes // config.num_machines
    return _SCRIPT.format(
        command=command,
        script=shlex.quote(path.rpartition(".")[0] + ".sbatch"),
        name=launch[1] if launch[0] == "hf-fsdp" else "train",
        machines=config.num_machines,
        devices="" if config.use_cpu else f"#SBATCH --gpus-per-node={each}\n",
        cpus=_CPUS_PER_PROCESS * each,
        memory="".join(f"# Less memory is wasted between tensors.\nexport {each}\n" for each in memory),
        rendezvous=_RENDEZVOUS if config.num_machines > 1 else "",
        # inside single quotes
        launch=line.replace("'", "'\\''"),
    )
