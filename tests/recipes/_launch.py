"""Launch recipes as a user does: `accelerate launch`, two processes on CPUs, a folder of their own.

Starting takes 8 s, nearly all of it imports. So what differs in options and data only is run in a series after one
start: `launch_series` calls the recipe's `main` for each run, and notes the logits of each trained model on its shards.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests._dist import LIMIT_S

ROOT = Path(__file__).parents[2]

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"

SERIES = """
import os, runpy, sys
from json import dumps, loads
from pathlib import Path
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from hf_fsdp_tools import FSDPToolsError


class Noting(TrainerCallback):
    def on_log(self, args, state, control, logs, **keywords):
        if state.is_world_process_zero:
            with open(Path(args.output_dir, "noted.jsonl"), "a") as file:
                file.write(dumps(logs) + "\\n")


INTEGRATION_TO_CALLBACK["noting"] = Noting  # as --report_to names it
recipe, probe, *series, wrong = sys.argv[1:]
names = runpy.run_path(recipe)
scope = names["main"].__globals__  # runpy returns a copy
environment = dict(os.environ)
PartialState.destroy_process_group = lambda *_: None  # one group for the series: torch's launcher has a store for one
ending = "finish" if "finish" in scope else "save_pretrained"
finish = scope[ending]


def noting_finish(last, where, *rest, **keywords):
    model, folder = (last.model, where.output_dir) if ending == "finish" else (last, where)
    model.eval()
    inputs = {name: torch.tensor(value) for name, value in loads(probe).items()}
    with torch.no_grad():
        logits = model(**inputs).logits
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl]
    if os.environ["RANK"] == "0":
        print(f"compiled: {' '.join(compiled) or 'none'}", flush=True)
    finish(last, where, *rest, **keywords)
    if os.environ["RANK"] == "0":
        torch.save(logits, Path(folder, "logits.pt"))


scope[ending] = noting_finish
for name, arguments, is_refused in map(loads, series):
    sys.argv = [recipe, *arguments]
    if os.environ["RANK"] == "0":
        print(f"=== {name}", flush=True)
    try:
        scope["main"]()
    except FSDPToolsError as error:
        if not is_refused:
            raise
        if os.environ["RANK"] == "0":
            print(f"error: {error}")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    if os.environ["RANK"] == "0":
        print("=== done", flush=True)
if loads(wrong) is not None:
    sys.argv = [recipe, *loads(wrong)]
    runpy.run_path(recipe, run_name="__main__")
sys.stdout.flush()
os._exit(0)  # as recipes do
"""

PROBE = {"input_ids": [list(range(3, 19))]}
"""Inputs of which the logits are noted, unless a test gives others."""


@dataclass(frozen=True)
class Series:
    """What a series of runs has printed and written."""

    folder: Path
    """Folder with the output of each run, under the run's name."""
    printed: dict[str, str]
    """Standard output of each run that ended as it was to end."""
    stderr: str
    """Standard error of all processes."""
    code: int
    """Exit status of the launcher."""
    probe: dict[str, Any]
    """Inputs of which the logits are noted."""

    def of(self, name: str) -> str:
        """What a run printed; fails with all of standard error where it did not end well."""
        assert name in self.printed, self.stderr[-6000:]
        return self.printed[name]

    def losses(self, name: str) -> tuple[float, float]:
        """The evaluation loss before and after a run, as printed."""
        match = re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", self.of(name))
        assert match, self.of(name)
        before, after = map(float, match.groups())
        return before, after

    def state(self, name: str) -> dict[str, Any]:
        """The `trainer_state.json` of a run."""
        return json.loads((self.folder / name / "trainer_state.json").read_text())

    def log(self, name: str, key: str) -> list[float]:
        """Every value of that name in a run's log."""
        self.of(name)
        return [entry[key] for entry in self.state(name)["log_history"] if key in entry]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors that a run has saved."""
        files = (self.folder / name).glob("*.safetensors")
        return {key: tensor for file in files for key, tensor in load_file(file).items()}

    def error(self, name: str) -> str:
        """The error of a run that was to be refused before it loaded a model."""
        assert "rank 0 read" not in self.of(name), "the model was loaded before"
        match = re.search(r"^error: (.*)$", self.of(name), re.MULTILINE)
        assert match, self.of(name)
        return match[1]

    def logits(self, name: str) -> torch.Tensor:
        """The logits of the trained model on its shards, for the probe."""
        self.of(name)
        return torch.load(self.folder / name / "logits.pt", weights_only=True)

    def check_opened(self, name: str, model: Any) -> None:
        """Compare what a plain model makes of the probe with what the trained model made of it on shards."""
        with torch.no_grad():
            logits = model.eval()(**{key: torch.tensor(value) for key, value in self.probe.items()}).logits
        torch.testing.assert_close(logits, self.logits(name), rtol=1e-4, atol=1e-4)

    def check_resumed(self) -> None:
        """The run "resumed" of `two_runs` began in the middle, and its end is that of "trained" to the bit, as is its
        log."""
        saved = {name: {p.name for p in (self.folder / name).glob("checkpoint-*")} for name in ("trained", "resumed")}
        assert len(saved["trained"]) == 2 and len(saved["resumed"]) == 1, f"it did not begin in the middle: {saved}"
        resumed = self.weights("resumed")
        for name, weight in self.weights("trained").items():
            assert torch.equal(weight, resumed[name]), name
        assert self.log("resumed", "loss") == self.log("trained", "loss")


def launch(
    folder: Path, *arguments: str, script: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Launch a script on two ranks in a folder, without a hub unless the variables give one."""
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", CONFIG, script]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": paths}
    return subprocess.run(
        [*map(str, command), *arguments],
        cwd=folder,
        env={**os.environ, **environment, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def launch_series(
    folder: Path,
    recipe: str,
    runs: dict[str, list[str]],
    *,
    refused: dict[str, list[str]] | None = None,
    probe: dict[str, Any] | None = None,
    wrong: list[str] | None = None,
) -> Series:
    """Run a recipe several times after one start, and note the logits for the keywords `probe` at the end of each run.

    Runs of `refused` end in an error of this package, and `wrong` has the options of a last run that ends so as a
    process of its own would.
    """
    script = folder / "series.py"
    script.write_text(SERIES)
    entries = [
        (name, [*options, "--output_dir", str(folder / name)], part is refused)
        for part in (runs, refused or {})
        for name, options in part.items()
    ]
    last = None if wrong is None else [*wrong, "--output_dir", str(folder / "wrong")]
    arguments = [str(ROOT / "recipes" / recipe), *map(json.dumps, [probe or PROBE, *entries, last])]
    done = launch(folder, *arguments, script=script)
    printed = dict(re.findall(r"^=== (\S+)\n(.*?)^=== done$", done.stdout, re.DOTALL | re.MULTILINE))
    return Series(folder, printed, done.stderr, done.returncode, probe or PROBE)


def two_runs(folder: Path, steps: int, *options: str, learning_rate: float) -> dict[str, list[str]]:
    """Two runs: "trained", and "resumed" from the middle of the first."""
    trained = [*options, "--max_steps", str(steps), "--save_steps", str(steps // 2)]
    trained += ["--learning_rate", str(learning_rate)]
    middle = folder / "trained" / f"checkpoint-{steps // 2}"
    return {"trained": trained, "resumed": [*trained, "--resume_from_checkpoint", str(middle)]}


def write_split(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Write a dataset of which the same rows are trained on and evaluated; return its folder as an option's value."""
    folder.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        write_lines(folder / name, rows)
    return str(folder)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a .jsonl file; return its path as an option's value."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
