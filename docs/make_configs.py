"""Write `accelerate_configs/` anew with `hf-fsdp search`, or compare: python docs/make_configs.py [--check] [NAME ...]

The settings of a file depend on what is trained. One rule for all: sequences of 4,096 tokens, 64 of them per
optimizer step; all parameters where that fits with AdamW on fp32, otherwise LoRA (r 16); never offload. The files of
machines are for Llama-3.1-8B; those of `models/` are presets for one model. A model is a config.json that is made on
the spot, with the published sizes and under the hub's name, so nothing is downloaded.
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
MODELS = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 1),
    "qwen3-8b": ("Qwen/Qwen3-8B", 8),
    "qwen3-8b-1m": ("Qwen/Qwen3-8B", 8),
    "qwen3-32b": ("Qwen/Qwen3-32B", 8),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 8),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", 1),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", 8),
    "gemma-3-1b": ("google/gemma-3-1b-pt", 1),
    "gpt-oss-20b": ("openai/gpt-oss-20b", 8),
    "phi-4": ("microsoft/phi-4", 8),
    "gpt-oss-20b-mxfp4": ("openai/gpt-oss-20b", 1),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B", 8),
    "qwen3.6-35b-a3b": ("Qwen/Qwen3.6-35B-A3B", 8),
    "gemma-4-31b": ("google/gemma-4-31B", 8),
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B", 8),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", 8),
    "mistral-small-4": ("mistralai/Mistral-Small-4-119B-2603", 8),
    "nemotron-3-nano": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8),
}
"""Name on the hub, and GPUs of 80 GB, by the name after `hf-fsdp finetune --preset`."""
TRAINED = ["--recipe", "finetune", "--global-batch-size", "64"]
OTHERS = {"gpt-oss-20b-mxfp4": [*TRAINED, "--dequantize", "false"]}
OTHERS |= {"qwen3-8b-1m": ["--recipe", "pretrain", "--max-length", str(1 << 20), "--global-batch-size", "1"]}
"""What some models train: LoRA on a base that stays as it is stored; a row of a million tokens in each step."""


def command(name: str, output: str) -> list[str]:
    """The options of `hf-fsdp init` and `search` for a file, without what is trained."""
    end = ["--output", output]
    if name == "cpu":
        return ["init", "--cpu", *end]
    rule = ["--no-offload-params", "--optimizer", "adamw"]
    if name in MODELS:
        model, count = MODELS[name]
        gpus = ["--gpu", "h100-80gb", "--num-processes", str(count)]
        return ["search", model, *OTHERS.get(name, TRAINED), *gpus, *rule, *end]
    gpu, count = MACHINES[name]
    several = ["--num-machines", "2", "--slurm"] if count > 8 else []
    return ["search", MODEL, "--gpu", gpu, "--num-processes", str(count), *several, *TRAINED[2:], *rule, *end]


def write(name: str) -> None:
    """Write one file below the current folder, with the first of the trainings that fits."""
    *words, option, output = command(name, f"accelerate_configs/{'models/' * (name in MODELS)}{name}.yaml")
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
        for model in {MODEL, *(model for model, _ in MODELS.values())}:
            there = Path(folder, model)
            there.mkdir(parents=True)
            (there / "config.json").write_text(CONFIGS[there.name].to_json_string())
        for name in names:
            with contextlib.chdir(folder):
                write(name)
            above = Path(folder, "accelerate_configs")
            for path in sorted((above / "models" if name in MODELS else above).glob(f"{name}.*")):
                yield path.relative_to(above).as_posix(), path.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="files without .yaml (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    options = parser.parse_args()
    found, different = [], []
    for name, text in made(options.names or ["cpu", *MACHINES, *MODELS]):
        path = FOLDER / name
        found.append(name)
        before = path.read_text() if path.exists() else ""
        if before == text:
            continue
        different.append(name)
        if options.check:
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), name, name))
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if not options.names:
        there = (path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*"))
        others = sorted(name for name in there if name not in (*found, "here.yaml"))
        different += [f"{name} (which nothing makes)" for name in others]
    print(f"{len(found)} files, {len(different)} different{': ' * bool(different)}{', '.join(different)}")
    return int(options.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
