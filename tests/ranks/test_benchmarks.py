"""Every script of `benchmarks/` starts in its smallest form and finds what it is there to find; no time is looked at.

`tests/unit/test_benchmarks.py` starts `benchmarks/gpu/run.py`, and has what needs no ranks.
"""

import json
import multiprocessing
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
Start = Callable[..., None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Run a script as from a shell, in a folder of its own and in this process, which has imported most of it."""

    def run(script: str, *options: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *options])
        monkeypatch.setattr(sys, "path", [*sys.path])
        # The server that forks ranks is the one of all tests; what it does not find it leaves out without a word.
        monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda names: [*map(import_module, names)])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


def rows_of(page: Path) -> dict[str, list[str]]:
    """The cells of the rows of all tables of a page, by the first cell."""
    lines = [line.strip("|").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


SMALLEST = ("--size-gb", "0.002", "--runs", "1", "--ranks", "2", "--cache", "warm", "--folder", "models")


def test_every_loader_loads(start: Start, tmp_path: Path) -> None:
    start("benchmarks/load.py", "--models", "dense", "--dtype", "stored", *SMALLEST, "--records", "load.jsonl")
    results = {name: cells[-1] for name, cells in rows_of(tmp_path / "load.md").items()}
    assert results.pop("hf_fsdp_tools") == "equal" and results.pop("limit") == "–"
    known = {"equal", "wrong: 2 tensors, model.rotary_emb.inv_freq", "result", "---"}
    assert len(results) > 6 and set(results.values()) <= known, results


def test_every_saver_saves(start: Start, tmp_path: Path) -> None:
    start("benchmarks/save.py", "--models", "dense", "--dtype", "stored", *SMALLEST, "--records", "save.jsonl")
    results = {name: cells[-1] for name, cells in rows_of(tmp_path / "save.md").items()}
    assert results.pop("limit") == "–" and len(results) == 8
    assert set(results.values()) == {"equal", "result", "---"}, results


def test_every_way_to_stream_weights_brings_all_names(start: Start, tmp_path: Path) -> None:
    start("benchmarks/stream.py", "--models", "tiny", "--runs", "1", "--folder", "models", "--records", "stream.jsonl")
    rows = rows_of(tmp_path / "stream.md")
    assert {name: rows[name][-1].split(" of ")[0] for name in ("buckets", "TRL")} == {"buckets": "0", "TRL": "0"}
    assert not [name for name, cells in rows.items() if "fails" in cells]


def test_one_rank_of_many_runs_each_stage_alone(start: Start, tmp_path: Path) -> None:
    words = ("--models", "gpt-oss-120b", "--ranks", "512", "--folder", "models", "--out", "scale.md")
    start("benchmarks/scale.py", *words)
    (cells,) = (cells for name, cells in rows_of(tmp_path / "scale.md").items() if name == "gpt-oss-120b, 512")
    assert len(cells) == 12 and all(cells)


def test_a_contestant_of_the_referee_trains_a_type_right(start: Start, tmp_path: Path) -> None:
    start("benchmarks/referee.py", "rows.jsonl", "--only", "qwen3_moe", "--contestants", "hf_fsdp_tools fsdp")
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (row["contestant"], row["verdict"], row["why"]) == ("hf_fsdp_tools fsdp", "right", "")
    assert "| qwen3_moe | · |" in (tmp_path / "rows.md").read_text()


REPORTS = {
    "accelerate_fsdp2_prepare.py buffer": "'Tensor' object has no attribute 'device_mesh'",
    "accelerate_fsdp2_prepare.py unit": "TypeError: Invariant encountered: value was None",
    "accelerate_fsdp2_prepare.py tied": "is shared with a parameter already managed by another FSDP group",
    "transformers_fsdp_buffers.py": "sharded nan",
    "transformers_fsdp_chunked_files.py": "24 of 35 weights differ",
    "transformers_fsdp_resume.py": "Missing key in checkpoint state_dict",
    "transformers_fsdp_tied_head.py": "sharded 1 4.31",
    "trl_fused_head.py": "largest difference 0.1",
}
"""What each report on two ranks prints as long as the defect is there."""
ALONE = {
    "transformers_exaone_names.py": "weights differ",
    "transformers_llama4_outputs.py": "has no attribute",
    "transformers_paligemma_mask.py": "sdpa later tokens change the logits of the first: True",
    "torch_conv_padding.py": "and not 0.0",
}
OF_524 = ("transformers_exaone_names.py", "transformers_llama4_outputs.py")


@pytest.mark.nightly
@pytest.mark.parametrize("report", [*REPORTS, *ALONE])
def test_a_report_shows_its_defect(tmp_path: Path, report: str) -> None:
    """One that shows none any more goes, with what the package does about the defect."""
    if report in OF_524 and transformers.__version__ < "5.24":
        pytest.skip("a defect of transformers 5.24")
    name, *words = report.split()
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if report in REPORTS else []
    words = [sys.executable, *ranks, str(ROOT / "benchmarks" / "reports" / name), *words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (REPORTS | ALONE)[report] in done.stdout + done.stderr, done.stderr[-2000:]


def test_every_report_is_started() -> None:
    files = {path.name for path in (ROOT / "benchmarks" / "reports").glob("*.py")}
    assert files == {report.split()[0] for report in (*REPORTS, *ALONE)}
