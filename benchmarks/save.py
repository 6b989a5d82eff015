"""Save FSDP2 shards as a Hugging Face checkpoint in every known way, in one run, beside the limit of the machine.

    python benchmarks/save.py --size-gb 0.05 --runs 1         # a quick look; without options 3 GB per model
    python benchmarks/save.py --models dense --cache cold --ranks 2 --records save.jsonl      # kept, and as save.md
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
          blocks are reserved, which every rank syncs, and which are renamed
written   bytes that went through write calls
above     highest resident memory minus what was resident before, so without the model itself; of the host
result    the saved folder opened by plain `from_pretrained`, every tensor compared with the original by checksums; then
          names, dtypes and shapes in its files
"""

import argparse
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not start CUDA, which survives no fork
os.environ.setdefault("NCCL_DEBUG", "WARN")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.loaders import DTYPES, reference
from benchmarks.loading.loaders import Job as Load
from benchmarks.loading.models import arguments, checkpoints, set_cache
from benchmarks.measuring import (
    LIMIT,
    Figures,
    Page,
    Row,
    about,
    measured,
    megabytes,
    ranks_of,
    seconds_text,
    table_of,
    times_of,
)
from benchmarks.savers import SAVERS, STORED, Job, compare, measure
from hf_fsdp_tools.testing import hide_gpus, run_ranks

SCRIPT = "benchmarks/save.py"
PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2")]
PRELOAD += ["hf_fsdp_tools.pretrained", "benchmarks.savers"]


def cells(args: argparse.Namespace) -> Iterator[Figures]:
    """Measure what was asked for, one cell after another."""
    target = args.folder / f"saved-{os.getpid()}"
    for kind, folder, tiny in checkpoints(args):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        stored = Load(folder=folder, dtype=STORED)
        expected = run_ranks(reference, 1, stored, timeout_s=900)[0][0]
        for dtype, cache, ranks in itertools.product(args.dtype, args.cache, args.ranks):
            load = Load(folder=folder, dtype=DTYPES[dtype], device=args.device)
            job = job_of(target / kind, load)
            first = job_of(target / "tiny", replace(load, folder=tiny))
            once = partial(save_once, job, first, expected, cache, ranks)
            cell = {"model": kind, "bytes": size, "dtype": dtype, "cache": cache, "ranks": ranks, "device": args.device}
            yield {"cell": cell, "rows": measured(list(SAVERS), args.runs, once), "about": about(SCRIPT, args.device)}


def save_once(
    job: Job, first: Job, expected: Figures, cache: str, ranks: int, name: str, is_first: bool
) -> tuple[list[Figures], str]:
    try:
        if cache == "warm":
            shutil.copytree(job.load.folder, job.target)
        os.sync()  # the disk has nothing else to do
        set_cache(job.load.folder, "cold")
        figures = run_ranks(measure, ranks, name, job, first, timeout_s=900, device=job.load.device)
        if not is_first or name == LIMIT:
            return figures, "–"
        return figures, run_ranks(compare, 1, job, job.target, expected, timeout_s=900)[0]
    finally:
        shutil.rmtree(job.target.parent, ignore_errors=True)


def job_of(target: Path, load: Load) -> Job:
    """To save what a checkpoint holds, into files as large as those that it has."""
    largest = max(file.stat().st_size for file in load.folder.glob("*.safetensors"))
    return Job(load=load, target=target, file_bytes=largest)


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16"]
    parts += ["from fp32"] if cell["dtype"] == "fp32" else []
    parts += ["a new folder" if cell["cache"] == "cold" else "over an earlier save", ranks_of(cell)]
    return ", ".join([*parts, *(["from GPUs"] if cell["device"] == "cuda" else [])])


def table(rows: dict[str, Row]) -> list[str]:
    """One row per saver; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["saver", "seconds: median (min–max)", "÷ limit", "÷ ours", "synced by itself", "seconds until on disk"]
    columns += ["÷ limit", "÷ ours", "pause", "written MB by rank", "above the model MB by rank"]
    columns += ["GPU MB above; pinned", "result"]
    return table_of(columns, [cells_of(name, row, rows) for name, row in rows.items()])


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 10, row["failed"]]
    by_rank = megabytes(row)
    on_gpu = any(rank["pinned"] or rank["above_device"] for rank in row["ranks"])
    return [
        name,
        *times_of(name, rows),
        SAVERS[name].syncs,
        *times_of(name, rows, "on_disk"),
        seconds_text(row["pause"]) if "pause" in row else "",
        by_rank["written"],
        by_rank["above"],
        f"{by_rank['above_device']}; {by_rank['pinned']}" if on_gpu else "",
        row["wrong"],
    ]


PAGE = Page(title="Saving from FSDP2 shards", script=SCRIPT, title_of=title_of, table=table)

if __name__ == "__main__":
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    set_forkserver_preload(PRELOAD)
    PAGE.run(arguments(__doc__, models=["dense", "moe", "tied"], ranks=(1, 2), folder="hf-fsdp-save"), cells)
