"""What works together, as tests show it: `@pytest.mark.shows("clipping", "tp", "ep")` makes cells of docs/support.md.

    python -m tests.support                                        # writes the table that the marks make
    pytest -m 'nightly or not nightly' --support docs/support.md   # the same of tests that ran and passed

Words are features and columns, and each of these features is shown with each of these columns; without a feature, the
first column with each of the others. `refused=True` marks a test that shows the refusal. A pytest plugin.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"
FEATURES = (
    "losses of one process", "gradient accumulation", "activation checkpointing", "offloaded or chosen checkpointing",
    "bf16", "FP8 (emulated)", "clipping", "Muon", "moving averages", "ranks that differ", "reads its own bytes",
    "save_pretrained", "save in the background", "resumed states", "export", "live weights", "generate",
    "DPO", "GRPO", "memory estimate", "hf-fsdp prove",
)  # fmt: skip
COLUMNS = (
    "FSDP2", "HSDP", "FSDP1", "LoRA", "QLoRA", "stays quantised", "packed rows", "offload", "compile", "tp", "ep", "cp",
)  # fmt: skip
START, END = "<!-- made by `python -m tests.support` -->\n", "<!-- end -->"
Mark = tuple[str, Iterable[str], bool]
"""A test, the words of its mark, and whether it shows a refusal."""


def marks() -> Iterator[Mark]:
    """All that stand above tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "pytest.mark.shows(" in text else ():
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.shows":
                    words = tuple(map(ast.literal_eval, call.args))
                    yield f"{path.relative_to(ROOT).as_posix()}::{node.name}", words, bool(call.keywords)


def page_of(marks: Iterable[Mark], page: str) -> str:
    """The page with the table of these marks."""
    cells: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for test, words, is_refused in marks:
        assert set(words) <= {*FEATURES, *COLUMNS}, f"{test} shows {words}"
        rows = [word for word in words if word in FEATURES] or [next(iter(words))]
        file, _, name = test.partition("::")
        link = f'[{"refused" if is_refused else "✓"}](../{file} "{name}")'
        for row, column in ((row, word) for row in rows for word in words if word not in rows):
            cells[row, column][link] = None
    lines = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for row in [*FEATURES, *(column for column in COLUMNS if any(column == row for row, _ in cells))]:
        lines.append([row, *(" ".join(sorted(cells.get((row, column), ["–"]))) for column in COLUMNS)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, _, rest = page.partition(START)
    return before + START + table + END + rest.partition(END)[2]


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--support", type=Path, metavar="FILE", help="write there what marked tests have shown")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        for mark in item.iter_markers("shows"):
            item.user_properties.append(("shows", (item.nodeid.partition("[")[0], mark.args, bool(mark.kwargs))))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if config.option.support is None:
        return
    seen = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "user_properties")]
    failed = {report.nodeid.partition("[")[0] for report in seen if report.outcome == "failed"}
    ran = [report for report in seen if report.outcome == "passed" and report.when == "call"]
    shown = [value for report in ran for name, value in report.user_properties if name == "shows"]
    config.option.support.write_text(page_of((mark for mark in shown if mark[0] not in failed), PAGE.read_text()))


if __name__ == "__main__":
    PAGE.write_text(page_of(marks(), PAGE.read_text()))
