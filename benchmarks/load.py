"""Load a Hugging Face checkpoint into FSDP2 shards in every known way, in one run, beside the limit of the machine.

    python benchmarks/load.py --size-gb 0.05 --runs 1         # a quick look; without options 3 GB per model
    python benchmarks/load.py --models dense --cache cold --ranks 2 --records load.jsonl      # some cells, kept as JSON
    python benchmarks/load.py --report load.jsonl --output benchmarks/results/load.md         # a table of all
    python benchmarks/load.py --device cuda --models dense 8b --ranks 1                       # to GPUs, one per rank
    python benchmarks/load.py --checkpoint FOLDER --dtype stored                              # a checkpoint of your own

It writes its own checkpoints (real architectures, random bf16 weights, several files) and keeps them for the next run;
"fp8" (blocks of 128 x 128) and "mxfp4" (gpt-oss) are quantised, and every loader dequantises them to the dtype in
question, by transformers' `dequantize=True` where it is transformers that reads. Shares are then those of the floats.
Each load runs in fresh processes, the loaders in turn (A B C, B C A, …), so that a slow minute hits all: on GPUs over
NCCL where there is one for each rank, otherwise on the CPU over gloo. The clock starts at a barrier, after imports,
process group and a first load of a tiny checkpoint (which imports the rest). It stops at a barrier after every page of
every local shard on the host has been touched once, because some loaders only map files, and after all that was queued
on the GPU is done.

--alone         instead: rank 3 of 8 alone on its machine, where no neighbour warms the page cache (a fake group)
--slow-storage  instead: a request for data takes 5 ms and 10 ms per MB more (100 MB/s per stream), cached or not; with
                --shared-mb-s all requests of all ranks together bring no more than that. Ours runs as it is, and with
                fewer and more requests in flight, with that delay put on each of its read calls. The last row replays
                the pattern of mapped files, as safetensors gives them to transformers: 4 threads fault the rank's
                slices in, and each fault brings in 128 KiB (Linux' read-ahead on network file systems). Nothing but
                those reads is counted there, which is generous.
--replicas 2    with --slow-storage: HSDP, where as many ranks want each byte

limit     as many bytes as the rank's share, by `pread` on 4 threads (or one per core) from one contiguous part of each
          file into fresh memory; for fp32, which takes twice the memory, the other half is faulted in as well. To a
          GPU: the slower of reading them, with as many threads as ours has reads in flight, into buffers that are used
          again and again, and copying as many from such pinned buffers
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
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not start CUDA, which survives no fork
os.environ.setdefault("NCCL_DEBUG", "WARN")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.loaders import DTYPES, Job, loaders_of
from benchmarks.loading.measure import measure, reference
from benchmarks.loading.models import KINDS, set_cache
from benchmarks.loading.storage import Storage
from benchmarks.measuring.command_line import checkpoints, run, shared_options
from benchmarks.measuring.process import Figures
from benchmarks.measuring.rounds import LIMIT, OURS, Row, command, in_turn, reason, where
from benchmarks.measuring.tables import Page, beside_limit_and_ours, ranks_of, table_of
from tests._dist import num_gpus, run_ranks

PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2", "gpt_oss")]
PRELOAD += ["hf_fsdp_tools.pretrained", "benchmarks.loading.measure"]


def run_cell(job: Job, tiny: Path, args: argparse.Namespace, cell: Figures, expected: list[Figures]) -> dict[str, Row]:
    """The loaders in turn; what they took, or why they failed."""
    wanted = [name for name in loaders_of(cell["mode"], job.device) if not args.loaders or name in args.loaders]
    results: dict[str, list[list[Figures]]] = {name: [] for name in wanted}
    failed: dict[str, str] = {}
    for name in in_turn(wanted, args.runs):
        if name not in failed:
            set_cache(job.folder, cell["cache"])
            check = not results[name]  # the first run is enough
            try:
                given = (name, job, tiny, check and not args.unchecked, cell["mode"])
                results[name].append(run_ranks(measure, cell["ranks"], *given, timeout_s=900, device=args.device))
            except AssertionError as error:  # holds the failing ranks' tracebacks
                failed[name] = reason(str(error))
    return {name: row_of(runs, failed.get(name, ""), expected) for name, runs in results.items()}


def row_of(runs: list[list[Figures]], failed: str, expected: list[Figures]) -> Row:
    """What is kept of a loader's runs: each run's slowest rank, the last run's figures by rank, what was wrong."""
    if failed:
        return {"failed": failed}
    wrong = sorted(
        {
            key
            for rank in runs[0]
            if rank["tensors"]
            for key in rank["tensors"].keys() | expected[0].keys()
            if all(rank["tensors"].get(key) != variant.get(key) for variant in expected)
        }
    )
    last = runs[-1][0]["notes"]
    kept = {key: last[key] for key in ("stages", "read_bytes_s", "copy_bytes_s", "threads") if key in last}
    if all("stages" in run[0]["notes"] for run in runs):
        kept["read_s"] = [max(rank["notes"]["stages"]["read"] for rank in run) for run in runs]
    return {
        "seconds": [max(rank["seconds"] for rank in run) for run in runs],
        "ranks": [{k: v for k, v in rank.items() if isinstance(v, int)} for rank in runs[-1]],
        "wrong": f"wrong: {len(wrong)} tensors, {wrong[0]}" if wrong else "equal" if runs[0][0]["tensors"] else "–",
        **kept,
    }


def about(device: str) -> dict[str, str]:
    """Where and how a cell was measured."""
    return {"where": where(device), "command": command("benchmarks/load.py")}


