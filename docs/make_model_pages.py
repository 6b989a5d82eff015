"""Write what `docs/models/` lacks, or some pages anew: python docs/make_model_pages.py [TYPE ...]

A page for each model type of transformers whose code is of 2025 or later (its header says so), that writes text, and
whose default configuration has 1 billion parameters or more; and for those that `docs/models.py` has configurations of.
Units come from the planner, memory from the estimates, both for the default configuration; what works is
what certificates (`benchmarks/results/certificates_*.md`) found with small models of the same code on CPU ranks, of the
newest transformers with which one was made; every page gets it anew.
"""

import argparse
import contextlib
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from models import CONFIGS
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_fsdp_tools import TrainingSetup, estimate_memory
from hf_fsdp_tools.axes import AXES
from hf_fsdp_tools.cli.options import progress
from hf_fsdp_tools.errors import FSDPToolsError
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan
from hf_fsdp_tools.text import show_bytes, show_count

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "models"
LEAST = 1e9
"""Parameters of a default configuration that is worth a page."""
FIRST_YEAR = 2025

LENGTH = 4096
"""Tokens of a row, or as many as the configuration has positions for."""

GPUS = {"1 × 80 GB": 1, "8 × 80 GB": 8}
TRAININGS: dict[str, dict[str, Any]] = {"LoRA, rank 16": {"lora_r": 16}, "all weights": {}}


MOST_SECONDS = 30.0
"""CPU seconds for one estimate; irregular stacks of many kinds of blocks take more, and get none here."""


def give_up(*_: object) -> None:
    raise TimeoutError(f"it takes more than {MOST_SECONDS:.0f} CPU seconds")


@dataclass(frozen=True)
class Family:
    """What a page says of one type."""

    model_type: str
    model_class: str
    num_params: int
    units: list[str]
    memory: dict[str, list[str]]


ABOUT = """A small model of the code of transformers 5.24 (Llama 4: 5.23), with images and sound where it reads them, on
2 CPU ranks, beside one process. ✓: it agrees. in bf16: it differs there alone. –: it has no such part, or none was
tried."""


@cache
def certificates() -> tuple[list[str], dict[str, list[str]], dict[tuple[str, str], str]]:
    """What was compared, the marks of each type, and why one is refused or differs. The newest transformers counts with
    which a small model of a type was made."""
    columns: list[str] = []
    known: dict[str, list[str]] = {}
    why: dict[tuple[str, str], str] = {}
    files = (ROOT / "benchmarks" / "results").glob("certificates_*.md")
    for path in sorted(files, key=lambda path: int(path.stem.rpartition(".")[2])):
        tables = [
            [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()]
            for part in path.read_text(encoding="utf-8").split("\n\n")
            if part.startswith("|")
        ]
        _, ((_, *columns), _, *marks), (_, _, *reasons) = tables
        made = {name: of for name, *of in marks if name not in known or {*of[1:]} != {"–"}}
        known |= made
        why = {(name, column): reason for (name, column), reason in why.items() if name not in made}
        why |= {(name, column): r for name, _, of, r in reasons for column in of.split(", ") if name in made}
    return columns, known, why


def works(model_type: str) -> str:
    """The part of a page that says what agreed, and why what did not."""
    columns, marks, why = certificates()
    of_type = marks.get(model_type, ["–"] * len(columns))
    cells = zip(columns, of_type, strict=True)
    lines = [f"| {column} | {mark}{reason(why.get((model_type, column), ''))} |" for column, mark in cells]
    return "\n".join(["## What works", "", ABOUT, "", "| | |", "| --- | --- |", *lines, "", ""])


def reason(text: str) -> str:
    """The first sentence of a reason, of at most 140 characters, that ends with a word."""
    first = re.split(r"(?<=[a-z)])[.;] ", re.sub(r"^hf_fsdp_tools\.errors\.\w+: ", "", text))[0]
    cut = first if len(first) <= 140 else first[:140].rpartition(" ")[0] + " …"
    return f": {cut}" if cut else ""


def year_of(model_class: type) -> int:
    """The latest year in the header of the code."""
    head = inspect.getsource(inspect.getmodule(model_class))[:2000]
    return max((int(year) for year in re.findall(r"Copyright (20\d\d)", head)), default=0)


def types() -> Iterator[str]:
    """The types that may have a page."""
    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    yield from sorted(names)


def family(model_type: str) -> Family | None:
    """What there is to say about a type; None where it has no page."""
    known = {config.model_type for config in CONFIGS.values()}
    try:
        config = CONFIG_MAPPING[model_type]()
        model = build_meta_model(config)
    except Exception as error:  # what cannot be built from its defaults has no sizes to tell
        print(f"{model_type}: no page ({type(error).__name__})", file=sys.stderr)
        return None
    if sum(p.numel() for p in model.parameters()) < LEAST or (
        year_of(type(model)) < FIRST_YEAR and model_type not in known
    ):
        return None
    plan = make_wrap_plan(model)
    rows: dict[tuple[int, str], list[str]] = {}
    for unit in plan.units:
        pattern = re.sub(r"\.\d+", ".*", "root" if unit.modules == ("",) else " + ".join(unit.modules))
        rows.setdefault((unit.num_params, pattern), []).append(unit.modules[0])
    units = [f"| {len(names)} | `{pattern}` | {show_count(size)} |" for (size, pattern), names in rows.items() if size]
    memory = {
        title: [memory_of(config, count, fields) for count in GPUS.values()] for title, fields in TRAININGS.items()
    }
    return Family(model_type, type(model).__name__, plan.num_params, units, memory)


