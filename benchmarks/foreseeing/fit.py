"""The efficiencies that fit published rows best, and what they say of rows that the fit has not seen.

Constants, and there are no others: for each generation of GPUs the share of the peak that matmuls and attention reach,
the dimension at which a matmul reaches half of that, the share of the memory's bandwidth, and how much slower the
slowest GPU is; for both generations together how much faster attention of 2024 is, and what compilation leaves of the
traffic of memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hf_fsdp_tools.foresight.efficiency import Efficiency
from hf_fsdp_tools.foresight.hardware import gpu_named

from benchmarks.foreseeing.rows import Row
from benchmarks.foreseeing.throughput import Program

__all__ = ["START", "Constants", "Outcome", "efficiency_from", "fit", "leave_out", "predict"]

Constants = dict[str, float]
"""By name: "a100.matmul", "newer.attention", …"""

START: Constants = {
    "a100.matmul": 0.85,
    "a100.matmul_half": 100.0,
    "a100.attention": 0.65,
    "a100.memory": 0.6,
    "a100.straggler": 0.02,
    "h100.matmul": 0.85,
    "h100.matmul_half": 400.0,
    "h100.attention": 0.4,
    "h100.memory": 0.6,
    "h100.straggler": 0.03,
    "newer.attention": 1.5,
    "newer.compiled": 0.4,
}
"""Where the search begins: shares that are usual for large kernels."""

_SOFT = 0.04
"""Relative error from which a row counts by its error, not by the error's square, in a fit."""


def efficiency_from(constants: Mapping[str, float], row: Row) -> Efficiency:
    """What a row's GPU reaches in its era."""
    family = gpu_named(row.setup.gpu).family
    return Efficiency(
        matmul=constants[f"{family}.matmul"],
        matmul_half=constants[f"{family}.matmul_half"],
        attention=constants[f"{family}.attention"] * (constants["newer.attention"] if row.era >= "2024" else 1.0),
        memory=constants[f"{family}.memory"],
        straggler=constants[f"{family}.straggler"],
        compiled_memory=constants["newer.compiled"],
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
    seconds = program.seconds(efficiency) * _slowest(efficiency, program)
    return Outcome(program, program.tokens / seconds)


def _slowest(efficiency: Efficiency, program: Program) -> float:
    return 1 + efficiency.straggler * math.sqrt(2 * math.log(program.row.setup.num_gpus))


def fit(programs: Sequence[Program], start: Mapping[str, float] = START, *, rounds: int = 3) -> Constants:
    """The constants with which rows are foreseen best.

    A round simulates every row once, keeps the seconds in which its compute stream waits, and searches the constants by
    least squares of the logarithms (Levenberg and Marquardt), large errors softened. Every publisher has the weight of
    the square root of the number of its rows for a GPU.

    Args:
        programs: rows.
        start: constants to begin with; those that no row depends on stay.
        rounds: how often the waiting is simulated again.
    """
    constants = dict(start)
    weights = _weights(programs)
    for _ in range(rounds):
        idle = [_idle(program, constants) for program in programs]

        def errors(values: Mapping[str, float], idle: Sequence[float] = idle) -> np.ndarray:
            return np.array([_log_error(program, values, rest) for program, rest in zip(programs, idle, strict=True)])

        constants = _least_squares(errors, constants, weights)
    return constants


def _idle(program: Program, constants: Mapping[str, float]) -> float:
    efficiency = efficiency_from(constants, program.row)
    return program.seconds(efficiency) - program.compute_seconds(efficiency)


def _log_error(program: Program, constants: Mapping[str, float], idle: float) -> float:
    efficiency = efficiency_from(constants, program.row)
    seconds = (program.compute_seconds(efficiency) + idle) * _slowest(efficiency, program)
    return math.log(program.tokens / seconds / program.row.tokens_per_second)


def _weights(programs: Sequence[Program]) -> np.ndarray:
    groups = [(program.row.publisher, gpu_named(program.row.setup.gpu).family) for program in programs]
    return np.array([1 / math.sqrt(groups.count(group)) for group in groups])


def _least_squares(
    errors: Callable[[Mapping[str, float]], np.ndarray], start: Mapping[str, float], weights: np.ndarray
) -> Constants:
    """Minimize the weighted sum of softened squares over the logarithms of the constants."""
    constants, damping, step = dict(start), 1e-3, 0.01
    now = errors(constants)
    for _ in range(30):
        columns = [(errors({**constants, name: constants[name] * (1 + step)}) - now) / step for name in constants]
        slopes = np.stack(columns, axis=1)
        importance = weights / np.sqrt(1 + (now / _SOFT) ** 2)
        curve = slopes.T @ (importance[:, None] * slopes)
        downhill = slopes.T @ (importance * now)
        for _ in range(8):
            move = np.linalg.solve(curve + np.diag(damping * np.diag(curve) + 1e-12), -downhill).clip(-0.3, 0.3)
            moved = {name: constants[name] * math.exp(by) for name, by in zip(constants, move, strict=True)}
            then = errors(moved)
            if _cost(then, weights) < _cost(now, weights):
                break
            damping *= 4
        else:
            break
        gain = _cost(now, weights) - _cost(then, weights)
        constants, now, damping = moved, then, damping / 4
        if gain < 1e-5 * _cost(now, weights):
            break
    return constants


def _cost(errors: np.ndarray, weights: np.ndarray) -> float:
    return float(np.sum(weights * (np.sqrt(1 + (errors / _SOFT) ** 2) - 1)))


def leave_out(
    programs: Sequence[Program], group_of: Callable[[Row], str], start: Mapping[str, float]
) -> Iterable[Outcome]:
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
        constants = fit(seen, start, rounds=2)
        for program in left:
            yield predict(program, constants)
