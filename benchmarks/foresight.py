"""What is estimated of trainings beside what they really take.

    python benchmarks/foresight.py memory --records FILE.jsonl                            # CPUs, over gloo
    python benchmarks/foresight.py memory --device cuda --size large --gpus 1 8 64 --records FILE      # a GPU
    python benchmarks/foresight.py published throughput --output FILE.md                   # published tokens per second
    python benchmarks/foresight.py published throughput --fit --output FILE.md             # with constants fitted anew
    python benchmarks/foresight.py published memory --rows Liger --output FILE.md          # published peaks

A record is written as it comes, and a page (.md) of all beside them; what has one is not run again. On CPUs all ranks
run; on CUDA this machine's one device is rank 0 of a group whose collectives do nothing. `--size` says how large the
models are (`foreseeing/cases.py`). Published rows are those of `foreseeing/published_*.csv`; all of them take some ten
minutes, a fit of the efficiencies half an hour.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.foreseeing import memory
from benchmarks.foreseeing.cases import CASES, SIZES
from benchmarks.foreseeing.published import START, Row, fit, read_rows
from benchmarks.measuring import state_of_the_code, table_of
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.testing import hide_gpus

_KEYS = ("case", "device", "size", "gpus")
_TRAINING = ("source", "model", "gpu", "gpus", "max_length", "precision", "offload", "attention")
"""What two published trainings have alike that differ in settings alone, so that their ratio tells what these do."""


def run_memory(args: argparse.Namespace) -> None:
    """Measure, estimate, and report."""
    records = [json.loads(line) for line in args.records.read_text().splitlines()] if args.records.exists() else []
    hide_gpus()  # from this process and the fork server, not from ranks that are to use one
    known = {tuple(record[key] for key in _KEYS) for record in records}
    for case, world in memory.runs(args.device, args.cases, args.gpus):
        record: dict[str, Any] = dict(zip(_KEYS, (case.name, args.device, args.size, world), strict=True))
        if tuple(record.values()) in known:
            continue
        try:
            record["measured"] = memory.measured(case, args.device, args.size, world)
            record |= memory.estimate(record)
        except Exception as error:  # the other cases are run all the same
            print(f"{case.name}, {world} GPUs: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        texts = (f"{key} {record['measured'][key]:,} estimated {value:,}" for key, value in record["estimated"].items())
        print(f"{case.name} ({args.size}, {world} GPUs): {', '.join(texts)}", flush=True)
        records.append(record)
        with args.records.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
    args.records.with_suffix(".md").write_text(measured_report(records))


def run_published(args: argparse.Namespace) -> None:
    """Estimate, fit if asked to, and report."""
    rows = [row for row in read_rows(args.kind) if args.rows in f"{row.entry['source']} {row.name}"]
    constants = None
    if args.fit:
        constants = fit([row for row in rows if row.entry["held_out"] != "yes" and row.entry["era"] != "2022"])
    args.output.write_text(published_report(rows, constants))


def measured_report(records: Sequence[dict[str, Any]]) -> str:
    """Real trainings: on CPUs every allocation counted, on a device the counts of PyTorch's caching allocator."""
    lines = ["# Memory: estimated beside measured", "", state_of_the_code(), ""]
    for device in dict.fromkeys((record["device"], record["measured"].get("device", "CPUs")) for record in records):
        some = [each for each in records if (each["device"], each["measured"].get("device", "CPUs")) == device]
        kinds = [key for key in some[0]["estimated"] if key != "held"]
        rows = []
        for record in some:
            cells = [record["case"], f"{record['gpus']}", f"{record['measured']['parameters'] / 1e6:.1f} M"]
            for kind in kinds:
                real, estimated = record["measured"][kind], record["estimated"][kind]
                cells += [f"{real / 2**20:,.1f}", f"{estimated / 2**20:,.1f}", f"{estimated / real - 1:+.4%}"]
            rows.append(cells)
        heads = [head for kind in kinds for head in (f"{kind} MiB", "estimated", "error")]
        torch = ", ".join(sorted({record["measured"]["torch"] for record in some}))
        shown = table_of(["training", "GPUs", "parameters", *heads], rows)
        lines += [f"## {device[1]}, PyTorch {torch}", "", *shown, ""]
    return "\n".join(lines)


def published_report(rows: Sequence[Row], constants: dict[str, float] | None = None) -> str:
    """Published trainings: memory where a row has it, and tokens per second."""
    peaks: list[Sequence[str]] = []
    rates: list[Sequence[str]] = []
    errors: dict[str, list[float]] = {}
    ratios: list[tuple[list[str | None], str, float]] = []
    for row in rows:
        peak, source = row.estimate(), row.entry["source"]
        if gib := row.entry.get("gib"):
            kinds = {"allocated": peak.peak_allocated, "reserved": peak.peak_reserved, "total": peak.total}
            estimated = kinds[row.entry["kind"]] / 2**30
            errors.setdefault("peak memory", []).append(estimated / float(gib) - 1)
            peaks.append((source, row.name, gib, f"{estimated:.1f}", f"{estimated / float(gib) - 1:+.1%}"))
        if row.tokens_per_second:
            estimate = throughput_of(peak, efficiency=row.efficiency)
            rate, real = estimate.tokens_per_second_per_gpu, row.tokens_per_second
            is_fitted = row.entry.get("held_out", "yes") != "yes" and row.entry["era"] != "2022"
            for name in ("tokens per second", f"of these {'fitted' if is_fitted else 'in no fit'}"):
                errors.setdefault(name, []).append(rate / real - 1)
            rates.append((source, row.name, f"{real:,.0f}", f"{rate:,.0f}", f"{rate / real - 1:+.1%}"))
            ratios.append(([row.entry.get(key) for key in _TRAINING], row.name, rate / real))
    pairs = [(one[2] / two[2] - 1) for one, two in combinations(ratios, 2) if one[0] == two[0] and one[1] != two[1]]
    if pairs:
        errors["ratio of two with other settings"] = pairs
    lines = ["# Published trainings and what was estimated", "", state_of_the_code(), ""]
    lines += ["Errors are estimated over published, less 1.", ""]
    lines += table_of(
        ("figure", "number", "mean error", "median", "bias", "90 % below", "worst"),
        [_summary(name, some) for name, some in errors.items()],
    )
    if constants:
        cells = [(name, f"{value:.4g}", f"{START[name]:.4g}") for name, value in constants.items()]
        lines += ["", "## Constants", "", *table_of(("constant", "value", "before"), cells)]
    for title, some, unit in (("Peak memory", peaks, "GiB"), ("Throughput", rates, "tokens/s per GPU")):
        if some:
            heads = ("source", "training", f"published {unit}", "estimated", "error")
            lines += ["", f"## {title}", "", *table_of(heads, some)]
    return "\n".join(lines) + "\n"


def _summary(name: str, errors: Sequence[float]) -> Sequence[str]:
    sizes = sorted(map(abs, errors))
    percent: Callable[[float], str] = "{:+.1%}".format
    return (
        name,
        str(len(errors)),
        f"{statistics.mean(sizes):.1%}",
        f"{statistics.median(sizes):.1%}",
        percent(statistics.mean(errors)),
        f"{sizes[math.ceil(0.9 * len(sizes)) - 1]:.1%}",
        percent(max(errors, key=abs)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("memory", help="count the peaks of real trainings, byte by byte")
    one.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    one.add_argument("--size", choices=list(SIZES), default="small", help="of models and batches")
    one.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[], help="run only these")
    one.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64], help="of the groups, with --device cuda")
    one.add_argument("--records", type=Path, required=True, help="JSON lines to which runs are added; a page beside it")
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
