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
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not start CUDA, which survives no fork
os.environ.setdefault("NCCL_DEBUG", "WARN")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.job import DTYPES
from benchmarks.loading.job import Job as Load
from benchmarks.loading.measure import reference
from benchmarks.loading.models import KINDS, make_checkpoint, set_cache
from benchmarks.measuring.process import Figures
from benchmarks.measuring.rounds import Row, command, in_turn, reason, where
from benchmarks.saving.bars import summary
from benchmarks.saving.job import STORED, Job
from benchmarks.saving.measure import compare, measure
from benchmarks.saving.savers import SAVERS
from benchmarks.saving.tables import render, table, title_of
from tests._dist import hide_gpus, num_gpus, run_ranks

PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2")]
PRELOAD += ["hf_fsdp_tools.pretrained", "benchmarks.saving.measure"]
GB_OF_8B = 16.06


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


def checkpoints(args: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Name, folder, and a tiny checkpoint to save first, of each model that was asked for."""
    for kind in ["dense"] if args.checkpoint else args.models:
        gb = GB_OF_8B if kind == "8b" else args.size_gb
        folder, tiny = args.folder / f"{kind}-{gb:g}GB", args.folder / f"{kind}-tiny"
        run_ranks(make_checkpoint, 1, kind, 1e6, tiny, timeout_s=900)
        if args.checkpoint:
            yield args.checkpoint.name, args.checkpoint, tiny
        else:
            run_ranks(make_checkpoint, 1, kind, gb * 1e9, folder, timeout_s=900)
            yield kind, folder, tiny


def parsed() -> argparse.Namespace:
    """The command line, with what it leaves open filled in."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="where shards are; unless given, GPUs where there are any"
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="1 and 2; not more than there are GPUs")
    parser.add_argument("--models", nargs="+", choices=KINDS, default=["dense", "moe", "tied"])
    parser.add_argument("--checkpoint", type=Path, help="this folder of safetensors in bf16, instead of --models")
    parser.add_argument("--size-gb", type=float, default=3.0, help="bf16 bytes of each model; not of 8b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the parameters")
    parser.add_argument("--savers", nargs="+", help="only these rows, named as in the table")
    parser.add_argument("--unchecked", action="store_true", help="do not open what was saved")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: copies of the model")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "hf-fsdp-save"), help="of models")
    parser.add_argument("--records", type=Path, help="JSON lines, one per cell, to which this run adds its own")
    parser.add_argument("--report", type=Path, help="measure nothing; make --output of such a file")
    parser.add_argument("--preface", type=Path, help="with --report: Markdown to put between the summary and the cells")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    gpus = num_gpus()
    args.device = args.device or ("cuda" if gpus else "cpu")
    args.ranks = args.ranks or [n for n in (1, 2) if args.device == "cpu" or n <= gpus]
    args.ranks = [n for n in args.ranks if n % args.replicas == 0]
    if args.device == "cuda" and max(args.ranks, default=1) > gpus:
        parser.error(f"--device cuda takes a GPU for each rank (there are {gpus})")
    return args


def main() -> None:
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    args = parsed()
    if args.report:
        records = [json.loads(line) for line in args.report.read_text().splitlines()]
        preface = args.preface.read_text() if args.preface else ""
        args.output.write_text(render(records, summary=summary(records), preface=preface))
        return
    multiprocessing.set_forkserver_preload(PRELOAD)
    args.folder.mkdir(parents=True, exist_ok=True)
    made = []
    for record in cells(args):
        made.append(record)
        print("", f"## {title_of(record['cell'])}", "", *table(record["rows"]), sep="\n", flush=True)
        if args.records:
            with args.records.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if args.output:
            args.output.write_text(render(made, summary=summary(made)))


if __name__ == "__main__":
    main()
