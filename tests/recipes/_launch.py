"""Launch recipes as a user does: `accelerate launch`, two processes on CPUs, a folder of their own.

Starting takes 8 s, nearly all of it imports. So `launch_series` starts once for several runs of several recipes: it
calls `main` for each, and notes the logits of each trained model on its shards.
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
import os, runpy, sys, time
from functools import cache
from json import dumps, loads
from pathlib import Path
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from hf_fsdp_tools import FSDPToolsError, scripting

root, probe, runs, late = sys.argv[1], *map(loads, sys.argv[2:])
is_first = os.environ["RANK"] == "0"
environment = dict(os.environ)
PartialState.destroy_process_group = lambda *_: None  # one group for the series: torch's launcher has a store for one


class Noting(TrainerCallback):
    def on_log(self, args, state, control, logs, **keywords):
        if is_first:
            with open(Path(args.output_dir, "noted.jsonl"), "a") as file:
                file.write(dumps(logs) + "\\n")


INTEGRATION_TO_CALLBACK["noting"] = Noting  # as --report_to names it


def noting(save, model_and_folder):
    def noting_save(*arguments, **keywords):
        model, folder = model_and_folder(*arguments)
        model.eval()
        with torch.no_grad():
            inputs = {name: torch.tensor(value) for name, value in probe.items()}
            if type(model).__name__ == "SentenceTransformer":
                logits = model(inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])})["sentence_embedding"]
            else:
                if model.config.is_encoder_decoder:
                    inputs["decoder_input_ids"] = inputs["input_ids"]
                logits = model(**inputs).logits
        compiled = [name for name, module in model.named_modules() if module._compiled_call_impl]
        if is_first:
            print(f"compiled: {' '.join(compiled) or 'none'}", flush=True)
        save(*arguments, **keywords)
        if is_first:
            torch.save(logits, Path(folder, "logits.pt"))

    return noting_save


@cache
def main_of(recipe):
    main = runpy.run_path(f"{root}/recipes/{recipe}.py")["main"]
    if recipe == "accelerate_loop":
        save = main.__globals__["save_pretrained"]
        main.__globals__["save_pretrained"] = noting(save, lambda model, folder: (model, folder))
    return main


scripting.finish = noting(scripting.finish, lambda trainer, training, *_: (trainer.model, training.output_dir))
for name, (recipe, *options), is_refused in runs:
    sys.argv = [recipe, *options]
    if is_first:
        print(f"=== {name}", flush=True)
    try:
        main_of(recipe)()
    except FSDPToolsError as error:
        if not is_refused:
            raise
        if is_first:
            print(f"error: {error}")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    if is_first:
        print("=== done", flush=True)


def main_of_late():
    try:
        main_of(late[0])()
    except FSDPToolsError:
        time.sleep(2 * is_first)
        raise


if late:
    sys.argv = late
    scripting.run(main_of_late, late[0])
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

    def log(self, name: str, key: str) -> list[float]:
        """Every value of that name in a run's log."""
        self.of(name)
        history = json.loads((self.folder / name / "trainer_state.json").read_text())["log_history"]
        return [entry[key] for entry in history if key in entry]

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
        inputs = {key: torch.tensor(value) for key, value in self.probe.items()}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
        torch.testing.assert_close(logits, self.logits(name), rtol=1e-4, atol=1e-4)

    def check_resumed(self, name: str) -> None:
        """The second of `two_runs` began in the middle; its end is that of the first to the bit, as is its log."""
        resumed = f"{name}-resumed"
        saved = {run: len([*(self.folder / run).glob("checkpoint-*")]) for run in (name, resumed)}
        assert saved == {name: 2, resumed: 1}, "it did not begin in the middle"
        weights = self.weights(resumed)
        for key, weight in self.weights(name).items():
            assert torch.equal(weight, weights[key]), key
        assert self.log(resumed, "loss") == self.log(name, "loss")


def launch(
    folder: Path, *arguments: str, script: Path, variables: Mapping[str, str] | None = None, config: Path = CONFIG
) -> subprocess.CompletedProcess[str]:
    """Launch a script in a folder, on two ranks unless a file gives others, without a hub unless the variables do."""
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", config, script]
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
    runs: dict[str, list[str]],
    *,
    refused: dict[str, list[str]] | None = None,
    probe: dict[str, Any] | None = None,
    late: list[str] | None = None,
    **launching: Any,
) -> Series:
    """Run recipes one after the other after one start, each given by its name and its options.

    The logits for the keywords `probe` are noted at the end of each run. Runs of `refused` end in an error of this
    package. `late` is a last run that ends so as a process of its own would, with an error that rank 0 meets 2 s after
    the other. `launching` goes to `launch`.
    """
    script = folder / "series.py"
    script.write_text(SERIES)
    entries = [
        (name, [*words, "--output_dir", str(folder / name)], part is refused)
        for part in (runs, refused or {})
        for name, words in part.items()
    ]
    done = launch(folder, str(ROOT), *map(json.dumps, [probe or PROBE, entries, late]), script=script, **launching)
    printed = dict(re.findall(r"^=== (\S+)\n(.*?)^=== done$", done.stdout, re.DOTALL | re.MULTILINE))
    return Series(folder, printed, done.stderr, done.returncode, probe or PROBE)


def two_runs(folder: Path, name: str, steps: int, *words: str, learning_rate: float) -> dict[str, list[str]]:
    """Two runs: of that name, and "…-resumed" from the middle of the first."""
    whole = [*words, "--max_steps", str(steps), "--save_steps", str(steps // 2), "--learning_rate", str(learning_rate)]
    middle = folder / name / f"checkpoint-{steps // 2}"
    return {name: whole, f"{name}-resumed": [*whole, "--resume_from_checkpoint", str(middle)]}


def write_split(folder: Path, rows: list[dict[str, Any]], held_out: list[dict[str, Any]] | None = None) -> str:
    """Write a dataset, which is evaluated on the same rows where no others are given; return its folder."""
    folder.mkdir(parents=True)
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "test.jsonl", held_out or rows)
    return str(folder)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a .jsonl file; return its path as an option's value."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
