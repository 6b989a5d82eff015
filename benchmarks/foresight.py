"""What is foreseen of trainings beside what they really take.

    python benchmarks/foresight.py memory --records benchmarks/results/foresight_memory.jsonl          # CPUs, over gloo
    python benchmarks/foresight.py memory --device cuda --size large --gpus 1 8 64 --records FILE      # a GPU
    python benchmarks/foresight.py memory --again --records FILE        # measure nothing, foresee all records anew
    python benchmarks/foresight.py memory --report --records FILE --output benchmarks/results/foresight_memory.md
    python benchmarks/foresight.py throughput --output benchmarks/results/foresight_throughput.md     # published rows
    python benchmarks/foresight.py published --output benchmarks/results/foresight_published.md       # real GPUs' peaks
    python benchmarks/foresight.py scaling --output benchmarks/results/scaling.json         # GPT-175B and GPT-1T

A record is written as it comes; what has one is not run again. On CPUs all ranks run; on CUDA this machine's one device
is rank 0 of a group whose collectives do nothing. `--size` says how large the models are (`foreseeing/cases.py`).
Throughputs are compared with published ones (`foreseeing/rows.py`), on which the constants are fitted; this takes some
ten minutes, and traces are kept in `--cache`.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.foreseeing import memory, tables
from benchmarks.foreseeing.cases import CASES, SIZES
from benchmarks.foreseeing.published import published_report
from benchmarks.foreseeing.scaling import write_scaling
from benchmarks.foreseeing.throughput_table import throughput_report

_KEYS = ("case", "device", "size", "gpus")


def run_memory(args: argparse.Namespace) -> None:
    """Measure, foresee, and report."""
    records = [json.loads(line) for line in args.records.read_text().splitlines()] if args.records.exists() else []
    if args.report:
        args.output.write_text(tables.render(records))
        return
    if args.again:
        for record in records:
            record |= memory.foresee(record)
            _show(record)
        args.records.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
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
    found = ", ".join(
        f"{key} {record['measured'][key]:,} foreseen {value:,} ({value / record['measured'][key] - 1:+.4%})"
        for key, value in record["foreseen"].items()
    )
    print(f"{record['case']} ({record['size']}, {record['gpus']} GPUs): {found}", flush=True)


def run_throughput(args: argparse.Namespace) -> None:
    """Fit, foresee, and report."""
    args.output.write_text(throughput_report(args.cache))


def run_published(args: argparse.Namespace) -> None:
    """Foresee, and report."""
    args.output.write_text(published_report())


def run_scaling(args: argparse.Namespace) -> None:
    """The curves of the two trainings that started FSDP's fame."""
    write_scaling(args.output)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("memory", help="peaks of real trainings, byte by byte")
    one.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    one.add_argument("--size", choices=list(SIZES), default="small", help="of models and batches")
    one.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[], help="only these")
    one.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64], help="of the groups, with --device cuda")
    one.add_argument("--records", type=Path, required=True, help="JSON lines, to which this run adds its own")
    one.add_argument("--again", action="store_true", help="measure nothing; foresee the kept records anew")
    one.add_argument("--report", action="store_true", help="measure nothing; make --output of the records")
    one.add_argument("--output", type=Path, help="Markdown file")
    one.set_defaults(run=run_memory)
    two = commands.add_parser("throughput", help="published tokens per second, and constants fitted on them")
    two.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "foresight", help="folder for traces")
    two.add_argument("--output", type=Path, required=True, help="Markdown file")
    two.set_defaults(run=run_throughput)
    four = commands.add_parser("published", help="published peaks of memory, and speeds that were not fitted")
    four.add_argument("--output", type=Path, required=True, help="Markdown file")
    four.set_defaults(run=run_published)
    three = commands.add_parser("scaling", help="GPT-175B and GPT-1T on 8 to 512 GPUs")
    three.add_argument("--output", type=Path, required=True, help="JSON file")
    three.set_defaults(run=run_scaling)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    args.run(args)


if __name__ == "__main__":
    main()
