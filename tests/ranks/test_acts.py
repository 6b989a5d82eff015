"""What users do in any order, on shards beside one plain process (`tests.acts` has the acts, and runs others by hand).

ACTS_MINUTES=120 ACTS_SEED=7 pytest -m nightly tests/ranks/test_acts.py
"""

import itertools
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tests._dist import run_cases, run_ranks
from tests.acts import LAYOUTS, drawn, make_files, play, script, search

FIXED = {
    1: {"one rank": (1,), "one rank bf16": (1,), "one rank lora": (1,)},
    2: {"2 ranks": (1,)},
}
"""Seeds by layout, by ranks: a dozen in each commit."""


def is_right(name: str, seed: int, parent: Path) -> None:
    """On a rank: no act of the sequence is wrong, or an error of somebody else."""
    acts, folder = drawn(LAYOUTS[name], f"{name} {seed}"), parent / f"{name} {seed}"
    folder.mkdir(exist_ok=True)
    told = play(LAYOUTS[name], acts, make_files(LAYOUTS[name], parent), folder)
    assert told[-1][0] in ("right", "refused"), script(name, acts[: len(told)], seed, told[-1][1])
    assert [kind for kind, _ in told].count("refused") < 3, told


@pytest.mark.parametrize("ranks", FIXED)
def test_a_dozen_sequences(ranks: int, tmp_path: Path) -> None:
    chosen = [(name, seed) for name, seeds in FIXED[ranks].items() for seed in seeds]
    for name, _ in chosen:
        make_files(LAYOUTS[name], tmp_path)
    run_ranks(run_cases, ranks, {f"{name} {seed}": partial(is_right, name, seed, tmp_path) for name, seed in chosen})


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_new_sequences() -> None:
    """For half an hour, by a seed of the day."""
    seed = int(os.environ.get("ACTS_SEED", time.strftime("%Y%m%d")))
    until = time.monotonic() + 60 * float(os.environ.get("ACTS_MINUTES", "30"))
    scripts = search(list(LAYOUTS), itertools.count(seed * 1000), until)
    assert not scripts, "\n\n".join(scripts)
