"""The command `hf-fsdp plan`: what repeats in a model, and what would be sharded together."""

import argparse
import json
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.options import add_model, amount, check_writable, parse_dtype, prepare_model, write
from hf_fsdp_tools.text import within


def add_plan(commands: Any) -> None:
    """Add the command `plan`."""
    about = "show what would be sharded together, why, and how much is gathered at once (no weights are read)"
    parser = commands.add_parser("plan", help=about, description=about)
    add_model(parser)
    add = parser.add_argument
    about_blocks = "also shows what repeats in the model: blocks, embeddings, final norm, head, ties"
    add("--blocks", action="store_true", help=about_blocks)
    about_units = "makes units of modules outside blocks with more parameters than N, such as 2e7"
    add("--min-unit-params", type=amount, metavar="N", help=about_units)
    add("--block-types", metavar="A,B", help="takes these class names or fqn patterns for blocks, not the detected")
    add("--dtype", metavar="DTYPE", help="counts weights of this dtype, such as bfloat16 (default: the config's)")
    add("--output", type=Path, metavar="FILE", help="also writes the plan as JSON")
    parser.set_defaults(run=_plan)


def meta_model(options: argparse.Namespace, *, dtype: str | None = None) -> Any:
    """The model that the options name, on meta."""
    keywords = prepare_model(options)
    from hf_fsdp_tools.modeling.meta import build_meta_model

    return build_meta_model(options.model, dtype=parse_dtype(dtype), **keywords)


def _plan(options: argparse.Namespace) -> None:
    check_writable(options.output)
    model = meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.blocks import detect_blocks
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import HybridPolicy

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = HybridPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
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
