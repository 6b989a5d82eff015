"""Options that the benchmarks of loading and saving share, and their checkpoints."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.loading.loaders import DTYPES
from benchmarks.loading.models import KINDS, RELEASED, make_checkpoint
from benchmarks.measuring.comparison import add_page_options
from tests._dist import num_gpus, run_ranks


def arguments(
    doc: str, *, contestants: str, models: Sequence[str], ranks: Sequence[int], folder: str
) -> argparse.Namespace:
    """The command line, with what it leaves open filled in."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    add_page_options(parser, folder)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where shards are; GPUs where there are any")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"{ranks} unless given; not more than there are GPUs")
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(models))
    parser.add_argument("--checkpoint", type=Path, help="this folder of safetensors in bf16, instead of --models")
    parser.add_argument("--size-gb", type=float, default=3.0, help="bytes of each model in bf16; not of 1b, 4b and 8b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the shards")
    parser.add_argument("--only", nargs="+", help=f"only these {contestants}, named as in the table")
    parser.add_argument("--unchecked", action="store_true", help="do not compare the result with plain loading")
    if contestants == "savers":
        parser.add_argument("--replicas", type=int, default=1, help="HSDP: copies of the model")
    args = parser.parse_args()
    gpus = num_gpus()
    args.device = args.device or ("cuda" if gpus else "cpu")
    args.ranks = args.ranks or [n for n in ranks if args.device == "cpu" or n <= gpus]
    if args.device == "cuda" and max(args.ranks, default=1) > gpus:
        parser.error(f"--device cuda takes a GPU for each rank (there are {gpus})")
    return args


def checkpoints(args: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Name, folder, and a tiny checkpoint to begin with, of each model that was asked for."""
    for kind in ["dense"] if args.checkpoint else args.models:
        folder = args.folder / (kind if kind in RELEASED else f"{kind}-{args.size_gb:g}GB")
        tiny = args.folder / f"{kind}-tiny"
        run_ranks(make_checkpoint, 1, "dense" if kind in RELEASED else kind, 1e6, tiny, timeout_s=900)
        if args.checkpoint:
            yield args.checkpoint.name, args.checkpoint, tiny
        else:
            run_ranks(make_checkpoint, 1, kind, args.size_gb * 1e9, folder, timeout_s=900)
            yield kind, folder, tiny
