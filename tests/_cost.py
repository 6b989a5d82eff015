"""What the tests cost: CPU seconds of all processes, by file. `tests/durations.json` keeps those of a quiet machine.

Files run in the order of that table, the dearest first, so that no worker ends with a long file alone. The summary of a
run prints its own figures beside the table's; nothing fails by them, for no machine is like another.

    pytest --durations-to tests/durations.json        # after a whole run on a quiet machine
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TABLE = Path(__file__).with_name("durations.json")
GB_PER_WORKER = 3
"""Memory of a worker, its fork server and four ranks."""


def cpu_seconds() -> float:
    """CPU seconds of this process and of all that it started, ended ones included."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and those of ended children
        except psutil.NoSuchProcess:  # it ended since; its parent has counted it
            continue
    return total


class Costs:
    """Counts in each worker, and prints in the process that has started them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.spent: dict[str, float] = {}
        self.before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        self.before = self.before or cpu_seconds()
        result = yield
        if nextitem is None or nextitem.path != item.path:
            file, now = str(item.path.relative_to(TABLE.parent)), cpu_seconds()
            self.spent[file] = self.spent.get(file, 0.0) + now - self.before
            self.before = now
        return result

    def pytest_sessionfinish(self) -> None:
        others = cpu_seconds() - sum(self.spent.values())
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output["costs"] = {**self.spent, "": others}
        elif not self.config.getoption("numprocesses", None):
            self.spent[""] = others

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, seconds in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.spent[file] = self.spent.get(file, 0.0) + seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        table = json.loads(TABLE.read_text())
        dearest = sorted(self.spent, key=lambda file: -self.spent[file])
        terminalreporter.section("CPU seconds of all processes, and those of a quiet machine")
        for file in [file for file in dearest if file][:10]:
            terminalreporter.line(f"{self.spent[file]:7.1f} {table.get(file, 0.0):7.1f}  {file}")
        terminalreporter.line(f"{sum(self.spent.values()):7.1f} {sum(table.values()):7.1f}  in all, with imports")
        if path := self.config.getoption("durations_to"):
            Path(path).write_text(json.dumps({k: round(self.spent[k], 1) for k in dearest}, indent=0) + "\n")


def in_order(items: list[pytest.Item], seed: int | None) -> None:
    """Sort tests by the cost of their file, dearest first; files that the table does not know come last. With a seed,
    files come in an order drawn by it."""
    table = json.loads(TABLE.read_text())
    places = {path: -table.get(str(path.relative_to(TABLE.parent)), 0.0) for path in {item.path for item in items}}
    if seed is not None:
        places = dict(zip(sorted(places), random.Random(seed).sample(range(len(places)), len(places)), strict=True))
    items.sort(key=lambda item: places[item.path])
