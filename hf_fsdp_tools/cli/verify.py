"""The command `hf-fsdp verify`: whether a layout computes what one process computes, on a tiny model of its kind."""

import argparse
import runpy
from pathlib import Path
from typing import Any

from hf_fsdp_tools.axes import size_names
from hf_fsdp_tools.cli.launch import named_config
from hf_fsdp_tools.cli.options import add_class_and_json, add_degrees, count, examples, prepare_model
from hf_fsdp_tools.errors import ConfigError

_MOST_PROCESSES = 4
"""Processes to which the degrees of a launch file are cut down: each needs all libraries in memory."""


def add_verify(commands: Any) -> None:
    """Add the command `verify`."""
    about = (
        "check a layout: train a tiny model of NAME's architecture on CPU ranks and compare loss, gradients, a step, "
        "evaluation, saved files and a resumed training with one process (no weights, no GPUs)"
    )
    more = "The exit status is 0 where all agrees, else 1. SCRIPT.py is run but for its `if __name__` part."
    epilog = examples("verify Qwen/Qwen3-8B --cp-size 2", "verify my_script.py --config-file 8x80gb --lora")
    parser = commands.add_parser("verify", help=about, description=f"{about}. {more}", epilog=epilog)
    about = (
        "a hub name, a local folder, the path of a config.json, or a SCRIPT.py which sets `model` (one of these) and, "
        "as a Trainer takes them, train_dataset, data_collator, args, peft_config"
    )
    parser.add_argument("model", metavar="NAME", help=about)
    add_class_and_json(parser.add_argument)
    about = "attention function of transformers (default: the model's own choice)"
    parser.add_argument("--attn-implementation", metavar="NAME", help=about)
    layout = parser.add_argument_group("layout").add_argument
    layout("--config-file", metavar="FILE", help="file for `accelerate launch` whose layout is taken, made small")
    layout("--num-processes", type=count, metavar="N", help="number of CPU ranks (default: the fewest that shard)")
    add_degrees(layout)
    layout("--fsdp-version", type=int, choices=(1, 2), help="version of FSDP (default: 2)")
    layout("--activation-checkpointing", action="store_true", help="recompute activations in the backward pass")
    layout("--lora", action="store_true", help="train LoRA adapters on all linear layers, and a copy of the head")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    given = _of_script(options.model) if options.model.endswith(".py") else {}
    options.model = given.get("model", options.model)
    keywords = prepare_model(options)
    from hf_fsdp_tools.modeling.meta import build_meta_model
    from hf_fsdp_tools.proof.run import prove

    if options.attn_implementation:
        keywords["attn_implementation"] = options.attn_implementation
    model = build_meta_model(options.model, **keywords)
    dims, num_processes, version = _layout(options, given.get("args"))
    peft_config = given.get("peft_config")
    proof = prove(
        model.config,
        type(model),
        dims,
        num_processes,
        sequence_parallel=bool(options.sequence_parallel),
        fsdp_version=version,
        activation_checkpointing=options.activation_checkpointing,
        adapter=options.lora or None if peft_config is None else peft_config,
        rows=given.get("train_dataset", ()),
        collator=given.get("data_collator"),
    )
    print(proof.to_json() if options.json else proof)
    return int(not proof.is_verified)


def _of_script(path: str) -> dict[str, Any]:
    """The names that a script sets outside of its `if __name__ == "__main__"` part."""
    if not Path(path).is_file():
        raise ConfigError(f"There is no file {path}; a script, a folder, a config.json or a hub name is needed.")
    try:
        names = runpy.run_path(path, run_name="hf_fsdp_tools_prove")
    except Exception as error:
        raise ConfigError(f"{path} stopped with {type(error).__name__}: {error}") from error
    if "model" not in names:
        raise ConfigError(
            f"{path} sets no `model` outside of `if __name__ == '__main__'`. Set it to a hub name, a folder or a "
            "configuration; train_dataset, data_collator, args and peft_config are taken too."
        )
    if hasattr(names["model"], "config"):  # a model that was made already
        names["model"] = names["model"].config
    return names


def _layout(options: argparse.Namespace, arguments: Any) -> tuple[Any, int, int]:
    """The degrees, their number of processes, and the version of FSDP: of options, else of the script or a file."""
    from hf_fsdp_tools import LaunchConfig, ParallelDims

    named: dict[str, Any] = {}
    parallelism = getattr(arguments, "parallelism_config", None)
    if parallelism is not None:
        named = {name: getattr(parallelism, name, 1) for name in size_names()}
    if options.config_file is not None:
        translation = LaunchConfig.translate_file(named_config(options.config_file))
        named = dict(translation.fields)
        options.fsdp_version = options.fsdp_version or (1 if translation.is_version1 else 2)
    degrees = {name: min(named.get(name) or 1, 2) for name in size_names()}
    degrees |= {name: size for name in degrees if (size := getattr(options, name))}
    dims = ParallelDims(**degrees)
    of_row = dims.ranks_per_row
    others = dims.num_copies * max(of_row, dims.ep_size)
    is_sharded = max(of_row, dims.ep_size) == 1 or options.config_file is not None
    num_processes = options.num_processes or others * (2 if is_sharded and 2 * others <= _MOST_PROCESSES else 1)
    version = options.fsdp_version or 2
    options.activation_checkpointing |= bool(named.get("activation_checkpointing"))
    if options.sequence_parallel is None:
        options.sequence_parallel = named.get("sequence_parallel")
    if version == 1 and (others > 1 or options.lora or options.activation_checkpointing):
        raise ConfigError(
            "FSDP1 is verified with full sharding of all weights: leave other sizes, --lora and "
            "--activation-checkpointing out."
        )
    return dims, num_processes, version
