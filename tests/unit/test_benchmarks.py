"""Scripts of `benchmarks/` name what exists, take the options that documents show, and estimate in their smallest form.
`tests/ranks/test_benchmarks.py` starts those that need ranks."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_script_for_gpus_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu.sh")], check=True)


def test_published_trainings_are_estimated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ["published", "throughput", "--rows", "mpt-125m a100-80gb x8 seq 512", "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["foresight.py", *words])
    runpy.run_path(str(ROOT / "benchmarks" / "foresight.py"), run_name="__main__")
    assert re.search(r"^\| tokens per second \| \d+ \| \d+\.\d% ", page.read_text(), re.MULTILINE)


def test_trainings_of_a_plan_are_estimated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output, committed = tmp_path / "forecast.json", ROOT / "benchmarks" / "gpu" / "forecast.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--forecast", str(output)])
    runpy.run_path(str(committed.with_name("run.py")), run_name="__main__")
    found, kept = (json.loads(path.read_text()) for path in (output, committed))
    assert {gpu: [*cases] for gpu, cases in found.items()} == {gpu: [*cases] for gpu, cases in kept.items()}


RUN = [sys.executable, "-m", "benchmarks.gpu.run"]


def test_a_plan_runs_at_a_tiny_size_and_was_foreseen(tmp_path: Path) -> None:
    words = [*RUN, "--plan", "three", "--tiny", "--device", "cpu", "--records", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert done.returncode == 0 and len(rows) == 2, done.stderr
    foreseen = json.loads((ROOT / "benchmarks/gpu/forecast.json").read_text())
    for row in rows:
        assert {row["case"] in each for each in foreseen.values()} == {True}
        ours, plain = row["ours"]["losses"], row["plain"]["losses"]
        assert plain[0] == pytest.approx(ours[0], rel=0.02), row
        assert f"| {row['case']} | {row['ours']['tokens_s']:,} tokens/s | " in done.stdout
