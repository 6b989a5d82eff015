"""Launch recipes as a user does: `accelerate launch`, two processes on CPUs, a folder of their own.

Starting takes 8 s, nearly all of it imports. So two launched ranks stay for all tests of this folder: `launch_series`
has them call a recipe's `main` for each of its runs, and note the logits of each trained model on its shards.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

__all__ = [
    "ROOT",
    "Series",
    "end_ranks",
    "four_bits",
    "launch",
    "launch_series",
    "three_runs",
    "write_lines",
    "write_split",
]

ROOT = Path(__file__).parents[2]

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"

RANKS = """
import itertools, os, runpy, sys, time
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
jobs, asking = Path(sys.argv[1]), int(sys.argv[2])
rank, environment = os.environ["RANK"], dict(os.environ)
PartialState.destroy_process_group = lambda *_: None  # one group for all: torch's launcher has a store for one


def say(text):
    if rank == "0":
        print(text, flush=True)


def run_series(recipe, probe, series, wrong):
    scope = runpy.run_path(recipe)["main"].__globals__  # runpy returns a copy
    ending = "finish" if "finish" in scope else "save_pretrained"
    finish = scope[ending]

    def noting_finish(last, where, *rest, **keywords):
        model, folder = (last.model, where.output_dir) if ending == "finish" else (last, where)
        model.eval()
        inputs = {name: torch.tensor(value) for name, value in probe.items()}
        with torch.no_grad():
            logits = model(**inputs).logits
        compiled = [name for name, module in model.named_modules() if module._compiled_call_impl]
        say(f"compiled: {' '.join(compiled) or 'none'}")
        finish(last, where, *rest, **keywords)
        if rank == "0":
            torch.save(logits, Path(folder, "logits.pt"))

    scope[ending] = noting_finish
    for name, arguments, is_refused in series:
        sys.argv = [recipe, *arguments]
        say(f"=== {name}")
        try:
            scope["main"]()
        except FSDPToolsError as error:
            if not is_refused:
                raise
            say(f"error: {error}")
        forget()
        say("=== done")
    if wrong is None:
        return 0
    sys.argv = [recipe, *wrong]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as error:
        return error.code
    finally:
        forget()


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)


for number in itertools.count():
    job = jobs / f"{number}.json"
    while not job.exists():
        os.kill(asking, 0)  # fails where the tests were killed
        time.sleep(0.02)
    where, ends, *series = loads(job.read_text())
    os.chdir(where)
    code = run_series(*series)
    sys.stdout.flush()
    sys.stderr.flush()
    if ends:
        os._exit(code)  # as recipes do
    (jobs / f"{number}.{rank}").write_text(str(code))
"""

PROBE = {"input_ids": [list(range(3, 19))]}
"""Inputs of which the logits are noted, unless a test gives others."""


@dataclass(frozen=True)
class Series:
    """What a series of runs has printed and written."""

    folder: Path
    """The output of each run lies in it, under the run's name."""

    printed: dict[str, str]
    """Standard output of each run that ended as it was to end."""

    said: str
    """Standard error of all processes."""

    code: int
    """Exit status of the wrong run, or of the launcher where it has ended."""

    def of(self, name: str) -> str:
        """What a run printed; fails with all of standard error where it did not end well."""
        assert name in self.printed, self.said[-6000:]
        return self.printed[name]

    def losses(self, name: str) -> tuple[float, float]:
        """The evaluation loss before and after a run, as printed."""
        found = re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", self.of(name))
        assert found, self.of(name)
        before, after = map(float, found.groups())
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
        assert "read per rank" not in self.of(name), "the model was loaded before"
        found = re.search(r"^error: (.*)$", self.of(name), re.MULTILINE)
        assert found, self.of(name)
        return found[1]

    def logits(self, name: str) -> torch.Tensor:
        """The logits of the trained model on its shards, for the probe."""
        self.of(name)
        return torch.load(self.folder / name / "logits.pt", weights_only=True)

    def check_opened(self, name: str, model: Any) -> None:
        """Compare what a plain model makes of the probe (PROBE) with what the trained model made of it on shards."""
        with torch.no_grad():
            found = model.eval()(input_ids=torch.tensor(PROBE["input_ids"])).logits
        torch.testing.assert_close(found, self.logits(name), rtol=1e-5, atol=1e-5)

    def check_four_bits(self) -> None:
        """The run of `four_bits`, if bitsandbytes is here: the base is 4 bits, and the adapter learns."""
        if not HAS_BITSANDBYTES:
            pytest.skip("bitsandbytes is not installed (pip install bitsandbytes)")
        assert "4-bit in float32" in self.of("qlora")
        losses = self.log("qlora", "eval_loss")
        assert losses[-1] < losses[0]
        assert set(self.weights("qlora")) == set(self.weights("lora")), "the adapter alone, and the head that it trains"

    def check_resumed(self) -> None:
        """The run "resumed" of `three_runs` began in the middle, and its end is that of "trained" to the bit, as is its
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
    command, keywords = _command(folder, *arguments, script=script)
    keywords["env"] |= variables or {}
    return subprocess.run(command, **keywords, capture_output=True, text=True, timeout=280, check=False)


def _command(folder: Path, *arguments: str, script: Path) -> tuple[list[str], dict[str, Any]]:
    """What starts two ranks in a folder, and the folder and environment as keywords of `subprocess`."""
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", CONFIG, script]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": paths}
    return [*map(str, command), *arguments], {"cwd": folder, "env": os.environ | told}


class Ranks:
    """Two launched ranks that wait for series of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        script = folder / "ranks.py"
        script.write_text(RANKS)
        command, keywords = _command(folder, str(folder), str(os.getpid()), script=script)
        with open(folder / "printed", "wb") as printed, open(folder / "said", "wb") as said:
            self.launcher = subprocess.Popen(command, **keywords, stdout=printed, stderr=said)

    def run(self, where: Path, *series: Any, ends: bool = False) -> tuple[str, str, int]:
        """What the ranks print and say in a series, and its exit status; `ends` lets them end with it."""
        streams = [self.folder / name for name in ("printed", "said")]
        starts = [stream.stat().st_size for stream in streams]
        partial = self.folder / "partial"
        partial.write_text(json.dumps([str(where), ends, *series]))
        partial.replace(self.folder / f"{self.count}.json")
        marks = [self.folder / f"{self.count}.{rank}" for rank in range(2)]
        self.count += 1
        until = time.monotonic() + 280
        while self.launcher.poll() is None and not all(mark.exists() and mark.read_text() for mark in marks):
            assert time.monotonic() < until, streams[1].read_text()[-6000:]
            time.sleep(0.02)
        texts = [stream.read_bytes()[start:].decode() for stream, start in zip(streams, starts, strict=True)]
        code = self.launcher.returncode
        return texts[0], texts[1], int(marks[0].read_text()) if code is None else code


