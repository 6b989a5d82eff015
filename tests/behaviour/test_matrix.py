"""Every behaviour with every feature, on shards beside one plain process: right, or refused in the words of one line.

In each commit each pair of behaviours and features meets in a cell, nightly each three;
`python -m tests.behaviour.cells` writes docs/compatibility.md from the same tables.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from tests._dist import run_cases, run_ranks
from tests.behaviour.behaviours import BEHAVIOURS
from tests.behaviour.cells import ABSENT, LEVELS, PAGE, REFUSED, Cell, covering, layout_of, page_of, refusals, words_of
from tests.behaviour.sides import make_files, play

AT_ONCE = 20
"""Cells of one test, at most: those of pairs end within 100 s on a GPU, where each collective takes long."""


def is_as_said(cell: Cell, parent: Path) -> None:
    """On a rank: all acts are right, or one is refused in these words, after which the model is as it was."""
    layout, words = layout_of(cell), words_of(cell)
    folder = parent / ", ".join(cell)
    folder.mkdir(exist_ok=True)
    acts = BEHAVIOURS[cell[0]](layout)
    told = play(layout, acts, make_files(layout, parent), folder, [words] if words else [])
    assert told[-1][0] in ("right", "refused"), f"{acts[len(told) - 1]} is {told[-1][0]}: {told[-1][1]}"
    assert bool(words) == ("refused" in dict(told)), f"nothing is refused with {words!r}"
    assert words or not any(said for _, said in told), f"an error on both sides: {told}"


def walk(cells: Sequence[Cell], folder: Path) -> None:
    for cell in cells:
        make_files(layout_of(cell), folder)
    for ranks, some in groupby(sorted(cells, key=ranks_of), ranks_of):
        run_ranks(run_cases, ranks, {", ".join(cell): partial(is_as_said, cell, folder) for cell in some})


def ranks_of(cell: Cell) -> int:
    return layout_of(cell).ranks


PAIRS = {ranks: [*some] for ranks, some in groupby(sorted((*covering(2), *refusals()), key=ranks_of), ranks_of)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files that several cells open."""
    return tmp_path_factory.mktemp("cells")


@pytest.mark.parametrize(
    ("ranks", "start"), [(ranks, start) for ranks in PAIRS for start in range(0, len(PAIRS[ranks]), AT_ONCE)]
)
def test_pairs(ranks: int, start: int, shared: Path) -> None:
    walk(PAIRS[ranks][start : start + AT_ONCE], shared)


TRIPLES = [cell for cell in covering(3) if cell not in covering(2)]


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(0, len(TRIPLES), AT_ONCE))
def test_triples(start: int, tmp_path: Path) -> None:
    walk(TRIPLES[start : start + AT_ONCE], tmp_path)


def test_every_pair_is_walked_or_said_to_be_none() -> None:
    """Each pair of a behaviour and features stands in a cell, in a refusal, or has no meaning."""
    walked = [{*cell} for cell in (*covering(2), *refusals())]
    names = [(axis, name) for axis, level in enumerate(LEVELS) for name in level]
    for axis, name in names:
        for other, second in names:
            pair = {name, second}
            if axis < other and not any(pair <= cell for cell in walked):
                assert any(together <= pair for together in ABSENT), pair


def test_the_page_is_what_the_cells_say() -> None:
    assert PAGE.read_text() == page_of(PAGE.read_text()), "python -m tests.behaviour.cells writes it"
    assert all(together <= {name for level in LEVELS for name in level} for together in (*REFUSED, *ABSENT))
