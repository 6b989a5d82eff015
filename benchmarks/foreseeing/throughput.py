"""The published rows under the model of time: what each runs, and how long that takes with given efficiencies."""

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from hf_fsdp_tools.foresight.allocator import replay
from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.dry_run import trace_model
from hf_fsdp_tools.foresight.durations import COLLECTIVES, Durations
from hf_fsdp_tools.foresight.efficiency import Efficiency
from hf_fsdp_tools.foresight.hardware import gpu_named
from hf_fsdp_tools.foresight.simulation import run
from hf_fsdp_tools.foresight.step import compose

from benchmarks.foreseeing.rows import Row, model_config
from hf_fsdp_tools.foresight.events import Event, Mark, Record, Wait, Work

__all__ = ["Program", "Run", "program_of"]

_FEW = 3
"""Micro-steps that are simulated at most; more are extrapolated, since from the second on all take as long."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One step with some micro-steps."""

    micro_steps: int
    """How many."""
    events: tuple[Event, ...]
    """Work, records and waits of the step."""
    kernels: tuple[tuple[Work, int], ...]
    """What the compute stream runs: kernels that take as long as each other stand together, with their number."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A row as the model of time sees it."""

    row: Row
    """The row."""
    runs: tuple[Run, ...]
    """One, or two from which the others are extrapolated."""
    peak_allocated: int
    """Bytes, of the setup's whole step."""
    peak_reserved: int
    """The same."""

    @property
    def tokens(self) -> int:
        """Tokens of a step on one GPU."""
        setup = self.row.setup
        return setup.batch_size * setup.seq_len * setup.gradient_accumulation_steps

    def seconds(self, efficiency: Efficiency) -> float:
        """Seconds of a step, simulated."""
        durations = self._durations(efficiency)
        compiled = self.row.setup.compile
        return self._extrapolated(run(each.events, durations, compiled=compiled).seconds for each in self.runs)

    def compute_seconds(self, efficiency: Efficiency) -> float:
        """Seconds of a step's kernels on the compute stream one after the other, without any wait."""
        durations = self._durations(efficiency)
        return self._extrapolated(
            sum(count * durations.seconds(work) for work, count in each.kernels) for each in self.runs
        )

    def _durations(self, efficiency: Efficiency) -> Durations:
        return Durations(self.row.setup, gpu_named(self.row.setup.gpu), efficiency)

    def _extrapolated(self, seconds: Iterable[float]) -> float:
        first, *more = seconds
        if not more:
            return first
        missing = self.row.setup.gradient_accumulation_steps - self.runs[0].micro_steps
        return first + missing * (more[0] - first)


def program_of(row: Row, cache: Path) -> Program:
    """What a row runs: the model's dry run with FSDP2's schedule over it.

    Args:
        row: the row.
        cache: folder in which the result is kept.
    """
    key = hashlib.sha256(repr((row.model, row.setup, row.recomputed)).encode()).hexdigest()[:24]
    kept = cache / f"{key}.pickle"
    if kept.exists():
        program: Program = pickle.loads(kept.read_bytes())
        return replace(program, row=row)
    program = _program(row)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(program))
    return program


def _program(row: Row) -> Program:
    setup = row.setup
    model, plan = build(model_config(row.model, setup.seq_len), setup)
    trace = trace_model(model, plan, setup)
    count = setup.gradient_accumulation_steps
    runs, peaks = [], (0, 0)
    for number in (count,) if count <= _FEW else (_FEW - 1, _FEW):
        step = compose(trace, plan, replace(setup, gradient_accumulation_steps=number))
        if not runs:
            memory = replay(step.resident, step.events, step.events)
            peaks = memory.peak_allocated, memory.peak_reserved
        runs.append(_run(number, tuple(_recomputed(step.events, row.recomputed))))
    return Program(row=row, runs=tuple(runs), peak_allocated=peaks[0], peak_reserved=peaks[1])


def _run(micro_steps: int, events: Sequence[Event]) -> Run:
    kept = tuple(event for event in events if isinstance(event, Work | Record | Wait))
    kernels: Counter[Work] = Counter()
    for event in kept:
        if isinstance(event, Work) and event.stream == "compute" and event.operation not in COLLECTIVES:
            kernels[replace(event, unit="", again=False)] += 1
    return Run(micro_steps=micro_steps, events=kept, kernels=tuple(kernels.items()))


# ---- selective activation checkpointing ----


def _recomputed(events: Iterable[Event], rule: Fraction | Literal["selective-op"]) -> Iterator[Event]:
    """The events without what selective activation checkpointing does not compute again."""
    if rule in (0, 1):
        yield from events
    elif isinstance(rule, Fraction):
        yield from _of_some_blocks(events, rule)
    else:
        yield from _of_some_operations(events)


def _of_some_blocks(events: Iterable[Event], share: Fraction) -> Iterator[Event]:
    """Checkpointed blocks are spread evenly over the model (`ac_handler.py` of fms-fsdp)."""
    known: dict[str, bool] = {}
    for event in events:
        if isinstance(event, Work) and event.again:
            if event.unit not in known:
                number = len(known) + 1
                known[event.unit] = int(number * share + Fraction(1, 2)) > int((number - 1) * share + Fraction(1, 2))
            if not known[event.unit]:
                continue
        yield event


def _of_some_operations(events: Iterable[Event]) -> Iterator[Event]:
    """Attention and every other matmul of a block are kept (`_save_list` of torchtitan), the first among them."""
    matmuls = 0
    for event in events:
        if isinstance(event, Mark):
            matmuls = 0
        elif isinstance(event, Work) and event.again:
            matmuls += event.operation == "matmul"
            if event.operation == "attention" or (event.operation == "matmul" and matmuls % 2):
                continue
        yield event
