"""The efficiencies that fit published throughputs best.

Constants, and there are no others: for each generation of GPUs the share of the peak that matmuls and attention reach,
the dimension at which a matmul reaches half of that, the share of the memory's bandwidth, and how much slower the
slowest GPU is; for both generations together how much faster attention of 2024 is, and what compilation leaves of the
traffic of memory.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.foreseeing.published import Row
from hf_fsdp_tools.foresight.memory import MemoryEstimate
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.efficiency import Efficiency
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

START = {
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
"""Relative error from which a row counts by its error, not by the error's square."""

_WIDTH = {"matmul_half": 1.0, "straggler": 0.7}
"""How far (standard deviation of the logarithm) constants may be from where the search begins, by their last name;
all others 0.3."""


def efficiency_from(constants: Mapping[str, float], row: Row) -> Efficiency:
    """The efficiency of a row's GPU in its era."""
    family = gpu_named(row.setup.gpu).family
    own = {key: constants[f"{family}.{key}"] for key in ("matmul", "matmul_half", "attention", "memory", "straggler")}
    own["attention"] *= constants["newer.attention"] if row.entry["era"] >= "2024" else 1.0
    compiled = constants["newer.compiled"] if row.setup.compile else 1.0
    return Efficiency(**own, compiled_memory=compiled, error=0.0, source="fitted")


def fit(rows: Sequence[Row], rounds: int = 4) -> dict[str, float]:
    """The constants with which rows are foreseen best: least squares of the logarithms, large errors softened.

    Every publisher has the weight of the square root of the number of its rows for a GPU; the constants are drawn to
    `START` a little. Each round simulates every row once for each constant, which takes minutes.
    """
    memories = [row.foresee() for row in rows]
    groups = [(row.publisher, gpu_named(row.setup.gpu).family) for row in rows]
    counts = Counter(groups)
    weights = np.array([1 / math.sqrt(counts[group]) for group in groups])
    constants, step = dict(START), 0.01
    widths = np.array([_WIDTH.get(name.partition(".")[2], 0.3) for name in constants])
    for _ in range(rounds):
        now = _errors(rows, memories, constants)
        moved = [_errors(rows, memories, {**constants, name: value * (1 + step)}) for name, value in constants.items()]
        importance = np.sqrt(weights / np.sqrt(1 + (now / _SOFT) ** 2))
        far = np.array([math.log(value / START[name]) for name, value in constants.items()])
        slopes = np.vstack(
            [importance[:, None] * (np.stack(moved, axis=1) - now[:, None]) / step, np.diag(_SOFT / widths)]
        )
        targets = np.concatenate([-importance * now, -_SOFT * far / widths])
        move = np.linalg.lstsq(slopes, targets, rcond=None)[0].clip(-0.3, 0.3)
        constants = {name: value * math.exp(by) for (name, value), by in zip(constants.items(), move, strict=True)}
    return constants


def _errors(rows: Sequence[Row], memories: Sequence[MemoryEstimate], constants: Mapping[str, float]) -> np.ndarray:
    """Logarithms of foreseen over published rates."""
    rates = [
        throughput_of(memory, efficiency=efficiency_from(constants, row)).tokens_per_second_per_gpu
        for row, memory in zip(rows, memories, strict=True)
    ]
    return np.log([rate / (row.tokens_per_second or 1) for row, rate in zip(rows, rates, strict=True)])
