"""One launch of a recipe on two ranks for several runs: starting takes 8 s, nearly all of it imports.

A run ends with its line of the summary or its error, and leaves what the sharded model computes of a few tokens.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_fsdp_tools.scripting.demo import make_demo_model
from hf_fsdp_tools.scripting.demo_data import demo_rows
from tests.recipes.test_finetune import ROOT, launch

__all__ = ["Series", "run_series", "write_rows"]

_SCRIPT = """
import os, runpy, sys
from json import loads
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from hf_fsdp_tools import FSDPToolsError

recipe, *series = sys.argv[1:]
names = runpy.run_path(recipe)
environment = dict(os.environ)
is_first = os.environ["RANK"] == "0"
PartialState.destroy_process_group = lambda *_: None  # one group for the series: torch's launcher has a store for one
for name, arguments in map(loads, series):
    sys.argv = [recipe, *arguments]
    if is_first:
        print(f"=== {name}", flush=True)
    try:
        trainer = names["main"]()
        with torch.no_grad():
            logits = trainer.model.eval()(input_ids=torch.arange(7, 39).reshape(2, 16)).logits
        if is_first:
            torch.save(logits, Path(trainer.args.output_dir, "logits.pt"))
    except FSDPToolsError as error:
        if is_first:
            print(f"error: {error}")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    if is_first:
        print("=== done", flush=True)
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Series:
    """What the runs of a recipe left behind, by the names of the runs."""

    folder: Path
    printed: Mapping[str, str]

    def log(self, run: str, key: str) -> list[float]:
        """Every value of that name in the run's log, in order."""
        state = json.loads((self.folder / run / "trainer_state.json").read_text())
        return [entry[key] for entry in state["log_history"] if key in entry]

    def logits(self, run: str) -> torch.Tensor:
        """What the trained sharded model computed of two rows of tokens."""
        return torch.load(self.folder / run / "logits.pt")

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        """All that the run saved, by name."""
        return {k: v for file in (self.folder / run).glob("*.safetensors") for k, v in load_file(file).items()}

    def error(self, run: str) -> str:
        """The error that ended the run before it had loaded a model."""
        assert "read per rank" not in self.printed[run], "the model was loaded before"
        found = re.search(r"^error: (.*)$", self.printed[run], re.MULTILINE)
        assert found, self.printed[run]
        return found[1]

    def same_logits(self, run: str, model: Any) -> None:
        """Compare a plain model with what the sharded one computed."""
        with torch.no_grad():
            found = model.eval()(input_ids=torch.arange(7, 39).reshape(2, 16)).logits
        torch.testing.assert_close(found, self.logits(run), rtol=1e-5, atol=1e-5)


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """A dataset of these rows, which are evaluated too."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(folder / "train.jsonl", folder / "test.jsonl")
    return str(folder)


def run_series(
    recipe: str,
    folder: Path,
    kind: str,
    options: Sequence[str],
    more: Mapping[str, Sequence[str]],
    *,
    steps: int = 8,
) -> Series:
    """Train the recipe on rows of the demo, with a learning rate of zero, and again from the middle; and more runs.

    Args:
        recipe: name of the script.
        folder: gets the demo model ("model"), the rows ("data") and a folder for each run: "trained", "still" (two
            steps), "resumed", and those of `more`.
        kind: of demo data, of which there are 16 rows.
        options: of all runs but those of `more` that name a model or data of their own.
        more: options of further runs; given after `options`, so that they win.
        steps: of the training; half of them are saved in the middle.
    """
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2))
    data = write_rows(folder / "data", demo_rows(kind)[:16])
    usual = ["--model_name_or_path", model, "--dataset_name", data, "--per_device_train_batch_size", "2"]
    usual += [
        "--logging_steps",
        "1",
        "--save_steps",
        str(steps // 2),
        "--max_steps",
        str(steps),
        "--disable_tqdm",
        "true",
    ]
    middle = str(folder / "trained" / f"checkpoint-{steps // 2}")
    runs: dict[str, Sequence[str]] = {
        "trained": [],
        "still": ["--learning_rate", "0", "--max_steps", "2"],
        "resumed": ["--resume_from_checkpoint", middle],
        **more,
    }
    script = folder / "series.py"
    script.write_text(_SCRIPT)
    series = [
        json.dumps([name, [*usual, *options, "--output_dir", str(folder / name), *own]]) for name, own in runs.items()
    ]
    done = launch(folder, str(ROOT / "recipes" / f"{recipe}.py"), *series, script=script)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = re.findall(r"^=== (\S+)\n(.*?)^=== done$", done.stdout, re.DOTALL | re.MULTILINE)
    return Series(folder, dict(printed))
