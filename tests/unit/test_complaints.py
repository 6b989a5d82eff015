"""docs/complaints.md says what each complaint is, and which tests answer it; a test is named after its number."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named_tests() -> dict[int, set[str]]:
    """The files with tests named after each complaint."""
    found: dict[int, set[str]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_complaint((_and)?_\d\d)+_", node.name)):
                for number in re.findall(r"\d\d", named[0]):
                    found.setdefault(int(number), set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_the_page_names_the_tests_of_each_complaint():
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs/complaints.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 35))
    tests = named_tests()
    for number, here in rows:
        named = set(re.findall(r"`(tests/[^`]+)`", here))
        if int(number) in tests:
            assert named == tests[int(number)], f"complaint {number}"
        else:
            assert "`tests/" in here or "not" in here, f"complaint {number} has neither a test nor a reason"
            assert all((ROOT / name).is_file() for name in named)
