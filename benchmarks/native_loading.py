"""Which tensors transformers' own loading into shards gets wrong, beside the same checkpoint in one process.

    python benchmarks/native_loading.py                                    # every type whose checkpoints are converted
    python benchmarks/native_loading.py --only dinov2 mixtral llama        # some types
    python benchmarks/native_loading.py --page benchmarks/results/native_loading.md

A tiny random checkpoint of each type is written by `save_pretrained`, in the layout of the hub, and loaded on 2 ranks
by `from_pretrained(distributed_config=DistributedConfig(…))`, with `fsdp_size=2` and, where the type has a plan for it,
with `tp_size=2`. A type without an FSDP plan of its own gets one unit for each block.

FSDP, tensor parallel   parameters that differ from those of plain `from_pretrained`, of all; or that loading fails
named                   how many this package names in a warning where it takes the model up, by its conversions (FSDP)
load_weights            parameters that still differ once `load_weights(model, folder)` of this package has read the
                        same files into the same shards (FSDP)
"""

import argparse
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from benchmarks.architectures.defaults import CONFIG_MAPPING, build_config, classes_by_default
from benchmarks.measuring import table_of
from hf_fsdp_tools import load_weights
from hf_fsdp_tools.loading.conversion import moved_by_native_loading
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.blocks import detect_blocks
from hf_fsdp_tools.proof.case import build
from hf_fsdp_tools.proof.shrink import shrink
from hf_fsdp_tools.testing import hide_gpus, run_ranks

RANKS = 2
UNCONVERTED = "llama"
SETTINGS: dict[str, dict[str, Any]] = {
    "dinov2": {"use_swiglu_ffn": True},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
}
"""Settings with which a type has the layers that are converted."""

COLUMNS = ("type", "conversions", "FSDP", "named", "load_weights", "tensor parallel")

PREFACE = """# transformers' own loading into shards

Parameters that differ from those of plain `from_pretrained`, of tiny random checkpoints in the hub's layout, loaded on
{ranks} ranks by `from_pretrained(distributed_config=…)`. Made with {versions} by

    python benchmarks/native_loading.py --page {page}

Every type whose files are converted while they are read is here, those that come out wrong first, and llama for those
whose files are read as they are. *Named*: how many this package names in its warning where it takes such a model up
under FSDP; *load_weights*: what differs once `load_weights(model, folder)` has read the files into the same shards.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="default: every type whose checkpoints are converted")
    parser.add_argument("--page", type=Path, help="write the table to this file in Markdown")
    arguments = parser.parse_args()
    hide_gpus()
    rows: list[dict[str, str]] = []
    for model_type in arguments.only or list(CONFIG_MAPPING):
        found = row_of(model_type, is_asked=bool(arguments.only))
        if found is not None:
            rows.append(found)
            print(*found.values(), sep="\t", flush=True)
    if arguments.page is not None:
        rows.sort(key=lambda row: row["FSDP"].startswith("0 of"))
        lines = [[row.get(column, "") for column in COLUMNS] for row in rows]
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        text = (
            PREFACE.format(ranks=RANKS, versions=versions, page=arguments.page)
            + "\n".join(table_of(COLUMNS, lines))
            + "\n"
        )
        arguments.page.write_text(text)


def row_of(model_type: str, *, is_asked: bool) -> dict[str, str] | None:
    """The row of a type; None for one whose files are read as they are, unless it was asked for."""
    with tempfile.TemporaryDirectory(prefix="native-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            operations = run_ranks(write, 1, model_type, folder, is_asked or model_type == UNCONVERTED)[0]
        except AssertionError as error:
            return {"type": model_type, "conversions": "", "FSDP": last_line(error)} if is_asked else None
        if operations is None:
            return None
        row = {"type": model_type, "conversions": operations or "none"}
        for title, layout in (("FSDP", {"fsdp_size": RANKS}), ("tensor parallel", {"tp_size": RANKS})):
            try:
                found = run_ranks(compare, RANKS, folder, layout)[0]
            except AssertionError as error:
                found = {"differ": last_line(error)}
            row[title] = found.pop("differ")
            row |= found
        return row


def last_line(error: AssertionError) -> str:
    """What a rank said."""
    said = str(error).strip().splitlines()[-1]
    return f"fails ({said.split(':')[0]})"


def write(model_type: str, folder: Path, is_kept: bool) -> str | None:
    """Write the tiny checkpoint of a type; return the operations of its conversions, None where it has none."""
    config = shrink(build_config(model_type), "tiny")
    for name, value in SETTINGS.get(model_type, {}).items():
        setattr(config, name, value)
    model_class = getattr(transformers, classes_by_default(model_type)["main"][0])
    model = build(model_class, config)
    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    if not converters and not is_kept:
        return None
    model.save_pretrained(folder)
    (folder / "class").write_text(model_class.__name__)
    reopened = model_class.from_pretrained(folder)
    used = [each for each in reopened._weight_conversions if isinstance(each, WeightConverter)]
    if not used and not is_kept:
        return None
    return "; ".join(dict.fromkeys(" ".join(map(repr, each.operations)) for each in used))


def compare(folder: Path, layout: dict[str, int]) -> dict[str, str]:
    """How many parameters differ on all ranks together; a function for `run_ranks`."""
    from transformers.distributed import DistributedConfig

    model_class = getattr(transformers, (folder / "class").read_text())
    plain = model_class.from_pretrained(folder)
    if "tp_size" in layout and not plain.tp_plan:
        return {"differ": "no plan"}
    plan = None
    if "fsdp_size" in layout and not plain.fsdp_plan:
        blocks = detect_blocks(build_meta_model(plain.config, auto_class=model_class))
        plan = {f"{stack.name}.*": "free_full_weight" for stack in blocks.stacks}
    model = model_class.from_pretrained(folder, distributed_config=DistributedConfig(**layout, fsdp_plan=plan))
    found = {"differ": differing(model, plain)}
    if "fsdp_size" in layout:
        found["named"] = str(len(moved_by_native_loading(model)))
        load_weights(model, folder, progress=False)
        found["load_weights"] = differing(model, plain)
    return found


def differing(model: nn.Module, plain: nn.Module) -> str:
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    expected = dict(plain.named_parameters())
    wrong = [name for name, value in whole.items() if not torch.equal(value, expected[name])]
    return f"{len(wrong)} of {len(expected)}"


if __name__ == "__main__":
    main()
