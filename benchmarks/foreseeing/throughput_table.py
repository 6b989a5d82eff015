"""The table of published throughputs beside what was foreseen: `benchmarks/results/foresight_throughput.md`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.foreseeing.fit import START, Outcome, fit, leave_out, predict
from benchmarks.foreseeing.rows import Row, read_rows
from benchmarks.foreseeing.throughput import Program, program_of

__all__ = ["REASONS", "throughput_report"]

REASONS = {
    "mpt-70b a100-40gb x64": "FSDP1 without its rate limiter, on GPUs that may be full; on 128 GPUs the same table has "
    "36 % more per GPU",
    "mpt-13b a100-40gb x8": "the memory is full within 1 GiB; on 16 GPUs and more the same table has 18 % more per GPU",
    "mpt-1b a100-40gb x32": "on 16 and on 64 GPUs the same table has 23 % more per GPU; nothing in the setup differs",
    "mpt-1b h100-80gb x8": "how slow attention of 2023 was on H100 stands in this publisher's rows only",
    "mpt-3b h100-80gb x8": "how slow attention of 2023 was on H100 stands in this publisher's rows only",
    "mpt-30b": "76.8 of 79.1 GiB before NCCL and context: the memory is full; at 4,096 tokens the error is below 3 %",
    "mpt-760m a100-80gb x8": "batches whose logits fill the memory; the same table has more tokens per second at 2,048",
    "gpt-1t": "the memory of each GPU was full; the post names the allocator, not the network, as the cause",
    "gpt-175b a100-40gb": "the memory of each GPU was full (batches of 21 no longer fitted)",
    "llama3.1-8b h200-141gb": "software of 2026, two years after the rows that were fitted",
    "llama2-7b h100-80gb x8": "bf16 masters; the issue names neither optimizer nor clipping",
}
"""Why a row falls short, by the beginning of its name."""

_HEAD = ("| rows | number | mean error | bias | 90 % below | worst |", "|---|---|---|---|---|---|")

_COLUMNS = """Tokens per second and GPU. GiB is what PyTorch's allocator would hold with transformers' cross entropy; in
brackets where the GPU has less; of selective checkpointing nothing is said.
"""

_PREFACE = """# Throughput: published trainings and what was foreseen

