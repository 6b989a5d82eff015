"""Every complaint of other tools' users that this one answers has a test named after its number in the survey."""

import ast
import re
from pathlib import Path

ANSWERED = {*range(1, 19), 22, 25, *range(28, 35)}


def test_every_complaint_has_a_test():
    found = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_complaint((_and)?_\d\d)+_", node.name)):
                found |= {int(number) for number in re.findall(r"\d\d", named[0])}
    assert found >= ANSWERED, f"no test for {sorted(ANSWERED - found)}"
