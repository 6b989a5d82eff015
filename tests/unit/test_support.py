"""The table of docs/support.md is what the marks of tests make, and only of tests that ran and passed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import PAGE, marks, page_of, pytest_terminal_summary


def test_the_page_has_the_table_that_the_marks_make_of_known_words() -> None:
    assert PAGE.read_text() == page_of(marks(), PAGE.read_text()), "python -m tests.support writes it"
    with pytest.raises(AssertionError, match="a_test shows"):
        page_of([("tests/a.py::a_test", ("clipping", "tensor parallel"), False)], PAGE.read_text())


def test_a_cell_is_made_by_tests_that_ran_and_of_which_no_case_failed(tmp_path: Path) -> None:
    def report(name: str, outcome: str, *words: str) -> SimpleNamespace:
        shown = ("shows", (f"tests/a.py::{name}", words, False))
        nodeid = f"tests/a.py::{name}[case]"
        return SimpleNamespace(nodeid=nodeid, outcome=outcome, when="call", user_properties=[shown])

    passed = [report("good", "passed", "clipping", "tp"), report("bad", "passed", "clipping", "ep")]
    others = {"failed": [report("bad", "failed", "clipping", "ep")], "skipped": [report("no", "skipped", "Muon", "cp")]}
    config = SimpleNamespace(option=SimpleNamespace(support=tmp_path / "support.md"))
    pytest_terminal_summary(SimpleNamespace(stats={"passed": passed, **others}), config)
    text = config.option.support.read_text()
    assert text.count("✓](") == 1 and '[✓](../tests/a.py "good")' in text
