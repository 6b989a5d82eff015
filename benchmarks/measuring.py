"""Contestants in turn, what a process used, and the page of their runs in Markdown."""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_tools
from hf_fsdp_tools.testing import num_gpus, run_ranks

Figures = dict[str, Any]
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


def measured(
    names: Sequence[str], rounds: int, run_once: Callable[[str, bool], tuple[list[Figures], str]]
) -> dict[str, Row]:
    """One row per contestant, or why it failed.

    `run_once` gives each rank's figures and the result of a check, of a name and whether it is that one's first run.
    """
    runs: dict[str, list[list[Figures]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    results: dict[str, str] = {}
    for name in in_turn(names, rounds):
        if name in failed:
            continue
        try:
            ranks, result = run_once(name, not runs[name])
        except AssertionError as error:  # holds the failing ranks' tracebacks
            failed[name] = reason(str(error))
        else:
            runs[name].append(ranks)
            results.setdefault(name, result)
    return {name: {"failed": failed[name]} if name in failed else _row(runs[name], results[name]) for name in names}


def on_ranks(run: Callable[..., tuple[Figures, str]], ranks: int, name: str, cell: Figures, *args: Any) -> Any:
    """What `measured` asks of a run, by a function that each rank of a cell's device runs."""
    found = run_ranks(run, ranks, name, cell, *args, timeout_s=900, device=cell["device"])
    return [figures for figures, _ in found], found[0][1]


def _row(runs: list[list[Figures]], result: str) -> Row:
    """Each run's slowest rank, the last run's figures by rank, and what was wrong."""
    times = [key for key, value in runs[0][0].items() if isinstance(value, float)]
    ranks = [{key: value for key, value in rank.items() if isinstance(value, int)} for rank in runs[-1]]
    slowest = {key: [max(rank[key] for rank in run) for run in runs] for key in times}
    return {**slowest, "ranks": ranks, "wrong": result}


def reason(failure: str) -> str:
    """One line of the tracebacks of failed ranks."""
    if f"exit code {OUT_OF_MEMORY}" in failure:
        return "the machine has too little memory for it"
    lines = failure.split("\n--- rank")[0].splitlines()
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return [lines[0], *errors][-1][:160].replace("|", "/")


def state_of_the_code() -> str:
    """The line of a page that says with which commit, and when, it was made."""
    words = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=, changed"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return f"> The code was that of commit {done.stdout.strip() or 'unknown'}, {date.today()}."


def about(script: str, device: str) -> dict[str, str]:
    """The command of this run, of absolute paths the last part; the day, the versions and the machine, in words."""
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = (f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "safetensors"))
    ranks = f"{num_gpus()} GPUs, NCCL" if device == "cuda" else "gloo on the CPU"
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory, {ranks}"
    where = f"{state_of_the_code()}\n\nhf_fsdp_tools {hf_fsdp_tools.__version__}, {', '.join(versions)}; {machine}."
    return {"where": where, "command": shlex.join(["python", script, *words])}


# ---- pages ----


@dataclass(frozen=True, kw_only=True)
class Page:
    """How the cells of one benchmark are shown."""

    title: str
    script: str  # At whose top stands what the columns mean
    title_of: Callable[[Figures], str]  # What was measured in a cell, in words
    table: Callable[[dict[str, Row]], list[str]]  # The rows of a cell

    def render(self, records: Sequence[dict[str, Any]]) -> str:
        """All cells; of a cell that was measured twice, the last."""
        lines = [f"# {self.title}", "", f"What each column means is said at the top of `{self.script}`."]
        for where in dict.fromkeys(record["about"]["where"] for record in records):
            lines += ["", where]
        for title, record in {self.title_of(record["cell"]): record for record in records}.items():
            lines += ["", f"## {title}", "", f"`{record['about']['command']}`", "", *self.table(record["rows"])]
        return "\n".join(lines) + "\n"

    def run(self, args: argparse.Namespace, cells: Callable[[argparse.Namespace], Iterable[Figures]]) -> None:
        """Measure cell by cell, and keep each in the records and in the page beside them."""
        args.folder.mkdir(parents=True, exist_ok=True)
        for record in cells(args):
            print("", f"## {self.title_of(record['cell'])}", "", *self.table(record["rows"]), sep="\n", flush=True)
            if args.records:
                with args.records.open("a") as stream:
                    stream.write(json.dumps(record) + "\n")
                records = [json.loads(line) for line in args.records.read_text().splitlines()]
                args.records.with_suffix(".md").write_text(self.render(records))


def add_page_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """The options of `Page.run`."""
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), folder), help="of models")
    parser.add_argument("--records", type=Path, help="JSON lines to which cells are added, with a page (.md) beside it")


