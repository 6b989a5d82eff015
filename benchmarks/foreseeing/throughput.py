"""The published rows under the model of time: what each runs, and how long that takes with given efficiencies."""

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from benchmarks.foreseeing.offloading import offload_checkpoints
from benchmarks.foreseeing.rows import Row, model_config
from hf_fsdp_tools.foresight.events import COLLECTIVES, Event, Mark, Record, Wait, Work
from hf_fsdp_tools.foresight.forecast import Forecast, step_of
from hf_fsdp_tools.foresight.fsdp2.step import compose
from hf_fsdp_tools.foresight.memory import MemoryEstimate, memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import allocator_stalls
from hf_fsdp_tools.foresight.timing.durations import Durations
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.foresight.timing.simulation import run

__all__ = ["Program", "Run", "forecast_of", "program_of", "recomputed_events"]

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
    stalls: Mapping[int, float]
    """By index of an event: before it the GPU stands still for so many seconds, since its memory is full."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A row as the model of time sees it."""

    row: Row
    """The row."""
    runs: tuple[Run, ...]
    """One, or two from which the others are extrapolated."""
    peak_reserved: int
    """Bytes that PyTorch's allocator holds."""
    is_full: bool
    """Whether the step is foreseen to end with "out of memory"; its time is that of a GPU with more."""

    @property
    def tokens(self) -> int:
        """Tokens of a step on one GPU."""
        setup = self.row.setup
        return setup.batch_size * setup.seq_len * setup.gradient_accumulation_steps

    def seconds(self, efficiency: Efficiency) -> float:
        """Seconds of a step, simulated."""
        durations = self._durations(efficiency)
        compiled = self.row.setup.compile
        return self._extrapolated(
            run(each.events, durations, compiled=compiled, stalls=stalls).seconds
            for each in self.runs
            for stalls in [{} if self.row.is_loss_fused else each.stalls]
        )

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
    facts = [row.model, row.setup, row.recomputed, *(["checkpoints on host"] if row.keeps_checkpoints_on_host else [])]
    key = hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:24]
    kept = cache / f"{key}.pickle"
    if kept.exists():
        program: Program = pickle.loads(kept.read_bytes())
        return replace(program, row=row)
    program = _program(row)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(program))
    return program


def forecast_of(row: Row, setup: TrainingSetup) -> Forecast:
    """The events of a step of a row's model.

    Args:
        row: the row.
        setup: the row's, perhaps with another number of GPUs or micro-steps.
    """
    config = model_config(row.model, setup.seq_len)
    forecast = step_of(config, setup)
    if row.keeps_checkpoints_on_host:
        num_bytes = setup.batch_size * setup.seq_len * config.hidden_size * 2
        trace = offload_checkpoints(forecast.trace, num_bytes)
        forecast = replace(forecast, trace=trace, step=compose(trace, forecast.plan, setup))
    return forecast


def _program(row: Row) -> Program:
    count = row.setup.gradient_accumulation_steps
    runs = []
    for number in (count,) if count <= _FEW else (_FEW - 1, _FEW):
        memory = memory_of(forecast_of(row, replace(row.setup, gradient_accumulation_steps=number)))
        runs.append(_run(number, memory, row.recomputed))
    return Program(row=row, runs=tuple(runs), peak_reserved=memory.peak_reserved, is_full=memory.is_full)


def _run(micro_steps: int, memory: MemoryEstimate, rule: Fraction | Literal["selective-op"]) -> Run:
    stalls = allocator_stalls(memory)
    kept: list[Event] = []
    moved: dict[int, float] = {}
    kernels: Counter[Work] = Counter()
    for index, event in recomputed_events(enumerate(memory.forecast.step.events), rule):
        if index in stalls:
            moved[len(kept)] = moved.get(len(kept), 0.0) + stalls[index]
        if isinstance(event, Work | Record | Wait):
            kept.append(event)
        if isinstance(event, Work) and event.stream == "compute" and event.operation not in COLLECTIVES:
            kernels[replace(event, unit="", again=False)] += 1
    return Run(micro_steps=micro_steps, events=tuple(kept), kernels=tuple(kernels.items()), stalls=moved)


# ---- selective activation checkpointing ----


def recomputed_events(
    events: Iterable[tuple[int, Event]], rule: Fraction | Literal["selective-op"]
) -> Iterator[tuple[int, Event]]:
    """The events, with their indices, without what selective activation checkpointing does not compute again."""
    if rule in (0, 1):
        yield from events
    elif isinstance(rule, Fraction):
        yield from _of_some_blocks(events, rule)
    else:
        yield from _of_some_operations(events)


def _of_some_blocks(events: Iterable[tuple[int, Event]], share: Fraction) -> Iterator[tuple[int, Event]]:
    """Checkpointed blocks are spread evenly over the model (`ac_handler.py` of fms-fsdp)."""
    known: dict[str, bool] = {}
    for index, event in events:
        if isinstance(event, Work) and event.again:
            if event.unit not in known:
                number = len(known) + 1
                known[event.unit] = int(number * share + Fraction(1, 2)) > int((number - 1) * share + Fraction(1, 2))
            if not known[event.unit]:
                continue
        yield index, event


def _of_some_operations(events: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
    """Attention and every other matmul of a block are kept (`_save_list` of torchtitan), the first among them."""
    matmuls = 0
    for index, event in events:
        if isinstance(event, Mark):
            matmuls = 0
        elif isinstance(event, Work) and event.again:
            matmuls += event.operation == "matmul"
            if event.operation == "attention" or (event.operation == "matmul" and matmuls % 2):
                continue
        yield index, event
