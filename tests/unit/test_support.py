"""The support matrix names tests that exist, and no cell says more than numbers of tests, a dash or a refusal."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text()
TESTS = dict(re.findall(r"^(\d+)\. (.+)$", TEXT, re.MULTILINE))
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("|---")
]


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def functions(path: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source(path))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", TESTS)
def test_a_test_that_is_named_exists(number: str) -> None:
    """And its case stands in its file, as a function, a name, or a part of an f-string."""
    path, test, case = re.fullmatch(r"`([\w/.]+)::(test_\w+)`(?: \[(.+)\])?", TESTS[number]).groups()
    assert test in functions(path), TESTS[number]
    if case is not None:
        parts = re.split(r", (?=experts$)", case)
        assert case in functions(path) or all(re.search(rf"\b{re.escape(part)}\b", source(path)) for part in parts)


def test_every_cell_names_a_test_and_every_test_is_named() -> None:
    named: set[str] = set()
    width = len(TABLE[0])
    for row in TABLE[1:]:
        for cell in row[1:] if len(row) == width else row[-1:]:
            if cell == "–" or not re.search(r"\d", cell):
                assert cell in ("–", "Tests"), row
                continue
            assert re.fullmatch(r"(refused )?\d+(, \d+)*( ◦)?", cell), row
            named |= set(re.findall(r"\d+", cell))
    assert width == 13 and named == set(TESTS)
    assert list(TESTS) == [str(number) for number in range(1, len(TESTS) + 1)]
