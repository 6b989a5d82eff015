"""Make the pictures of the README and the documentation from the package's own predictions.

    pip install -e '.[plots]' && python docs/make_pictures.py

No network, no weights, no GPU: models are made from the numbers of their configurations (`models.py`). The loss is
that of the run that `paste.py --record` kept.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from drawing import (
    draw_comparison,
    draw_units,
    memory_timeline,
)
from models import CONFIGS

from hf_fsdp_tools.foresight.forecast import Forecast, step_of
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Durations, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.plots import draw_losses, save
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
RUN = ROOT / "docs" / "records" / "finetune.json"


def main() -> None:
    """Make all pictures, or those whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="plan, loss, wrapping; all without a name")
    wanted = parser.parse_args().names
    FOLDER.mkdir(exist_ok=True)
    for name, figure in chain(pictures_of_a_plan(), pictures_of_a_run(), pictures_of_a_step()):
        if not wanted or name in wanted:
            path = FOLDER / f"{name}.svg"
            save(figure, path)
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def pictures_of_a_plan() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of the units of DeepSeek-V3."""
    plan = make_wrap_plan(build_meta_model(CONFIGS["DeepSeek-V3"], dtype="bfloat16"))
    yield "plan", draw_units(plan)


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


def pictures_of_a_step() -> Iterator[tuple[str, Any]]:
    """Yield the name and the picture of the memory of Llama-3.1-8B on 8 H100."""
    title = "Estimated: Llama-3.1-8B on 8 × H100-80GB, 1 × 8,192 tokens per GPU, AdamW, bf16, activation checkpointing"
    forecasts = {name: forecast(wrapping) for name, wrapping in (("root-only", "root"), ("hybrid", "hybrid"))}
    lines = {
        name: memory_timeline(each.step.events, each.step.resident, durations(each.setup).seconds)
        for name, each in forecasts.items()
    }
    limit = memory_of(forecasts["hybrid"]).limit_bytes
    yield "wrapping", draw_comparison(lines, model=title, limit_bytes=limit)


def forecast(wrapping: Any) -> Forecast:
    """One step of Llama-3.1-8B."""
    fields: dict[str, Any] = {"max_length": 8192, "activation_checkpointing": True, "wrapping": wrapping}
    return step_of(CONFIGS["Llama-3.1-8B"], TrainingSetup(num_processes=8, gpu="h100-80gb", **fields))


def durations(setup: TrainingSetup) -> Durations:
    """The time of each kernel."""
    gpu = gpu_named(setup.gpu)
    return Durations(setup, gpu, efficiency_of(gpu))


if __name__ == "__main__":
    main()
