"""Load a Hugging Face checkpoint into FSDP2 shards in every known way, in one run, beside the limit of the machine.

    python benchmarks/load.py --size-gb 0.05 --runs 1         # a quick look; without options 3 GB per model
    python benchmarks/load.py --models dense --cache cold --ranks 2 --records load.jsonl      # kept, and as load.md
    python benchmarks/load.py --device cuda --models dense 8b --ranks 1                       # to GPUs, one per rank

It writes its own checkpoints (real architectures, random bf16 weights, several files) and keeps them for the next run;
"fp8" (blocks of 128 x 128) and "mxfp4" (gpt-oss) are quantised, and every loader dequantises them to the dtype in
question, by transformers' `dequantize=True` where it is transformers that reads. Shares are then those of the floats.
Each load runs in fresh processes, the loaders in turn (A B C, B C A, …), so that a slow minute hits all: on GPUs over
NCCL where there is one for each rank, otherwise on the CPU over gloo. The clock starts at a barrier, after imports,
process group and a first load of a tiny checkpoint (which imports the rest). It stops at a barrier after every page of
every local shard on the host has been written once, because some loaders only map files, and after all that was queued
on the GPU is done.

limit     as many bytes as the rank's share, by `pread` on 4 threads (or one per core) from one contiguous part of each
          file into fresh memory of the host; for fp32, which takes twice the memory, the other half is faulted in too
read()    bytes that came through read calls; neither mapped files nor what ranks send each other count here
disk      bytes that came from the disk, mapped files included, charged to the rank that met them first
above     highest resident memory minus what was resident before minus the local shards; mapped files count if touched
GPU       highest memory allocated on the GPU minus what was before minus the shards (memory that stays reserved beside
          the shards); pinned host memory at its highest (and what stays in use), before any garbage is collected
result    every parameter and buffer, non-persistent ones too, against plain `from_pretrained`, by checksums
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not start CUDA, which survives no fork
os.environ.setdefault("NCCL_DEBUG", "WARN")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.loaders import DTYPES, LOADERS, Job, measure, reference
from benchmarks.loading.models import arguments, checkpoints, set_cache
from benchmarks.measuring import Figures, Page, Row, about, measured, megabytes, ranks_of, table_of, times_of
from hf_fsdp_tools.testing import hide_gpus, run_ranks

SCRIPT = "benchmarks/load.py"
PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2", "gpt_oss")]
PRELOAD += ["hf_fsdp_tools.pretrained", "benchmarks.loading.loaders"]
MODELS = ["dense", "moe", "tied", "gpt2", "fp8", "mxfp4"]


def cells(args: argparse.Namespace) -> Iterator[Figures]:
    """Measure what was asked for, one cell after another."""
    for kind, folder, tiny in checkpoints(args):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for dtype in args.dtype:
            job = Job(folder=folder, dtype=DTYPES[dtype], device=args.device)
            expected = run_ranks(reference, 1, job, timeout_s=900, device=args.device)[0]
            for cache, ranks in itertools.product(args.cache, args.ranks):
                once = partial(load_once, job, tiny, expected, cache, ranks)
                cell = {"model": kind, "bytes": size, "dtype": dtype, "cache": cache, "ranks": ranks}
                rows = measured(list(LOADERS[args.device]), args.runs, once)
                yield {"cell": cell | {"device": args.device}, "rows": rows, "about": about(SCRIPT, args.device)}


def load_once(
    job: Job, tiny: Path, expected: list[Figures], cache: str, ranks: int, name: str, is_first: bool
) -> tuple[list[Figures], str]:
    set_cache(job.folder, cache)
    figures = run_ranks(measure, ranks, name, job, tiny, is_first, timeout_s=900, device=job.device)
    return figures, result_of(figures, expected) if is_first else "–"


def result_of(ranks: list[Figures], expected: list[Figures]) -> str:
    """Which tensors differ from plain loading on any rank."""
    wrong = {
        key
        for rank in ranks
        if rank["tensors"]
        for key in rank["tensors"].keys() | expected[0].keys()
        if all(rank["tensors"].get(key) != variant.get(key) for variant in expected)
    }
    if not ranks[0]["tensors"]:
        return "–"
    return f"wrong: {len(wrong)} tensors, {min(wrong)}" if wrong else "equal"


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16", cell["dtype"], f"{cell['cache']} cache"]
    return ", ".join([*parts, ranks_of(cell), *(["to GPUs"] if cell["device"] == "cuda" else [])])


def table(rows: dict[str, Row]) -> list[str]:
    """One row per loader; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["loader", "seconds: median (min–max)", "÷ limit", "÷ ours", "read() MB by rank", "÷ share"]
    columns += ["disk MB by rank", "÷ share", "above the shards MB by rank (mapped files)"]
    columns += ["GPU MB above (stays reserved); pinned (stays in use)", "result"]
    return table_of(columns, [cells_of(name, row, rows) for name, row in rows.items()])


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 8, row["failed"]]
    by_rank = megabytes(row)
    read, disk = (max(rank[key] / rank["share"] for rank in row["ranks"]) for key in ("read", "disk"))
    on_gpu = any(rank.get("pinned") or rank.get("above_device") for rank in row["ranks"])
    device, pinned = ("{above_device} ({reserved_left})", "{pinned} ({pinned_left})")
    return [
        name,
        *times_of(name, rows),
        by_rank["read"],
        f"{read:.3f}",
        by_rank["disk"],
        f"{disk:.2f}",
        f"{by_rank['above']} ({by_rank['mapped']})",
        f"{device}; {pinned}".format(**by_rank) if on_gpu else "",
        row["wrong"],
    ]


PAGE = Page(title="Loading into FSDP2 shards", script=SCRIPT, title_of=title_of, table=table)

if __name__ == "__main__":
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    set_forkserver_preload(PRELOAD)
    PAGE.run(arguments(__doc__, models=MODELS, ranks=(2, 4), folder="hf-fsdp-load"), cells)
