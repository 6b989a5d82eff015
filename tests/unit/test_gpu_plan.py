"""`benchmarks/gpu`: the plans' cases train at a tiny size, beside a plain loop, and each has a forecast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
