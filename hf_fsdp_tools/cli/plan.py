"""The commands `hf-fsdp blocks` and `hf-fsdp plan`: what repeats in a model, and what would be sharded together."""

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.common import add_model, check_writable, parse_dtype, quiet, write
from hf_fsdp_tools.text import within


def add_blocks(commands: Any) -> None:
    """Add the command `blocks`."""
    about = "show what repeats in a model: blocks, embeddings, final norm, head, ties (no weights are read)"
    parser = commands.add_parser("blocks", help=about, description=about)
    add_named_model(parser)
    parser.set_defaults(run=_blocks)


def add_plan(commands: Any) -> None:
    """Add the command `plan`."""
    about = "show what would be sharded together, why, and how much is gathered at once (no weights are read)"
    parser = commands.add_parser("plan", help=about, description=about)
    add_named_model(parser)
    add = parser.add_argument
    about_units = "modules outside blocks with more parameters than N are units of their own, such as 2e7"
    add("--min-unit-params", type=float, metavar="N", help=about_units)
    add("--block-types", metavar="A,B", help="class names or fqn patterns of blocks, instead of the detected ones")
    add("--dtype", metavar="DTYPE", help="of the weights, such as bfloat16 (default: the config's)")
    add("--output", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=_plan)


def add_named_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the model, its class, and how the answer is printed."""
    add_model(parser, optional=optional)
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")


def meta_model(options: argparse.Namespace, *, dtype: str | None = None) -> Any:
    """The model that the options name, on meta."""
    quiet()
    from hf_fsdp_tools.hub import local_path

    if sys.stderr.isatty() and local_path(options.model) is None:
        print(f"asking the Hugging Face hub for {options.model} ...", file=sys.stderr)
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return build_meta_model(
        options.model,
        auto_class=options.auto_class,
        dtype=parse_dtype(dtype),
        trust_remote_code=options.trust_remote_code,
    )


def _blocks(options: argparse.Namespace) -> None:
    model = meta_model(options)
    from hf_fsdp_tools.planning.blocks import detect_blocks

    blocks = detect_blocks(model)
    print(blocks.to_json() if options.json else within(blocks))


def _plan(options: argparse.Namespace) -> None:
    check_writable(options.output)
    model = meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import HybridPolicy

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = HybridPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
    plan = make_wrap_plan(model, policy=policy)
    if options.output:
        write(options.output, plan.to_json() + "\n")
    if options.json:
        print(plan.to_json())
        return
    print(within(plan))
    if options.output:
        print(f"wrote {options.output}")
