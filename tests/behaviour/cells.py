"""Which behaviours are walked with which features, and what each cell says: that it is right, or why it is refused.

python -m tests.behaviour.cells          # writes the tables of docs/compatibility.md
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path

from tests.behaviour.behaviours import BEHAVIOURS
from tests.behaviour.features import AXES, made
from tests.behaviour.sides import Layout

Cell = tuple[str, ...]
"""A behaviour, and a feature of each axis."""
LEVELS: tuple[tuple[str, ...], ...] = (tuple(BEHAVIOURS), *(tuple(makers) for makers in AXES.values()))
PACKED = ("FP8 base", "int4 base", "4-bit base")
REFUSED: dict[frozenset[str], str] = {
    **{frozenset({base, "adapter merged"}): "is quantised as stored, and nothing can be added" for base in PACKED},
    **{frozenset({base, "FP8"}): "has no plain linear layer in its blocks that can be converted" for base in PACKED},
    **{
        frozenset({division, "adapter merged"}): "cannot merge adapters into layers or experts that ranks share"
        for division in ("tp", "sequence parallelism", "ep", "tp and ep")
    },
    **{
        frozenset({"4-bit base", division}): "is flattened before bitsandbytes packs it, so ranks cannot share it"
        for division in ("tp", "sequence parallelism", "tp and ep")
    },
    frozenset({"encoder-decoder", "tp"}): "has no tp_plan for tp_size 2",
    frozenset({"encoder-decoder", "sequence parallelism"}): "has no tp_plan for tp_size 2",
    frozenset({"encoder-decoder", "cp"}): "it is not a decoder of transformers alone",
}
"""Words of the one line that a user gets who asks for these together."""
ABSENT: dict[frozenset[str], str] = {
    **{
        frozenset({division, kind}): "it has no experts"
        for division, kind in product(("ep", "tp and ep"), AXES["model"])
        if kind != "mixture"
    },
    **{frozenset({"MXFP4 base", kind}): "experts alone are stored so" for kind in AXES["model"] if kind != "mixture"},
    **{frozenset({base, "encoder-decoder"}): "no checkpoint is stored so" for base in PACKED[:2]},
}
"""Why there is nothing to try."""


def layout_of(cell: Cell) -> Layout:
    return made(*cell[1:])


def words_of(cell: Cell) -> str:
    """Of its refusal, or ""."""
    return next((words for together, words in REFUSED.items() if together <= {*cell}), "")


def _goes(names: set[str]) -> bool:
    return not any(together <= names for together in (*REFUSED, *ABSENT))


def _filled(part: dict[int, str], left: set[tuple[str, ...]], size: int) -> Cell | None:
    """The cell that has this part, goes together, and has most of what is left."""
    part = dict(part)
    for axis in sorted(set(range(len(LEVELS))) - {*part}):
        best = None
        for name in LEVELS[axis]:
            names = {*part.values(), name}
            if _goes(names) and _completes(part | {axis: name}):
                others = combinations([value for _, value in sorted(part.items())], size - 1)
                new = sum(tuple(sorted((*each, name))) in left for each in others)
                if best is None or new > best[0]:
                    best = new, name
        if best is None:
            return None
        part[axis] = best[1]
    return tuple(name for _, name in sorted(part.items()))


def _completes(part: dict[int, str]) -> bool:
    """Whether a whole cell goes together that has this part."""
    free = [axis for axis in range(len(LEVELS)) if axis not in part]
    if not free:
        return True
    return any(_goes({*part.values(), name}) and _completes(part | {free[0]: name}) for name in LEVELS[free[0]])


@cache
def covering(size: int) -> tuple[Cell, ...]:
    """Cells in which every so many features and behaviours meet that go together, few of them."""
    every = [
        dict(zip(axes, names, strict=True))
        for axes in combinations(range(len(LEVELS)), size)
        for names in product(*(LEVELS[axis] for axis in axes))
    ]
    parts = {tuple(sorted(each.values())): each for each in every if _goes({*each.values()}) and _completes(each)}
    left, cells = {*parts}, []
    for key, part in parts.items():
        if key in left:
            cell = _filled(part, left, size)
            assert cell is not None, part
            cells.append(cell)
            left -= {tuple(sorted(each)) for each in combinations(cell, size)}
    return tuple(cells)


def refusals() -> Iterator[Cell]:
    """A cell for each refusal, in which nothing else is refused."""
    for together in REFUSED:
        others = [each for each in (*REFUSED, *ABSENT) if each != together]
        for cell in product(*(([*together & {*names}] or names) for names in LEVELS)):
            if not any(each <= {*cell} for each in others):
                yield cell
                break
        else:
            raise AssertionError(f"nothing has {together} alone")


PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
START, END = "<!-- made by `python -m tests.behaviour.cells` -->\n", "<!-- end -->"


def _said(row: str, column: str) -> str:
    names, words = {row, column}, list(dict.fromkeys(REFUSED.values()))
    if any(names <= {*level} or any(together <= names for together in ABSENT) for level in LEVELS):
        return ""
    refused = next((said for together, said in REFUSED.items() if together <= names), None)
    return "✓" if refused is None else f"refused ({words.index(refused) + 1})"


def _table(rows: Sequence[str], columns: Sequence[str]) -> str:
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(_said(row, column) for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_of(page: str) -> str:
    """The page with the tables of behaviours and of features by features, and the words of refusals."""
    behaviours, *axes = LEVELS
    features = [name for level in axes for name in level[1:]]
    before, _, rest = page.partition(START)
    notes = "".join(f"{i}. … {words} …\n" for i, words in enumerate(dict.fromkeys(REFUSED.values()), 1))
    tables = (_table(behaviours, features), _table(features[: -len(axes[-1]) + 1], features[len(axes[0]) - 1 :]), notes)
    return before + START + "\n".join(tables) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text()))
