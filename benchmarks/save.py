"""Save FSDP2 shards as a Hugging Face checkpoint in every known way, in one run, beside the limit of the machine.

    python benchmarks/save.py --size-gb 0.05 --runs 1         # a quick look; without options 3 GB per model
    python benchmarks/save.py --models dense --cache cold --ranks 2 --records save.jsonl      # some cells, kept as JSON
    python benchmarks/save.py --report save.jsonl --output benchmarks/results/save.md         # a table of all
    python benchmarks/save.py --ranks 2 --replicas 2                                          # HSDP
    python benchmarks/save.py --device cuda --models dense 8b --ranks 1                       # from GPUs, one per rank

It writes its own checkpoints (real architectures, random bf16 weights, several files) and keeps them for the next run;
models are loaded from these, in bf16 or as fp32 masters, and saved in bf16 again. Each save runs in fresh processes,
the savers in turn (A B C, B C A, …), so that a slow minute hits all: on GPUs over NCCL where there is one for each
rank, otherwise on the CPU over gloo. The clock starts at a barrier, after imports, process group, the load, and a first
save of a tiny model (which imports the rest). It stops at a barrier once the folder holds a checkpoint that can be
opened; and a second time once every file in it is on disk too, which the benchmark asks for (`fsync`), since some
savers do not.

cold      into a folder that is not there, with nothing of earlier saves in the page cache
warm      into a folder that holds such a checkpoint already, on disk and in the page cache, as from the second save of
          a training on. Ours and the limit write new files beside it and then let them take its place; the other savers
          overwrite it, so that whoever opens it meanwhile, or after a crash, finds neither the old nor the new one
limit     as many bytes as the rank's share, from memory that has been touched, by `pwrite` on as many threads as ours
          has requests in flight, 8 MiB each, to one contiguous part of each of as many files of the same sizes, whose
          blocks are reserved, which every rank syncs, and which are renamed; the same where the disk begins after each
          write (`sync_file_range`), as with ours; and the same without `fsync`
written   bytes that went through write calls
above     highest resident memory minus what was resident before, so without the model itself; of the host
result    the saved folder opened by plain `from_pretrained`, every tensor compared with the original by checksums; then
          names, dtypes and shapes in its files
"""

import argparse
import itertools
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not start CUDA, which survives no fork
os.environ.setdefault("NCCL_DEBUG", "WARN")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.loaders import DTYPES
from benchmarks.loading.loaders import Job as Load
from benchmarks.loading.measure import reference
from benchmarks.loading.models import set_cache
from benchmarks.measuring.command_line import checkpoints, run, shared_options
from benchmarks.measuring.process import Figures
from benchmarks.measuring.rounds import Row, command, in_turn, median, reason, where
from benchmarks.measuring.tables import Page, beside_limit_and_ours, ranks_of, table_of
from benchmarks.saving.measure import compare, measure
from benchmarks.saving.savers import SAVERS, STORED, Job
from tests._dist import num_gpus, run_ranks

PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2")]
PRELOAD += ["hf_fsdp_tools.pretrained", "benchmarks.saving.measure"]


def run_cell(job: Job, tiny: Path, args: argparse.Namespace, cell: Figures, expected: Figures) -> dict[str, Row]:
    """The savers in turn; what they took, or why they failed."""
    wanted = [name for name in SAVERS if not args.savers or name in args.savers]
    results: dict[str, list[list[Figures]]] = {name: [] for name in wanted}
    failed: dict[str, str] = {}
    said: dict[str, str] = {}
    first = job_of(tiny, job.target.with_name("tiny"), job.load)
    for name in in_turn(wanted, args.runs):
        if name in failed:
            continue
        try:
            make_ready(job, SAVERS[name].folder, cell["cache"])
            results[name].append(run_ranks(measure, cell["ranks"], name, job, first, timeout_s=900, device=args.device))
            if name not in said and expected and not name.startswith("limit"):
                opened = job.target / SAVERS[name].folder
                said[name] = run_ranks(compare, 1, job, opened, expected, timeout_s=900)[0]
        except AssertionError as error:  # holds the failing ranks' tracebacks
            failed[name] = reason(str(error))
        finally:
            remove(job.target.parent)
    return {name: row_of(runs, failed.get(name, ""), said.get(name, "–")) for name, runs in results.items()}


