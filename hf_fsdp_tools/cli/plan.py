"""`hf-fsdp plan`: what would be sharded together; `hf-fsdp doctor`: whether machine, config or model are sound."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.launch import named_config
from hf_fsdp_tools.cli.options import (
    add_model,
    amount,
    check_writable,
    count,
    examples,
    prepare_model,
    refuse,
    write,
)
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import within


def add_plan(commands: Any) -> None:
    """Add the command `plan`."""
    about = "show what would be sharded together, why, and how much is gathered at once (no weights)"
    epilog = examples("plan Qwen/Qwen3-8B", "plan Qwen/Qwen3-30B-A3B --blocks --dtype bfloat16")
    parser = commands.add_parser("plan", help=about, description=about, epilog=epilog)
    add_model(parser)
    add = parser.add_argument
    about_blocks = "also show what repeats in the model: blocks, embeddings, final norm, head, ties"
    add("--blocks", action="store_true", help=about_blocks)
    about_units = "modules outside blocks with at least N parameters are FSDP units (default: the size of a block)"
    add("--min-unit-params", type=amount, metavar="N", help=about_units)
    add("--block-types", metavar="A,B", help="class names or fqn patterns of blocks (default: detected)")
    add("--dtype", metavar="DTYPE", help="dtype of the weights, such as bfloat16 (default: the config's)")
    add("--output", type=Path, metavar="FILE", help="file for the plan as JSON")
    parser.set_defaults(run=_plan)


def meta_model(options: argparse.Namespace, *, dtype: str | None = None) -> Any:
    """The model that the options name, on meta."""
    keywords = prepare_model(options)
    from hf_fsdp_tools.modeling.arguments import as_dtype
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return build_meta_model(options.model, dtype=as_dtype(dtype, "--dtype"), **keywords)


def _plan(options: argparse.Namespace) -> None:
    check_writable(options.output)
    model = meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.blocks import detect_blocks
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import WrapPolicy

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = WrapPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
    plan = make_wrap_plan(model, policy=policy)
    blocks = detect_blocks(model) if options.blocks else None
    if options.output:
        write(options.output, plan.to_json() + "\n")
    if options.json:
        value = json.loads(plan.to_json())
        value |= {} if blocks is None else {"blocks": json.loads(blocks.to_json())}
        print(json.dumps(value, indent=1))
        return
    print(within("\n".join(map(str, filter(None, (plan, blocks))))))
    if options.output:
        print(f"wrote {options.output}")


def add_doctor(commands: Any) -> None:
    """Add the command `doctor`."""
    about = (
        "check this machine, an Accelerate config (--config_file), or with NAME how a model would be sharded (no "
        "weights, no GPUs)"
    )
    more = "The exit status is 1 where a finding is an error, so that a job script can stop; else it is 0."
    epilog = examples("doctor", "doctor --config_file 8x80gb", "doctor Qwen/Qwen3-8B --num-processes 8")
    parser = commands.add_parser("doctor", help=about, description=f"{about}. {more}", epilog=epilog)
    add_model(parser, optional=True)
    about = "file for `accelerate launch`, or name of one that comes with the package"
    parser.add_argument("--config-file", metavar="FILE", help=about)
    about = "processes that share the model of NAME (default: 8)"
    parser.add_argument("--num-processes", type=count, metavar="N", help=about)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.model is None:
        names = ("num_processes", "auto_class", "trust_remote_code")
        refuse(options, names, "is about a model: name it, hf-fsdp doctor NAME …")
    if options.config_file is not None:
        return _doctor_of_file(options)
    from hf_fsdp_tools.diagnostics.environment import check_environment, rehearse

    if options.model is None:
        report: Any = check_environment()
    else:
        model = meta_model(options, dtype="float32")  # of what is trained, as this package loads it
        report = rehearse(model, num_processes=options.num_processes or 8)
    print(report.to_json() if options.json else within(report))
    return int(report.has_errors)


def _doctor_of_file(options: argparse.Namespace) -> int:
    from hf_fsdp_tools import LaunchConfig

    if options.model is not None:
        raise ConfigError("doctor looks at a model or at a config; give NAME or --config_file, not both")
    path = named_config(options.config_file)
    findings = LaunchConfig.check_file(path)
    if options.json:
        value = {"config_file": str(path), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(value, indent=1))
    else:
        print(within("\n".join([str(path), "", *map(str, findings or ["no findings"])])))
    return int(any(finding.severity == "error" for finding in findings))
