"""Options that the benchmarks of loading and saving share, their checkpoints, and how cells are kept and shown."""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.loading.loaders import DTYPES
from benchmarks.loading.models import KINDS, make_checkpoint
from benchmarks.measuring.process import Figures
from benchmarks.measuring.tables import Page
from tests._dist import hide_gpus, run_ranks

GB_OF_8B = 16.06


def shared_options(
    doc: str, *, contestants: str, models: Sequence[str], ranks: str, folder: str
) -> argparse.ArgumentParser:
    """A parser of the options of both.

    Args:
        doc: of the script; its first line is shown.
        contestants: "loaders" or "savers", the name of an option too.
        models: those that are measured unless others are asked for.
        ranks: numbers of ranks unless given, for the help text.
        folder: of models, within the system's temporary folder.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="where shards are; unless given, GPUs where there are any"
    )
    parser.add_argument("--ranks", type=int, nargs="+", help=ranks)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(models))
    parser.add_argument("--checkpoint", type=Path, help="this folder of safetensors in bf16, instead of --models")
    parser.add_argument("--size-gb", type=float, default=3.0, help="bytes of each model in bf16; not of 8b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the shards")
    parser.add_argument(f"--{contestants}", nargs="+", help="only these rows, named as in the table")
    parser.add_argument("--unchecked", action="store_true", help="do not compare the result with plain loading")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: copies of the model")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), folder), help="of models")
    parser.add_argument("--records", type=Path, help="JSON lines, one per cell, to which this run adds its own")
    parser.add_argument("--report", type=Path, help="measure nothing; make --output of such a file")
    parser.add_argument("--preface", type=Path, help="with --report: Markdown to put between the summary and the cells")
    parser.add_argument("--output", type=Path, help="Markdown file")
    return parser


def checkpoints(args: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Name, folder, and a tiny checkpoint to begin with, of each model that was asked for."""
    for kind in ["dense"] if args.checkpoint else args.models:
        gb = GB_OF_8B if kind == "8b" else args.size_gb
        folder, tiny = args.folder / f"{kind}-{gb:g}GB", args.folder / f"{kind}-tiny"
        run_ranks(make_checkpoint, 1, kind, 1e6, tiny, timeout_s=900)
        if args.checkpoint:
            yield args.checkpoint.name, args.checkpoint, tiny
        else:
            run_ranks(make_checkpoint, 1, kind, gb * 1e9, folder, timeout_s=900)
            yield kind, folder, tiny


def run(
    parsed: Callable[[], argparse.Namespace],
    cells: Callable[[argparse.Namespace], Iterator[Figures]],
    page: Page,
    *,
    preload: Sequence[str],
) -> None:
    """Measure what the command line asks for, cell by cell, and keep it; or show what was kept.

    Args:
        parsed: gives the options.
        cells: measures one cell after another.
        page: shows them.
        preload: modules that the ranks find imported.
    """
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    args = parsed()
    if args.report:
        records = [json.loads(line) for line in args.report.read_text().splitlines()]
        args.output.write_text(page.render(records, args.preface.read_text() if args.preface else ""))
        return
    multiprocessing.set_forkserver_preload(list(preload))
    args.folder.mkdir(parents=True, exist_ok=True)
    made = []
    for record in cells(args):
        made.append(record)
        print("", f"## {page.title_of(record['cell'])}", "", *page.table(record["rows"]), sep="\n", flush=True)
        if args.records:
            with args.records.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if args.output:
            args.output.write_text(page.render(made))
