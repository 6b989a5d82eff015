"""What is foreseen of trainings beside what they really take.

    python benchmarks/foresight.py memory --records benchmarks/results/foresight_memory.jsonl          # CPUs, over gloo
    python benchmarks/foresight.py memory --device cuda --size large --gpus 1 8 64 --records FILE      # a GPU
    python benchmarks/foresight.py memory --report --records FILE --output FILE.md
    python benchmarks/foresight.py published throughput --output FILE.md                   # published tokens per second
    python benchmarks/foresight.py published throughput --fit --output FILE.md             # with constants fitted anew
    python benchmarks/foresight.py published memory --rows Liger --output FILE.md          # published peaks

A record is written as it comes; what has one is not run again. On CPUs all ranks run; on CUDA this machine's one device
is rank 0 of a group whose collectives do nothing. `--size` says how large the models are (`foreseeing/cases.py`).
Published rows are those of `foreseeing/published_*.csv`; all of them take some ten minutes, a fit of the efficiencies
half an hour.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.foreseeing import memory, tables
from benchmarks.foreseeing.cases import CASES, SIZES
from benchmarks.foreseeing.fit import fit
from benchmarks.foreseeing.published import read_rows
from tests._dist import hide_gpus

_KEYS = ("case", "device", "size", "gpus")


def run_memory(args: argparse.Namespace) -> None:
    """Measure, foresee, and report."""
    records = [json.loads(line) for line in args.records.read_text().splitlines()] if args.records.exists() else []
    if args.report:
        args.output.write_text(tables.measured_report(records))
        return
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    known = {tuple(record[key] for key in _KEYS) for record in records}
    for case, world in memory.runs(args.device, args.cases, args.gpus):
        record: dict[str, Any] = dict(zip(_KEYS, (case.name, args.device, args.size, world), strict=True))
        if tuple(record.values()) in known:
            continue
        try:
            record["measured"] = memory.measured(case, args.device, args.size, world)
            record |= memory.foresee(record)
        except Exception as error:  # the other cases are run all the same
            print(f"{case.name}, {world} GPUs: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        _show(record)
        with args.records.open("a") as stream:
            stream.write(json.dumps(record) + "\n")


def _show(record: dict[str, Any]) -> None:
    texts = ", ".join(
        f"{key} {record['measured'][key]:,} foreseen {value:,} ({value / record['measured'][key] - 1:+.4%})"
        for key, value in record["foreseen"].items()
    )
    print(f"{record['case']} ({record['size']}, {record['gpus']} GPUs): {texts}", flush=True)


def run_published(args: argparse.Namespace) -> None:
    """Foresee, fit if asked to, and report."""
    rows = [row for row in read_rows(args.kind) if args.rows in f"{row.entry['source']} {row.name}"]
    constants = None
    if args.fit:
        constants = fit([row for row in rows if row.entry["held_out"] != "yes" and row.entry["era"] != "2022"])
    args.output.write_text(tables.published_report(rows, constants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("memory", help="count the peaks of real trainings, byte by byte")
    one.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    one.add_argument("--size", choices=list(SIZES), default="small", help="of models and batches")
    one.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[], help="run only these")
    one.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64], help="of the groups, with --device cuda")
    one.add_argument("--records", type=Path, required=True, help="JSON lines, to which this run adds its own")
    one.add_argument("--report", action="store_true", help="measure nothing; make --output of the records")
    one.add_argument("--output", type=Path, help="Markdown file")
    one.set_defaults(run=run_memory)
    two = commands.add_parser("published", help="compare with published trainings")
    two.add_argument("kind", choices=["throughput", "memory"])
    two.add_argument("--rows", default="", help="only rows whose source or name has this text in it")
    two.add_argument("--fit", action="store_true", help="fit the efficiencies to the throughputs")
    two.add_argument("--output", type=Path, required=True, help="Markdown file")
    two.set_defaults(run=run_published)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