def parsed_with_ranks(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with those of where the ranks of a benchmark run, how many there are, and how often."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if num_gpus() else "cpu")
    parser.add_argument("--ranks", type=int, help="2 on CPUs, all GPUs otherwise")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    args.ranks = args.ranks or (num_gpus() if args.device == "cuda" else 2)
    return args


def table_of(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns that hold nothing."""
    kept = [i for i in range(len(columns)) if not lines or any(line[i] for line in lines)]
    shown = [[line[i] for i in kept] for line in [columns, ["---"] * len(columns), *lines]]
    return [f"| {' | '.join(line)} |" for line in shown]


def seconds_text(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


def ratio(rows: dict[str, Row], name: str, base: str, key: str = "seconds") -> str:
    """The median over rounds of one contestant's times over another's; empty if either failed or did not run."""
    pairs = zip(rows.get(name, {}).get(key, []), rows.get(base, {}).get(key, []), strict=False)
    ratios = [a / b for a, b in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def times_of(name: str, rows: dict[str, Row], key: str = "seconds") -> list[str]:
    """Three columns: a contestant's seconds, and medians over rounds of their ratios to the limit and to ours."""
    return [seconds_text(rows[name][key]), ratio(rows, name, LIMIT, key), ratio(rows, name, OURS, key)]


def megabytes(row: Row) -> dict[str, str]:
    """Each figure of the ranks in MB, one after the other."""
    return {key: ", ".join(f"{rank[key] / 1e6:.0f}" for rank in row["ranks"]) for key in row["ranks"][0]}


def ranks_of(cell: Figures) -> str:
    """The ranks of a cell, in words."""
    return f"{cell['ranks']} ranks" if cell["ranks"] > 1 else "1 rank"


# ---- one process, from /proc and from the GPU's allocator ----

OUT_OF_MEMORY = 77
"""Exit code of a rank that ended because the machine had no memory left."""

_SPARE_BYTES = 2**30  # of the machine, below which ranks end


def share_cores() -> None:
    """As many threads for torch's own work as this rank has cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))


def end_without_memory() -> None:
    """End this process, with a code of its own, when the machine runs out of memory; the user's work goes on."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # should it come faster than this looks

    def watch() -> None:
        while True:
            lines = Path("/proc/meminfo").read_text().splitlines()
            if next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024 < _SPARE_BYTES:
                os._exit(OUT_OF_MEMORY)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()


def begin(device: torch.device) -> Figures:
    """Let all ranks meet, and begin to count; `usage` before what is measured."""
    with suppress(OSError):  # some sandboxes have no such file; the high-water mark is then that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # it starts again from here
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    if dist.is_initialized():
        dist.barrier()
    return usage(device)


def usage(device: torch.device) -> dict[str, int]:
    """Bytes read and bytes resident of this process, from /proc, its processor time, and memory of and for a GPU."""
    fields = (line.split() for name in ("io", "status") for line in Path("/proc/self", name).read_text().splitlines())
    figures = {f[0].rstrip(":"): int(f[1]) * (1024 if f[-1] == "kB" else 1) for f in fields if f[1:] and f[1].isdigit()}
    on_gpu = dict.fromkeys(("device", "device_peak", "device_reserved", "pinned", "pinned_peak"), 0)
    figures |= {**on_gpu, "cpu_us": int(time.process_time() * 1e6)}
    if device.type == "cuda":
        figures["device"] = torch.cuda.memory_allocated(device)
        figures["device_peak"] = torch.cuda.max_memory_allocated(device)
        figures["device_reserved"] = torch.cuda.memory_reserved(device)
        host = torch.cuda.host_memory_stats()  # empty until something is pinned
        figures["pinned"] = host.get("active_bytes.current", 0)
        figures["pinned_peak"] = host.get("allocated_bytes.peak", 0)
    return figures