def cells(args: argparse.Namespace) -> Iterator[Figures]:
    """Measure what was asked for, one cell after another."""
    mode = "alone" if args.alone else "slow storage" if args.slow_storage else "side by side"
    caches, ranks_of = (["cold"], [1]) if args.alone else (args.cache, args.ranks)
    clock = args.folder / "clock"
    for kind, folder, tiny in checkpoints(args):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for dtype, shared in itertools.product(args.dtype, args.shared_mb_s if args.slow_storage else [0]):
            limit = shared * 1e6 or None
            storage = Storage(shared_bytes_s=limit, clock=clock) if args.slow_storage else None
            job = Job(folder=folder, dtype=DTYPES[dtype], device=args.device, replicas=args.replicas, storage=storage)
            compared = mode == "side by side" and not args.unchecked
            expected = run_ranks(reference, 1, job, timeout_s=900, device=args.device)[0] if compared else [{}]
            for cache, ranks in itertools.product(caches, ranks_of):
                clock.write_bytes(bytes(8))
                cell = {"model": kind, "bytes": size, "dtype": dtype, "cache": cache, "ranks": ranks, "mode": mode}
                cell |= {"replicas": args.replicas, "device": args.device, "storage": str(storage or "")}
                cell["shared_bytes_s"] = limit or 0
                rows = run_cell(job, tiny, args, cell, expected)
                yield {"cell": cell, "rows": rows, "about": about(args.device)}


def parsed() -> argparse.Namespace:
    """The command line, with what it leaves open filled in."""
    parser = shared_options(
        __doc__,
        contestants="loaders",
        models=[kind for kind in KINDS if kind != "8b"],
        ranks="2 and 4; on GPUs also 1, and not more than there are",
        folder="hf-fsdp-load",
    )
    parser.add_argument("--alone", action="store_true", help="rank 3 of 8 alone, cold")
    parser.add_argument("--slow-storage", action="store_true", help="5 ms per request, 100 MB/s per stream")
    parser.add_argument("--shared-mb-s", type=float, nargs="+", default=[0.0], help="all streams together; 0: no limit")
    args = parser.parse_args()
    gpus = num_gpus()
    plain = not (args.alone or args.slow_storage)
    args.device = args.device or ("cuda" if gpus and plain else "cpu")
    args.ranks = args.ranks or ([n for n in (1, 2, 4) if n <= gpus] if args.device == "cuda" else [2, 4])
    if args.device == "cuda" and not (plain and max(args.ranks) <= gpus):
        parser.error(
            f"--device cuda takes a GPU for each rank (there are {gpus}), and neither --alone nor --slow-storage"
        )
    if args.replicas > 1 and not args.slow_storage:
        parser.error("--replicas goes with --slow-storage")
    return args


def title_of(cell: dict[str, Any]) -> str:
    """What was measured, in words."""
    parts = [f"{cell['model']}, {cell['bytes'] / 1e9:.2f} GB of bf16", cell["dtype"], f"{cell['cache']} cache"]
    parts.append("rank 3 of 8 alone" if cell["mode"] == "alone" else ranks_of(cell))
    parts += ["to GPUs"] if cell["device"] == "cuda" else []
    parts += [f"slow storage: {cell['storage']}"] if cell["storage"] else []
    return ", ".join(parts)


def table(rows: dict[str, Row]) -> list[str]:
    """One row per loader; ratios are medians over runs of the same round. Columns that hold nothing are left out."""
    columns = ["loader", "seconds: median (min–max)", "÷ limit", "÷ ours", "read() MB by rank", "÷ share"]
    columns += ["disk MB by rank", "÷ share", "above the shards MB by rank (mapped files)"]
    columns += ["GPU MB above (stays reserved); pinned (stays in use)", "result"]
    lines = [cells_of(name, row, rows) for name, row in rows.items()]
    return table_of(columns, lines) + remarks(rows)


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 8, row["failed"]]
    by_rank = {key: ", ".join(f"{r.get(key, 0) / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
    read, disk = (max(r[key] / r["share"] for r in row["ranks"]) for key in ("read", "disk"))
    on_gpu = any(r.get("pinned") or r.get("above_device") for r in row["ranks"])
    return [
        name,
        *beside_limit_and_ours(name, rows),
        by_rank["read"],
        f"{read:.3f}",
        by_rank["disk"],
        f"{disk:.2f}",
        f"{by_rank['above']} ({by_rank['mapped']})",
        gpu_cell(by_rank) if on_gpu else "",
        row["wrong"],
    ]


def gpu_cell(by_rank: dict[str, str]) -> str:
    """Memory of and for the GPU, by rank."""
    above, reserved = by_rank["above_device"], by_rank["reserved_left"]
    return f"{above} ({reserved}); {by_rank['pinned']} ({by_rank['pinned_left']})"


def remarks(rows: dict[str, Row]) -> list[str]:
    """What does not fit into columns."""
    lines = []
    ours, limit = rows.get(OURS, {}), rows.get(LIMIT, {})
    if stages := ours.get("stages"):
        shown = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        lines.append(f"hf_fsdp_tools, rank 0, last run: {shown} s; the rest is building and sharding on meta.")
    if "copy_bytes_s" in limit:
        speeds = [
            f"{what} {limit[key] / 1e9:.1f} GB/s" for what, key in (("read", "read_bytes_s"), ("copy", "copy_bytes_s"))
        ]
        threads = f" on {limit['threads']} threads" if "threads" in limit else ""
        lines.append(f"Limit, each rank{threads}: {', '.join(speeds)}.")
    return [line for remark in lines for line in ("", remark)]


PAGE = Page(title="Loading into FSDP2 shards", script="benchmarks/load.py", title_of=title_of, table=table)

if __name__ == "__main__":
    run(parsed, cells, PAGE, preload=PRELOAD)
