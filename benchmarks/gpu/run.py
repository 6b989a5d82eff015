"""The run of `benchmarks/gpu.sh`: parts one after the other, a record after each, one page of all."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from benchmarks.gpu.execute import NOT_RUN, run_part, run_program, why_not
from benchmarks.gpu.page import latest, render
from benchmarks.gpu.record import Record
from benchmarks.gpu.steps import STEPS, Part, Settings, parts

_PREFIX = "hf-fsdp-gpu-"
_LEAST_S = 20.0
"""A part is not begun with less time."""

_RESULTS = Path(__file__).parents[1] / "results"


def chosen_steps(words: Sequence[str]) -> list[int]:
    """`["1-3", "6"]` as numbers; all steps without any.

    Raises:
        ValueError: there is no such step.
    """
    found: set[int] = set()
    for word in (part for given in words for part in given.split(",")):
        first, _, last = word.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    if unknown := found - STEPS.keys():
        raise ValueError(f"there is no step {', '.join(map(str, sorted(unknown)))}; there are 1 to {max(STEPS)}")
    return sorted(found or STEPS)


class Book:
    """The JSON lines and the page beside them, both complete after every part."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.page = folder / f"{name}.jsonl", folder / f"{name}.md"
        self.records = read_records([self.lines]) if self.lines.exists() else []

    def add(self, record: Record) -> None:
        """Write a record down."""
        self.records.append(record)
        with self.lines.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        self.page.write_text(render(self.records))

    def passed(self) -> set[tuple[int, str]]:
        """Parts that need not run again."""
        done = (record["part"] for record in latest(self.records))
        return {(part["step"], part["name"]) for part in done if part["status"] == "passed"}


def read_records(files: Sequence[Path]) -> list[Record]:
    """The records of several runs, in the order of the files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_all(
    wanted: Sequence[Part], settings: Settings, book: Book, budget_s: float, say: Callable[..., object] = print
) -> list[Record]:
    """Every part, whatever becomes of the others; their records."""
    deadline = time.monotonic() + budget_s
    made = []
    for index, part in enumerate(wanted):
        left = deadline - time.monotonic()
        about: Record = {"step": part.step, "name": part.name}
        if reason := why_not(part, settings):
            record = {**about, "status": "skipped", "why": reason}
        elif left < _LEAST_S:
            record = {**about, "status": "not run", "why": NOT_RUN}
        else:
            record = run_part(part, settings, left)
        book.add({"part": record})
        made.append(record)
        took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
        why = f": {record['why'][:200]}" if record["why"] else ""
        say(f"step {part.step}, {part.name}: {record['status']}{took}{why}", flush=True)
        forget_models(wanted[index + 1 :], settings)
    return made


def forget_models(later: Sequence[Part], settings: Settings) -> None:
    """Remove checkpoints that no later part needs."""
    needed = {name for part in later for name in part.models}
    for name in {name for part in parts(settings) for name in part.models} - needed:
        for folder in (settings.model(name), f"{settings.model(name)}-adapter"):
            shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(root: Path) -> None:
    """Scratch folders of runs that were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX)
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(folder, ignore_errors=True)


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Versions and GPUs, asked in a process of its own: this one never touches a GPU.

    Raises:
        SystemExit: with what went wrong; nothing could run without PyTorch.
    """
    done = run_program([sys.executable, "-m", "benchmarks.gpu.machine"], settings, 180, {})
    if done.failed:
        sys.exit(f"benchmarks/gpu.sh: {sys.executable} cannot describe this machine:\n{done.output[-2000:]}")
    machine: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return machine


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; variables stand in for what it leaves out."""
    variables = os.environ.get
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description="What a GPU shows, on one page.")
    parser.add_argument("steps", nargs="*", help="such as 1-4 or 6; unless given, all")
    parser.add_argument("--small", action="store_true", default=variables("SMALL", "0") not in ("", "0"))
    parser.add_argument("--out", type=Path, default=Path(variables("OUT") or _RESULTS))
    parser.add_argument("--scratch", type=Path, default=Path(variables("SCRATCH") or tempfile.gettempdir()))
    parser.add_argument("--budget-s", type=float, default=float(variables("BUDGET_S") or 1800))
    parser.add_argument("--only", default="", help="parts whose name holds this")
    parser.add_argument("--resume", action="store_true", help="leave out what passed according to the records in OUT")
    parser.add_argument("--list", action="store_true", help="name all parts, and run none")
    parser.add_argument("--report", type=Path, nargs="+", help="run nothing: one page of these JSON files")
    parser.add_argument("--output", type=Path, help="of --report")
    options = parser.parse_args(words)
    try:
        options.steps = chosen_steps(options.steps)
    except ValueError as error:
        parser.error(str(error))
    if bool(options.report) != bool(options.output):
        parser.error("--report goes with --output")
    return options


def name_of(machine: dict[str, Any], small: bool) -> str:
    """`gpu-nvidia-h200-2026-11-22`, of page and records."""
    gpus = machine["gpus"]
    device = re.sub(r"[^a-z0-9]+", "-", gpus[0]["name"].lower()).strip("-") if gpus else "none"
    many = f"-x{len(gpus)}" if len(gpus) > 1 else ""
    return f"gpu-{device}{many}{'-small' if small else ''}-{datetime.now():%Y-%m-%d}"


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End as after an error: the program under way is ended and the scratch folder removed."""
    raise SystemExit(128 + number)


def main() -> int:
    options = parsed()
    if options.report:
        options.output.write_text(render(read_records(options.report)))
        return 0
    if options.list:
        for part in parts(Settings(scratch=options.scratch)):
            print(f"step {part.step}, {part.name}")
        return 0
    signal.signal(signal.SIGTERM, stop)
    remove_left_over(options.scratch)
    scratch = options.scratch.absolute() / f"{_PREFIX}{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        return run_here(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_here(options: argparse.Namespace, scratch: Path) -> int:
    """Ask what this machine is, and run what was asked for; 1 if anything failed."""
    machine = describe_machine(Settings(scratch=scratch))
    gpu_gb = min((gpu["bytes"] / 1e9 for gpu in machine["gpus"]), default=0.0)
    settings = Settings(
        scratch=scratch, out=options.out.absolute(), small=options.small, gpus=len(machine["gpus"]), gpu_gb=gpu_gb
    )
    book = Book(options.out, name_of(machine, options.small))
    run = {
        "began": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "command": shlex.join(["benchmarks/gpu.sh", *sys.argv[1:]]),
        "small": options.small,
        "scratch_free_gb": shutil.disk_usage(scratch).free / 1e9,
        "machine": machine,
    }
    left_out = book.passed() if options.resume else set()
    book.add({"run": run})
    wanted = [
        part
        for part in parts(settings)
        if part.step in options.steps and options.only in part.name and (part.step, part.name) not in left_out
    ]
    made = run_all(wanted, settings, book, options.budget_s)
    print(f"{book.page}\n{book.lines}")
    return int(any(record["status"] in ("failed", "timed out") for record in made))


if __name__ == "__main__":
    sys.exit(main())
