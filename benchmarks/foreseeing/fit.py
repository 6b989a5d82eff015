"""The efficiencies that fit published rows best, and what they say of rows that the fit has not seen.

Constants, and there are no others: for each generation of GPUs the share of the peak that matmuls and attention reach,
the dimension at which a matmul reaches half of that, the share of the memory's bandwidth, and how much slower the
slowest GPU is; for both generations together how much faster attention of 2024 is, and what compilation leaves of the
traffic of memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.foreseeing.rows import Row
from benchmarks.foreseeing.throughput import Program
from hf_fsdp_tools.foresight.throughput import straggling
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

__all__ = ["START", "Constants", "Outcome", "efficiency_from", "fit", "leave_out", "predict"]

Constants = dict[str, float]
"""By name: "a100.matmul", "newer.attention", …"""

START: Constants = {
    "a100.matmul": 0.85,
    "a100.matmul_half": 100.0,
    "a100.attention": 0.35,
    "a100.memory": 0.6,
    "a100.straggler": 0.02,
    "h100.matmul": 0.85,
    "h100.matmul_half": 400.0,
    "h100.attention": 0.25,
    "h100.memory": 0.6,
    "h100.straggler": 0.03,
    "newer.attention": 1.6,
    "newer.compiled": 0.4,
}
"""Where the search begins: shares that are usual for large kernels."""

_SOFT = 0.04
"""Relative error from which a row counts by its error, not by the error's square, in a fit."""

_WIDTH = {"matmul_half": 1.0, "straggler": 0.7}
"""How far (standard deviation of the logarithm) constants may be from where the search begins, by their last name …"""

_USUAL_WIDTH = 0.3
"""… and all others. It matters where rows say little: without llm-foundry there are eight."""


def efficiency_from(constants: Mapping[str, float], row: Row) -> Efficiency:
    """What a row's GPU reaches in its era."""
    family = gpu_named(row.setup.gpu).family
    return Efficiency(
        matmul=constants[f"{family}.matmul"],
        matmul_half=constants[f"{family}.matmul_half"],
        attention=constants[f"{family}.attention"] * (constants["newer.attention"] if row.era >= "2024" else 1.0),
        memory=constants[f"{family}.memory"],
        straggler=constants[f"{family}.straggler"],
        compiled_memory=constants["newer.compiled"] if row.setup.compile else 1.0,
        error=0.0,
        source="",
    )


@dataclass(frozen=True)
class Outcome:
    """What was foreseen for a row."""

    program: Program
    """The row."""
    tokens_per_second: float
    """Foreseen, per GPU."""

    @property
    def error(self) -> float:
        """Relative; above 0 where more was foreseen than was measured."""
        return self.tokens_per_second / self.program.row.tokens_per_second - 1


def predict(program: Program, constants: Mapping[str, float]) -> Outcome:
    """Simulate a row."""
    efficiency = efficiency_from(constants, program.row)
    seconds = program.seconds(efficiency) * (1 + straggling(program.row.setup, efficiency))
    return Outcome(program, program.tokens / seconds)


def fit(programs: Sequence[Program], start: Mapping[str, float] = START, *, rounds: int = 3) -> Constants:
    """The constants with which rows are foreseen best.

    A round simulates every row once, keeps the seconds in which its compute stream waits, and searches the constants by
    least squares of the logarithms (Levenberg and Marquardt), large errors softened. Every publisher has the weight of
    the square root of the number of its rows for a GPU; the constants are drawn to `START` a little (`_WIDTH`).

    Args:
        programs: rows.
        start: constants to begin with.
        rounds: how often the waiting is simulated again.
    """
    constants = dict(start)
    for _ in range(rounds):
        constants = _Search(programs, constants).run()
    return constants


class _Search:
    """Least squares over the logarithms of the constants, with the waiting of each row as it is at the start.

    Args:
        programs: rows.
        start: constants to begin with.
    """

    def __init__(self, programs: Sequence[Program], start: Constants) -> None:
        self._programs = programs
        self._start = start
        self._known: dict[tuple[int, Efficiency], float] = {}
        self._idle = [self._waits(program) for program in programs]
        groups = [(program.row.publisher, gpu_named(program.row.setup.gpu).family) for program in programs]
        self._weights = np.array([1 / math.sqrt(groups.count(group)) for group in groups] + [1.0] * len(start))

    def run(self) -> Constants:
        """The best constants."""
        constants, damping, step = dict(self._start), 1e-3, 0.01
        now = self._errors(constants)
        for _ in range(15):
            columns = [self._errors({**constants, name: constants[name] * (1 + step)}) - now for name in constants]
            slopes = np.stack(columns, axis=1) / step
            importance = self._importance(now)
            curve = slopes.T @ (importance[:, None] * slopes)
            downhill = slopes.T @ (importance * now)
            for _ in range(8):
                move = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -downhill).clip(-0.3, 0.3)
                moved = {name: constants[name] * math.exp(by) for name, by in zip(constants, move, strict=True)}
                then = self._errors(moved)
                gain = self._cost(now) - self._cost(then)
                if gain > 0:
                    break
                damping *= 4
            else:
                break
            constants, now, damping = moved, then, damping / 4
            if gain < 1e-4 * self._cost(now):
                break
        return constants

    def _errors(self, constants: Mapping[str, float]) -> np.ndarray:
        """Logarithms of foreseen over published rates, and distances of the constants from their start."""
        errors = [self._error(number, constants) for number in range(len(self._programs))]
        widths = [_WIDTH.get(name.partition(".")[2], _USUAL_WIDTH) for name in constants]
        far = [
            _SOFT * math.log(constants[name] / START[name]) / width
            for name, width in zip(constants, widths, strict=True)
        ]
        return np.array(errors + far)

    def _error(self, number: int, constants: Mapping[str, float]) -> float:
        program = self._programs[number]
        efficiency = efficiency_from(constants, program.row)
        key = number, efficiency
        if key not in self._known:
            late = 1 + straggling(program.row.setup, efficiency)
            seconds = (program.compute_seconds(efficiency) + self._idle[number]) * late
            self._known[key] = math.log(program.tokens / seconds / program.row.tokens_per_second)
        return self._known[key]

    def _waits(self, program: Program) -> float:
        efficiency = efficiency_from(self._start, program.row)
        return program.seconds(efficiency) - program.compute_seconds(efficiency)

    def _importance(self, errors: np.ndarray) -> np.ndarray:
        softened = np.sqrt(1 + (errors / _SOFT) ** 2)
        softened[-len(self._start) :] = 1
        importance: np.ndarray = self._weights / softened
        return importance

    def _cost(self, errors: np.ndarray) -> float:
        rows, far = errors[: -len(self._start)], errors[-len(self._start) :]
        cost = self._weights[: len(rows)] @ (np.sqrt(1 + (rows / _SOFT) ** 2) - 1)
        return float(cost + np.sum((far / _SOFT) ** 2) / 2)


def leave_out(
    programs: Sequence[Program], group_of: Callable[[Row], str], start: Mapping[str, float]
) -> Iterator[Outcome]:
    """Every row as it is foreseen by a fit that has seen no row of its group.

    Args:
        programs: rows.
        group_of: what is left out together: the model's size, or the publisher.
        start: where each fit begins: a fit of all rows, of whose constants each that depends on the rows moves.
    """
    groups: dict[str, list[Program]] = {}
    for program in programs:
        groups.setdefault(group_of(program.row), []).append(program)
    for name, left in groups.items():
        seen = [program for program in programs if group_of(program.row) != name]
        constants = fit(seen, start, rounds=1)
        for program in left:
            yield predict(program, constants)
