"""Make the pictures of the README and the documentation from committed measurements and the package's own estimates.

    pip install -e '.[plots]' && python docs/make_pictures.py

No network, no weights, no GPU: models are made from the numbers of their configurations (`models.py`). The loss is
that of the run that `paste.py --record` kept.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from typing import Any

from drawing import draw_idea, draw_measured, draw_wrappings
from models import CONFIGS

from hf_fsdp_tools import TrainingSetup, WrapPolicy
from hf_fsdp_tools.foresight.events import Alloc, Free, Work
from hf_fsdp_tools.foresight.forecast import step_of
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.timing.efficiency import Durations, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.plots import draw_losses, save

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
RUN = ROOT / "docs" / "records" / "finetune.json"
RESULTS = ROOT / "benchmarks" / "results"
CONTESTANTS = {
    "hf_fsdp_tools fsdp": "hf_fsdp_tools",
    "accelerate fsdp2, every rank loads": "Accelerate, FSDP2",
    "transformers fsdp": "transformers, native",
}
"""Rows of the referee, and how the picture names them."""
LOADERS = {
    "hf_fsdp_tools": "hf_fsdp_tools",
    "transformers native, then written once": "transformers, native",
    "accelerate FSDP2, RAM-efficient": "Accelerate, RAM-efficient",
    "accelerate FSDP2, every rank loads all": "Accelerate, all ranks load all",
    "torch DCP HuggingFaceStorageReader": "torch DCP reader (2 buffers wrong)",
}
"""Rows of the benchmark of loading, likewise."""
SETTING = "Estimated: Llama-3.1-8B on 8 × H100, 1 × 8,192 tokens of a GPU, activation checkpointing, AdamW"
ABOVE = "above the shards MB by rank (mapped files)"


def main() -> None:
    """Make all pictures, or those whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="idea, wrapping, loss, measured; all without a name")
    wanted = parser.parse_args().names
    FOLDER.mkdir(exist_ok=True)
    for name, figure in chain(pictures_of_the_idea(), pictures_of_a_step(), pictures_of_a_run(), pictures_of_results()):
        if not wanted or name in wanted:
            path = FOLDER / f"{name}.svg"
            save(figure, path)
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def pictures_of_the_idea() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of what each rank reads, keeps and writes."""
    yield "idea", draw_idea()


def pictures_of_a_step() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of the estimated memory of a step of Llama-3.1-8B, wrapped in three ways."""
    ways: dict[str, dict[str, Any]] = {
        "the root alone": {"wrapping": "root"},
        "blocks alone": {"policy": WrapPolicy(min_unit_params=math.inf, group_tail=False)},
        "this package's plan": {},
    }
    yield "wrapping", draw_wrappings({name: memory_over_time(**fields) for name, fields in ways.items()}, SETTING)


def memory_over_time(**fields: Any) -> tuple[list[float], list[int]]:
    """Seconds and allocated bytes after each event of a step on the compute stream, as estimated."""
    setup = TrainingSetup(num_processes=8, gpu="h100-80gb", max_length=8192, activation_checkpointing=True, **fields)
    forecast, gpu = step_of(CONFIGS["Llama-3.1-8B"], setup), gpu_named(setup.gpu)
    step = forecast.step
    times = Durations(setup, gpu, efficiency_of(gpu))
    sizes = {each.block: each.num_bytes for each in step.resident}
    seconds, allocated, now = [0.0], [sum(sizes.values())], 0.0
    for event in step.events:
        if isinstance(event, Alloc):
            sizes[event.block] = event.num_bytes
        gone = sizes.pop(event.block, 0) if isinstance(event, Free) else 0
        now += times.seconds(event) if isinstance(event, Work) and event.stream == "compute" else 0.0
        seconds.append(now)
        allocated.append(allocated[-1] + (event.num_bytes if isinstance(event, Alloc) else -gone))
    libraries = memory_of(forecast).peak_allocated - max(allocated)  # their workspaces, which stay
    return seconds, [each + libraries for each in allocated]


def pictures_of_a_run() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of the losses of the recorded run."""
    history = json.loads(RUN.read_text())
    runs = {
        name: [(entry["step"], entry[key]) for entry in history if key in entry]
        for name, key in (("training", "loss"), ("held out", "eval_loss"))
    }
    first, last = ([points[end][1] for points in runs.values()] for end in (0, -1))
    title = f"Loss: training {first[0]:.2f} to {last[0]:.2f}, held out {first[1]:.2f} to {last[1]:.2f}"
    setting = "hf-fsdp finetune: a Llama of 1.3 M parameters on CPython's documentation, 2 CPU processes"
    yield "loss", draw_losses(runs, title=title, setting=setting)


def pictures_of_results() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of what the package and others were measured at."""
    yield "measured", draw_measured(trained(), loaded())


def rows_of(name: str, title: str = "# ") -> dict[str, dict[str, str]]:
    """The first table under a title of a page of results: each row's cells by column, by the row's first cell."""
    _, _, after = (RESULTS / name).read_text().partition(title)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_in(after)]
    return {name: dict(zip(lines[0][1:], cells, strict=True)) for name, *cells in lines[2:]}


def table_in(text: str) -> list[str]:
    """The lines of the first table of a text."""
    lines = [*dropwhile(lambda line: not line.startswith("|"), text.splitlines())]
    return [*takewhile(lambda line: line.startswith("|"), lines)]


def trained() -> dict[str, dict[str, int]]:
    """How many model types were right, wrong, refused and crashed, of each contestant of the referee."""
    rows, words = rows_of("referee_fsdp.md"), ("right", "wrong", "refuses", "crashes")
    shown = ("right", "silently wrong", "refused", "crashed")
    return {
        name: {own: int(rows[row][word] or 0) for own, word in zip(shown, words, strict=True)}
        for row, name in CONTESTANTS.items()
    }


def loaded() -> dict[str, tuple[float, str]]:
    """Most MB of a rank above its shards where the page cache is warm, and time next to ours, warm and cold."""
    warm, cold = (
        rows_of("load.md", f"## dense, 3.00 GB of bf16, stored, {cache} cache, 2 ranks") for cache in ("warm", "cold")
    )
    memory = {row: max(map(float, re.findall(r"\d+", warm[row][ABOVE].partition("(")[0]))) for row in LOADERS}
    times = {row: [f"{float(cells[row]['÷ ours']):.1f}" for cells in (warm, cold)] for row in LOADERS}
    notes = {row: f"time {first} × ours (cold cache {second})" for row, (first, second) in times.items()}
    return {name: (memory[row], notes[row] if row != name else "time 1") for row, name in LOADERS.items()}


if __name__ == "__main__":
    main()