def memory_of(config: PreTrainedConfig, count: int, fields: dict[str, object]) -> str:
    """The memory per GPU of one training, and whether it fits."""
    length = min(LENGTH, max_positions(config) or LENGTH)
    setup = TrainingSetup(num_processes=count, max_length=length, activation_checkpointing=True, images=0, **fields)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        estimate = estimate_memory(config, setup)
    except (FSDPToolsError, ImportError, TimeoutError) as error:
        return f"not estimated: {str(error).splitlines()[0][:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return f"{show_bytes(estimate.total)}{'' if estimate.spare_bytes >= 0 else ', does not fit'}"


def page(found: Family) -> str:
    """The page of one type."""
    lines = [
        f"# {found.model_class}",
        "",
        f"Type `{found.model_type}` of transformers {transformers.__version__}. Units and memory are those of its",
        f"default configuration, which has {show_count(found.num_params)} parameters.",
        "",
        "## Units",
        "",
        "| count | modules | parameters each |",
        "| --- | --- | --- |",
        *found.units,
        "",
        *works(found.model_type).splitlines(),
        "## Memory for each GPU",
        "",
        f"Estimated: a row of {LENGTH:,} tokens (or as many as it has positions), AdamW, activation checkpointing.",
        "",
        f"| | {' | '.join(GPUS)} |",
        f"| --- |{' --- |' * len(GPUS)}",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in found.memory.items()),
        "",
        "## Commands",
        "",
        "```bash",
        "hf-fsdp search NAME --gpu h100-80gb --num-processes 8 --recipe finetune --output mine.yaml",
        "hf-fsdp finetune --preset mine.yaml --dataset_name trl-lib/Capybara",
        "```",
        "",
        "NAME is the model on the hub, or its folder.",
        "",
    ]
    return "\n".join(lines)


def index(pages: list[Path]) -> str:
    """The table of all pages."""
    columns, marks, _ = certificates()
    rows = []
    for path in pages:
        text = path.read_text(encoding="utf-8")
        size = re.search(r"which has (.*) parameters\.", text)
        assert size is not None, path
        rows.append(
            f"| [{path.stem}]({path.name}) | {size[1]} | {' | '.join(marks.get(path.stem, '–' * len(columns)))} |"
        )
    about = f"Model types of transformers {transformers.__version__}, with the sizes of their default configurations."
    head = [f"| type | parameters | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    shipped = [
        "## Settings",
        "",
        "`hf-fsdp finetune --preset NAME` takes these, found by `hf-fsdp search`, for cards of 80 GB, rows of 4,096.",
        "",
        "| `--preset` | Model | GPUs | Trained | Rows × micro-batches of a GPU | Memory of a GPU, estimated |",
        f"|{' --- |' * 6}",
        *map(settings, sorted((ROOT / "accelerate_configs" / "models").glob("*.yaml"))),
        "",
    ]
    toctree = ["```{toctree}", ":hidden:", ":glob:", "*", "```"]
    return "\n".join(["# Models", "", about, ABOUT, "", *head, *rows, "", *shipped, *toctree, ""])


def settings(path: Path) -> str:
    """The line of a preset for one model."""
    text = path.read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    run, launch = found["options"], found["launch"]
    trained = [f"LoRA, rank {run['lora_r']}" if run.get("use_peft") else "all parameters"]
    trained += ["base as stored"] * (run.get("dequantize") is False)
    trained += ["activation checkpointing"] * launch.get("activation_checkpointing", False)
    trained += [f"`{axis.size}` {launch[axis.size]}" for axis in AXES if axis.size in launch]
    memory = re.search(r"^# memory +(\S+ GB)", text, re.MULTILINE)
    assert memory is not None, path
    rows = f"{run['per_device_train_batch_size']} × {run['gradient_accumulation_steps']}"
    model, count = run["model_name_or_path"], launch["num_processes"]
    return f"| `{path.stem}` | {model} | {count} | {', '.join(trained)} | {rows} | {memory[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    given = parser.parse_args()
    signal.signal(signal.SIGPROF, give_up)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    with progress() as say:
        for model_type in given.types or types():
            say(model_type)
            path = FOLDER / f"{model_type}.md"
            if (given.types or not path.exists()) and os.fork() == 0:  # an estimate that is given up leaves its traces
                if (found := family(model_type)) is not None:
                    path.write_text(page(found), encoding="utf-8")
                os._exit(0)
            with contextlib.suppress(ChildProcessError):  # nothing was started
                os.wait()
    pages = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "index.md"})
    for path in pages:
        before, _, after = path.read_text(encoding="utf-8").partition("## What works")
        path.write_text(before + works(path.stem) + after[after.index("## Memory") :], encoding="utf-8")
    (FOLDER / "index.md").write_text(index(pages), encoding="utf-8")


if __name__ == "__main__":
    main()