def make_ready(job: Job, within: str, cache: str) -> None:
    """Let the target be absent, or hold an earlier checkpoint, and the disk have nothing else to do."""
    remove(job.target)
    if cache == "warm":
        shutil.copytree(job.load.folder, job.target / within)
    os.sync()
    set_cache(job.load.folder, "cold")


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def row_of(runs: list[list[Figures]], failed: str, said: str) -> Row:
    """What is kept of a saver's runs: each run's slowest rank, the last run's figures by rank, what was wrong."""
    if failed:
        return {"failed": failed}
    kept = {key: [max(rank[key] for rank in run) for run in runs] for key in ("seconds", "on_disk")}
    pauses = [[rank["notes"].get("pause") for rank in run] for run in runs]
    if all(None not in run for run in pauses):
        kept["pause"] = [max(run) for run in pauses]
    total = sum(rank["written"] for rank in runs[-1])
    ranks = [{k: v for k, v in rank.items() if isinstance(v, int)} for rank in runs[-1]]
    return {**kept, "ranks": [{**rank, "even": total / len(ranks)} for rank in ranks], "wrong": said}


def job_of(folder: Path, target: Path, load: Load) -> Job:
    """To save what that folder holds, into files as large as those that it has."""
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Job(load=replace(load, folder=folder), target=target, file_bytes=math.ceil(largest))


def cells(args: argparse.Namespace) -> Iterator[Figures]:
    """Measure what was asked for, one cell after another."""
    for kind, folder, tiny in checkpoints(args):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        stored = Load(folder=folder, dtype=STORED)
        expected = {} if args.unchecked else run_ranks(reference, 1, stored, timeout_s=900)[0][0]
        for dtype, cache, ranks in itertools.product(args.dtype, args.cache, args.ranks):
            load = Load(folder=folder, dtype=DTYPES[dtype], device=args.device, replicas=args.replicas)
            job = job_of(folder, args.folder / f"saved-{os.getpid()}" / kind, load)
            cell = {"model": kind, "bytes": size, "dtype": dtype, "cache": cache, "ranks": ranks}
            cell |= {"replicas": args.replicas, "device": args.device}
            rows = run_cell(job, tiny, args, cell, expected)
            about = {"where": where(args.device), "command": command("benchmarks/save.py")}
            yield {"cell": cell, "rows": rows, "about": about}


def parsed() -> argparse.Namespace:
    """The command line, with what it leaves open filled in."""
    parser = shared_options(
        __doc__,
        contestants="savers",
        models=["dense", "moe", "tied"],
        ranks="1 and 2; not more than there are GPUs",
        folder="hf-fsdp-save",
    )
    args = parser.parse_args()
    gpus = num_gpus()
    args.device = args.device or ("cuda" if gpus else "cpu")
    args.ranks = args.ranks or [n for n in (1, 2) if args.device == "cpu" or n <= gpus]
    args.ranks = [n for n in args.ranks if n % args.replicas == 0]
    if args.device == "cuda" and max(args.ranks, default=1) > gpus:
        parser.error(f"--device cuda takes a GPU for each rank (there are {gpus})")
    return args


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16"]
    parts += ["from fp32"] if cell["dtype"] == "fp32" else []
    parts += ["a new folder" if cell["cache"] == "cold" else "over an earlier save"]
    parts.append(ranks_of(cell))
    parts += ["from GPUs"] if cell["device"] == "cuda" else []
    return ", ".join(parts)


def table(rows: dict[str, Row]) -> list[str]:
    """One row per saver; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["saver", "seconds: median (min–max)", "÷ limit", "÷ ours", "synced by itself", "seconds until on disk"]
    columns += ["÷ limit", "÷ ours", "pause", "written MB by rank", "above the model MB by rank"]
    columns += ["GPU MB above; pinned", "result"]
    lines = [cells_of(name, row, rows) for name, row in rows.items()]
    return table_of(columns, lines)


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 10, row["failed"]]
    by_rank = {key: ", ".join(f"{r[key] / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
    on_gpu = any(r["pinned"] or r["above_device"] for r in row["ranks"])
    return [
        name,
        *beside_limit_and_ours(name, rows),
        SAVERS[name].syncs,
        *beside_limit_and_ours(name, rows, "on_disk"),
        median(row.get("pause", ())),
        by_rank["written"],
        by_rank["above"],
        f"{by_rank['above_device']}; {by_rank['pinned']}" if on_gpu else "",
        row["wrong"],
    ]


PAGE = Page(title="Saving from FSDP2 shards", script="benchmarks/save.py", title_of=title_of, table=table)

if __name__ == "__main__":
    run(parsed, cells, PAGE, preload=PRELOAD)
