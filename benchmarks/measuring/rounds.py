"""Contestants in turn, what is kept of their runs, and where it was."""

import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hf_fsdp_tools
from benchmarks.measuring.process import OUT_OF_MEMORY
from tests._dist import num_gpus

Row = dict[str, Any]

LIMIT = "limit"
OURS = "hf_fsdp_tools"


def in_turn(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name once per round. Rounds begin in different places: who comes after a contestant that took much memory
    finds it at hand, where the host of a virtual machine takes free memory back.
    """
    for i in range(rounds):
        first = i * len(names) // rounds
        yield from (*names[first:], *names[:first])


def reason(failure: str) -> str:
    """One line of the tracebacks of failed ranks."""
    if f"exit code {OUT_OF_MEMORY}" in failure:
        return "the machine has too little memory for it"
    lines = failure.split("\n--- rank")[0].splitlines()
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return [lines[0], *errors][-1][:160].replace("|", "/")


def ratios(rows: dict[str, Row], name: str, base: str, key: str = "seconds") -> list[float]:
    """The times of one contestant over those of another one in the same round; empty if either failed or did not
    run."""
    pairs = zip(rows.get(name, {}).get(key, []), rows.get(base, {}).get(key, []), strict=False)
    return [a / b for a, b in pairs]


def median(values: Sequence[float], digits: int = 2) -> str:
    """As text; empty for no values."""
    return f"{statistics.median(values):.{digits}f}" if values else ""


def command(script: str) -> str:
    """The command of this run, as a shell takes it; of absolute paths the last part, for others have other folders."""
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
    return shlex.join(["python", script, *words])


def where(device: str) -> str:
    """The day, the versions and the machine, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = (f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "safetensors"))
    ranks = f"{num_gpus()} GPUs, NCCL" if device == "cuda" else "gloo on the CPU"
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory, {ranks}"
    return f"{date.today()}; hf_fsdp_tools {hf_fsdp_tools.__version__}, {', '.join(versions)}; {machine}."