_ranks: list[Ranks] = []


def end_ranks() -> None:
    """Let the ranks end that wait for further series, if there are any."""
    while _ranks:
        ranks = _ranks.pop()
        ranks.launcher.terminate()  # which ends the ranks
        ranks.launcher.wait(60)


def launch_series(
    folder: Path,
    recipe: str,
    runs: dict[str, list[str]],
    *,
    refused: dict[str, list[str]] | None = None,
    probe: dict[str, Any] | None = None,
    wrong: list[str] | None = None,
    ends: bool = False,
) -> Series:
    """Run a recipe several times on the ranks that stay, which are launched where there are none.

    Args:
        folder: in which all runs write, each into a folder of its own name.
        recipe: its file's name in `recipes/`.
        runs: the options of each run but `--output_dir`, by the run's name.
        refused: the options of further runs, each of which is to end in an error of this package.
        probe: keywords of the model as lists of numbers; the logits for them are noted at the end of each run.
        wrong: options of a last run, which is to end in an error, as a process of its own would.
        ends: the processes end with the series; the next is launched anew.
    """
    given = [
        (name, [*options, "--output_dir", str(folder / name)], part is refused)
        for part in (runs, refused or {})
        for name, options in part.items()
    ]
    last = None if wrong is None else [*wrong, "--output_dir", str(folder / "wrong")]
    if not _ranks or _ranks[-1].launcher.poll() is not None:
        _ranks[:] = [Ranks(Path(tempfile.mkdtemp(prefix="ranks-", dir=folder.parent)))]
    shown, said, code = _ranks[-1].run(folder, str(ROOT / "recipes" / recipe), probe or PROBE, given, last, ends=ends)
    printed = dict(re.findall(r"^=== (\S+)\n(.*?)^=== done$", shown, re.DOTALL | re.MULTILINE))
    return Series(folder, printed, said, code)


def three_runs(folder: Path, steps: int, *options: str, learning_rate: float) -> dict[str, list[str]]:
    """Three runs of a recipe: "trained", "still" with a learning rate of zero, and "resumed" from the first's middle.

    Args:
        folder: of the series.
        steps: of each run; even.
        options: of all three.
        learning_rate: of the first and the last.
    """
    common = [*options, "--max_steps", str(steps), "--save_steps", str(steps // 2)]
    trained = [*common, "--learning_rate", str(learning_rate)]
    middle = folder / "trained" / f"checkpoint-{steps // 2}"
    return {
        "trained": trained,
        "still": [*common, "--learning_rate", "0"],
        "resumed": [*trained, "--resume_from_checkpoint", str(middle)],
    }


def four_bits(short: list[str]) -> dict[str, list[str]]:
    """The run "qlora" of four steps, beside "lora"; none where bitsandbytes is not installed.

    Args:
        short: options that end with `--max_steps`.
    """
    given = [*short, "4", "--use_peft", "--lora_r", "4", "--load_in_4bit", "--bnb_4bit_quant_storage", "float32"]
    return {"qlora": given} if HAS_BITSANDBYTES else {}


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
