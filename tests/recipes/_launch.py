"""Run recipes as a user does, two processes on CPUs, each run in a folder of its own.

`launch_series` runs many runs of many recipes in ranks that are forked, in the environment that Accelerate's launcher
would give them: it calls `main` for each, and notes the logits of each trained model on its shards. A real launch takes
20 s of CPU, nearly all of it imports: the quick start and two machines have one each.
"""

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests._dist import run_ranks

ROOT = Path(__file__).parents[2]

CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"

ONCE = ["--eval_strategy", "steps", "--eval_steps", "100", "--save_strategy", "no"]
"""Options of a run that is evaluated at its start and its end alone, and leaves no checkpoints."""

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
    """Standard error of all processes, and how a run failed that was to end well."""
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


def launch_series(
    folder: Path,
    runs: dict[str, list[str]],
    *,
    refused: dict[str, list[str]] | None = None,
    probe: dict[str, Any] | None = None,
) -> Series:
    """Run recipes one after the other in the same ranks, each given by its name, or a script's path, and its options.

    The logits for the keywords `probe` are noted at the end of each run. Runs of `refused` end in an error of this
    package. The launch file gives the number of ranks and their environment.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(CONFIG), "recipe.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = {**prepare_multi_gpu_env(arguments), "HF_HOME": str(folder / "hf")}
    entries = [
        (name, [*words, "--output_dir", str(folder / name)], part is refused)
        for part in (runs, refused or {})
        for name, words in part.items()
    ]
    failure = ""
    try:
        run_ranks(_run_series, int(arguments.num_processes), folder, environment, entries, probe or PROBE)
    except AssertionError as error:
        failure = str(error)
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    printed = dict(re.findall(r"^=== (\S+)\n(.*?)^=== done$", stdout, re.DOTALL | re.MULTILINE))
    return Series(folder, printed, stderr + failure, probe or PROBE)


def _run_series(folder: Path, environment: dict[str, str], entries: list[Any], probe: dict[str, Any]) -> None:
    """The life of one rank of a series; what it prints goes to files of the folder."""
    from accelerate.state import PartialState
    from datasets import IterableDataset
    from huggingface_hub import constants

    from hf_fsdp_tools import FSDPToolsError, scripting
    from hf_fsdp_tools.scripting import running
    from hf_fsdp_tools.testing import forget_accelerate

    is_first = os.environ["RANK"] == "0"
    environment |= {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    constants.HF_HUB_OFFLINE = True
    PartialState.destroy_process_group = lambda *_: None  # one group for all runs
    map_stream = IterableDataset.map
    IterableDataset.map = lambda *args, **given: map_stream(*args, **given | {"batch_size": 40})  # few rows are read

    @cache
    def main_of(recipe: str) -> Callable[[], object]:
        if recipe.endswith(".py"):
            return lambda: runpy.run_path(recipe, run_name="__main__")
        main = runpy.run_path(f"{ROOT}/recipes/{recipe}.py")["main"]
        if recipe == "accelerate_loop":
            save = main.__globals__["save_pretrained"]
            main.__globals__["save_pretrained"] = _noting(save, lambda model, folder: (model, folder), probe)
        return main

    running._picture = lambda *_: ""  # the quick start looks at it
    scripting.finish = _noting(scripting.finish, lambda trainer, args, *_: (trainer.model, args.output_dir), probe)
    for name, (recipe, *options), is_refused in entries:
        os.environ.clear()
        os.environ.update(environment)
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
        forget_accelerate()
        if is_first:
            print("=== done", flush=True)


def _noting(save: Callable[..., Any], model_and_folder: Callable[..., tuple[Any, str]], probe: dict[str, Any]) -> Any:
    """A function that saves as `save` does, and notes the logits of the model and what of it is compiled."""

    def noting_save(*arguments: Any, **keywords: Any) -> None:
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
        if os.environ["RANK"] == "0":
            print(f"compiled: {' '.join(compiled) or 'none'}", flush=True)
        save(*arguments, **keywords)
        if os.environ["RANK"] == "0":
            torch.save(logits, Path(folder, "logits.pt"))

    return noting_save


def two_runs(folder: Path, name: str, steps: int, *words: str, learning_rate: float) -> dict[str, list[str]]:
    """Two runs: of that name, and "…-resumed" from the middle of the first."""
    whole = [*words, "--max_steps", str(steps), "--save_steps", str(steps // 2), "--learning_rate", str(learning_rate)]
    middle = folder / name / f"checkpoint-{steps // 2}"
    return {name: whole, f"{name}-resumed": [*whole, "--resume_from_checkpoint", str(middle)]}


def refused_runs(table: dict[str, tuple[str, str, str]], bases: Any, **places: Any) -> dict[str, list[str]]:
    """Runs of a table of name: (base, further words, what is said)."""
    words_of = {name: [word.format(**places) for word in words.split()] for name, (_, words, _) in table.items()}
    return {name: [*bases[table[name][0]], *words] for name, words in words_of.items()}


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
