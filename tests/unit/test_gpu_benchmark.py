"""`benchmarks/gpu.sh` where there is no GPU: it says so, its header is true, and what fails ends nothing else."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import reading, train
from benchmarks.gpu.execute import last_error, run_part, tail, why_not
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.page import render
from benchmarks.gpu.record import Check, Done, Outcome, Ratio
from benchmarks.gpu.run import Book, chosen_steps, forget_models, remove_left_over, run_all
from benchmarks.gpu.steps import MODEL_GB, STEPS, Part, Settings, parts
from benchmarks.loading.loaders import loaders_of
from benchmarks.saving.savers import SAVERS
from hf_fsdp_tools.modeling.meta import build_meta_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"

MACHINE: dict[str, Any] = {
    "gpus": [{"name": "NVIDIA H200", "bytes": 2**37, "kind": "9.0"}], "cores": 16, "processor": "a processor",
    "memory": 2**37, "system": "Linux", "python": "3.12", "cuda": "13.0", "nccl": "2.28", "package": "0.1.0",
    "versions": {"torch": "2.11.0"}, "nvidia_smi": "+--- a table ---+", "topology": "",
}  # fmt: skip
RUN = {"began": "2026-11-22 10:00:00", "command": "benchmarks/gpu.sh", "small": False, "scratch_free_gb": 60.0}


def test_without_a_gpu_the_page_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "SCRATCH": str(tmp_path), "PYTHON": sys.executable}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (tmp_path / "out").glob("gpu-none-*.md")
    text = page.read_text()
    assert "**There is no GPU on this machine: steps 2 to 8 measured nothing.**" in text
    assert "None was measured." in text and "torch" in text
    records = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    assert records[0]["run"]["machine"]["gpus"] == []
    status = {(record["part"]["step"], record["part"]["name"]): record["part"] for record in records[1:]}
    assert set(status) == {(part.step, part.name) for part in parts(Settings(scratch=tmp_path))}
    assert status.pop((1, "hf-fsdp doctor"))["status"] == "passed"
    assert {(part["status"], part["why"]) for part in status.values()} == {
        ("skipped", "there is no GPU on this machine")
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "the scratch folder is gone"


def test_the_header_names_the_steps() -> None:
    found = re.findall(r"^#   (\d)  (.+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {int(number): title for number, title in found} == STEPS
    assert {part.step for part in parts(Settings(scratch=ROOT))} == set(STEPS), "no step without a part"


def test_steps_are_chosen_by_number() -> None:
    assert chosen_steps([]) == list(STEPS)
    assert chosen_steps(["1-3", "6"]) == [1, 2, 3, 6]
    assert chosen_steps(["4,6-7"]) == [4, 6, 7]
    with pytest.raises(ValueError, match="there is no step 9; there are 1 to 8"):
        chosen_steps(["7-9"])


@pytest.mark.parametrize("small", [False, True])
def test_every_command_line_is_understood(small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(Settings(scratch=tmp_path, small=small, gpus=2, gpu_gb=141))
    assert len({(part.step, part.name) for part in made}) == len(made), "names are unique within a step"
    trained = 0
    for part in made:
        assert set(part.models) <= MODEL_GB.keys()
        for command in part.programs.values():
            if "benchmarks.gpu.train" in command:
                arguments = command[command.index("benchmarks.gpu.train") :]
                monkeypatch.setattr(sys, "argv", arguments)
                assert train.parsed().steps >= 4
                trained += 1
            if "benchmarks/load.py" in command:
                names = command[command.index("--loaders") + 1 :]
                assert set(names) <= loaders_of("side by side", "cuda").keys()
            if "benchmarks/save.py" in command:
                assert set(command[command.index("--savers") + 1 :]) <= SAVERS.keys()
            for word in command:
                if word.endswith((".py", ".yaml")) and "{" not in word:
                    assert (ROOT / word).exists(), word
    assert trained > 20


@pytest.mark.parametrize("name", [name for name in MODEL_GB if name != "demo"])
def test_models_have_the_size_that_is_asked_of_the_disk(name: str) -> None:
    kind, shape = SHAPES[name]
    stored = build_meta_model(kind(**shape)).num_parameters() * 2 / 1e9
    assert stored == pytest.approx(MODEL_GB[name], rel=0.02)


# ---- what fails ----


def _settings(folder: Path) -> Settings:
    return Settings(scratch=folder, small=True, gpus=1, gpu_gb=80)


def _nothing(done: dict[str, Done]) -> Outcome:
    return Outcome(figures={name: program.result for name, program in done.items()})


def _part(name: str, *code: str, **about: Any) -> Part:
    programs = {f"program {index}": [sys.executable, "-c", text, "{result}"] for index, text in enumerate(code)}
    return Part(step=6, name=name, programs=programs, **{"read": _nothing, "limit_s": 60, **about})


WRITES = "import json, sys; json.dump(7, open(sys.argv[1], 'w'))"


def test_a_part_that_fails_ends_no_other(tmp_path: Path) -> None:
    unheld = Outcome(checks=[Check(claim="1 is 2", held=False)])
    wanted = [
        _part("raises", "print('before', flush=True); raise ValueError('the disk is full')", WRITES),
        _part("unreadable", "pass", read=lambda done: done["nobody"]),
        _part("claims", "pass", read=lambda done: unheld),
        _part("needs what is absent", WRITES, packages=("no_such_package",)),
        _part("needs more", WRITES, gpus=2),
        _part("works", WRITES),
    ]
    book = Book(tmp_path / "out", "records")
    book.add({"run": {**RUN, "machine": MACHINE}})
    made = run_all(wanted, _settings(tmp_path), book, 600, say=lambda *said, **how: None)
    assert [record["status"] for record in made] == ["failed", "failed", "failed", "skipped", "skipped", "passed"]
    assert made[0]["why"] == "program 0 ended with code 1: ValueError: the disk is full"
    assert made[0]["tails"]["program 0"][0] == "before" and made[0]["figures"] == {"program 0": None, "program 1": 7}
    assert made[1]["why"] == "its output could not be read: KeyError: 'nobody'"
    assert made[2]["why"] == "1 is 2"
    assert made[3]["why"] == "not installed: no_such_package"
    assert made[4]["why"] == "it needs 2 GPUs; there is 1"
    page = book.page.read_text()
    assert "**3 of 6 parts failed**, 1 passed, 2 skipped." in page
    assert page.index("ValueError: the disk is full") < page.index("## Ratios"), "seen at once"
    again = Book(tmp_path / "out", "records")
    assert again.passed() == {(6, "works")}


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "number"
    wait = subprocess.Popen.wait

    def wait_from_then(process: Any, timeout: float | None = None) -> int:
        """Its time begins when it has started the other."""
        while process.poll() is None and not (note.exists() and note.read_text()):
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_from_then)
    hangs = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(note)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    record = run_part(_part("hangs", hangs, WRITES, limit_s=1), _settings(tmp_path), 600)
    assert record["status"] == "timed out" and "program 0" in record["why"], "the other had no time left"
    child = int(note.read_text())
    deadline = time.monotonic() + 100
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def test_what_is_not_begun_in_time_is_said_not_to_have_run(tmp_path: Path) -> None:
    book = Book(tmp_path / "out", "records")
    book.add({"run": {**RUN, "machine": MACHINE}})
    (record,) = run_all([_part("works", WRITES)], _settings(tmp_path), book, 0, say=lambda *said, **how: None)
    assert record["status"] == "not run" and "--resume" in record["why"]
    assert "1 not run" in book.page.read_text()
    cut = run_part(_part("long", "import time; time.sleep(60)"), _settings(tmp_path), 1)
    assert cut["status"] == "not run" and "--resume" in cut["why"], "its own time was not over"


def test_a_model_that_finds_no_room_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_GB, "8b", 1e9)
    part, settings = _part("large", WRITES, models=("8b",)), replace(_settings(tmp_path), small=False)
    assert "SCRATCH=FOLDER names another place" in why_not(part, settings)
    Path(settings.model("8b")).mkdir()
    assert not why_not(part, settings), "it is there"


def test_little_memory_is_said_before_anything_runs(tmp_path: Path) -> None:
    part = _part("large", WRITES, gpu_gb=100)
    assert "it needs about 100 GB of GPU memory; there are 80" in why_not(
        part, replace(_settings(tmp_path), small=False)
    )
    assert not why_not(part, _settings(tmp_path)), "of no account with tiny sizes"


def test_models_and_folders_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    for name in ("1b", "1b-adapter", "8b"):
        (tmp_path / name).mkdir()
    forget_models([_part("later", WRITES, models=("8b",))], settings)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    for number in (ended.pid, os.getpid()):
        (tmp_path / f"hf-fsdp-gpu-{number}").mkdir()
    remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["8b", f"hf-fsdp-gpu-{os.getpid()}"]


# ---- figures ----


def _row(seconds: float, **more: Any) -> dict[str, Any]:
    rank = dict.fromkeys(("pinned", "pinned_left", "above_device", "reserved_left", "above"), 2**21)
    return {"seconds": [seconds], "read_s": [seconds / 2], "ranks": [rank], "wrong": "–", **more}


def test_speeds_of_loading_stand_beside_the_limit_and_transformers(tmp_path: Path) -> None:
    cell = {"model": "8b", "bytes": 16_000_000_000, "dtype": "stored", "cache": "warm", "ranks": 1}
    rows = {
        "limit": _row(0.4, threads=16, read_bytes_s=5e10, copy_bytes_s=4e10),
        "hf_fsdp_tools": _row(0.8, wrong="equal"),
        "transformers from_pretrained(device_map)": _row(4.0),
        "torch DCP HuggingFaceStorageReader": {"failed": "out of memory"},
    }
    (tmp_path / "load.jsonl").write_text(json.dumps({"cell": cell, "rows": rows}) + "\n")
    outcome = reading.loading({"load": Done(code=0, output="", files=str(tmp_path))})
    values = [(ratio.ours, ratio.other, ratio.value) for ratio in outcome.ratios]
    assert values == [pytest.approx(v) for v in ((20, 40, 0.5), (40, 40, 1.0), (20, 4, 5.0))]
    assert outcome.figures["8b, bf16, warm, 1 GPU: limit"] == "read 50.0, pinned copy 40.0 GB/s, 16 threads"
    assert any("2 MiB at most, 2 left" in str(said) for said in outcome.figures.values())
    assert [check.held for check in outcome.checks] == [True, False]
    part = {"step": 4, "name": "loading", "status": "passed", "why": "", "seconds": 9.0, **outcome.as_record()}
    page = render([{"run": {**RUN, "machine": MACHINE}}, {"part": part}])
    line = "| 4 | 8b, bf16, warm, 1 GPU: from_pretrained | 20 GB/s | 4 GB/s, transformers' from_pretrained(device_map) "
    assert f"{line}| **5.00** | more |" in page
    assert page.startswith("# GPU run: 1 × NVIDIA H200, 2026-11-22") and "+--- a table ---+" in page


def test_speeds_of_saving_stand_beside_the_limit_and_transformers(tmp_path: Path) -> None:
    cell = {"model": "1b", "bytes": 2_000_000_000, "cache": "cold", "ranks": 1}
    rows = {
        "limit": {"on_disk": [1.0], "wrong": "–"},
        "hf_fsdp_tools": {"on_disk": [2.0], "wrong": "equal"},
        "hf_fsdp_tools, blocking=False": {"on_disk": [2.0], "wrong": "wrong: 1 tensors", "pause": [0.25]},
        "transformers save_pretrained": {"failed": "out of memory"},
    }
    (tmp_path / "save.jsonl").write_text(json.dumps({"cell": cell, "rows": rows}) + "\n")
    outcome = reading.saving({"save": Done(code=0, output="", files=str(tmp_path))})
    assert [(ratio.ours, ratio.other, ratio.of) for ratio in outcome.ratios] == [(1.0, 2.0, "limit")]
    assert [check.held for check in outcome.checks] == [True, True, False, False]
    assert outcome.figures == {"1b, 1 GPU: hf_fsdp_tools, blocking=False: pause": "0.25 s"}


def _trained(losses: list[float], **more: float) -> dict[str, Any]:
    sizes = {"peak": 2e9, "reserved": 3e9, "load_peak": 1e9, "used": 4e9, "load_s": 1.0, "step_s": 0.1}
    return {"losses": losses, "after": 1.0, "tokens_s": 1000.0, **sizes, **more}


def test_training_stands_beside_plain_training() -> None:
    plain = Done(code=0, output="", result=_trained([2.0, 1.8, 1.6, 1.4, 9.0]))
    ours = Done(code=0, output="", result=_trained([2.0, 1.8, 1.61, 1.4, 1.0], tokens_s=900.0))
    outcome = reading.trained_pair({"ours": ours, "plain": plain})
    assert [ratio.value for ratio in outcome.ratios] == [0.9, 1.0, 1.0]
    assert [check.held for check in outcome.checks] == [True], "the first four losses"
    ours.result = _trained([2.0, 1.8, 1.7, 1.4])
    assert [check.held for check in reading.trained_pair({"ours": ours, "plain": plain}).checks] == [False]
    ours.result = None
    alone = reading.trained_pair({"ours": ours, "plain": plain})
    assert alone.ratios == [] and alone.figures["plain: loading"] == "1.0 s", "what there is, is kept"


def test_prediction_and_peers_are_read_from_the_records_of_their_programs(tmp_path: Path) -> None:
    record = {"case": "dense", "gpus": 8, "measured": {"allocated": 2**30, "reserved": 2**30}}
    lines = [record | {"foreseen": {"allocated": 2**30 * share, "reserved": 2**30}} for share in (1.01, 0.9)]
    (tmp_path / "memory.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outcome = reading.prediction({"memory": Done(code=0, output="", files=str(tmp_path))})
    assert [check.held for check in outcome.checks] == [True, False] and "-10.00%" in outcome.checks[1].claim
    rows = {"ours": {"seconds": [2.0, 4.0, 2.0], "tokens": 4096, "peak": 2e9}, "slow": {"failed": "no memory"}}
    rows["peer"] = {"seconds": [4.0], "tokens": 4096, "peak": 4e9}
    (tmp_path / "training.jsonl").write_text(json.dumps({"cell": {}, "rows": rows}))
    outcome = reading.peers({"training": Done(code=0, output="", files=str(tmp_path))})
    assert [ratio.value for ratio in outcome.ratios] == [2.0, 0.5] and outcome.figures["slow"] == "no memory"


def test_two_gpus_are_compared_with_one() -> None:
    done = {name: Done(code=0, output="", result=_trained([2.0, 1.8, 1.6, 1.4])) for name in ("one", "two")}
    done["resumed"] = Done(code=0, output="", result=_trained([1.6, 1.4]))
    done["opened"] = Done(code=0, output="", result=_trained([1.0, 0.9]))
    assert [check.held for check in reading.two_gpus(done).checks] == [True, True, True]
    done["resumed"].result = _trained([1.6, 1.5])
    done["opened"].result = _trained([1.1, 0.9])
    assert [check.held for check in reading.two_gpus(done).checks] == [True, False, False]


def test_contexts_on_other_gpus_and_growing_memory_are_failures() -> None:
    found = {"ranks": [{"loading": [0], "saving": [0]}, {"loading": [1], "saving": [0, 1]}]}
    checks = reading.contexts({"contexts": Done(code=0, output="", result=found)}).checks
    assert [check.held for check in checks] == [True, False] and "rank 1 on GPUs 0, 1" in checks[1].claim
    grows = {"pinned": [2**20] * 10, "reserved": [2**20 * n for n in range(10)], "shards": 2**20}
    checks = reading.repeated({"loads": Done(code=0, output="", result=grows)}).checks
    assert [check.held for check in checks] == [True, False]


def test_test_reports_are_counted_and_absent_packages_are_no_failures(tmp_path: Path) -> None:
    cases = """<testsuites><testsuite>
    <testcase classname="tests.a" name="good"/>
    <testcase classname="tests.a" name="off"><skipped message="needs 2 GPUs">tests/a.py:7: needs 2</skipped></testcase>
    <testcase classname="" name="tests.b"><error message="collection failure">tests/b.py:7: in
