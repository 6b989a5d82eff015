"""Scripts of `benchmarks/` name what exists, take the options that documents show, and estimate in their smallest form.
`tests/ranks/test_benchmarks.py` starts those that need ranks."""

import json
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import ranks, run

ROOT = Path(__file__).parents[2]


def test_published_trainings_are_estimated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ["published", "throughput", "--rows", "mpt-125m a100-80gb x8 seq 512", "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["foresight.py", *words])
    runpy.run_path(str(ROOT / "benchmarks" / "foresight.py"), run_name="__main__")
    assert re.search(r"^\| tokens per second \| \d+ \| \d+\.\d% ", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("script", ["one", "memory"])
def test_what_a_gpu_will_measure_was_foreseen(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    committed, module = json.loads(run.FORECAST.read_text())[script], import_module(f"benchmarks.gpu.{script}")
    name = next(iter(committed))
    monkeypatch.setattr(module, "STEPS", {name: 1})
    output = tmp_path / "forecast.json"
    run.foresee(Namespace(script=script, forecast=output, tiny=True), module)
    assert json.loads(output.read_text())[script][name].keys() == committed[name].keys()


RUN = [sys.executable, "-m", "benchmarks.gpu.run"]
SMALLEST = {
    "one": "1B full, 128 tokens",
    "memory": "1B, 2 ranks",
    "faults": "load, killed, 2 ranks",
    "ranks": "groups",
}


@pytest.mark.parametrize("script", SMALLEST)
def test_a_call_runs_at_a_tiny_size_and_ends_with_a_table(script: str, tmp_path: Path) -> None:
    name, records = SMALLEST[script], tmp_path / "rows.jsonl"
    words = [*RUN, script, "--only", name, "--tiny", "--device", "cpu", "--records", str(records)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (row,) = [json.loads(line) for line in records.read_text().splitlines()]
    assert done.returncode == 0 and row["step"] == name and "failed" not in row, (done.stderr, row)
    assert f"| {name} | " in done.stdout
    if script == "one":
        assert row["plain"]["losses"][0] == pytest.approx(row["ours"]["losses"][0], rel=0.02), row
    if script == "faults":
        assert "RanksError: While reading the checkpoint" in row["said"]["0"] and "rank 1 has ended" in row["said"]["0"]


def test_the_tests_on_gpus_are_there() -> None:
    named = {f"tests/{given.split()[0]}" for given in ranks.TESTS.values()}
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", *named]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(named) > 20, done.stdout[-2000:]


CHILD = """
import json, os, sys, time
records, *names = sys.argv[1:]
for name in names:
    time.sleep(60 if name == "hangs" else 0)
    if name == "dies":
        os._exit(3)
    with open(records, "a") as lines:
        lines.write(json.dumps({"step": name}) + chr(10))
"""


def test_a_step_in_which_the_child_dies_or_is_late_is_a_line_and_the_others_are_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records, start = tmp_path / "rows.jsonl", subprocess.Popen

    def child(words: list[str], **how: Any) -> Any:
        return start([sys.executable, "-c", CHILD, str(records), *words[words.index("--steps") + 1 :]], **how)

    monkeypatch.setattr(subprocess, "Popen", child)
    monkeypatch.setattr(run, "_BEGIN_S", 1)
    options = Namespace(script="one", device="cpu", records=records, folder=tmp_path, limit=60, tiny=True, patience=1)
    script = SimpleNamespace(STEPS=dict.fromkeys(("first", "dies", "hangs", "last"), 1), HEADS=("said",))
    for _ in range(2):  # the second time nothing is left to do
        run.run(options, script)
    rows = run.done(records)
    assert len(records.read_text().splitlines()) == 4 and [*rows] == [*script.STEPS]
    assert not rows["first"] and not rows["last"]
    assert rows["dies"]["failed"].endswith(": 3") and rows["hangs"]["failed"].endswith(": -9")
    script.cells = lambda row, foreseen: ["well"]
    assert "| last | well |  |" in run.table(script, rows, {}) and len(run.table(script, {}, {})) == 3
