"""Write `accelerate_configs/` anew with `hf-fsdp config`, or compare: python docs/make_configs.py [--check] [NAME ...]

The settings of a file depend on what is trained. One rule for all: Llama-3.1-8B, sequences of 4,096 tokens, 64 of them
per optimizer step; all parameters where that fits, otherwise LoRA (r 16); never offload. The model is
a config.json that is made on the spot, with the published sizes and under the hub's name, so nothing is downloaded.
"""

import argparse
import contextlib
import difflib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models import CONFIGS

from hf_fsdp_tools.cli.main import main as hf_fsdp

FOLDER = Path(__file__).resolve().parents[1] / "accelerate_configs"
MODEL = "meta-llama/Llama-3.1-8B"
TRAININGS = ([], ["--lora-r", "16"])
MACHINES = {"1x24gb": ("rtx-4090", 1), "1x80gb": ("h100-80gb", 1), "8x80gb": ("h100-80gb", 8)}
MACHINES |= {"2x8x80gb": ("h100-80gb", 16)}
"""GPU, whose speed decides between settings that fit, and processes over all machines, by file."""


def command(name: str, output: str) -> list[str]:
    """The options of `hf-fsdp config` for a file, without what is trained."""
    end = ["--output", output]
    if name == "cpu":
        return ["config", "--cpu", *end]
    gpu, count = MACHINES[name]
    several = ["--num-machines", "2", "--slurm"] if count > 8 else []
    rule = ["--no-offload-params", "--global-batch-size", "64"]
    return ["config", MODEL, "--gpu", gpu, "--num-processes", str(count), *several, *rule, *end]


def write(name: str) -> None:
    """Write one file below the current folder, with the first of the trainings that fits."""
    *words, option, output = command(name, f"accelerate_configs/{name}.yaml")
    for training in TRAININGS if name != "cpu" else ([],):
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = hf_fsdp([*words, *training, option, output])
        if code == 0:
            return
    raise SystemExit(f"{name}: {err.getvalue()}")


def made(names: list[str]) -> Iterator[tuple[str, str]]:
    """Name and text of each file, as soon as it is made."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, MODEL)
        there.mkdir(parents=True)
        (there / "config.json").write_text(CONFIGS["Llama-3.1-8B"].to_json_string())
        for name in names:
            with contextlib.chdir(folder):
                write(name)
            for path in sorted(Path(folder, "accelerate_configs").glob(f"{name}.*")):
                yield path.name, path.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="files without .yaml (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    options = parser.parse_args()
    found, different = [], []
    for name, text in made(options.names or ["cpu", *MACHINES]):
        path = FOLDER / name
        found.append(name)
        before = path.read_text() if path.exists() else ""
        if before == text:
            continue
        different.append(name)
        if options.check:
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), name, name))
        else:
            path.write_text(text)
    if not options.names:
        others = sorted(path.name for path in FOLDER.iterdir() if path.name not in (*found, "here.yaml"))
        different += [f"{name} (which nothing makes)" for name in others]
    print(f"{len(found)} files, {len(different)} different{': ' * bool(different)}{', '.join(different)}")
    return int(options.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