E   ModuleNotFoundError: No module named 'trl'</error></testcase>
    <testcase classname="" name="tests.c"><skipped message="collection skipped">('c.py', 39, 'Skipped: no bitsandbytes')
    </skipped></testcase>MORE</testsuite></testsuites>"""
    done = {"tests": Done(code=1, output="", files=str(tmp_path))}
    (tmp_path / "tests.xml").write_text(cases.replace("MORE", ""))
    outcome = reading.tests(done)
    assert outcome.figures["not collected"] == "tests.b: trl is not installed; tests.c: no bitsandbytes"
    assert outcome.figures["skipped: needs 2 GPUs"] == 1
    assert [(check.claim, check.held) for check in outcome.checks] == [("1 passed, 0 failed, 1 skipped", True)]
    bad = """<testcase classname="tests.d" name="bad"><failure message="AssertionError: [+32 more lines]">
E   a traceback
E   RuntimeError: no</failure></testcase>"""
    (tmp_path / "tests.xml").write_text(cases.replace("MORE", bad))
    outcome = reading.tests(done)
    assert not outcome.checks[0].held and outcome.text == "tests.d::bad: RuntimeError: no"
    own = """<testcase classname="" name="tests.e"><error message="collection failure">
E   ModuleNotFoundError: No module named 'tests.gone'</error></testcase>"""
    (tmp_path / "tests.xml").write_text(cases.replace("MORE", own))
    assert not reading.tests(done).checks[0].held, "a module of our own is no optional package"


def test_tests_that_did_not_end_are_counted_from_what_they_printed(tmp_path: Path) -> None:
    output = "tests/a.py::one[a b] PASSED [ 3%]\ntests/a.py::two FAILED [ 6%]\ntests/a.py::three "
    outcome = reading.tests({"tests": Done(code=None, output=output, files=str(tmp_path))})
    assert outcome.figures == {"passed": 1, "failed": 1} and outcome.text == "tests/a.py::two"
    assert not outcome.checks[0].held


def test_the_last_lines_leave_out_progress_bars() -> None:
    output = "first\n 10%|█ | 1/9\r100%|██| 9/9\n\x1b[0mlast: error\n"
    assert tail(output) == ["first", "\x1b[0mlast: error"]


def test_the_error_of_a_rank_is_named_and_not_that_of_its_launcher() -> None:
    launched = "[rank1]: RuntimeError: the disk is full\ntorch.distributed.ChildFailedError:\n===\nexitcode: 1\n"
    assert last_error(launched) == "RuntimeError: the disk is full"
    assert last_error("finetune: error: no such model\n") == "finetune: error: no such model"
    assert tail(launched) == ["[rank1]: RuntimeError: the disk is full"]
    assert last_error("killed\n") == "killed" and last_error("") == "it printed nothing"


def test_a_part_that_ran_twice_is_shown_as_it_ended() -> None:
    part = {"step": 6, "name": "full", "status": "failed", "why": "a ratio of nothing", "seconds": 1.0}
    better = {
        **part,
        "status": "passed",
        "why": "",
        "ratios": [vars(Ratio(what="x", ours=3, other=2, of="y", unit="s"))],
    }
    page = render([{"run": {**RUN, "machine": MACHINE}}, {"part": part}, {"part": better}])
    assert "a ratio of nothing" not in page and "**None of 1 parts failed**" in page and "**1.50**" in page
