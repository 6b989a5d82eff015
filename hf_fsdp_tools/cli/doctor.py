"""The command `hf-fsdp doctor`: whether a machine, an Accelerate config or the sharding of a model is sound."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from hf_fsdp_tools.cli.launch import named_config
from hf_fsdp_tools.cli.options import add_model, count
from hf_fsdp_tools.cli.plan import meta_model
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import within


def add_doctor(commands: Any) -> None:
    """Add the command `doctor`."""
    about = (
        "check this machine, an Accelerate config (--config_file), or with NAME how a model would be sharded on N "
        "processes: units, bytes per rank, what is split along which dimension (no weights, no GPUs)"
    )
    more = "The exit status is 1 where a finding is an error, so that a job script can stop; else it is 0."
    parser = commands.add_parser("doctor", help=about, description=f"{about}. {more}")
    add_model(parser, optional=True)
    about = "checks this file for `accelerate launch`, or the one of that name that comes with the package"
    parser.add_argument("--config-file", metavar="FILE", help=about)
    about = "shards the model of NAME over N processes (default: 8)"
    parser.add_argument("--num-processes", type=count, default=8, metavar="N", help=about)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.config_file is not None:
        return _doctor_of_file(options)
    from hf_fsdp_tools.diagnostics.environment import check_environment, rehearse

    if options.model is None:
        report: Any = check_environment()
    else:
        model = meta_model(options, dtype="float32")  # of what is trained, as this package loads it
        report = rehearse(model, num_processes=options.num_processes)
    print(report.to_json() if options.json else within(report))
    return int(report.has_errors)


def _doctor_of_file(options: argparse.Namespace) -> int:
    from hf_fsdp_tools import FSDPConfig

    if options.model is not None:
        raise ConfigError("doctor looks at a model or at a config; give NAME or --config_file, not both")
    path = named_config(options.config_file)
    findings = FSDPConfig.check_file(path)
    if options.json:
        value = {"config_file": str(path), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(value, indent=1))
    else:
        print(within("\n".join([str(path), "", *map(str, findings or ["no findings"])])))
    return int(any(finding.severity == "error" for finding in findings))
