"""The command `hf-fsdp plan`: what repeats in a model, and what would be sharded together."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_fsdp_tools.cli.common import add_model, amount, check_writable, count, parse_dtype, prepare_model, write
from hf_fsdp_tools.text import within


def add_plan(commands: Any) -> None:
    """Add the command `plan`."""
    about = "show what would be sharded together, why, and how much is gathered at once (no weights are read)"
    parser = commands.add_parser("plan", help=about, description=about)
    add_model(parser)
    add = parser.add_argument
    about_blocks = "also shows what repeats in the model: blocks, embeddings, final norm, head, ties"
    add("--blocks", action="store_true", help=about_blocks)
    add("--num-processes", type=count, metavar="N", help="also shows what each of N processes keeps")
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


def class_note(options: argparse.Namespace, model: Any) -> str:
    """A line where the model's usual class is not the one of its config; nothing where the options name one."""
    from hf_fsdp_tools.modeling.model_class import other_class_note

    note = None if options.auto_class else other_class_note(model.config, type(model))
    return f"\nnote: {note}" if note else ""


def _plan(options: argparse.Namespace) -> None:
    check_writable(options.output)
    model = meta_model(options, dtype=options.dtype)
    from hf_fsdp_tools.planning.blocks import detect_blocks
    from hf_fsdp_tools.planning.make_plan import make_wrap_plan
    from hf_fsdp_tools.planning.policy import HybridPolicy
    from hf_fsdp_tools.sharding.share import share_of

    names = tuple(name.strip() for name in (options.block_types or "").split(",") if name.strip())
    policy = HybridPolicy(min_unit_params=options.min_unit_params, block_types=names or None)
    plan = make_wrap_plan(model, policy=policy)
    blocks = detect_blocks(model) if options.blocks else None
    share = None if options.num_processes is None else share_of(model, plan, options.num_processes)
    if options.output:
        write(options.output, plan.to_json() + "\n")
    if options.json:
        value = json.loads(plan.to_json())
        value |= {} if blocks is None else {"blocks": json.loads(blocks.to_json())}
        value |= {} if share is None else {"share": asdict(share)}
        print(json.dumps(value, indent=1))
        return
    texts = [f"{plan}{class_note(options, model)}", *map(str, filter(None, (share, blocks)))]
    print(within("\n".join(texts)))
    if options.output:
        print(f"wrote {options.output}")
