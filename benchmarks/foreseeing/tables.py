"""What was foreseen beside what was measured or published, as Markdown."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.foreseeing.fit import START
from benchmarks.foreseeing.published import Row
from benchmarks.measuring.comparison import table_of
from hf_fsdp_tools.foresight.throughput import throughput_of


def measured_report(records: Sequence[dict[str, Any]]) -> str:
    """Real trainings: on CPUs every allocation counted, on a device the counts of PyTorch's caching allocator."""
    lines = ["# Memory: foreseen beside measured", ""]
    for device in dict.fromkeys((record["device"], record["measured"].get("device", "CPUs")) for record in records):
        some = [each for each in records if (each["device"], each["measured"].get("device", "CPUs")) == device]
        kinds = [key for key in some[0]["foreseen"] if key != "held"]
        rows = []
        for record in some:
            cells = [record["case"], f"{record['gpus']}", f"{record['measured']['parameters'] / 1e6:.1f} M"]
            for kind in kinds:
                real, foreseen = record["measured"][kind], record["foreseen"][kind]
                cells += [f"{real / 2**20:,.1f}", f"{foreseen / 2**20:,.1f}", f"{foreseen / real - 1:+.4%}"]
            rows.append(cells)
        heads = [head for kind in kinds for head in (f"{kind} MiB", "foreseen", "error")]
        torch = ", ".join(sorted({record["measured"]["torch"] for record in some}))
        shown = table_of(["training", "GPUs", "parameters", *heads], rows)
        lines += [f"## {device[1]}, PyTorch {torch}", "", *shown, ""]
    return "\n".join(lines)


def published_report(rows: Sequence[Row], constants: dict[str, float] | None = None) -> str:
    """Published trainings: memory where a row has it, and tokens per second."""
    peaks: list[Sequence[str]] = []
    rates: list[Sequence[str]] = []
    errors: dict[str, list[float]] = {"peak memory": [], "tokens per second": []}
    for row in rows:
        memory, source = row.foresee(), row.entry["source"]
        if gib := row.entry.get("gib"):
            kinds = {"allocated": memory.peak_allocated, "reserved": memory.peak_reserved, "total": memory.total}
            foreseen = kinds[row.entry["kind"]] / 2**30
            errors["peak memory"].append(foreseen / float(gib) - 1)
            peaks.append((source, row.name, gib, f"{foreseen:.1f}", f"{foreseen / float(gib) - 1:+.1%}"))
        if row.tokens_per_second:
            estimate = throughput_of(memory, efficiency=row.efficiency)
            rate, real = estimate.tokens_per_second_per_gpu, row.tokens_per_second
            errors["tokens per second"].append(rate / real - 1)
            rates.append((source, row.name, f"{real:,.0f}", f"{rate:,.0f}", f"{rate / real - 1:+.1%}"))
    lines = ["# Published trainings and what was foreseen", "", "Errors are foreseen over published, less 1.", ""]
    lines += table_of(
        ("figure", "number", "mean error", "median", "bias", "90 % below", "worst"),
        [_summary(name, some) for name, some in errors.items() if some],
    )
    if constants:
        cells = [(name, f"{value:.4g}", f"{START[name]:.4g}") for name, value in constants.items()]
        lines += ["", "## Constants", "", *table_of(("constant", "value", "before"), cells)]
    for title, some, unit in (("Peak memory", peaks, "GiB"), ("Throughput", rates, "tokens/s per GPU")):
        if some:
            heads = ("source", "training", f"published {unit}", "foreseen", "error")
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