Made by `python benchmarks/foresight.py throughput`. Each published row is built from its configuration, traced by dry
run, laid under FSDP2's schedule and simulated. `benchmarks/foreseeing/rows.py` says how publications were read,
`published_throughput.csv` has the facts with their sources, `fit.py` the search. The error is foreseen over published
tokens per second, less 1; bias is its mean. Every fold of a left-out group is fitted anew. There is no constant for a
row, a model, or a publisher.
"""


def throughput_report(cache: Path) -> str:
    """The whole text, in Markdown.

    Args:
        cache: folder for what the rows run; the first time takes minutes.
    """
    programs = [program_of(row, cache) for row in read_rows()]
    seen = [program for program in programs if not program.row.is_held_out and program.row.era != "2022"]
    never = [program for program in programs if not program.row.is_held_out and program.row.era == "2022"]
    held = [program for program in programs if program.row.is_held_out]
    constants = fit(seen)
    fitted = _foreseen(seen, constants)
    by_size = {id(each.program): each for each in leave_out(seen, lambda row: row.model, constants)}
    by_publisher = {id(each.program): each for each in leave_out(seen, lambda row: row.publisher, constants)}
    sizes = [by_size[id(program)] for program in seen]
    publishers = [by_publisher[id(program)] for program in seen]
    others = _foreseen(never, constants)
    kept = _foreseen(held, constants)
    return "\n".join(
        [
            _PREFACE,
            "## Summary",
            "",
            *_HEAD,
            _summary("before any fit (usual shares of the peaks)", _foreseen(seen, START)),
            _summary("fitted", fitted),
            _summary("**model size left out of the fit**", sizes),
            _summary("**publisher left out of the fit**", publishers),
            _summary("held out: in no fit, evaluated at the end", kept),
            _summary("trainings of 2022, never in a fit", others),
            "",
            "## Constants",
            "",
            *_table(
                ("constant", "value", "before"), [(n, f"{v:.4g}", f"{START[n]:.4g}") for n, v in constants.items()]
            ),
            "",
            "## Bias by regime",
            "",
            "With the model size left out of the fit:",
            "",
            *_regimes(sizes),
            "Of the rows that were held out:",
            "",
            *_regimes(kept),
            "## Rows that fall short (15 % or more)",
            "",
            *_shortfalls([*sizes, *publishers, *others, *kept]),
            "",
            "## Each row",
            "",
            _COLUMNS,
            *_each(fitted, sizes, publishers),
            "",
            "Held out, and of 2022:",
            "",
            *_each([*kept, *others]),
            "",
        ]
    )


def _foreseen(programs: Iterable[Program], constants: Mapping[str, float]) -> list[Outcome]:
    return [predict(program, constants) for program in programs]


_REGIMES: tuple[tuple[str, Callable[[Program], bool]], ...] = (
    ("A100 40 GB", lambda p: p.row.setup.gpu == "a100-40gb"),
    ("A100 80 GB", lambda p: p.row.setup.gpu == "a100-80gb"),
    ("H100, H200", lambda p: p.row.setup.gpu[0] == "h"),
    ("sequences below 2,048", lambda p: p.row.setup.seq_len < 2048),
    ("sequences of 2,048 and 4,096", lambda p: p.row.setup.seq_len in (2048, 4096)),
    ("sequences of 8,192 and 16,384", lambda p: p.row.setup.seq_len in (8192, 16384)),
    ("sequences of 32,768 and 65,536", lambda p: p.row.setup.seq_len >= 32768),
    ("one machine", lambda p: p.row.setup.num_gpus <= p.row.setup.gpus_per_node),
    ("16 to 64 GPUs", lambda p: p.row.setup.gpus_per_node < p.row.setup.num_gpus <= 64),
    ("more than 64 GPUs", lambda p: p.row.setup.num_gpus > 64),
    ("network of 400 or 800 Gbit/s per machine", lambda p: (p.row.setup.network_gbit_s or 9999) <= 800),
    ("small models (350M, 1B) on 64 GPUs and more", lambda p: _is_small(p) and p.row.setup.num_gpus >= 64),
    ("at most 4,096 tokens per GPU and micro-step", lambda p: p.row.setup.batch_size * p.row.setup.seq_len <= 4096),
    ("activation checkpointing", lambda p: bool(p.row.recomputed)),
    ("without it", lambda p: not p.row.recomputed),
    ("compiled", lambda p: p.row.setup.compile),
)


def _regimes(outcomes: Sequence[Outcome]) -> list[str]:
    chosen = [(name, [each for each in outcomes if holds(each.program)]) for name, holds in _REGIMES]
    return [*_HEAD, *(_summary(name, some) for name, some in chosen if some), ""]


def _is_small(program: Program) -> bool:
    return program.row.model in ("mpt-125m", "mpt-350m", "mpt-760m", "mpt-1b")


def _summary(name: str, outcomes: Sequence[Outcome]) -> str:
    errors = np.array([each.error for each in outcomes])
    sizes = np.abs(errors)
    cells = f"{sizes.mean():.1%}", f"{errors.mean():+.1%}", f"{np.quantile(sizes, 0.9):.1%}", f"{sizes.max():.1%}"
    return f"| {name} | {len(outcomes)} | {' | '.join(cells)} |"


def _shortfalls(outcomes: Sequence[Outcome]) -> list[str]:
    worst: dict[str, Outcome] = {}
    for each in outcomes:
        name = f"{each.program.row.name} ({each.program.row.source})"
        if abs(each.error) >= 0.15 and (name not in worst or abs(each.error) > abs(worst[name].error)):
            worst[name] = each
    rows = [(name, f"{each.error:+.1%}", _reason(each.program.row)) for name, each in worst.items()]
    return _table(("row", "error where the fit had not seen it", "reason"), rows)


def _reason(row: Row) -> str:
    return next((reason for name, reason in REASONS.items() if row.name.startswith(name)), "not known")


def _each(outcomes: Sequence[Outcome], *left_out: Sequence[Outcome]) -> list[str]:
    heads = ["source", "training", "published", "foreseen", "error", "size left out", "publisher left out"]
    heads = [*heads[: 5 + len(left_out)], "GiB"]
    rows = []
    for number, each in enumerate(outcomes):
        row = each.program.row
        gib = f"{each.program.peak_reserved / 2**30:.1f}"
        gib = f"({gib})" if each.program.is_full else gib
        errors = [f"{other[number].error:+.1%}" for other in left_out]
        rates = f"{row.tokens_per_second:,.0f}", f"{each.tokens_per_second:,.0f}", f"{each.error:+.1%}"
        rows.append((row.source, row.name, *rates, *errors, gib if row.recomputed in (0, 1) else ""))
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
